"""Reads logs for `diagnose`: files, folders, run folders, archives, standard input; plain or gzip."""

from __future__ import annotations

import codecs
import gzip
import os
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections import deque
from dataclasses import field, replace
from typing import IO, Callable, Deque, Iterable, Iterator, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.redact import printable
from drumbeat.desk.runs import NoSuchRun, find_run
from drumbeat.desk.state import recorded_end, with_paths
from drumbeat.doctor.dumps import judged
from drumbeat.findings.model import Evidence
from drumbeat.logs.failure import with_unseen
from drumbeat.logs.own_verdicts import OwnVerdicts
from drumbeat.logs.read import flight
from drumbeat.logs.read.jobs import PEEK, JobFiles, by_job, clues
from drumbeat.logs.read.launchers import FirstFailure
from drumbeat.logs.read.pasted_jobs import read_pasted_jobs
from drumbeat.logs.read.prefixes import MAX_LINE as LONGEST
from drumbeat.logs.read.records import MAX_LINES, unquoted, unwrap
from drumbeat.logs.reader import Reader
from drumbeat.logs.report import MAY_BE_SEVERAL, Report, of_job, of_jobs
from drumbeat.machine.dumps import MAX_BYTES, read_dumps
from drumbeat.machine.dumps.text import Dump
from drumbeat.runfolder.lines import near
from drumbeat.runfolder.run import Run

BLOCK = 1 << 20
GZIP = b"\x1f\x8b"
MAX_LINE = 1 << 16  # bytes: of a longer line, only the start and the end are read
LONGEST_TAIL = 4096  # bytes kept from the end of a line that is longer than the reader's limit
_MARKS = (  # the one that begins like another stands before it
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
MAX_FILES = 20_000
MAX_MEMBERS, MAX_UNPACKED = 256, 1 << 30  # files and bytes that are read from archives
TAIL = 2_000  # lines at the end of a file that are always read, however often similar lines came before
# fmt: off
SKIPPED = (
    ".pt", ".pth", ".bin", ".safetensors", ".npy", ".npz", ".so", ".pyc", ".pyz", ".png", ".jpg", ".pdf", ".zip",
    ".tar", ".tar.gz", ".tgz", ".whl", ".parquet", ".arrow", ".h5", ".db", ".sif", ".mp4", ".sqlite", ".yaml", ".py",
    ".sh", ".o", ".a", ".idx", ".distcp", ".ckpt", ".tfevents",
)
# fmt: on


@dataclass
class Source:
    """One file to read, and its name in the output: a path that can be pasted in the current folder."""

    path: str
    name: str
    rank: Optional[int] = None
    host: Optional[str] = None
    cut: List[int] = field(default_factory=list)  # numbers of lines that were too long to be read whole
    run: Optional[Run] = None  # whose folder it is in, where a run folder was given


@dataclass
class Sources:
    files: List[Source] = field(default_factory=list)
    skipped: int = 0  # binary or not for us
    runs: List[Run] = field(default_factory=list)  # whose folders were given
    copies: List[IO[bytes]] = field(default_factory=list)  # of standard input and archives: then files like the others

    def copy(self, file: IO[bytes], name: str) -> None:
        """Add what `file` holds. The copy has no name of its own and lives as long as this object."""
        self.copies.append(tempfile.NamedTemporaryFile(prefix="drumbeat-"))  # noqa: SIM115
        self.files.append(Source(self.copies[-1].name, name))
        try:
            shutil.copyfileobj(file, self.copies[-1])
        finally:
            self.copies[-1].flush()


def find(paths: List[str]) -> Sources:
    """Find everything to read below the given paths; Problem for a path that does not exist."""
    found = Sources()
    for path in paths:
        if path == "-":
            found.copy(sys.stdin.buffer, "stdin")
        elif os.path.isdir(path):
            _folder(path, found)
        elif os.path.exists(path):
            source = Source(path, printable(path))
            start = start_of(source) if os.path.isfile(path) else b""
            if start.startswith(b"PK\3\4") or start[257:262] == b"ustar":
                _archive(path, found)
            else:
                found.files.append(source)
        else:
            _run_folder(_run_named(path), found)
    if not found.files and not found.runs:
        raise Problem(
            f"{', '.join(map(printable, paths))}: nothing to read there",
            "give the files themselves if they have unusual names",
        )
    return found


def _run_named(name: str) -> str:
    """Return the folder of the run with this id, or with an id that starts with it."""
    try:
        return find_run(name, os.environ).path
    except NoSuchRun:
        raise Problem(
            f"{printable(name)}: no such file, folder or run",
            "give log files, folders, run folders, run ids, or - for stdin",
        ) from None


def _folder(path: str, found: Sources) -> None:
    if os.path.exists(os.path.join(path, "run.json")):
        _run_folder(path, found)
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in ("__pycache__", "wandb")
        )
        folders[:] = [name for name in folders if not _is_run(os.path.join(folder, name), found)]
        for name in sorted(names):
            full = os.path.join(folder, name)
            if name.startswith(".") or name.endswith(SKIPPED) or not os.path.isfile(full):
                found.skipped += 1
            elif len(found.files) >= MAX_FILES:
                raise Problem(
                    f"{printable(path)}: more than {MAX_FILES} files", "give a smaller folder, or the files themselves"
                )
            else:
                found.files.append(Source(full, printable(os.path.normpath(full))))


def _archive(path: str, found: Sources) -> None:
    """Add the plain files of a zip or tar archive, by copies; no name in it is used as a path."""

    def members() -> Iterator[Tuple[str, int, IO[bytes]]]:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                yield from (
                    (each.filename, each.file_size, packed.open(each))
                    for each in packed.infolist()
                    if not each.is_dir()
                )
        else:
            with tarfile.open(path, "r|*") as tar:
                yield from ((each.name, each.size, tar.extractfile(each)) for each in tar if each.isfile())  # type: ignore[misc]

    left = MAX_UNPACKED
    try:
        for name, size, file in members():
            left -= max(size, 0)  # neither kind gives more bytes than it says
            if left < 0 or len(found.copies) >= MAX_MEMBERS:
                words = f"{printable(path)}: more than {MAX_MEMBERS} files, or {MAX_UNPACKED >> 30} GiB, are in it"
                raise Problem(words, "unpack it, and give the logs themselves")
            if os.path.basename(name).startswith(".") or name.endswith(SKIPPED):
                found.skipped += 1
            elif os.path.basename(name) == "run.json" and b'"run_id"' in file.read(1 << 16):
                raise Problem(
                    f"{printable(path)}: a run folder is in it", "unpack it (tar xf), and diagnose that folder"
                )
            else:
                found.copy(file, printable(os.path.join(path, name.lstrip("/"))))
    except Problem:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged archive raises whatever zlib, lzma, tarfile and zipfile raise
        print(f"drumbeat diagnose: {printable(path)}: damaged or locked ({error}); read up to there", file=sys.stderr)


def _is_run(path: str, found: Sources) -> bool:
    """Add the folder if it is a run folder; another program may use the same file name."""
    if not os.path.exists(os.path.join(path, "run.json")):
        return False
    try:
        _run_folder(path, found)
    except Problem:
        return False
    return True


def _run_folder(path: str, found: Sources) -> None:
    """List the logs of the last attempt, what NCCL wrote, and what the scheduler's job printed."""
    try:
        run = Run.open(path)
    except RecordError as error:
        raise Problem(str(error), "use the drumbeat that wrote it, or give its log files one by one") from None
    found.runs.append(run)
    hosts = {member.node: member.host for member in run.members()}
    before = len(found.files)
    for log in run.logs():
        file = os.path.join(path, log.name)
        found.files.append(Source(file, printable(near(file)), log.rank, hosts.get(log.node)))
    for node, name in run.nccl_logs():
        file = os.path.join(path, name)
        found.files.append(Source(file, printable(near(file)), host=hosts.get(node)))
    found.files += [Source(file, printable(near(file))) for file in (os.path.join(path, name) for name in run.output())]
    for source in found.files[before:]:
        source.run = run


def lines(source: Source) -> Iterator[Tuple[int, List[bytes]]]:
    """Yield lines without their ends, many at a time, with the number of the first; memory is bounded whatever the file
    holds. Lines of a short text are joined where a terminal or a mail has cut them."""
    short: List[bytes] = []
    blocks = _as_written(source)
    for number, some in blocks:
        if number != len(short) + 1 or len(short) + len(some) > MAX_LINES or sum(map(len, short)) > BLOCK:
            if short:
                yield 1, short
            yield number, some
            yield from blocks
            return
        short += some
    yield 1, unwrap(unquoted(unwrap(short)))


def _as_written(source: Source) -> Iterator[Tuple[int, List[bytes]]]:
    number, rest, cut = 1, b"", b""  # of the next line; `cut`: the start of one without end, of which `rest` is the end
    for block in _blocks(source.path):
        parts = (rest + block).split(b"\n")
        rest = parts.pop()
        if parts:
            if cut:
                parts[0], cut = cut + b"\r" + parts[0][-LONGEST_TAIL:], b""
                source.cut.append(number)
            if max(map(len, parts)) > LONGEST:
                source.cut += [number + place for place, part in enumerate(parts) if _is_long(part)]
                parts = list(map(_shortened, parts))
            yield number, parts
            number += len(parts)
        if len(rest) > MAX_LINE and not cut and b"\r" in rest:
            # A progress bar writes over its line again and again; what comes last on it may be an error.
            written, _, rest = rest.rpartition(b"\r")
            yield number, [written]
        if len(rest) > MAX_LINE:
            cut, rest = cut or rest[: LONGEST - LONGEST_TAIL], rest[-LONGEST_TAIL:]
    if cut:
        source.cut.append(number)
        yield number, [cut + b"\r" + rest[-LONGEST_TAIL:]]
    elif rest:
        source.cut += [number] if _is_long(rest) else []
        yield number, [_shortened(rest)]


def _is_long(line: bytes) -> bool:
    return len(line) > LONGEST and any(len(part) > LONGEST for part in line.split(b"\r"))


def _shortened(line: bytes) -> bytes:
    """Return start and end of a line that is too long for the reader, which takes them for two overwritten lines."""
    if len(line) <= LONGEST:
        return line
    parts = line.split(b"\r")
    return b"\r".join(
        part if len(part) <= LONGEST else part[: LONGEST - LONGEST_TAIL] + b"\r" + part[-LONGEST_TAIL:]
        for part in parts
    )


def with_tail(blocks: Iterable[Tuple[int, List[bytes]]]) -> Iterator[Tuple[int, List[bytes], bool]]:
    """Yield the same blocks, each with true if it is among the last TAIL lines; the block where these begin is split."""
    held: Deque[Tuple[int, List[bytes]]] = deque()
    lines = 0
    for number, block in blocks:
        held.append((number, block))
        lines += len(block)
        while lines - len(held[0][1]) >= TAIL:
            lines -= len(held[0][1])
            yield (*held.popleft(), False)
    before = max(lines - TAIL, 0)
    if before:
        number, block = held.popleft()
        yield number, block[:before], False
        held.appendleft((number + before, block[before:]))
    for number, block in held:
        yield number, block, True


def _blocks(path: str, warns: bool = True) -> Iterator[bytes]:
    try:
        with open_binary(path) as file:
            start = file.read(4)
            encoding = encoding_of(start)
            decode = codecs.getincrementaldecoder(encoding)("replace").decode if encoding else None
            block = start[3:] if start.startswith(codecs.BOM_UTF8) else start
            while start:
                yield block if decode is None else decode(start).encode()
                block = start = file.read1(BLOCK)  # type: ignore[attr-defined]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        # The readable part has been read; a gzip file that is still being written ends this way.
        words = f"{printable(path)}: damaged or unfinished gzip ({error}); read up to there"
        print(f"drumbeat diagnose: {words}", file=sys.stderr) if warns else None
    except OSError as error:
        raise Problem(f"{printable(path)}: {error.strerror or error}", "check that it can be read") from None


def open_binary(path: str) -> IO[bytes]:
    with open(path, "rb") as file:
        packed = file.read(2) == GZIP
    return gzip.open(path, "rb") if packed else open(path, "rb")  # type: ignore[return-value]


def encoding_of(start: bytes) -> str:
    """Return the encoding of the byte order mark at the start of a file; empty for anything to read as UTF-8."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), "")


def start_of(source: Source, size: int = 4096) -> bytes:
    """Return the first bytes, to tell text from other data."""
    try:
        with open_binary(source.path) as file:
            return file.read(size)
    except (OSError, EOFError, zlib.error):
        return b""


_CONTROLS = bytes({*range(1, 32), 127} - set(b"\a\b\t\n\v\f\r\x1b"))  # that no terminal output needs


def is_text(start: bytes) -> bool:
    """Return True unless more than a tenth of these bytes are NUL or more than a thirtieth other control characters. Bytes
    above 127 may be text of any encoding; NUL bytes are left where a file system lost a few blocks."""
    controls = len(start) - len(start.translate(None, _CONTROLS))
    return start.count(b"\0") * 10 <= len(start) and controls * 30 <= len(start)


def end_of(source: Source, size: int) -> bytes:
    """Return the last `size` bytes of an uncompressed file, without any that are part of its start."""
    try:
        with open(source.path, "rb") as file:
            packed = file.read(2) == GZIP
            whole = file.seek(0, os.SEEK_END)
            file.seek(max(whole - size, min(size, whole)))
            return b"" if packed else file.read()
    except OSError:
        return b""


class Progress:
    """A progress line on stderr, shown only on a terminal and only after two seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + 2.0
        self._shown = False
        self._on = sys.stderr.isatty()

    def tick(self, name: str, number: int) -> None:
        if self._on and self._clock() >= self._next:
            self._next = self._clock() + 0.5
            self._shown = True
            print(f"\r\x1b[Kreading {name[-60:]}: line {number:,}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# The report on everything that was found.


def diagnose(paths: Sequence[str]) -> Report:
    """Read logs, folders or runs, and report for each job by itself what failed first, why, the fix, and the transport."""
    parts = [(job, part, _judged(part)) for job, part in _by_job(find(list(paths)))]
    judged = [(job, part, report) for job, part, report in parts if report is not None]
    if not judged:
        raise Problem(
            f"{', '.join(map(printable, paths))}: nothing to read: empty, or not text",
            "give the run's log files, or its folder",
        )
    if len(judged) == 1 and len(parts) == 1:
        job, _, report = judged[0]
        return replace(report, failure=with_unseen(report.failure, (MAY_BE_SEVERAL,), True)) if job.guessed else report
    judged.sort(key=lambda each: max((os.path.getmtime(source.path) for source in each[1].files), default=0.0))
    names = [tuple(source.name for source in part.files) for _, part, _ in judged]
    return of_jobs([of_job(report, job.job, name, job.guessed) for (job, _, report), name in zip(judged, names)])


def _by_job(sources: Sources) -> List[Tuple[JobFiles, Sources]]:
    """Split the sources by the job or run that wrote them."""
    rest = [source for source in sources.files if source.run is None]
    jobs = by_job(
        [clues(each.name, start_of(each, PEEK), end_of(each, PEEK)) for each in rest] if len(rest) > 1 else []
    )
    if len(sources.runs) + len(jobs) < 2 or len(sources.runs) == 1 and len(jobs) < 2:
        job = jobs[0] if jobs else JobFiles("", ())
        return [(job, sources)]
    found = [
        (JobFiles(run.run_id, ()), Sources([source for source in sources.files if source.run is run], runs=[run]))
        for run in sources.runs
    ]
    jobs = jobs or [JobFiles("", tuple(range(len(rest))), True)]
    found += [(job, Sources([rest[place] for place in job.files], copies=sources.copies)) for job in jobs]
    return [each for each in found if each[1].files or each[1].runs]


def _judged(sources: Sources) -> Optional[Report]:
    """Return the report on the sources of one job; None if none can be read."""
    verdicts = OwnVerdicts()
    reader = _read_all(sources, verdicts)
    return None if reader.is_empty else verdicts.judged(reader)


def read(paths: Sequence[str]) -> Reader:
    """Read everything below these paths as the logs of one job; for a single run folder, also the run's own records."""
    return _read_all(find(list(paths)), None)


def _read_all(sources: Sources, verdicts: Optional[OwnVerdicts]) -> Reader:
    reader, progress = Reader(), Progress()
    dumps: List[Dump] = []
    for source in sources.files:
        dumps += _read(reader, source, progress, verdicts)
    progress.end()
    reader.pasted[:0] = judged(dumps)
    if len(sources.runs) == 1:
        _add_record(reader, sources.runs[0])
    return reader


def read_one(source: Source) -> Report:
    """Read one file as a log and report on it alone."""
    reader = Reader()
    _read(reader, source, Progress(), None)
    return reader.report()


def _read(reader: Reader, source: Source, progress: Progress, verdicts: Optional[OwnVerdicts]) -> Sequence[Dump]:
    """Feed a file to the reader; return the node dumps that were pasted into it."""
    start = start_of(source)
    if flight.looks_like_dump(os.path.basename(source.path), start):
        with open_binary(source.path) as file:
            try:
                reader.add_dump(flight.parse(source.name, file.read(flight.MAX_BYTES + 1)))
            except flight.DumpError as error:
                print(f"drumbeat diagnose: {source.name}: {error}; skipped", file=sys.stderr)
        return ()
    encoding = encoding_of(start)
    if not encoding and not is_text(start):
        print(f"drumbeat diagnose: {source.name}: not text; skipped", file=sys.stderr)
        return ()
    if source.rank is not None or source.host:
        reader.name_file(source.name, source.rank, source.host)
    for number, some, last in with_tail(lines(source)):
        some = verdicts.take(source.name, number, some) if verdicts and last else some
        reader.feed_lines(source.name, number, some, last)
        progress.tick(source.name, number)
    reader.not_whole(source.name, source.cut)
    text = short_text(source)
    jobs = read_pasted_jobs(text, source.name)
    reader.pasted += [jobs] if jobs else []
    return read_dumps(text, source.name)


def short_text(source: Source) -> str:
    """Return a short file's text, such as people paste beside a log; '' if it is too long for that."""
    if os.path.getsize(source.path) > MAX_BYTES:
        return ""
    data = b""
    for block in _blocks(source.path, False):
        data += block
        if len(data) > MAX_BYTES:
            return ""
    return data.decode("utf-8", "replace")


def _add_record(reader: Reader, run: Run) -> None:
    """Add the run's own records: its end, its checks' findings, and the rank that ended first by the lead's clock."""
    reader.of_a_run = True
    reader.recorded = with_paths(run, recorded_end(run))
    facts = [run.facts(node) for node in run.nodes()]
    reader.communicators.no_gpus = bool(facts) and all(each is not None and each.has_no_gpu for each in facts)
    hosts = {member.node: member.host for member in run.members()}
    first = next((end for end in run.ranks().ended if end.failed), None)
    if first is not None and reader.elastic.first is None:
        where = Evidence(f"rank {first.rank} {first.words}", near(run.folder.node(first.node).events))
        host = hosts.get(first.node, "")
        reader.elastic.first = FirstFailure(first.rank, host, first.exit_code, where, "drumbeat")
