"""One program of the workload table: by hand, with drumbeat in front, on 2 x 2, and with one rank that fails."""

from __future__ import annotations

import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.metrics.printed import Reader
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import Summary

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("WORKLOADS_SECONDS", "1500"))  # for one command, on a machine that may be busy
FAULTS = ("exception", "kill", "oom")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
LATE = "no: not ended within"
NOT_YET = "not finished"
_NOT_NUMBERS = ("t", "node", "rank", "kind", "printed", "rate", "rate_per", "unit", "loss_per")


@dataclass(frozen=True)
class Program:
    name: str
    packages: Sequence[str]  # the first one is {at} where there is no checkout
    command: str
    checkout: str = ""
    venv: str = "venv"
    processes: str = "many"  # or one
    launcher: str = ""  # mpirun: it stands before drumbeat
    options: Sequence[str] = ()
    folder: str = ""  # where it must be started
    prepare: str = ""
    places: Mapping[str, str] = field(
        default_factory=dict
    )  # where the program looks -> what of the data it finds there
    env: Mapping[str, str] = field(default_factory=dict)
    makes: Sequence[str] = ()  # folders that it expects where it is started


@dataclass
class Row:
    """What was seen of a program; a cell that begins with `no:` is not as it should be."""

    name: str
    version: str = ""
    date: str = ""
    skipped: str = ""
    hand: str = ""
    front: str = ""
    square: str = ""
    exception: str = ""
    kill: str = ""
    oom: str = ""
    numbers: str = ""
    loss: Optional[float] = None  # by hand
    source: str = ""  # the drumbeat with which it was seen

    @property
    def bad(self) -> List[str]:
        return [name for name, value in asdict(self).items() if str(value).startswith("no:")]

    @property
    def is_whole(self) -> bool:
        """Whether it ran, and every cell was seen."""
        return not self.skipped and NOT_YET not in (
            self.hand,
            self.front,
            self.square,
            self.exception,
            self.kill,
            self.oom,
        )

    def finish(self, processes: str) -> None:
        """Say which cells were not seen; a program of one process has none for 2 x 2."""
        for name in ("hand", "front", "square", *FAULTS):
            if not getattr(self, name) and not (name == "square" and processes == "one"):
                setattr(self, name, NOT_YET)

    def again(self) -> Row:
        """To go on with: what was seen stays, but for what had no time to end."""
        kept = {name: "" if str(value).startswith(LATE) else value for name, value in asdict(self).items()}
        return Row(**kept)


class Place:
    """The checkouts, environments and data of $DRUMBEAT_WORKLOADS."""

    def __init__(self, root: Path, work: Path, data: Path) -> None:
        self.root, self.work, self.data = root, work, data

    def python(self, program: Program) -> str:
        own = self.root / program.venv / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def versions(self, program: Program) -> Tuple[str, str]:
        """The versions, or why the program cannot run here."""
        script = (
            "import importlib.metadata as m, importlib.util as u, sys\n"
            "for name in sys.argv[1:]:\n"
            "    if u.find_spec(name) is None: print('-', name); continue\n"
            "    try: print(name, m.version(name))\n"
            "    except m.PackageNotFoundError: print(name, '')\n"
        )
        done = subprocess.run([self.python(program), "-c", script, *program.packages], capture_output=True, text=True)
        lines = done.stdout.splitlines()
        missing = [line[2:] for line in lines if line.startswith("- ")]
        if missing:
            return "", f"{', '.join(missing)} not installed"
        words = [line.strip() for line in lines]
        if program.checkout:
            folder = self.root / program.checkout
            if not folder.exists():
                return "", f"no checkout {program.checkout}"
            words.insert(0, _commit(folder))
        return ", ".join(words), ""

    def at(self, program: Program) -> str:
        if program.checkout:
            return str((self.root / program.checkout).resolve())
        script = "import importlib.util as u, sys; print(list(u.find_spec(sys.argv[1]).submodule_search_locations)[0])"
        done = subprocess.run([self.python(program), "-c", script, program.packages[0]], capture_output=True, text=True)
        return done.stdout.strip()


def _commit(folder: Path) -> str:
    noted = folder / "VERSION.drumbeat"  # of a checkout without its history
    if noted.exists():
        return noted.read_text().strip()
    done = subprocess.run(["git", "-C", str(folder), "log", "-1", "--format=%h %cs"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown commit"


@dataclass
class Done:
    code: int
    out: str
    run: Optional[Run] = None
    late: bool = False  # it had to be ended


class Runner:
    def __init__(self, place: Place, program: Program) -> None:
        self.place, self.program = place, program
        self.at = place.at(program)
        self.count = 0

    def row(self, row: Row, keep: Callable[[Row], None]) -> Row:
        """Every cell that `row` does not have yet; `keep` gets the row after each of them."""
        version, skipped = self.place.versions(self.program)
        if row.version != version:
            row = Row(self.program.name, source=row.source)
        row.version, row.skipped, row.date = version, skipped, row.date or datetime.date.today().isoformat()
        if not skipped:
            self.fill(row, keep)
        keep(row)
        return row

    def fill(self, row: Row, keep: Callable[[Row], None]) -> None:
        if not row.hand:
            hand = self.start(2, drumbeat=False)
            by_hand = numbers_printed(hand.out)
            row.loss, row.hand = by_hand.get("loss"), _ended(hand, by_hand)
            keep(row)
        if row.bad == ["hand"]:
            row.skipped = f"fails by hand: {row.hand}"
            return
        if not row.front:
            front = self.start(2)
            seen = numbers_of(front.run)
            row.front = _ended(front, seen) + _same(row.loss, seen)
            row.numbers = ", ".join(sorted(seen)) or "none printed"
            keep(row)
        if self.program.processes == "many" and not row.square:
            row.square = self.on_two_nodes()
            keep(row)
        for fault in FAULTS:
            if not getattr(row, fault):
                setattr(row, fault, self.failing(fault))
                keep(row)

    def on_two_nodes(self) -> str:
        done = self.start(4 if self.program.launcher else 2, nodes=2)
        size = done.run.order() if done.run else None
        world = size.nodes * size.ranks_per_node if size else 0
        if done.late or done.code != 0:
            return _ended(done, {})
        joined = "one world" in done.out
        wanted = 4
        return (
            f"{world} ranks in one world"
            if joined and world == wanted
            else f"no: {world} ranks, {_line(done.out, 'world')}"
        )

    def failing(self, fault: str) -> str:
        many = self.program.processes == "many"
        rank = 1 if many else 0
        shape = (2, 1) if self.program.launcher else (1, 2 if many else 1)
        done = self.start(shape[0], nodes=shape[1], fault=fault, rank=rank)
        if done.late:
            return _ended(done, {})
        summary = _summary(done.run) if done.run else None
        failure = summary.failure if summary else None
        if failure is None:
            return f"no: exit code {done.code}, no failure was told"
        words = {"exception": "injected", "kill": "SIGKILL", "oom": "memory"}[fault]
        text = " ".join([failure.title, failure.cause, *(evidence.text for evidence in failure.evidence)])
        right = done.code != 0 and words in text and failure.rank == rank
        told = f"rank {failure.rank}: {failure.title[:90]}, exit {done.code}"
        return told if right else f"no: {told}"

    def start(self, ranks: int, nodes: int = 1, drumbeat: bool = True, fault: str = "", rank: int = 0) -> Done:
        program = self.program
        self.count += 1
        top = self.place.work / f"{_slug(program.name)}-{self.count}"
        out = top / "out"
        out.mkdir(parents=True)
        (top / "data").symlink_to(self.place.data / "mnist")
        for name in program.makes:
            (out / name).mkdir()
        words = {"at": self.at, "data": str(self.place.data), "out": str(out), "ranks": str(ranks), "here": str(HERE)}
        for where, what in program.places.items():
            path = Path(where.format(**words))
            if path.is_symlink():  # of an earlier run, whose data is gone
                path.unlink()
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(self.place.data / what)
        environ = self.environ(words, fault, rank)
        folder = program.folder.format(**words) or str(out)
        if program.prepare:
            run(shlex.split(program.prepare.format(**words)), folder, environ)
        command = shlex.split(program.command.format(**words))
        before = [*MPIRUN, "-n", str(ranks)] if program.launcher == "mpirun" else []
        if not drumbeat:
            return run([*before, *command], folder, environ)
        shape = [] if program.launcher else ["--nodes", str(nodes)]
        runs = top / "runs"
        front = [sys.executable, "-m", "drumbeat", "run", "--runs", str(runs), *shape, *program.options, "--", *command]
        done = run([*before, *front], folder, environ)
        found = sorted(runs.iterdir()) if runs.exists() else []
        done.run = Run.open(str(found[-1])) if found else None
        return done

    def environ(self, words: Mapping[str, str], fault: str, rank: int) -> Dict[str, str]:
        program = self.program
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
        own = {name: value.format(**words) for name, value in program.env.items()}
        path = os.pathsep.join([os.path.dirname(self.place.python(program)), environ.get("PATH", "")])
        pythonpath = os.pathsep.join(filter(None, [str(HERE / "fault"), own.pop("PYTHONPATH", "")]))
        environ.update(
            PATH=path, PYTHONPATH=pythonpath, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
            DS_ACCELERATOR="cpu", WANDB_MODE="disabled", JAX_PLATFORMS="cpu", HF_HOME=str(self.place.work / "hf"), **own,
        )  # fmt: skip
        if fault:
            environ.update(WORKLOAD_FAULT=fault, WORKLOAD_RANK=str(rank))
        return environ


def run(argv: List[str], folder: str, environ: Mapping[str, str]) -> Done:
    """Both streams together; after the deadline the whole session is ended."""
    process = subprocess.Popen(
        argv, cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    late = False
    try:
        out = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out = process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out = process.communicate()[0]
    return Done(process.returncode, out.decode("utf-8", "replace"), late=late)


def _summary(run: Run) -> Optional[Summary]:
    """mpirun ends drumbeat's own tasks after an MPI_Abort; the lead writes the summary a moment later."""
    until = time.monotonic() + 120
    while run.summary() is None and time.monotonic() < until:
        time.sleep(0.5)
    return run.summary()


def numbers_printed(text: str) -> Dict[str, Any]:
    return _last(Reader().feed(text.encode(), final=True))


def numbers_of(run: Optional[Run]) -> Dict[str, Any]:
    if run is None:
        return {}
    records = [metric._asdict() for node in run.nodes() for metric in run.metrics(node)]
    return _last([{**record, **record.pop("more")} for record in records])


def _last(records: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """The last value of each kind; the loss of a validation under its own name."""
    found: Dict[str, Any] = {}
    for record in records:
        for name, value in record.items():
            if (
                value is not None
                and name not in _NOT_NUMBERS
                and isinstance(value, (int, float))
                and not isinstance(value, bool)
            ):
                found["validation loss" if name == "loss" and record.get("kind") == "validation" else name] = value
    return found


def _ended(done: Done, numbers: Mapping[str, Any]) -> str:
    if done.late:
        return f"{LATE} {SECONDS:g} s"
    if done.code != 0:
        return f"no: exit code {done.code}, {_last_error(done.out)}"
    return f"ok, loss {numbers['loss']:.4g}" if isinstance(numbers.get("loss"), (int, float)) else "ok"


def _same(by_hand: Optional[float], seen: Mapping[str, Any]) -> str:
    if by_hand is None or "loss" not in seen:
        return ""
    return " (the same)" if by_hand == seen["loss"] else " (not the same)"


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailed" not in line]
    return (lines[-1] if lines else (text.strip().splitlines() or ["nothing printed"])[-1])[-120:].replace("|", "/")


def _line(text: str, label: str) -> str:
    return next((line.strip()[:100] for line in text.splitlines() if line.startswith(label)), f"no line {label}")


def _slug(name: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in name)
