"""Table of the causes for which attempts end, with the consequence of each and why.

The codes are those of findings (docs/diagnose.md). A code that is not in the table is a failure of the program.
"""

from __future__ import annotations

import errno
from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.causes.events import (
    EXIT,
    LOST_PEER,
    OUTSIDE,
    RAISED,
    RAISED_IN_COMMUNICATION,
    TIMED_OUT,
    in_communication,
)
from drumbeat.causes.events import HARDWARE as OF_HARDWARE
from drumbeat.findings.model import Finding

# The kernel's message for each error number.
OF_ERRNO = {
    number: code
    for code, numbers in {
        "disk-full": (errno.ENOSPC, errno.EDQUOT),
        "file-missing": (errno.ENOENT, errno.ENOTDIR),
        "permission": (errno.EACCES, errno.EPERM, errno.EROFS),
        "file-descriptors": (errno.EMFILE, errno.ENFILE),
        "port-in-use": (errno.EADDRINUSE,),
        "host-out-of-memory": (errno.ENOMEM,),
        "storage-error": (errno.EIO, errno.ESTALE, errno.ESHUTDOWN),
        "connect-failed": (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ENETDOWN, errno.EADDRNOTAVAIL),
        "store-refused": (errno.ECONNREFUSED,),
        "peer-lost": (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED),
        "not-executable": (errno.ENOEXEC,),
    }.items()
    for number in numbers
}
HANG = "hang-"  # prefix of the codes of hangs
NOT_ZERO = "let the failure end the program: raise the exception again, or leave with an exit code other than 0"

NEVER, SAME_STEP, SAME_WORDS = "never", "same step", "same words"
LONGEST_WAIT = 600.0  # seconds between two attempts


@dataclass(frozen=True)
class Cause:
    """Policy for attempts that ended for this cause."""

    name: str
    why: str  # why it is treated like this
    codes: Tuple[str, ...] = ()
    most: Optional[int] = None  # restarts in a row for this cause; None: as many as the job allows
    wait: float = 0.0  # seconds before the first restart; each further one in a row waits twice as long
    free: bool = False  # restarts do not count against the job's `restarts`
    repeats: str = NEVER  # no more restarts if it fails twice at the SAME_STEP, or before any step with the SAME_WORDS
    breaks_member: bool = False  # the machine is excluded at once
    suspects_member: bool = False  # the machine is excluded when it is the first to fail twice in a row
    hint: str = ""  # what to do when `most` is reached

    def delay(self, in_a_row: int) -> float:
        """Return the seconds to wait before the next restart, after this many attempts in a row ended for this cause."""
        return min(LONGEST_WAIT, self.wait * 2.0 ** min(in_a_row - 1, 30))


CONFIGURATION = Cause(
    "configuration",
    "another start would run the same way",
    (
        "transport-mismatch", "wrong-interface", "rdma-not-used", "separate-worlds", "ranks-repeated",
        "launcher-refused", "command-not-found", "not-executable", "no-rank-started",
    ),
    most=0,
)  # fmt: skip
PORT = Cause(
    "taken port",
    "the ranks' port was free when it was chosen; the next candidate costs nothing",
    ("port-in-use",),
    most=2,
    free=True,
    hint="likely two ranks take themselves for rank 0, and each opens it",
)
HARDWARE = Cause(
    "bad node",
    "a broken GPU, link or machine breaks the next attempt too: it must run elsewhere",
    (
        "node-lost", "node-failure", "process-stuck", "gpu-lost", "gpu-ecc", "gpu-xid", "gpu-hang", "amdgpu-reset",
        "pcie-error", "nvlink-down", "ib-device-fatal", "ib-port-error", "link-down",
    ),
    breaks_member=True,
)  # fmt: skip
MEMORY = Cause(
    "out of memory",
    "the same sizes need the same memory; once it may have been a neighbour or fragmentation",
    ("gpu-out-of-memory", "gpu-memory-taken", "oom-kill", "host-out-of-memory", "shm-full"),
    most=1,
    hint="use a smaller batch: drumbeat tune batch finds the largest that fits",
)
NAN = Cause(
    "NaN",
    "once it may have been a flipped bit; the second time it is the data or the learning rate",
    ("nan-loss",),
    most=1,
    hint="look at the learning rate and at the data of that step",
)
STORAGE = Cause(
    "storage",
    "a full or missing file system may come back; it needs time, not speed",
    ("disk-full", "storage"),
    most=3,
    wait=30.0,
    hint="make room, or write elsewhere",
)
SCHEDULER = Cause(
    "scheduler",
    "a preemption or a time limit is nobody's fault: queued again, where a scheduler can, it costs no restart",
    ("preempted", "time-limit"),
)
NETWORK = Cause(
    "network",
    "links recover within seconds; a machine that loses them twice in a row is bad",
    (
        "ib-retry-exceeded", "ib-remote-error", "efa-peer-unresponsive", "ofi-error", "connect-failed", "gloo-connect",
        "hub-access", "service-access", "store-connect-timeout", "store-no-route", "store-refused", "store-clients-missing",
        "rendezvous-timeout", "rendezvous-connection", "nccl-error", "nccl-closed", "ucx-error",
    ),
    wait=5.0,
    suspects_member=True,
)  # fmt: skip
UNCLEAR = Cause(
    "cause unknown",
    "nothing says why: program, machine or network; a machine that fails first twice in a row is suspected",
    (
        "unknown", "exit-code", "killed", "signal", "terminated", "bus-error", "cuda-failure", "gpu-launch-failure",
        "no-gpu", "rank-absent", "peer-lost", "collective-timeout", "gloo-timeout", "store-key-timeout", "store-gone",
        "watchdog-stuck", "watchdog-teardown", "init-incomplete", "ranks-missing",
    ),
    wait=1.0,
    repeats=SAME_STEP,
    suspects_member=True,
)  # fmt: skip
GUESSED = Cause(
    "cause unknown",
    "the words of the program alone suggest a cause: no machine is suspected for them, and no other one is asked for",
    wait=1.0,
    repeats=SAME_STEP,
)
PROGRAM = Cause("program", "a bug comes back at the same step; anything else may pass", wait=1.0, repeats=SAME_WORDS)

CAUSES = (CONFIGURATION, PORT, HARDWARE, MEMORY, NAN, STORAGE, SCHEDULER, NETWORK, UNCLEAR, PROGRAM)
_BY_CODE = {code: cause for cause in CAUSES for code in cause.codes}


def cause_of(finding: Optional[Finding], exit_code: int) -> Cause:
    if exit_code in (126, 127):  # as shells report that a command cannot be started
        return CONFIGURATION
    if finding is None:
        return UNCLEAR
    if finding.code.startswith(HANG):
        return UNCLEAR
    cause = _BY_CODE.get(finding.code, PROGRAM)
    decides = cause.breaks_member or cause.suspects_member or cause in (CONFIGURATION, SCHEDULER)
    return GUESSED if finding.guessed and decides else cause


# Codes of ends by the kind of event they are; every other code is an exception of the program.
_KINDS = {
    OUTSIDE: (
        "killed", "oom-kill", "segfault", "bus-error", "illegal-instruction", "signal", "terminated", "interrupted", "cpu-limit",
    ),
    OF_HARDWARE: HARDWARE.codes,
    EXIT: ("exit-code", "unknown", "aborted"),
    RAISED_IN_COMMUNICATION: tuple(code for code in NETWORK.codes if not code.endswith("-access")),
    LOST_PEER: ("peer-lost", "watchdog-teardown"),
    TIMED_OUT: ("collective-timeout", "gloo-timeout", "store-key-timeout", "watchdog-stuck", "jax-coordinator"),
}  # fmt: skip
_KIND_OF = {code: kind for kind, codes in _KINDS.items() for code in codes}
# they say that another rank went away or did not come
CONSEQUENCES = frozenset((*_KINDS[LOST_PEER], *_KINDS[TIMED_OUT]))

NOBODYS_FAULT = frozenset({"time-limit", "cancelled", "preempted", "terminated"})  # somebody else ended the run


def kind_of(code: str, words: str, guessed: bool = False) -> str:
    """Return the kind of event that ended a rank, from its finding's code and the rank's own words. `guessed`: the code is
    only a guess from the words, which do not prove a signal or broken hardware."""
    kind = _KIND_OF.get(code, RAISED)
    kind = RAISED if guessed and kind in (OUTSIDE, OF_HARDWARE) else kind
    own_words = kind == EXIT or code == "exception"
    return RAISED_IN_COMMUNICATION if own_words and in_communication(words) else kind
