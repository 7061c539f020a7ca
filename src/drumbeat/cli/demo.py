"""drumbeat demo: a training of 2 nodes x 2 ranks, emulated on this machine, that needs nothing but Python."""

from __future__ import annotations

from typing import Any


def add_arguments(parser: Any) -> None:
    parser.epilog = "Exit code: that of the run. Its folder is below ./runs, as for any run."


def run(args: Any) -> int:
    import pkgutil
    import sys

    from drumbeat.desk.start.run import run_job
    from drumbeat.jobfile.job import Job

    program = pkgutil.get_data("drumbeat.desk", "demo_program.py") or b""
    command = (sys.executable, "-c", program.decode().replace("$", "$$"))
    return run_job(Job(command=command, name="demo", nodes=2, ranks_per_node=2, site="localhost"), None, None, "", 2)
