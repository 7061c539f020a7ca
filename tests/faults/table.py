"""Runs every row of the fault table and writes docs/reliability.md. `make faults`; words choose rows: `FAULTS="torch asleep"`."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, Optional

from tests.faults.rows import BLAME, HANGS, HEALTHY, OUTSIDE, PROGRAMS, REPEATED, RETURNS, SLOW, Row
from tests.faults.runner import PATIENCE, Seen, run_row

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
TOGETHER = 2  # rows at a time
SLACK = 1.5  # times the bound that a row may take: the machine also runs the other rows

HEAD = """# Reliability: faults and what drumbeat says about them

Reference, written by `make faults` on {machine}. Every row is a real run of 2 nodes x 2 ranks on one machine (plain
Python ranks that meet over TCP, or torch with gloo), to which one thing is done. *Found after* counts from the fault to the first
word of it in the run folder. *As it should be* includes that `diagnose RUN` and `status RUN` name the same cause and rank, with
the same certainty, as the run's summary. *Bound* is for an idle machine; here 1.5 times as long is allowed, since rows run two
at a time beside whatever else the machine does (load average {load:.0f}); a run that is not over after {patience:g} s is ended.
How hangs are told: [hangs.md](hangs.md); what follows a failure: [comeback.md](comeback.md).

"""


def main() -> int:
    words = sys.argv[1:]
    single = [*HANGS, *BLAME, *PROGRAMS, *OUTSIDE, *RETURNS, *SLOW]
    rows: List[Row] = [*single, *(row for row in HEALTHY for _ in range(REPEATED))]
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
    lines = [HEAD.format(machine=machine, load=os.getloadavg()[2], patience=PATIENCE)]
    lines += ["## Hangs", "", *_hangs([seen for seen in results if seen.row in (*HANGS, *SLOW)])]
    lines += ["", "## Who is blamed", "", *_failures([seen for seen in results if seen.row in (*BLAME, *PROGRAMS)])]
    lines += ["", "## Agents, nodes, desk, folder, scheduler", ""]
    lines += _failures([seen for seen in results if seen.row in OUTSIDE])
    lines += ["", "## It comes back", "", "*Lost* are steps that were made twice; the program saves every 5 steps.", ""]
    lines += _returns([seen for seen in results if seen.row in RETURNS])
    lines += [
        "",
        "## Healthy runs",
        "",
        "Long work that is no hang (12 s each, twice per run). A warning here is a false alarm.",
        "",
    ]
    lines += ["| work | runs | false alarms | ended well in time |", "|---|---|---|---|"]
    for row in HEALTHY:
        mine = [seen for seen in results if seen.row == row]
        alarms = sum(1 for seen in mine if seen.finding or seen.failure)
        well = sum(1 for seen in mine if not seen.problems(SLACK))
        lines.append(f"| {row.name.replace('healthy: ', '')} | {len(mine)} | {alarms} | {well} |")
    return "\n".join(lines) + "\n"


def _hangs(results: List[Seen]) -> List[str]:
    lines = ["| fault | found after | bound | what was said | exit code | processes left | as it should be |"]
    lines.append("|---|---|---|---|---|---|---|")
    for seen in results:
        said = _cell(seen.finding["title"]) if seen.finding else "nothing"
        lines.append(
            f"| {seen.row.name} | {_seconds(seen.seconds)} | {seen.row.within:g} s | {said} | {seen.exit_code} "
            f"| {seen.orphans} | {_verdict(seen)} |"
        )
    return lines


def _failures(results: List[Seen]) -> List[str]:
    titles = (
        "fault",
        "found after",
        "cause named",
        "rank or node",
        "the others",
        "outcome",
        "exit code",
        "processes left",
    )
    lines = [f"| {' | '.join(titles)} | as it should be |", "|---|---|---|---|---|---|---|---|---|"]
    for seen in results:
        failure = seen.failure or seen.finding or {}
        cause = f"{failure['code']}: {_cell(failure['title'])}" if failure else "none"
        who = f"rank {failure.get('rank')}" if failure.get("rank") is not None else ""
        who = who or (f"node {failure.get('node')}" if failure.get("node") is not None else "")
        lines.append(
            f"| {seen.row.name} | {_seconds(seen.seconds)} | {cause} | {who} | {_cell(seen.then)} | {seen.outcome} "
            f"| {seen.exit_code} | {seen.orphans} | {_verdict(seen)} |"
        )
    return lines


def _returns(results: List[Seen]) -> List[str]:
    lines = ["| fault | found after | back after | lost | outcome | exit code | processes left | as it should be |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for seen in results:
        lost = "" if seen.lost is None else f"{seen.lost} steps"
        lines.append(
            f"| {seen.row.name} | {_seconds(seen.seconds)} | {_seconds(seen.back)} | {lost} | {seen.outcome} "
            f"| {seen.exit_code} | {seen.orphans} | {_verdict(seen)} |"
        )
    return lines


def _seconds(value: Optional[float]) -> str:
    return "" if value is None else f"{value} s"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _verdict(seen: Seen) -> str:
    return _cell("; ".join(seen.problems(SLACK))) or "yes"


if __name__ == "__main__":
    sys.exit(main())
