"""drumbeat compare: `drumbeat report` with several runs, under the name that many look for."""

from __future__ import annotations

from typing import Any

from drumbeat.cli import report


def add_arguments(parser: Any) -> None:
    report.add_arguments(
        parser, "two or more: each a run id or the start of one, run folder, scheduler job, or printed file"
    )


def run(args: Any) -> int:
    from drumbeat.base.problem import Problem

    if len(args.runs) < 2:
        raise Problem("compare takes two runs or more", "drumbeat compare RUN RUN; drumbeat list shows them")
    return report.run(args)
