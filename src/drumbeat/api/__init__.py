"""drumbeat from Python: the same code that the command line calls.

    from drumbeat import api

    run = api.run("job.yaml")                    # on this machine, until it has ended
    print(api.report(run).speed, api.diagnose(run).failure.finding)

    run = api.submit("job.yaml")                 # or {"command": "python train.py", "nodes": 2}
    run.wait()
    for line in run.logs(rank=0): print(line.text)

    run = api.submit(train, 3e-4, job={"nodes": 2, "ranks-per-node": 4})       # a function, in every rank
    run.result()                                 # what rank 0 returned, or its exception

Mistakes of the user are `Problem`s, as on the command line.
"""

from __future__ import annotations

from drumbeat.api.runs import (
    CallFailed,
    JobLike,
    Planned,
    Submitted,
    as_job,
    cancel,
    compare,
    diagnose,
    logs,
    map_array,
    plan,
    report,
    run,
    status,
    submit,
    wait,
)
from drumbeat.base.problem import Problem
from drumbeat.desk.state import State
from drumbeat.logs.report import Report
from drumbeat.report.figures import Figures
from drumbeat.report.scaling import Comparison
from drumbeat.runfolder.records import Line

__all__ = [
    "CallFailed",
    "Comparison",
    "Figures",
    "JobLike",
    "Line",
    "Planned",
    "Problem",
    "Report",
    "State",
    "Submitted",
    "as_job",
    "cancel",
    "compare",
    "diagnose",
    "logs",
    "map_array",
    "plan",
    "report",
    "run",
    "status",
    "submit",
    "wait",
]
