"""Runs every row of the fault table and writes measured/reliability.md once all have run. `make faults`.

A call that was cut short goes on where it was, as long as the source is the same; words choose rows that are run again:
`FAULTS="torch asleep"`; `--page` only writes the page, from what is known so far.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, Optional, Set, Tuple

from tests.faults.rows import (
    ALL,
    BLAME,
    EVEN,
    HANGS,
    HEALTHY,
    OUTSIDE,
    PROGRAMS,
    REPEATED,
    RETURNS,
    SLOW,
    STRANGERS,
    Row,
)
from tests.faults.runner import PATIENCE, Seen, run_row

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "measured" / "reliability.md"
TOGETHER = int(os.environ.get("FAULTS_TOGETHER", "2"))  # rows at a time
SLACK = 1.5  # times the bound that a row may take: the machine also runs the other rows

HEAD = """# Reliability: faults and what drumbeat says about them

Reference, written by `make faults` on {machine}. Every row is a real run of 2 nodes x 2 ranks on one machine (plain
Python ranks that meet over TCP, or torch with gloo), to which one thing is done. *Found after* counts from the fault to the first
word of it in the run folder. *As it should be* includes that `diagnose RUN` and `status RUN` name the same cause and rank, with
the same certainty, as the run's summary. *Bound* is for an idle machine; here 1.5 times as long is allowed, since {together} rows
run at a time beside whatever else the machine does; a run that is not over after {patience:g} s is ended.
Made on {day} in {calls}, src {revision}{again}. Load average while the rows ran: {low:.0f} to {high:.0f},
{middle:.0f} in the median.{missing}
How hangs are told: [hangs.md](../docs/hangs.md); what follows a failure: [comeback.md](../docs/comeback.md).

"""


def main() -> int:
    only_page = sys.argv[1:] == ["--page"]  # from what is known so far
    words = [] if only_page else sys.argv[1:]
    numbered = [(row, 0) for row in (*HANGS, *BLAME, *PROGRAMS, *OUTSIDE, *STRANGERS, *RETURNS, *SLOW, *EVEN)]
    numbered += [(row, number) for row in HEALTHY for number in range(REPEATED)]
    kept = Kept()
    if words:  # these once more, whatever is known of them
        todo = [each for each in numbered if any(word in each[0].name for word in words)]
    else:
        todo = [each for each in numbered if key(*each) not in kept.results and not only_page]
    with tempfile.TemporaryDirectory(prefix="drumbeat-faults-") as place:
        os.environ["HOME"] = place

        def one(number: int) -> None:
            row = todo[number][0]
            try:
                seen = run_row(row, Path(place) / str(number))
            except Exception as error:  # it is run again by the next call
                print(f"BROKEN  {row.name}: {type(error).__name__}: {error}", flush=True)
                return
            problems = seen.problems(SLACK)
            after = "" if seen.seconds is None else f" after {seen.seconds} s"
            print(f"{'FAILED' if problems else 'ok':<7} {row.name}{after} {'; '.join(problems)}", flush=True)
            kept.add(key(*todo[number]), seen)

        with ThreadPoolExecutor(TOGETHER) as pool:
            list(pool.map(one, range(len(todo))))
    results = [kept.results[key(*each)] for each in numbered if key(*each) in kept.results]
    bad = [seen for seen in results if seen.problems(SLACK)]
    if only_page or len(results) == len(numbered):
        PAGE.write_text(page(results, kept, len(numbered)))
    print(f"{len(results) - len(bad)} of {len(results)} rows as they should be, on {kept.revision}")
    return 1 if bad or len(results) < len(numbered) else 0


Key = Tuple[str, int]  # name of the row, which of its runs


def key(row: Row, number: int) -> Key:
    return row.name, number


class Kept:
    """What rows of this very source have shown so far: a call that was cut short goes on where it was."""

    def __init__(self) -> None:
        self.revision = _revision()
        self.path = ROOT / "build" / f"faults-{self.revision}.jsonl"
        self.results: Dict[Key, Seen] = {}
        self.calls: Set[int] = set()
        self.again, self.loads = 0, [os.getloadavg()[0]]
        by_name = {row.name: row for row in ALL}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            data = json.loads(line)
            self.calls.add(data["call"])
            if data["name"] in by_name:
                self._put((data["name"], data["number"]), Seen(by_name[data["name"]], **data["seen"]), data["load"])

    def add(self, which: Key, seen: Seen) -> None:
        load = os.getloadavg()[0]
        self.calls.add(os.getpid())
        self._put(which, seen, load)
        shown = {key: value for key, value in vars(seen).items() if key != "row"}
        data = {"name": which[0], "number": which[1], "call": os.getpid(), "load": load, "seen": shown}
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(data) + "\n")

    def _put(self, which: Key, seen: Seen, load: float) -> None:
        self.again += which in self.results
        self.results[which] = seen
        self.loads.append(load)


def _revision() -> str:
    """Of what is tested: git's name of the whole of src, and what was changed in it since."""
    git = ["git", "-C", str(ROOT)]
    tree = subprocess.run(
        [*git, "rev-parse", "--short=8", "HEAD:src"], capture_output=True, text=True, check=True
    ).stdout
    changes = subprocess.run([*git, "diff", "HEAD", "--", "src"], capture_output=True, check=True).stdout
    return tree.strip() + (f"-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")


def page(results: List[Seen], kept: Kept, planned: int) -> str:
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    loads = sorted(kept.loads)
    missing = f" **{planned - len(results)} of {planned} runs were not made.**" if len(results) < planned else ""
    again = f"; {kept.again} rows were run again, and the last run counts" if kept.again else ""
    head = HEAD.format(
        machine=machine, patience=PATIENCE, together=TOGETHER, day=time.strftime("%Y-%m-%d", time.gmtime()),
        revision=kept.revision, low=loads[0], middle=loads[len(loads) // 2], high=loads[-1], again=again, missing=missing,
        calls="one call" if len(kept.calls) == 1 else f"{len(kept.calls)} calls on this one source",
    )  # fmt: skip
    lines = [head]
    lines += ["## Hangs", "", *_hangs([seen for seen in results if seen.row in HANGS])]
    lines += ["", "## Slow ranks", "", *_hangs([seen for seen in results if seen.row in (*SLOW, *EVEN)])]
    lines += ["", "## Who is blamed", "", *_failures([seen for seen in results if seen.row in (*BLAME, *PROGRAMS)])]
    lines += ["", "## Agents, nodes, desk, folder, scheduler", ""]
    lines += _failures([seen for seen in results if seen.row in OUTSIDE])
    lines += [
        "",
        "## Other users, clocks",
        "",
        "Ports, caches and relays of another user (uid 65534), where root runs this.",
        "",
    ]
    lines += _failures([seen for seen in results if seen.row in STRANGERS])
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
        lost = "" if seen.lost is None else "1 step" if seen.lost == 1 else f"{seen.lost} steps"
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
