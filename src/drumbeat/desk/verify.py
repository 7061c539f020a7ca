"""`drumbeat verify`: a job like any other whose command is our collective test; then its results are judged."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import Any, Dict, Optional, Tuple

from drumbeat.desk.run import order_for, start_order
from drumbeat.facts.model import Peers
from drumbeat.finding import Verdict
from drumbeat.order import Order
from drumbeat.problem import Problem
from drumbeat.record import from_plain, to_plain
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.read import read_json, read_lines
from drumbeat.runfolder.write import replace, replace_json
from drumbeat.spec.job import Job
from drumbeat.spec.site import Site
from drumbeat.verify.ceiling import OPS
from drumbeat.verify.judge import Floor, Judgement, judge

SCHEMA = "1.0"
SCRIPTS = ("verify/collectives.py", "verify/smoke.py")
RESULTS = "collectives.json"


def verify_job(job: Job, quick: bool, backend: str, python: Optional[str]) -> Job:
    """The job with our test as its command. What else it says (nodes, environment, setup) is what is verified."""
    command = [python or _python(job), "{attempt}/collectives.py", "--out", "{attempt}/" + RESULTS]
    command += ["--quick"] if quick else []
    command += ["--backend", backend] if backend != "auto" else []
    name = job.name or "verify"
    return dataclasses.replace(job, name=name, command=tuple(command), launcher="ranks", wrap=None, restarts=0)


def _python(job: Job) -> str:
    """The one that runs drumbeat, if it has torch; after a `setup`, or if not, whichever `python3` is found."""
    if not job.setup and importlib.util.find_spec("torch") is not None:
        return sys.executable
    return "python3"


def run_verify(job: Job, node_rank: Optional[int], master: str) -> Tuple[int, Optional[RunFolder], Order, Site]:
    """The run's exit code, and its folder where this machine is the lead's."""
    order, site, node_rank = order_for(job, node_rank, master, job.nodes)
    for op in site.floors:
        if op not in OPS:
            raise Problem(f"{site.where('floors.' + op)}: there is no such operation", f"known: {', '.join(OPS)}")
    order = dataclasses.replace(order, brings=SCRIPTS)
    code = start_order(order, node_rank, None)
    return code, None if node_rank else RunFolder(order.folder), order, site


def judged(folder: RunFolder, order: Order, site: Site) -> Tuple[Optional[Dict[str, Any]], Optional[Judgement]]:
    """What rank 0 wrote and what it means; nothing where the ranks did not even meet."""
    results, peers = read_json(os.path.join(folder.node(0).attempt(0), RESULTS)), read_json(folder.peers)
    if results is None or peers is None:
        return None, None
    floors = {op: Floor(floor.busbw, floor.nodes, floor.source or "") for op, floor in site.floors.items()}
    judgement = judge(results, from_plain(Peers, peers), floors, order.emulated)
    return results, dataclasses.replace(judgement, verdicts=(*_transport(folder), *judgement.verdicts))


def _transport(folder: RunFolder) -> Tuple[Verdict, ...]:
    """What the gate of each node saw; the same answer of several is told once."""
    said = [event["verdict"] for event in read_lines(folder.events) if event.get("kind") == "verdict"]
    verdicts = [from_plain(Verdict, each) for each in said if each.get("check") == "transport"]
    return tuple({verdict.answer: verdict for verdict in reversed(verdicts)}.values())


def write_verdict(folder: RunFolder, plain: Dict[str, Any], results: Dict[str, Any], judgement: Judgement) -> None:
    from drumbeat.verify.plot import plot

    replace_json(folder.at("verify.json"), plain)
    replace(folder.at("verify.svg"), plot(results, judgement))


def as_plain(
    folder: RunFolder, code: int, results: Optional[Dict[str, Any]], judgement: Optional[Judgement]
) -> Dict[str, Any]:
    return {
        "schema": SCHEMA,
        "folder": folder.path,
        "exit_code": code,
        "verdicts": to_plain(judgement.verdicts) if judgement else [],
        "rows": to_plain(judgement.rows) if judgement else [],
        "results": results,
        "failure": (read_json(folder.summary) or {}).get("failure"),
    }
