"""Which processes get the stop signal: those that train, behind shells and launchers, and never their helpers."""

import pytest

from drumbeat.base.proc import Stat
from drumbeat.inspector.tree import Snapshot, stop_targets

PYTHON = b"python\0train.py\0"


def table(*rows):
    """Rows of (pid, parent, program, keywords)."""
    look = Snapshot({pid: Stat("S", parent, 0.0, 0.0, str(pid)) for pid, parent, _, _ in rows})
    for pid, _, program, more in rows:
        known = {"program": program, "command": program.encode(), "rank": "", "handles": False, **more}
        known["handles"] = {True: lambda number: True, False: lambda number: False}[known["handles"]]
        look._sockets[pid] = known.pop("sockets", None)
        vars(look.processes[pid]).update(known)
    return look


CASES = {
    "the rank itself, not its DataLoader workers": (
        [(1, 0, "python", {"command": PYTHON, "handles": True}), (2, 1, "python", {"command": PYTHON, "handles": True})],
        [1],
    ),
    "workers handle TERM by themselves, the script does not": (
        [(1, 0, "python", {"command": PYTHON}), (2, 1, "python", {"command": PYTHON, "handles": True})],
        [1],
    ),
    "spawned workers": (
        [(1, 0, "python", {"command": PYTHON}),
         (2, 1, "python", {"command": b"python\0-c\0from multiprocessing.spawn import spawn_main", "handles": True})],
        [1],
    ),
    "a rank that waits for its compiler": (
        [(1, 0, "python", {"command": PYTHON, "sockets": {"7": (1, 2)}}), (2, 1, "gcc", {"handles": True})],
        [1],
    ),
    "a wrapper with a connection of its own": (
        [(1, 0, "python", {"command": b"wrapper", "sockets": {"7": (1, 2)}}),
         (2, 1, "python", {"command": PYTHON, "handles": True, "sockets": {"8": (3, 4)}})],
        [2],
    ),
    "a wrapper with a connection of its own, before a shell": (
        [(1, 0, "python", {"command": b"wrapper", "sockets": {"7": (1, 2)}}), (2, 1, "bash", {}),
         (3, 2, "python", {"command": PYTHON, "handles": True, "sockets": {"8": (3, 4)}})],
        [3],
    ),
    "behind a shell, past tee": (
        [(1, 0, "bash", {}), (2, 1, "python", {"command": PYTHON, "handles": True}), (3, 1, "tee", {})],
        [2],
    ),
    "behind two shells": (
        [(1, 0, "bash", {}), (2, 1, "dash", {}), (3, 2, "python", {"command": PYTHON, "handles": True})],
        [3],
    ),
    "a shell that passes signals on itself: what trains gets it once, from us": (
        [(1, 0, "bash", {"handles": True}), (2, 1, "python", {"command": PYTHON, "handles": True})],
        [2],
    ),
    "a shell that handles it for a program that does not": (
        [(1, 0, "bash", {"handles": True}), (2, 1, "python", {"command": PYTHON})],
        [1],
    ),
    "nothing handles it": (
        [(1, 0, "bash", {}), (2, 1, "python", {"command": PYTHON}), (3, 2, "python", {"command": PYTHON})],
        [1, 2],
    ),
    "ranks of a launcher, not the launcher": (
        [(1, 0, "python", {"command": b"torchrun", "handles": True}),
         (2, 1, "python", {"command": PYTHON, "rank": "0", "handles": True}),
         (3, 1, "python", {"command": PYTHON, "rank": "1", "handles": True}),
         (4, 3, "python", {"command": PYTHON, "rank": "1", "handles": True}),
         (5, 1, "python", {"command": b"server", "handles": True})],
        [2, 3],
    ),
    "a launcher that was given a rank itself": (
        [(1, 0, "bash", {"rank": "0"}), (2, 1, "python", {"command": b"torchrun", "rank": "0", "handles": True}),
         (3, 2, "python", {"command": PYTHON, "rank": "0", "handles": True}),
         (4, 2, "python", {"command": PYTHON, "rank": "1", "handles": True})],
        [3, 4],
    ),
    "a launcher whose ranks do not handle it": (
        [(1, 0, "python", {"command": b"torchrun", "handles": True}),
         (2, 1, "python", {"command": PYTHON, "rank": "0"}), (3, 1, "python", {"command": PYTHON, "rank": "1"})],
        [1],
    ),
    "a program that starts the training as another": (
        [(1, 0, "python", {"command": b"python\0outer.py"}), (2, 1, "python", {"command": PYTHON, "handles": True})],
        [2],
    ),
    "gone": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_gets_the_signal(case):
    rows, wanted = CASES[case]
    assert [process.pid for process in stop_targets(table(*rows), 1, 15)] == wanted
