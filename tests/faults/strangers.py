"""What stands in a run's way before it starts: another user's processes and files, and stand-ins for what this machine lacks.

Each gets the row's folder and the names that the run will use, and returns what has to be ended with the row.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Callable, Dict, List

from drumbeat.bundle.build import cached_bundle
from drumbeat.plan.scene import DEFAULT_EPHEMERAL, ports
from tests.runs.test_clock import SHIM

Before = Callable[[Path, str], ExitStack]
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"  # a virtual environment may lie where others cannot look


def own_address() -> str:
    """One by which others would reach this machine; without any network, another one of its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


MASTER = own_address()


def candidates(name: str) -> List[int]:
    """The ports at which the lead of a job that is typed on each machine is looked for: anybody can work them out."""
    return list(ports(f"muster/{getpass.getuser()}/{name}/{MASTER}", DEFAULT_EPHEMERAL)[0])


def as_another_user(code: str, *words: str) -> subprocess.Popen[bytes]:
    who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"] if os.geteuid() == 0 else []
    return subprocess.Popen(
        [*who, SYSTEM_PYTHON, "-I", "-S", "-c", code, *words],
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _until_ready(process: subprocess.Popen[bytes]) -> ExitStack:
    assert process.stdout
    assert process.stdout.readline() == b"ready\n", process.wait(10)
    ends = ExitStack()
    ends.callback(process.wait)
    ends.callback(process.kill)
    return ends


_SQUAT = """
import socket, sys, time
held = [socket.create_server((sys.argv[1], int(port))) for port in sys.argv[2:]]
print("ready", flush=True)
time.sleep(3600)
"""

# It sits on the first candidate port and hands every byte on to the second, where the lead has to listen then.
_RELAY = """
import selectors, socket, sys, threading
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
def hand_on(member):
    with socket.create_connection((sys.argv[1], int(sys.argv[3]))) as lead, member:
        way = selectors.DefaultSelector()
        way.register(member, selectors.EVENT_READ, lead)
        way.register(lead, selectors.EVENT_READ, member)
        while True:
            for key, _ in way.select():
                data = key.fileobj.recv(65536)
                if not data:
                    return
                key.data.sendall(data)
def guarded(member):
    try:
        hand_on(member)
    except OSError:
        member.close()
while True:
    threading.Thread(target=guarded, args=(listener.accept()[0],), daemon=True).start()
"""


def squat_one_port(folder: Path, name: str) -> ExitStack:
    return _until_ready(as_another_user(_SQUAT, MASTER, str(candidates(name)[0])))


def squat_all_ports(folder: Path, name: str) -> ExitStack:
    return _until_ready(as_another_user(_SQUAT, MASTER, *map(str, candidates(name))))


def relay(folder: Path, name: str) -> ExitStack:
    return _until_ready(as_another_user(_RELAY, MASTER, *map(str, candidates(name)[:2])))


def plant_bundle(folder: Path, name: str) -> ExitStack:
    """In the place of the cached bundle lies another user's, which would leave a trace if it ran."""
    path = Path(cached_bundle({"HOME": os.environ["HOME"], "XDG_CACHE_HOME": str(folder / "cache")}))
    path.unlink()
    path.write_text(f"open({str(folder / 'it-ran')!r}, 'w').close()\n")
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    return ExitStack()


def kernel_logs(folder: Path, name: str) -> ExitStack:
    """One stand-in per node; in it, an error of before the run."""
    for node in range(3):
        (folder / f"kernel-{node}").write_text("[ 1.0] NVRM: Xid (PCI:0000:4e:00): 79, pid=1, of yesterday\n")
    return ExitStack()


def clock(folder: Path, name: str) -> ExitStack:
    (folder / "clock.c").write_text(SHIM)
    compiler = shutil.which("gcc")
    assert compiler, "needs a C compiler (apt install gcc libc6-dev)"
    source, library = str(folder / "clock.c"), str(folder / "clock.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    (folder / "offset").write_text("0\n")
    return ExitStack()


BEFORE: Dict[str, Before] = {
    "squat one port": squat_one_port,
    "squat all ports": squat_all_ports,
    "relay": relay,
    "plant a bundle": plant_bundle,
    "kernel logs": kernel_logs,
    "clock": clock,
}
