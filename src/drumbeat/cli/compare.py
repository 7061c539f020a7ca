"""drumbeat compare: `drumbeat report` with several runs, under the name that many look for."""

from __future__ import annotations

from drumbeat.cli.report import add_arguments, run

__all__ = ["add_arguments", "run"]
