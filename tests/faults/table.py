"""Runs every row of the fault table and writes docs/reliability.md. `make faults`; words choose rows: `FAULTS="torch asleep"`."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List

from tests.faults.rows import BLAME, HANGS, HEALTHY, REPEATED, Row
from tests.faults.runner import Seen, run_row

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
TOGETHER = 2  # rows at a time
SLACK = 1.5  # times the bound that a row may take: the machine also runs the other rows

HEAD = """# Reliability: faults and what drumbeat says about them

Reference, written by `make faults` on {machine}. Every row is a real run of 2 nodes x 2 ranks on one machine (plain Python ranks
that meet over TCP, or torch with gloo), to which one thing is done. *Found after* counts from the fault to the finding in the run
folder. *Bound* is for an idle machine; here 1.5 times as long is allowed, since rows run two at a time beside whatever else the
machine does. How hangs are told: [hangs.md](hangs.md).

"""


def main() -> int:
    words = sys.argv[1:]
    rows: List[Row] = [*HANGS, *BLAME, *(row for row in HEALTHY for _ in range(REPEATED))]
    rows = [row for row in rows if not words or any(word in row.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="drumbeat-faults-") as place:
        os.environ["HOME"] = place

        def one(number: int) -> Seen:
            seen = run_row(rows[number], Path(place) / str(number))
            problems = seen.problems(SLACK)
            after = "" if seen.seconds is None else f" after {seen.seconds} s"
            print(f"{'FAILED' if problems else 'ok':<7} {rows[number].name}{after} {'; '.join(problems)}", flush=True)
            return seen

        with ThreadPoolExecutor(TOGETHER) as pool:
            results = list(pool.map(one, range(len(rows))))
    bad = [seen for seen in results if seen.problems(SLACK)]
    if not words:
        PAGE.write_text(page(results))
    print(f"{len(results) - len(bad)} of {len(results)} rows as they should be")
    return 1 if bad else 0


def page(results: List[Seen]) -> str:
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    lines = [HEAD.format(machine=machine)]
    lines += [
        "## Hangs",
        "",
        "| fault | found after | bound | what was said | exit code | processes left | as it should be |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for seen in results:
        if seen.row in HANGS:
            said = seen.finding["title"] if seen.finding else "nothing"
            lines.append(
                f"| {seen.row.name} | {seen.seconds} s | {seen.row.within:g} s | {said} | {seen.exit_code} "
                f"| {seen.orphans} | {_verdict(seen)} |"
            )
    lines += [
        "",
        "## Who is blamed",
        "",
        "| fault | cause named | rank | the others | exit code | processes left | as it should be |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for seen in results:
        if seen.row in BLAME:
            failure = seen.failure or {}
            lines.append(
                f"| {seen.row.name} | {failure.get('code')}: {failure.get('title')} | {failure.get('rank')} | {seen.then} "
                f"| {seen.exit_code} | {seen.orphans} | {_verdict(seen)} |"
            )
    lines += [
        "",
        "## Healthy runs",
        "",
        "Long work that is no hang (12 s each, twice per run). A warning here is a false alarm.",
        "",
    ]
    lines += ["| work | runs | false alarms |", "|---|---|---|"]
    for row in HEALTHY:
        mine = [seen for seen in results if seen.row == row]
        alarms = sum(1 for seen in mine if seen.problems(SLACK))
        lines.append(f"| {row.name.replace('healthy: ', '')} | {len(mine)} | {alarms} |")
    return "\n".join(lines) + "\n"


def _verdict(seen: Seen) -> str:
    return "; ".join(seen.problems(SLACK)) or "yes"


if __name__ == "__main__":
    sys.exit(main())
