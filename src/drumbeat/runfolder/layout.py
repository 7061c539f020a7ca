"""The layout of a run folder, and nothing else: where each file is and who writes it.

RUN/
  run.json             what this is, schema, handle        desk; again when a scheduler has given it a handle
  order.json           the Order                           desk, once
  job.yaml             the job file as it was given        desk, once
  code.json            commit, dirty state, image digest   desk, once
  code.diff            what differs from the commit        desk, once; secrets are replaced, its size is limited
  packages.json        Python packages and versions        agent 0, once per start
  code.tar.gz, code/   with `code: sync` the code that ran, packed and as the ranks see it   desk, once
  call/                a submitted function and its arguments; what to call after a checkpoint   desk, once; ranks
  drumbeat.pyz         what every node runs                desk, once
  job.sh               the batch script, where there is one   desk, once
  NAME-J.out           what the whole job printed          the scheduler
  desk.log             of a job of this machine's queue: what on-start and the desk printed   desk, appended
  verdict              the end, for whatever started the agents   lead, replaced; removed when the job starts again
  lost, requeues       nodes lost and requeues so far      lead, replaced
  stop                 a line for each request to stop     whoever asks; only the lead reads it
  trackers.json        names of the runs of MLflow and Aim   rank 0, replaced
  on-end.log           what the on-end command printed   the command, appended
  track-NAME.log       what the process of a tracker printed   that process, appended
  track-NAME.sent      time of the last metric it has   that process, replaced
  array/N/             one job of an array: a run folder of its own
  events.jsonl         the run's events                    lead
  peers.json           who took part, and as which node    lead, replaced
  summary.json         how it went                         lead, replaced; the desk, if the lead was killed
  nodes/K/facts.json         what node K has               agent K
  nodes/K/environment.json   every variable, with reason   agent K, replaced
  nodes/K/events.jsonl       its events                    agent K
  nodes/K/metrics.jsonl      what its ranks reported       agent K
  nodes/K/telemetry.jsonl    GPUs, cores, network          agent K's monitor
  nodes/K/agent.log          what the monitor complained of   agent K's monitor
  nodes/K/attempt-N/rank-R.out, rank-R.err                 rank R
  nodes/K/attempt-N/ranks.log      instead, above 64 ranks agent K
  nodes/K/attempt-N/launcher.out, launcher.err             a launcher or script that starts the ranks
  nodes/K/attempt-N/launcher.json  after a failure: which ranks the launcher saw fail   that launcher
  nodes/K/attempt-N/looks.json     what its ranks were doing when steps stopped coming   agent K, replaced
  nodes/K/attempt-N/nccl-rankR.log   after a failure: what NCCL said   agent K
  nodes/K/attempt-N/profile/rank-R.pt.trace.json   drumbeat train with profile=   rank R
  nodes/0/attempt-N/collectives.json verify: what was measured         rank 0
  verify.json, verify.svg            verify: what it means             desk, at the end
"""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from contextlib import suppress
from typing import Any, Dict, List, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.files import append

SCHEMA = "1.0"


class _File:
    """The path of a file below an object that has a `path`."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, folder: Any, owner: Any = None) -> str:
        return os.path.join(folder.path, *self.parts)


@dataclass(frozen=True)
class _Folder:
    path: str

    def at(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)


@dataclass(frozen=True)
class RunFolder(_Folder):
    run_json = _File("run.json")
    order = _File("order.json")
    job = _File("job.yaml")
    code = _File("code.json")
    diff = _File("code.diff")
    packages = _File("packages.json")
    code_archive = _File("code.tar.gz")
    code_copy = _File("code")
    bundle = _File("drumbeat.pyz")
    script = _File("job.sh")
    desk_log = _File("desk.log")
    call = _File("call", "call.pkl")
    stop = _File("stop")
    trackers = _File("trackers.json")
    on_end_log = _File("on-end.log")
    verdict = _File("verdict")
    lost = _File("lost")
    requeues = _File("requeues")
    events = _File("events.jsonl")
    peers = _File("peers.json")
    summary = _File("summary.json")

    def track_log(self, tracker: str) -> str:
        return self.at(f"track-{tracker}.log")

    def tracked(self, tracker: str) -> str:
        return self.at(f"track-{tracker}.sent")

    def node(self, node: int) -> NodeFolder:
        return NodeFolder(self.at("nodes", str(node)), node)


@dataclass(frozen=True)
class NodeFolder(_Folder):
    node: int

    facts = _File("facts.json")
    environment = _File("environment.json")
    events = _File("events.jsonl")
    metrics = _File("metrics.jsonl")
    telemetry = _File("telemetry.jsonl")
    agent_log = _File("agent.log")

    def attempt(self, attempt: int) -> str:
        return self.at(f"attempt-{attempt}")

    def log(self, attempt: int, rank: int, stream: str) -> str:
        """Return the path of a log. `stream` is `out` or `err`."""
        return self.at(f"attempt-{attempt}", f"rank-{rank}.{stream}")

    def merged(self, attempt: int) -> str:
        """Return the file that holds the output of all ranks of the node in a large job."""
        return self.at(f"attempt-{attempt}", "ranks.log")

    def looks(self, attempt: int) -> str:
        return self.at(f"attempt-{attempt}", "looks.json")

    def ranks(self, attempt: int) -> Dict[int, str]:
        """Map each rank to the path of its log without the stream's suffix."""
        try:
            names = os.listdir(self.attempt(attempt))
        except OSError:
            return {}
        stems = {name.rsplit(".", 1)[0] for name in names if name.startswith("rank-")}
        return {int(stem[5:]): self.at(f"attempt-{attempt}", stem) for stem in stems if stem[5:].isdigit()}


# The run's `stop` file: a way to ask for the end of the run without signalling the lead. A batch script's trap, `drumbeat cancel`
# and the desk of an allocation append a line, `WORD reason`. A signal sent through a launcher may reach every process of the job,
# including DataLoader workers; a line reaches only the lead, and nodes that still wait for the lead or for their own tasks.


# TERM: the scheduler asks for the end. INT: the user interrupts; a second INT ends the run at once. USR2: the scheduler will end
# the job soon. CANCEL: `drumbeat cancel`, after which the run does not come back; a second CANCEL ends it at once. LOST: a node's
# agent has ended before all nodes had joined, so the lead would wait until its timeout. LEFT is for readers: the seconds until
# whoever asked for the end kills the ranks, and why.
WORDS = ("TERM", "INT", "USR2", "CANCEL", "LOST")
_LIMIT = 1 << 16


def ask_to_stop(path: str, name: str, reason: str) -> None:
    """Ask the agents to stop. `name` is one of WORDS."""
    append(path, stop_line(name, reason).encode())


def stop_word(number: int) -> str:
    """Return the word of WORDS for a stop signal."""
    return {signal.SIGINT: "INT", signal.SIGUSR2: "USR2"}.get(signal.Signals(number), "TERM")


def stop_line(name: str, reason: str) -> str:
    assert name in WORDS, name
    return f"{name} {reason}\n"


@dataclass
class StopFile:
    """The agents' side of the stop file: requests since the last call."""

    path: str
    position: int = 0

    def look(self) -> List[Tuple[str, str]]:
        """Return pairs of a word of WORDS and the reason."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read(_LIMIT)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        asked = []
        for line in whole.decode("utf-8", "replace").splitlines():
            name, _, reason = line.partition(" ")
            if name in WORDS:
                asked.append((name, reason or f"asked to stop by {name}"))
        return asked

    def skip(self, started_before: bool, events: str) -> int:
        """Return the position from which to read. Requests to an earlier start of this run no longer count, except a
        cancellation. There was an earlier start if the scheduler says so (`started_before`), or if a lead left `events`."""
        position = 0
        with suppress(OSError), open(self.path, "rb") as file:  # without the file, nobody has asked
            for line in file:
                if line.split()[:1] == [b"CANCEL"] or not line.endswith(b"\n"):
                    break
                position += len(line)
        return position if started_before or os.path.exists(events) else 0


# Checks that a run folder is this user's own before anything is written into it.


def untrusted(folder: RunFolder, node: int) -> str:
    """Explain why node `node` must not write into this run folder; '' if it may.

    The folder, and those below it that the node uses, must be real folders, not links, and belong to this user: otherwise
    somebody else could place links there that make this user overwrite files. The path above may contain links: a user's own
    `runs` often is one.
    """
    places = (folder.path, folder.at("nodes"), folder.node(node).path)
    return next((why for why in map(_foreign, places) if why), "")


def _foreign(path: str) -> str:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid != os.geteuid() and found.st_uid != _owner_of_new(path):
        return f"{path} belongs to another user (uid {found.st_uid})"
    return ""


def _owner_of_new(folder: str) -> int:
    """Return the owner of files that this process creates in the folder: some file systems give all files one owner."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".owner-") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()
