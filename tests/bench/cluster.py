"""A real Slurm on one machine: each node is a network, pid, mount, uts and ipc namespace with its own address.

Needs root and Debian's slurmctld, slurmd, slurm-client, munge, iproute2, util-linux and procps. Nothing of the machine
is changed: daemons run in the foreground of their namespaces with their files in one folder, and end by recorded pid.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

from drumbeat.base.proc import children
from drumbeat.base.processes import die_with_parent
from tests.bench import config

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
HEAD = "head"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def why_not() -> str:
    """Why no cluster can be had here; '' where it can."""
    if os.geteuid() != 0:
        return "a real Slurm needs root (namespaces, munge)"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"a real Slurm needs {', '.join(missing)}: apt-get install {config.PACKAGES}" if missing else ""


@dataclass
class Cluster:
    base: str  # on storage that every node sees, and not below /tmp: each node has its own
    nodes: Dict[str, str]  # name -> last number of its address, in Slurm's order
    cpus: int = 2
    gpus: int = 4
    partitions: Dict[str, Iterable[str]] = field(default_factory=dict)  # the first is the default
    system: str = ""  # folder of another Debian that all nodes run, with its own Slurm and Python
    pids: Dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = os.getpid()
        self.net = f"db{secrets.token_hex(4)}"  # names of network namespaces: unlike those of any other bench
        self.home = os.path.join(self.base, "home")
        words = subprocess.run(
            [*(["chroot", self.system] if self.system else []), "slurmd", "-V"],
            capture_output=True,
            text=True,
            check=True,
        )
        self.version = tuple(int(number) for number in words.stdout.split()[-1].split(".")[:2])
        self.environ = {
            "PATH": os.path.dirname(sys.executable) + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "SLURM_CONF": os.path.join(self.base, "etc", "slurm.conf"),
        }

    # -- bringing it up and down -------------------------------------------------------------------------------------

    def up(self, seconds: float = 180.0) -> None:
        for name in ("etc", "state", "spool", "log", "run", "dev", "munge", "home"):
            os.makedirs(os.path.join(self.base, name), mode=0o755, exist_ok=True)
        os.makedirs(f"{self.base}/pmix", exist_ok=True)
        os.symlink("libpmix.so.2", f"{self.base}/pmix/libpmix.so")
        # A small disk that runs full: mounted before the nodes are, so that they see it too.
        os.makedirs(os.path.join(self.home, "small"), exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "small", f"{self.home}/small"], check=True)
        self._munge()
        for number in range(self.gpus):  # a gres file must be a device; this one is /dev/null's
            os.mknod(os.path.join(self.base, "dev", f"nvidia{number}"), 0o666 | 0o020000, os.makedev(1, 3))
        for name, text in config.files(
            self.base, self.nodes, self.cpus, self.gpus, self.partitions, self.version
        ).items():
            with open(os.path.join(self.base, "etc", name), "w", encoding="utf-8") as file:
                file.write(text)
        self._network()
        self.boot(HEAD)
        for node in self.nodes:
            self.boot(node)
        deadline = time.monotonic() + seconds
        while self._idle() < len(self.nodes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not come up; its logs are in {self.base}/log")
            time.sleep(0.1)

    def down(self) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        self.pids.clear()
        subprocess.run(["umount", f"{self.home}/small"], check=False, capture_output=True)
        for node in (HEAD, *self.nodes):
            subprocess.run(["ip", "netns", "del", self._netns(node)], check=False, capture_output=True)

    def boot(self, node: str) -> None:
        program = ["slurmctld", "-i", "-D"] if node == HEAD else ["slurmd", "-D", "-N", node]
        os.makedirs(os.path.join(self.base, "spool", node), exist_ok=True)
        argv = [
            "ip", "netns", "exec", self._netns(node),
            "unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc",
            "sh", os.path.join(self.base, "etc", "init.sh"), node, self.base, ROOT, self.system, *program,
        ]  # fmt: skip
        with open(os.path.join(self.base, "log", f"init.{node}.log"), "ab") as log:
            process = subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=self._die_with_us,
            )  # fmt: skip
        self.pids[node] = process.pid

    def cut(self, node: str) -> None:
        """The power is gone: first the link, so that not even a reset is seen; then everything at once."""
        subprocess.run(["ip", "-n", self._netns(node), "link", "set", "eth0", "down"], check=True)
        pid = self.pids.pop(node)
        os.kill(pid, 9)
        os.waitpid(pid, 0)

    def repair(self, node: str) -> None:
        subprocess.run(["ip", "-n", self._netns(node), "link", "set", "eth0", "up"], check=True)
        self.boot(node)

    # -- using it ----------------------------------------------------------------------------------------------------

    def start(self, node: str, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, **more):
        """A process on a node (or on the head, which is the login node too), as a Popen with text pipes."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.Popen(self._enter(node, argv), env={**self.environ, **(env or {})}, **{**options, **more})

    def run(
        self, node: str, argv: Sequence[str], env: Optional[Mapping[str, str]] = None, timeout: float = 180, **more
    ):
        with self.start(node, argv, env, **more) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"{argv} took more than {timeout} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def out(self, *argv: str, timeout: float = 120) -> str:
        done = self.run(HEAD, argv, timeout=timeout)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def job(self, number: int) -> Dict[str, str]:
        """`scontrol show job` as a mapping."""
        words = self.out("scontrol", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: int, states: Sequence[str], seconds: float = 180) -> Dict[str, str]:
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if job["JobState"] in states:
                return job
            assert time.monotonic() < deadline, f"job {number} is {job['JobState']} ({job['Reason']}), not {states}"
            time.sleep(0.2)

    def processes(self, node: str) -> List[str]:
        """Command lines of all that runs on a node, but for its own daemons and whoever asks."""
        out = self.run(node, ["ps", "-eo", "args="]).stdout.splitlines()
        mine = ("sh " + self.base, "sleep 3600", "slurmd", "slurmctld", "ps -eo", "[")
        return [line.strip() for line in out if line.strip() and not line.strip().startswith(mine)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _enter(self, node: str, argv: Sequence[str]) -> List[str]:
        (first,) = children(self.pids[node])
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", "-t", str(first), *spaces, "--root", f"--wdns={self.home}", "--", *argv]

    def _die_with_us(self) -> None:
        """Tests that are killed outright must not leave a cluster behind."""
        die_with_parent(self.owner)

    def _netns(self, node: str) -> str:
        return f"{self.net}-{node}"

    def _idle(self) -> int:
        try:
            done = self.run(HEAD, ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], timeout=60)
        except ValueError:  # the namespace has no first process yet
            return 0
        return len(set(done.stdout.split())) if done.returncode == 0 else 0

    def _munge(self) -> None:
        folder = os.path.join(self.base, "munge")
        with open(os.open(os.path.join(folder, "key"), os.O_WRONLY | os.O_CREAT, 0o400), "wb") as file:
            file.write(os.urandom(128))
        argv = [
            "munged", "--foreground", "--num-threads=2", f"--key-file={folder}/key", f"--socket={folder}/socket",
            f"--pid-file={folder}/pid", f"--log-file={folder}/log", f"--seed-file={folder}/seed",
        ]  # fmt: skip
        with open(os.path.join(folder, "out"), "wb") as out:
            process = subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=self._die_with_us
            )
        self.pids["munged"] = process.pid

    def _network(self) -> None:
        """A bridge on the head, a wire to each node; written as one batch each, because `ip` starts slowly."""
        for node in (HEAD, *self.nodes):
            subprocess.run(["ip", "netns", "add", self._netns(node)], check=True)
        head = self._netns(HEAD)
        wires = ["link set lo up", "link add br0 type bridge", f"addr add {config.address('254')}/24 dev br0"]
        wires.append("link set br0 up")
        for number, node in enumerate(self.nodes):
            wires += [
                f"link add v{number} type veth peer name eth0 netns {self._netns(node)}",
                f"link set v{number} master br0 up",
            ]
        self._ip(head, wires)
        for node, last in self.nodes.items():
            lines = ["link set lo up", f"addr add {config.address(last)}/24 dev eth0", "link set eth0 up"]
            self._ip(self._netns(node), lines)

    @staticmethod
    def _ip(namespace: str, lines: Sequence[str]) -> None:
        subprocess.run(["ip", "-n", namespace, "-b", "-"], input="\n".join(lines).encode(), check=True)
