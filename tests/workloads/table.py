"""Runs the programs of programs.yaml and writes docs/workloads.md: `make workloads`.

Words choose programs by name; then nothing is written to docs. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List

from drumbeat.packaged import parse_yaml
from tests.workloads import data
from tests.workloads.lines import LINES, Lines
from tests.workloads.results import TOP, Results
from tests.workloads.runner import HERE, Place, Program, Row, Runner

PAGE = TOP / "docs" / "workloads.md"
TOGETHER = int(os.environ.get("WORKLOADS_TOGETHER", "2"))  # programs at a time
ENOUGH = 14  # programs that must have run

HEAD = """# Real programs under drumbeat

Reference, written by one run of `make workloads`: drumbeat at {source}, begun {began}, {machine}. {ran} programs ran;
{good} of them as they should in every cell.

The programs are other people's, unchanged, with small data that `tests/workloads/data.py` makes.

| column | what was run |
|---|---|
| by hand | the command alone, with 2 ranks (or one process) |
| in front | the same with `drumbeat run --` before it |
| 2 x 2 | `drumbeat run --nodes 2 --` before it, with 2 ranks per node, on one machine; not for programs of one process |
| exception, kill -9, out of memory | on 2 nodes of one rank each, one rank fails (below) |
| numbers read | what drumbeat's rules for printed lines found |

Rank 1, or rank 0 of a program of one process, raises a RuntimeError, is killed with SIGKILL, or raises torch's OutOfMemoryError
with CUDA's words: no GPU ran out of memory. It fails in its third training step; without torch, a moment after jax or mpi4py was
loaded. A cell says what drumbeat said: which rank, what, and the exit code. `no:` marks what is not as it should be. A loss is
the last one that was read; a program that sets no seed has another one in each run, and the cell says `not the same`.

"""

LINES_HEAD = """Each stands behind `drumbeat run --nodes 2 --` (mpirun: before it). `p.py` prints its rank and
world; for the last column rank 3 kills itself with SIGKILL. uv and nsys
are stand-ins where they are not installed: they run what follows their own words.

| | command | what was seen | after the kill |
|---|---|---|---|"""


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
    chosen = [program for program in programs if not words or any(word in program.name for word in words)]
    results = Results(root / "results.json")
    folder = tempfile.mkdtemp(prefix="drumbeat-workloads-")
    try:
        place = Place(root, Path(folder), Path(folder) / "data")
        data.make(place.data)
        with ThreadPoolExecutor(TOGETHER) as pool:
            for row in pool.map(lambda each: Runner(place, each).row(results.row(each.name), results.keep), chosen):
                print(f"{'skipped' if row.skipped else 'FAILED' if row.bad else 'ok':<8}{row}", flush=True)
            wrapped = Lines(os.path.dirname(place.python(programs[0])), place.work)
            names = [name for name in LINES if not words or any(word in name for word in words)]
            for line in pool.map(lambda each: wrapped.row(results.line(each), results.keep), names):
                print(f"{'FAILED' if line.bad else 'ok':<8}{line}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [results.rows[program.name] for program in chosen]
    ran = [row for row in rows if not row.skipped]
    good = [row for row in ran if not row.bad]
    if not words:
        PAGE.write_text(page(results, rows))
    print(f"{len(ran)} programs ran, {len(good)} as they should, {len(rows) - len(ran)} skipped; {ENOUGH} must run")
    whole = len(good) == len(ran) and not any(results.lines[name].bad for name in names)
    return 0 if whole and (words or len(ran) >= ENOUGH) else 1


def page(results: Results, rows: List[Row]) -> str:
    ran = [row for row in rows if not row.skipped]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    good = sum(1 for row in ran if not row.bad)
    lines = [HEAD.format(source=results.source, began=results.began, machine=machine, ran=len(ran), good=good)]
    lines += [
        "| program | version | date | by hand | in front | 2 x 2 | exception | kill -9 | out of memory | numbers read |",
        "|---" * 10 + "|",
    ]
    for row in ran:
        cells = (row.name, row.version, row.date, row.hand, row.front, row.square or "one process", row.exception, row.kill,
                 row.oom, row.numbers)  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    skipped = [row for row in rows if row.skipped]
    if skipped:
        lines += ["", "Not run:", ""]
        lines += [f"- {row.name}: {row.skipped} ({row.date})" for row in skipped]
    lines += ["", "## Ten command lines, on 2 nodes of 2 ranks", "", LINES_HEAD]
    for line in (results.lines[name] for name in LINES):
        lines.append(f"| {line.name} | `{line.command}` | {line.world} | {line.killed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
