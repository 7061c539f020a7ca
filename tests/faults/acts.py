"""What is done to a run from outside, once its fault begins. Each gets the run folder and the desk's process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List

from tests.runs.test_nobody_left import tree

Act = Callable[[Path, "subprocess.Popen[str]"], None]


def _signal(number: int, *roles: str) -> Act:
    """Signals guards and agents: `agent 1` is the agent of node 1. All at once: each would notice that the other is gone."""

    def act(run: Path, desk: subprocess.Popen[str]) -> None:
        found = tree(run.name)
        pids = [found[role.split()[0]][int(role.split()[1])] for role in roles]
        for each in (signal.SIGSTOP, number) if len(pids) > 1 else (number,):
            for pid in pids:
                os.kill(pid, each)

    return act


def _desk(*numbers: int) -> Act:
    def act(run: Path, desk: subprocess.Popen[str]) -> None:
        for index, number in enumerate(numbers):
            time.sleep(1.0 if index else 0.0)
            desk.send_signal(number)

    return act


def _cancel(run: Path, desk: subprocess.Popen[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "drumbeat", "cancel", str(run)], check=False, capture_output=True, timeout=120
    )


def _delete(run: Path, desk: subprocess.Popen[str]) -> None:
    """Renamed first: who writes by path finds it gone at once, and nobody adds to what is being deleted."""
    gone = run.parent.parent / f"{run.name}.deleted"  # beside the runs, of which it is none any more
    run.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)  # a file that is still held open may be written to until its writer ends


def _garbage(run: Path, desk: subprocess.Popen[str]) -> None:
    """To every port on which an agent of the run listens now; there should be none, and one is noted down."""
    pids = {pid for nodes in tree(run.name).values() for pid in nodes.values()}
    for port in _listening(pids):
        (run.parent.parent / "listens").write_text(str(port))
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b'{"proof":"\\u00e9"}\n' + os.urandom(4096))


def _listening(pids: set[int]) -> List[int]:
    inodes = set()
    for pid in pids:
        try:
            targets = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # it has just ended, or closed one
            continue
        inodes |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def _set_clock(seconds: int) -> Act:
    """Of those processes that read their clock from the row's `offset`."""

    def act(run: Path, desk: subprocess.Popen[str]) -> None:
        folder = run.parent.parent
        (folder / "offset.new").write_text(f"{seconds}\n")
        (folder / "offset.new").replace(folder / "offset")

    return act


def _cut(checkpoint: Path) -> None:
    """As after a failing disk."""
    for path in checkpoint.glob("*.distcp"):
        os.truncate(path, path.stat().st_size // 2)


def _tear(checkpoint: Path) -> None:
    """As after a power cut in the middle of a save: there is no commit marker."""
    _cut(checkpoint)
    (checkpoint / "commit.json").unlink()


def _flip(checkpoint: Path) -> None:
    """One bit in the middle of the largest file: a value of a tensor."""
    path = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def _damage(how: Callable[[Path], None]) -> Act:
    """The newest checkpoint is damaged, and then a rank dies."""

    def act(run: Path, desk: subprocess.Popen[str]) -> None:
        folder = run.parent.parent
        ranks = _rank_pids(run)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        newest = max(path.parent for path in (folder / "checkpoints").glob("step-*/commit.json"))
        how(newest)
        (folder / "fault").write_text(str(time.time()))
        os.kill(ranks[-1], signal.SIGKILL)
        for pid in ranks[:-1]:
            os.kill(pid, signal.SIGCONT)

    return act


def _rank_pids(run: Path) -> List[int]:
    found = []
    for path in sorted(run.glob("nodes/*/events.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        found += [event["pid"] for event in events if event["kind"] == "rank-started"]
    return found


ACTS: Dict[str, Act] = {
    "set the clock back": _set_clock(-86400),
    "set the clock forward": _set_clock(86400),
    "tear the newest checkpoint": _damage(_tear),
    "corrupt the newest checkpoint": _damage(_cut),
    "flip a bit of the newest checkpoint": _damage(_flip),
    "kill the desk": _desk(signal.SIGKILL),
    "hang up": _desk(signal.SIGHUP),
    "interrupt": _desk(signal.SIGINT),
    "interrupt twice": _desk(signal.SIGINT, signal.SIGINT),
    "terminate": _desk(signal.SIGTERM),
    "cancel": _cancel,
    "kill the lead": _signal(signal.SIGKILL, "agent 0"),
    "kill the lead's guard": _signal(signal.SIGKILL, "guard 0"),
    "kill node 0": _signal(signal.SIGKILL, "guard 0", "agent 0"),
    "kill agent 1": _signal(signal.SIGKILL, "agent 1"),
    "kill node 1": _signal(signal.SIGKILL, "guard 1", "agent 1"),
    "stop node 1": _signal(signal.SIGSTOP, "guard 1", "agent 1"),
    "stop agent 1": _signal(signal.SIGSTOP, "agent 1"),
    "delete the folder": _delete,
    "garbage": _garbage,
}
