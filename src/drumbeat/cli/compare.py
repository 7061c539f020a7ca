"""drumbeat compare: `drumbeat report` with several runs, under the name that many look for."""

from __future__ import annotations

from typing import Any

from drumbeat.cli import report
from drumbeat.cli.report import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: Any) -> int:
    from drumbeat.problem import Problem

    if len(args.runs) < 2:
        raise Problem("compare takes two runs or more", "drumbeat compare RUN RUN; drumbeat list shows them")
    return report.run(args)
