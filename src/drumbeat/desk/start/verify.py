"""`drumbeat verify`: a job like any other whose command is our collective test; then its results are judged."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.desk.start.run import run_job
from drumbeat.jobfile.job import Job
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.runfolder.files import replace, replace_json
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.verify.judge import Judgement, judge

SCHEMA = "1.0"
PACKAGE = "inrank/collective_test"
RESULTS = "collectives.json"


def verify_job(job: Job, quick: bool, backend: str, python: Optional[str]) -> Job:
    """Return the job with our test as its command. Everything else that the job sets (nodes, environment, setup) is what is
    verified."""
    command = [python or _python(job), "{attempt}/collective_test/__main__.py", "--out", "{attempt}/" + RESULTS]
    command += ["--quick"] if quick else []
    command += ["--backend", backend] if backend != "auto" else []
    launcher = job.launcher if job.launcher == "tasks" else "auto"
    return _test_job(job, "verify", command, launcher, PACKAGE)


def _test_job(job: Job, name: str, command: Sequence[str], launcher: str, package: str) -> Job:
    brings, words = (package,), tuple(command)
    job = dataclasses.replace(job, name=job.name or name, command=words, launcher=launcher, brings=brings)
    return dataclasses.replace(job, wrap=None, restarts=0)


def _python(job: Job) -> str:
    """Return the Python that runs drumbeat if it has torch; after a `setup` or in a container, the `python3` found there."""
    elsewhere = job.setup or job.on_start or getattr(job, "container", None) or getattr(job, "modules", ())
    if not elsewhere and importlib.util.find_spec("torch") is not None:
        return sys.executable
    return "python3"


def run_verify(job: Job, node_rank: Optional[int], master: str) -> Tuple[int, Optional[RunFolder]]:
    """Return the run's exit code, and its folder if it was created here, with the lead."""
    made: List[RunFolder] = []
    code = run_job(job, None, node_rank, master, job.nodes, made.append)
    return code, made[0] if made else None


def judged(folder: RunFolder) -> Tuple[Optional[Dict[str, Any]], Optional[Judgement]]:
    """Return rank 0's results and their judgement; None for both if the ranks never met."""
    run = Run.open(folder.path)
    results, peers, order = run.results(RESULTS), peers_of(run), run.order()
    if results is None or order is None or not peers.nodes:
        return None, None
    results = _with_nics(run, results)
    judgement = judge(results, peers, order.floors, order.emulated)
    transport = {each.answer: each for each in reversed(run.verdicts()) if each.check == "transport"}  # each one once
    return results, dataclasses.replace(judgement, verdicts=(*transport.values(), *judgement.verdicts))


def peers_of(run: Run) -> Peers:
    """Return the members, each with the facts that it wrote itself."""
    nodes = [
        Peer(member.node, member.host, member.address, run.facts(member.node) or Facts(member.host), ranks=member.ranks)
        for member in run.members()
    ]
    return Peers(tuple(nodes), "", 0)


def _with_nics(run: Run, results: Dict[str, Any]) -> Dict[str, Any]:
    """Add to each rank the NIC that its node's plan assigned to it, so that a slow one can be named."""
    slots = {}
    for node in run.nodes():
        planned = run.environment(node).get("binding") or {}
        slots.update({(node, slot.get("local_rank")): slot.get("nic") for slot in planned.get("slots") or ()})
    ranks = [{**each, "nic": slots.get((each["node"], each["local_rank"]))} for each in results["ranks"]]
    return {**results, "ranks": ranks}


def write_verdict(folder: RunFolder, plain: Dict[str, Any], results: Dict[str, Any], judgement: Judgement) -> None:
    from drumbeat.verify.judge import plot

    replace_json(folder.at("verify.json"), plain)
    replace(folder.at("verify.svg"), plot(results, judgement))


def as_plain(
    folder: RunFolder, code: int, results: Optional[Dict[str, Any]], judgement: Optional[Judgement]
) -> Dict[str, Any]:
    summary = Run.open(folder.path).summary()
    return {
        "schema": SCHEMA,
        "folder": folder.path,
        "exit_code": code,
        "verdicts": to_plain(judgement.verdicts) if judgement else [],
        "rows": to_plain(judgement.rows) if judgement else [],
        "results": results,
        "failure": to_plain(summary.failure) if summary else None,
    }


# `drumbeat verify --mpi`: a job whose command is the MPI test. mpirun stands before drumbeat, as for every MPI program.


MPI_PACKAGE = "inrank/mpi_test.py"
MPI_RESULTS = "mpi.json"
# Set by each kind of MPI launcher for its tasks.
_STARTED = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "PALS_RANKID", "FLUX_TASK_RANK")


def require_mpi_launcher(environ: Mapping[str, str]) -> None:
    """Require an MPI launcher, which assigns the ranks: without one each process would be alone."""
    if not any(name in environ for name in _STARTED):
        raise Problem(
            "verify --mpi has to be started by an MPI launcher",
            "type: mpirun -n 4 drumbeat verify --mpi (docs page verify)",
        )


def mpi_job(job: Job, quick: bool, python: Optional[str]) -> Job:
    chosen = python or (sys.executable if importlib.util.find_spec("mpi4py") is not None else "python3")
    command = [chosen, "{attempt}/mpi_test.py", "--out", "{attempt}/" + MPI_RESULTS]
    return _test_job(job, "verify-mpi", command + ["--quick"] * quick, "auto", MPI_PACKAGE)


def mpi_results(folder: RunFolder) -> Optional[Dict[str, Any]]:
    """Return rank 0's results; None if the ranks never met."""
    return Run.open(folder.path).results(MPI_RESULTS)
