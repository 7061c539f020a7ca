"""Runs the programs of programs.yaml and writes measured/workloads.md: `make workloads`.

Words choose programs by name; then nothing is written to docs. A run that was interrupted goes on where it was. `--page` runs
nothing: it writes the page of what was seen so far. A program that the newest source has not been through keeps its older row.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import List, Union

from drumbeat.base.data import parse_yaml
from tests.workloads import data
from tests.workloads.lines import LINES, LineRow, Lines
from tests.workloads.results import TOP, Results, kept_source
from tests.workloads.runner import HERE, Place, Program, Row, Runner

PAGE = TOP / "measured" / "workloads.md"
TOGETHER = int(os.environ.get("WORKLOADS_TOGETHER", "2"))  # programs at a time
ENOUGH = 14  # programs that must have run

HEAD = """# Real programs under drumbeat

Reference, written by `make workloads`, last with drumbeat at {source}, {machine}. Each row names the commit of drumbeat and the
kind of machine with which it was seen. {count}

The programs are other people's, unchanged, with small data that `tests/workloads/data.py` makes.
`torch.cuda replaced`: the program insists on a GPU, and `tests/workloads/no_gpu.py` lets it train on the CPU; what it prints
of a GPU means nothing.

| column | what was run |
|---|---|
| by hand | the command alone, with 2 ranks (or one process) |
| in front | the same with `drumbeat run --` before it |
| 2 x 2 | `drumbeat run --nodes 2 --` before it, with 2 ranks per node, on one machine; not for programs of one process |
| exception, kill -9, out of memory | on 2 nodes of one rank each, one rank fails (below) |
| numbers | what drumbeat's rules for printed lines found |

Rank 1, or rank 0 of a program of one process, raises a RuntimeError, is killed with SIGKILL, or raises torch's OutOfMemoryError
with CUDA's words: no GPU ran out of memory. It fails in its third training step; without torch, a moment after jax or mpi4py was
loaded. A cell says what drumbeat said: which rank, what, and the exit code. `no:` marks what is not as it should be. A loss is
the last one that was read; a program that sets no seed has another one in each run, and the cell says `not the same`.

"""

LINES_HEAD = """Each stands behind `drumbeat run --nodes 2 --` (mpirun: before it). `p.py` prints its rank and
world; for the last column rank 3 kills itself with SIGKILL. uv and nsys
are stand-ins where they are not installed: they run what follows their own words.

| | command | what was seen | after the kill | drumbeat |
|---|---|---|---|---|"""


def main() -> int:
    root = Path(os.environ.get("DRUMBEAT_WORKLOADS", "workloads")).resolve()
    if not root.is_dir():
        print(
            f"{root} is no folder. Put checkouts of the programs there (tests/workloads/programs.yaml names them) and,"
        )
        print("if you like, an environment called venv; then: DRUMBEAT_WORKLOADS=FOLDER make workloads")
        return 2
    programs = [Program(**entry) for entry in parse_yaml((HERE / "programs.yaml").read_bytes())]
    words = sys.argv[1:]
    kept = root / "results.json"
    if words == ["--page"]:
        return write_page(Results(kept, kept_source(kept)), programs)
    chosen = [program for program in programs if not words or any(word in program.name for word in words)]
    results = Results(kept)
    folder = tempfile.mkdtemp(prefix="drumbeat-workloads-")
    try:
        place = Place(root, Path(folder), Path(folder) / "data")
        data.make(place.data)
        with ThreadPoolExecutor(TOGETHER) as pool:
            wrapped = Lines(os.path.dirname(place.python(programs[0])), place.work)
            names = [name for name in LINES if not words or any(word in name for word in words)]
            work: List[Future[Union[Row, LineRow]]] = []
            work += [pool.submit(Runner(place, each).row, results.row(each.name), results.keep) for each in chosen]
            work += [pool.submit(wrapped.row, results.line(name), results.keep) for name in names]
            for done in as_completed(work):
                row = done.result()
                skipped = isinstance(row, Row) and row.skipped
                print(f"{'skipped' if skipped else 'FAILED' if row.bad else 'ok':<8}{row}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not words:
        return write_page(results, programs)
    seen = [results.rows[program.name] for program in chosen]
    return 1 if any(row.bad for row in seen if not row.skipped) or any(results.lines[name].bad for name in names) else 0


def write_page(results: Results, programs: List[Program]) -> int:
    """The exit code says whether enough of them ran, and all of them as they should."""
    rows = [results.last_row(program.name, program.processes) for program in programs]
    ran = [row for row in rows if row.is_whole]
    good = [row for row in ran if not row.bad]
    PAGE.write_text(page(results, rows))
    print(f"{len(ran)} programs ran, {len(good)} as they should, {len(rows) - len(ran)} did not; {ENOUGH} must run")
    lines = [results.last_line(name) for name in LINES]
    whole = len(good) == len(ran) and not any(line.bad or not line.killed for line in lines)
    return 0 if whole and len(ran) >= ENOUGH else 1


def page(results: Results, rows: List[Row]) -> str:
    shown, whole = [row for row in rows if not row.skipped], [row for row in rows if row.is_whole]
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    good = sum(1 for row in whole if not row.bad)
    count = f"{len(whole)} programs ran in every cell, {good} of them as they should."
    if len(shown) > len(whole):
        count += f" Not finished: {len(shown) - len(whole)} more."
    lines = [HEAD.format(source=results.source, machine=machine, count=count)]
    lines += [
        "| program | version | date, drumbeat | by hand | in front | 2 x 2 | exception | kill -9 | out of memory | numbers |",
        "|---" * 10 + "|",
    ]
    for row in shown:
        cells = (
            row.name, row.version, f"{row.date}, {_commit(row.source)}", row.hand, row.front, row.square or "one process",
            row.exception, row.kill, row.oom, row.numbers,
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    skipped = [row for row in rows if row.skipped]
    if skipped:
        lines += ["", "Not run:", ""]
        lines += [f"- {row.name}: {row.skipped}" + (f" ({row.date})" if row.date else "") for row in skipped]
    lines += ["", "## Ten command lines, on 2 nodes of 2 ranks", "", LINES_HEAD]
    for line in map(results.last_line, LINES):
        seen, killed = line.world or "not finished", line.killed or "not finished"
        lines.append(f"| {line.name} | `{LINES[line.name]}` | {seen} | {killed} | {_commit(line.source)} |")
    return "\n".join(lines) + "\n"


def _commit(source: str) -> str:
    """Without its date; the kind of machine, and whether files differed from it, is said."""
    return " ".join(source.split()[:1] + source.split()[2:])


if __name__ == "__main__":
    sys.exit(main())
