"""Runs the programs of programs.yaml and writes docs/workloads.md: `make workloads`. Words choose programs by name."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List

from drumbeat.packaged import parse_yaml
from tests.workloads import data
from tests.workloads.runner import HERE, Place, Program, Row, Runner, dump

PAGE = HERE.parent.parent / "docs" / "workloads.md"
TOGETHER = int(os.environ.get("WORKLOADS_TOGETHER", "2"))  # programs at a time
ENOUGH = 14  # programs that must have run

HEAD = """# Real programs under drumbeat

Reference, written by `make workloads` ({machine}). Programs that nobody here wrote, unchanged, with small data that
`tests/workloads/data.py` makes. *By hand*: the command alone, 2 ranks (or one process). *In front*: `drumbeat run --` before it.
*2 x 2*: `drumbeat run --nodes 2 --` before it, on one machine. Then one rank fails in its third training step (without torch: a
moment after jax or mpi4py was loaded), on 2 nodes of one rank each: it raises a RuntimeError, is killed with SIGKILL, or raises
torch's OutOfMemoryError with CUDA's words (no GPU ran out of memory). A cell says what drumbeat said: which rank, what, and the
exit code; `no:` marks what is not as it should be. A loss is the last one that was read. Programs of one process are not started
on 2 x 2.

"""


def main() -> int:
    root = Path(os.environ.get("DRUMBEAT_WORKLOADS", "workloads")).resolve()
    if not root.is_dir():
        print(
            f"{root} is no folder. Put checkouts of the programs there (tests/workloads/programs.yaml names them) and, if you"
        )
        print("like, an environment called venv; then: DRUMBEAT_WORKLOADS=FOLDER make workloads")
        return 2
    programs = [Program(**entry) for entry in parse_yaml((HERE / "programs.yaml").read_bytes())]
    words = sys.argv[1:]
    kept = root / "results.json"
    rows: Dict[str, Row] = {}
    if words and kept.exists():  # the others keep what was seen of them
        rows = {name: Row(**values) for name, values in json.loads(kept.read_text()).items()}
    folder = tempfile.mkdtemp(prefix="drumbeat-workloads-")
    try:
        place = Place(root, Path(folder), Path(folder) / "data")
        data.make(place.data)
        chosen = [program for program in programs if not words or any(word in program.name for word in words)]
        with ThreadPoolExecutor(TOGETHER) as pool:
            for row in pool.map(lambda program: Runner(place, program).row(), chosen):
                rows[row.name] = row
                print(f"{'skipped' if row.skipped else 'FAILED' if row.bad else 'ok':<8}{row}", flush=True)
                dump(rows, kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what an aborted MPI job left may still write
    ordered = [rows[program.name] for program in programs if program.name in rows]
    PAGE.write_text(page(ordered))
    ran = [row for row in ordered if not row.skipped]
    good = [row for row in ran if not row.bad]
    skips = len(ordered) - len(ran)
    print(f"{len(ran)} programs ran, {len(good)} as they should, {skips} skipped; {ENOUGH} must run")
    return 0 if len(ran) >= ENOUGH and len(good) == len(ran) else 1


def page(rows: List[Row]) -> str:
    lines = [HEAD.format(machine=f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")]
    ran = [row for row in rows if not row.skipped]
    lines[0] += (
        f"{len(ran)} programs ran; {len([row for row in ran if not row.bad])} were as they should be in every cell.\n\n"
    )
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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
