"""Machines with a real sshd each: a network, pid, mount and uts namespace per host, and one for the desk.

Needs root and Debian's openssh-server, openssh-client, iproute2 and util-linux. Nothing of the machine is changed: each sshd
has its own configuration and keys, and everything ends by recorded pid.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from typing import Dict, List, Sequence

from drumbeat.base.proc import children
from drumbeat.base.processes import die_with_parent

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "unshare", "nsenter")
DESK = "desk"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

INIT = """#!/bin/sh
# First process of a host: NAME BASE CODE PROGRAM...
name=$1 base=$2 code=$3
shift 3
hostname "$name"
mount --make-rprivate /
mount --bind "$base/hosts" /etc/hosts
for place in /run /dev/shm "$base/own"; do mount -t tmpfs -o mode=1777 host "$place"; done
mkdir -p /run/sshd
case "$code" in /tmp/*) mkdir /run/code && mount --rbind "$code" /run/code ;; esac
mount -t tmpfs -o mode=1777 host /tmp
case "$code" in /tmp/*) mkdir -p "$code" && mount --move /run/code "$code" ;; esac
for program in "$@"; do sh -c "$program" & done
while :; do sleep 3600 & wait $!; done
"""

SSHD = """
Port {port}
HostKey {base}/{name}.key
AuthorizedKeysFile {base}/desk.key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PidFile none
SetEnv XDG_CACHE_HOME={base}/own/cache XDG_STATE_HOME={base}/own/state PATH={path}
{more}
"""

SLOW = """ForceCommand sleep 6; exec sh -c "$SSH_ORIGINAL_COMMAND" """


def why_not() -> str:
    if os.geteuid() != 0:
        return "sshd in namespaces needs root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"sshd in namespaces needs {', '.join(missing)}: apt-get install openssh-server iproute2" if missing else ""


class Machines:
    """`names` get addresses 10.78.0.1 and up; `base` is seen by all of them, `base`/own is different on each."""

    def __init__(self, base: str, names: Sequence[str]) -> None:
        self.base, self.names = base, list(names)
        self.owner = os.getpid()
        self.net = f"dh{secrets.token_hex(4)}"  # names of network namespaces: unlike those of any other bench
        self.pids: Dict[str, int] = {}
        self.path = f"{base}/bin:{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.environ = {"PATH": self.path, "HOME": f"{base}/home", "LANG": "C.UTF-8", "XDG_RUNTIME_DIR": f"{base}/own"}

    def address(self, name: str) -> str:
        return f"10.78.0.{self.names.index(name) + 1 if name in self.names else 254}"

    def up(self) -> None:
        for folder in ("own", "home", "bin", "shared"):
            os.makedirs(f"{self.base}/{folder}", exist_ok=True)
        for name in ("desk", "other", *self.names):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.base}/{name}.key"], check=True)
        self._write("hosts", "127.0.0.1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self.names))
        self._write("init.sh", INIT)
        # Found before the system's own: it is that very ssh, with a configuration file other than root's.
        self._write("bin/ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.base}/ssh_config "$@"\n', 0o755)
        self._write("ssh_config", f"Host *\n  UserKnownHostsFile {self.base}/known_hosts\n  IdentityFile {self.base}/desk.key\n"
                    "  IdentitiesOnly yes\n  User root\n")  # fmt: skip
        self._write("known_hosts", "".join(f"{name},{self.address(name)} {self._public(name)}" for name in self.names))
        self._network()
        self.boot(DESK)
        for name in self.names:
            self._write(f"{name}.conf", SSHD.format(port=22, base=self.base, name=name, path=self.path, more=""))
            self._write(
                f"{name}-slow.conf", SSHD.format(port=2222, base=self.base, name=name, path=self.path, more=SLOW)
            )
            sshd = f"exec /usr/sbin/sshd -D -e -f {self.base}/{name}"
            self.boot(name, f"{sshd}.conf", f"{sshd}-slow.conf")
        deadline = time.monotonic() + 120
        for name in self.names:
            while self.run(["ssh", name, "true"]).returncode:
                assert time.monotonic() < deadline, f"sshd on {name}: {self._read(f'{name}.log')}"
                time.sleep(0.1)

    def also(self, alias: str, lines: str) -> None:
        """One more entry of the user's ssh configuration."""
        text = self._read("ssh_config")
        self._write("ssh_config", f"Host {alias}\n" + "".join(f"  {line}\n" for line in lines.split(";")) + text)

    def know(self, alias: str, name: str) -> None:
        """A host key, `name`'s, that the desk expects of `alias`."""
        with open(f"{self.base}/known_hosts", "a") as file:
            file.write(f"{alias} {self._public(name)}")

    def boot(self, name: str, *programs: str) -> None:
        argv = [
            "ip", "netns", "exec", f"{self.net}-{name}",
            "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc",
            "sh", f"{self.base}/init.sh", name, self.base, ROOT, *programs,
        ]  # fmt: skip
        with open(f"{self.base}/{name}.log", "ab") as log:
            process = subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: die_with_parent(self.owner),
            )  # fmt: skip
        self.pids[name] = process.pid
        deadline = time.monotonic() + 120
        while not children(process.pid) or self._hostname(name) != name:
            assert time.monotonic() < deadline, f"{name} did not start"
            time.sleep(0.02)

    def down(self) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        for name in (DESK, *self.names):
            subprocess.run(["ip", "netns", "del", f"{self.net}-{name}"], check=False, capture_output=True)

    def start(self, argv: Sequence[str], on: str = DESK, env: Dict[str, str] = {}, **more):  # noqa: B006
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(self._enter(on, argv), env={**self.environ, **env}, **{**options, **more})

    def run(self, argv: Sequence[str], on: str = DESK, env: Dict[str, str] = {}, timeout: float = 180):  # noqa: B006
        with self.start(argv, on, env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{argv} took more than {timeout} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def processes(self, name: str) -> List[str]:
        """Command lines of all that runs on a host, but for its own daemon and whoever asks."""
        lines = self.run(["ps", "-eo", "args="], on=name).stdout.splitlines()
        mine = (
            f"sh {self.base}",
            "sh -c exec",
            "sleep 3600",
            "/usr/sbin/sshd -D",
            "sshd: /usr/sbin/sshd",
            "ps -eo",
            "[",
        )
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith(mine)]

    def cut(self, name: str, state: str = "down") -> None:
        """The network cable: not even a reset is seen."""
        subprocess.run(["ip", "-n", f"{self.net}-{name}", "link", "set", "eth0", state], check=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, argv: Sequence[str]) -> List[str]:
        (first,) = children(self.pids[name])
        spaces = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", "-t", str(first), *spaces, f"--wd={self.base}/home", "--", *argv]

    def _hostname(self, name: str) -> str:
        try:
            return self.run(["hostname"], on=name).stdout.strip()
        except ValueError:
            return ""

    def _public(self, name: str) -> str:
        return self._read(f"{name}.key.pub")

    def _read(self, name: str) -> str:
        with open(f"{self.base}/{name}") as file:
            return file.read()

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        with open(f"{self.base}/{name}", "w") as file:
            file.write(text)
        os.chmod(f"{self.base}/{name}", mode)

    def _network(self) -> None:
        for name in (DESK, *self.names):
            subprocess.run(["ip", "netns", "add", f"{self.net}-{name}"], check=True)
        wires = [
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {self.address(DESK)}/24 dev br0",
            "link set br0 up",
        ]
        for number, name in enumerate(self.names):
            wires += [
                f"link add v{number} type veth peer name eth0 netns {self.net}-{name}",
                f"link set v{number} master br0 up",
            ]
        self._ip(DESK, wires)
        for name in self.names:
            self._ip(name, ["link set lo up", f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up"])

    def _ip(self, name: str, lines: Sequence[str]) -> None:
        subprocess.run(["ip", "-n", f"{self.net}-{name}", "-b", "-"], input="\n".join(lines).encode(), check=True)
