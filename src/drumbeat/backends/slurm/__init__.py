"""Backend `slurm`: a readable batch script, sent by sbatch; srun starts the agents. Slurm is asked by its own tools, each call
with a deadline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set

from drumbeat.backends import contract
from drumbeat.backends.contract import Backend, Launch, Request, Status
from drumbeat.backends.slurm import directives
from drumbeat.backends.slurm import render as steps
from drumbeat.backends.slurm.directives import seconds_of
from drumbeat.backends.slurm.render import SCRIPT, node_lines_of, render, render_command
from drumbeat.base.data import load
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.bundle.pinned import start_argv
from drumbeat.containers import started_by_launcher
from drumbeat.machine.model import Identity, Pool
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.layout import RunFolder

# Slurm's words about a job. Pure: text in, Status out.


# Fields of `squeue --Format`; a size is needed, or it would cut at 20 characters.
SQUEUE = "JobArrayID:60|,State:30|,RestartCnt:12|,Reason:80|,StartTime:30|,NodeList:400"
SACCT = "JobID,State,ExitCode"

# Every state that is missing here is a failure: FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, BOOT_FAIL, DEADLINE.
_STATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"), contract.QUEUED),
    **dict.fromkeys(("SPECIAL_EXIT", "RESV_DEL_HOLD"), contract.QUEUED),
    **dict.fromkeys(("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"), contract.RUNNING),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), contract.RUNNING),
    "COMPLETED": contract.FINISHED,
    **dict.fromkeys(("CANCELLED", "PREEMPTED", "REVOKED"), contract.CANCELLED),
}


def from_squeue(handle: str, text: str, prefix: str) -> Optional[contract.Status]:
    """Parse squeue's answer, one line per job; `prefix` is the handle without the job. None: it does not know the job."""
    return _one_or_array(handle, [_squeue_line(line, prefix) for line in text.splitlines() if "|" in line])


def _squeue_line(line: str, prefix: str) -> contract.Status:
    job, word, starts, reason, begins, nodes = [field.strip() for field in (line.split("|") + [""] * 6)[:6]]
    detail = word.lower() + (f" on {nodes}" if nodes else "") + (f" ({reason})" if reason not in ("None", "") else "")
    state = state_of(word)
    if word == "PENDING" and reason not in ("None", ""):
        detail = why_pending(reason, job)
        detail += f"; expected to start at {begins.replace('T', ' ')}" if begins[:1].isdigit() else ""
    if state == contract.QUEUED and starts not in ("", "0"):
        detail += f", start {starts} is over"
    return contract.Status(prefix + job, state, detail, starts=int(starts) if starts.isdigit() else None)


def why_pending(reason: str, job: str) -> str:
    """Say in words why a job waits, with Slurm's own reason and what can be done."""
    plain = reason.strip("()")
    known = next(
        (each for each in load("drumbeat.backends.slurm", "reasons") if plain.startswith(each["reason"])), None
    )
    if known is None:
        return f"pending ({plain})"
    return f"{known['means']} ({plain})" + (f": {known['do'].format(job=job)}" if "do" in known else "")


def from_sacct(handle: str, text: str, prefix: str) -> Optional[contract.Status]:
    """Parse the answer of `sacct --parsable2`, used once squeue has forgotten the job."""
    statuses = []
    for line in text.splitlines():
        job, word, code = (line.split("|") + ["", ""])[:3]
        number = code.partition(":")[0]
        if job.strip() and word.strip():
            exit_code = int(number) if number.isdigit() else None
            state = state_of(word)
            over = state not in contract.ALIVE
            statuses.append(contract.Status(prefix + job.strip(), state, word.strip().lower(), exit_code, over=over))
    return _one_or_array(handle, statuses)


def state_of(word: str) -> str:
    """Return the state alone: `CANCELLED by 1000` is CANCELLED."""
    first = word.split()[0].rstrip("+") if word.split() else ""
    return _STATES.get(first, contract.FAILED if first else contract.UNKNOWN)


def _one_or_array(handle: str, statuses: Iterable[contract.Status]) -> Optional[contract.Status]:
    found = list(statuses)
    if not found:
        return None
    if len(found) == 1 and "_" not in found[0].handle.rpartition("/")[2]:
        return found[0]
    asked = [status for status in found if status.handle == handle]
    return asked[0] if asked else contract.overall(handle, sorted(found, key=lambda status: _task(status.handle)))


def _task(handle: str) -> int:
    task = handle.rpartition("_")[2]
    return int(task) if task.isdigit() else 0


_LOOKED_AT = 4.0  # seconds
_clusters: Dict[str, str] = {}  # slurm.conf -> the cluster's name
UNREACHABLE = "no Slurm controller can be reached from here"
_NO_CONTROLLER = regex(
    r"Unable to contact slurm controller|Could not establish a configuration source|resolve_ctls_from_dns_srv"
)


def submit(script: str, environ: Mapping[str, str], avoided: Sequence[str] = ()) -> str:
    """Return the handle of the queued job. `avoided`: nodes that drumbeat itself excludes."""
    try:
        folder = os.getcwd()  # SLURM_SUBMIT_DIR of the job
    except OSError:
        folder = os.path.sep
    done = _call(["sbatch", "--parsable"], environ, script, folder)
    if done.returncode != 0:
        raise _refused(done.stderr, avoided)
    job, _, cluster = done.stdout.strip().partition(";")
    if not job.isdigit():
        raise Problem(f"sbatch answered {done.stdout.strip()[:80]!r} instead of a job's number")
    return str(contract.Handle("slurm", cluster or cluster_name(environ) or "cluster", job))


def sbatch_environment(environ: Mapping[str, str], settled: Sequence[str]) -> Dict[str, str]:
    """Return the environment without `settled`, sbatch's own variables that are in the script now and would win over it,
    and without those of a surrounding job, which would leak into the new one."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
    return {
        name: value
        for name, value in environ.items()
        if name not in settled and (not name.startswith("SLURM_") or name in kept)
    }


def cluster_name(environ: Mapping[str, str]) -> str:
    """Return the cluster's name; empty if Slurm does not answer. Asked once per slurm.conf."""
    conf = environ.get("SLURM_CONF", "")
    if conf not in _clusters:
        done = _call(["scontrol", "show", "config"], environ)
        match = re.search(r"^ClusterName\s*=\s*(\S+)", done.stdout, re.MULTILINE)
        _clusters[conf] = match.group(1) if match else ""
    return _clusters[conf]


def statuses(handles: Sequence[str], environ: Mapping[str, str]) -> Dict[str, contract.Status]:
    """Return the states of all of these jobs with one query; `unknown` if Slurm has forgotten a job and keeps no accounts."""
    jobs = {handle: job_number(handle) for handle in handles}
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--Format={SQUEUE}"]
    queue = _call([*argv, f"--jobs={','.join(jobs.values())}"], environ)
    # squeue fails for all jobs if it does not know one of them
    if queue.returncode and len(jobs) > 1 and not _unreachable(queue.stderr):
        return {handle: statuses([handle], environ)[handle] for handle in handles}
    found = {handle: from_squeue(handle, _of(job, queue.stdout), _prefix(handle)) for handle, job in jobs.items()}
    lost = [job for handle, job in jobs.items() if found[handle] is None]
    if lost:
        argv = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(lost)}", f"--format={SACCT}"]
        done = _call(argv, environ)
        accounts = done.stdout if done.returncode == 0 else ""
        for handle, job in jobs.items():
            found[handle] = found[handle] or from_sacct(handle, _of(job, accounts), _prefix(handle))
    away = _unreachable(queue.stderr)
    unknown = UNREACHABLE if away else "Slurm no longer knows this job"
    return {
        handle: status or contract.Status(handle, contract.UNKNOWN, unknown, over=not away)
        for handle, status in found.items()
    }


def hopeless(handle: str, environ: Mapping[str, str]) -> str:
    """Return why a job that was just queued can never start, with what to do; empty if nothing says so. Slurm 24.11 and newer
    give a reason only when their scheduler has looked at the job, by default within 3 s; 22.05 gives it at once."""
    never, deadline = "never starts: ", time.monotonic() + _LOOKED_AT  # `never` is in reasons.yaml
    pause = 0.1
    while True:
        try:
            found = statuses([handle], environ)[handle]
        except Problem:
            return ""
        words = [task.detail for task in found.tasks or (found,)]
        if "pending" not in words or time.monotonic() > deadline:
            return next((text[len(never) :] for text in words if text.startswith(never)), "")
        pause = min(2 * pause, 1.0)  # each look is a call to the controller
        time.sleep(pause)


def default_limit(partition: str, environ: Mapping[str, str]) -> float:
    """Return the limit in seconds that a job without one gets; 0 if there is none, or Slurm does not tell."""
    if environ.get("SBATCH_TIMELIMIT"):
        return seconds_of(environ["SBATCH_TIMELIMIT"])
    done = _call(["sinfo", "--noheader", "--format=%P|%L|%l"], environ)
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if done.returncode == 0]
    for name, usual, longest in (row for row in rows if len(row) == 3):
        if name.rstrip("*") == partition or not partition and name.endswith("*"):
            return seconds_of(usual if usual != "n/a" else longest)  # without a default it is the longest
    return 0.0


def _prefix(handle: str) -> str:
    return handle.rpartition("/")[0] + "/"


def _of(job: str, text: str) -> str:
    """Return the lines about this job, or about the jobs of this array."""
    words = (line.partition("|")[0].strip() for line in text.splitlines())
    return "\n".join(line for line, word in zip(text.splitlines(), words) if word == job or word.startswith(f"{job}_"))


def cancel(handle: str, environ: Mapping[str, str]) -> None:
    done = _call(["scancel", job_number(handle)], environ)
    if done.returncode != 0 and _unreachable(done.stderr):
        raise _refused(done.stderr)
    if done.returncode != 0:
        raise Problem(f"Slurm does not cancel job {job_number(handle)}: {_complaint(done.stderr)}")


def job_number(handle: str) -> str:
    parsed = contract.parse_handle(handle)
    if parsed is None or not parsed.job.isdigit():
        raise Problem(f"{handle!r} is not a job of Slurm", "it looks like slurm://CLUSTER/123, or 123_4 in an array")
    return parsed.id


def _call(
    argv: Sequence[str], environ: Mapping[str, str], stdin: str = "", folder: str = os.path.sep
) -> subprocess.CompletedProcess[str]:
    missing, silent = (
        "log in to the cluster's login node, or load its module",
        "Slurm's controller may be busy: try again",
    )
    return contract.ask_tool(argv, environ, missing, silent, input=stdin, text=True, errors="replace", cwd=folder)


def _unreachable(text: str) -> bool:
    """Return true if a tool of Slurm says that it found no controller, or got no connection to it."""
    return bool(_NO_CONTROLLER.search(text))


def _refused(text: str, avoided: Sequence[str] = ()) -> Problem:
    """Turn what sbatch wrote when it failed into a Problem; if Slurm was never reached, it has refused nothing."""
    if _unreachable(text):
        return Problem(
            f"{UNREACHABLE}: {_complaint(text)}", "log in to the cluster's login node; there, scontrol ping must answer"
        )
    advice = contract.advised(text, _ADVICE, "drumbeat plan --render JOB.yaml shows what was requested")
    if avoided and ("node configuration" in text or "processors" in text):
        advice = f"drumbeat excludes {', '.join(avoided[:8])} after earlier failures; --bad-nodes use keeps them. Or: {advice}"
    return Problem(f"Slurm refuses this job: {_complaint(text)}", advice)


def _complaint(text: str) -> str:
    """Return sbatch's complaint once: it says the same thing twice, in other words."""
    prefix = r"^\w+: (error: |fatal: )?"
    own = contract.complaint(text, rf"{prefix}(allocation failure|Batch job submission).*|{prefix}")
    return (own or contract.complaint(text, prefix))[:500] or "it does not say why"


_ADVICE = (
    ("invalid partition", "sinfo -s lists the partitions; add --partition NAME"),
    ("invalid account", "sacctmgr show associations user=$USER lists yours; add --account NAME"),
    ("time limit", "sinfo -o '%P %l' shows the longest times; add --time"),
    ("node configuration", "no node has all that is requested: fewer GPUs, cores or less memory per node"),
    ("more processors", "the partition has no such number of nodes or cores: fewer nodes, or --cpus"),
    ("node count", "sinfo -o '%P %D' shows how many nodes a partition has"),
    ("invalid qos", "add --qos NAME, or leave it out"),
)


_CONF = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/var/spool/slurmd/conf-cache/slurm.conf")


class Slurm(Backend):
    name = "slurm"
    title = "Slurm"
    no_spares = no_start = ""
    avoids_nodes = True
    default_site = "slurm"
    interactive = "salloc -N 2"
    specific = directives.SPECIFIC
    exported = {
        "account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS",
        "reservation": "SBATCH_RESERVATION", "constraint": "SBATCH_CONSTRAINT",
    }  # fmt: skip

    def submits_here(self, environ: Mapping[str, str]) -> bool:
        """Return true if Slurm is configured here: its tools alone may come with any image."""
        if shutil.which("sbatch", path=environ.get("PATH", os.defpath)) is None:
            return False
        return bool(environ.get("SLURM_CONF")) or any(map(os.path.exists, _CONF))

    def cluster(self, environ: Mapping[str, str]) -> Optional[str]:
        if environ.get("SLURM_CLUSTER_NAME"):
            return environ["SLURM_CLUSTER_NAME"]
        if shutil.which("scontrol", path=environ.get("PATH", os.defpath)) is None:
            return None
        return cluster_name(environ) or None

    def pools(self, environ: Mapping[str, str]) -> List[Pool]:
        """Return each partition's like nodes, with what Slurm says of them; none where there is no sinfo."""
        if shutil.which("sinfo", path=environ.get("PATH", os.defpath)) is None:
            return []
        done = _call(["sinfo", "--noheader", "--format=%P|%D|%c|%m|%G"], environ)
        if done.returncode:
            raise Problem(f"sinfo failed: {_complaint(done.stderr)}")
        found = []
        for line in done.stdout.splitlines():
            name, nodes, cores, memory, gres = [field.strip() for field in (line.split("|") + [""] * 5)[:5]]
            numbers = [int(text) if text.isdigit() else 0 for text in (nodes, cores, memory)]
            gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))
            found.append(Pool(name.rstrip("*"), name.endswith("*"), numbers[0], numbers[1], numbers[2], gpus))
        return found

    def check_allocation(self, identity: Identity, environ: Mapping[str, str]) -> None:
        if shutil.which("srun", path=environ.get("PATH", os.defpath)) is None:
            raise Problem(
                f"this is Slurm job {identity.job_id}, but there is no srun here to reach its nodes (inside a "
                "container?)",
                "put srun before the container: srun --ntasks-per-node=1 apptainer exec IMAGE python3 drumbeat.pyz "
                "run ...",
            )

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        super().check(order, where)
        directives.check(order, where)
        if order.container and order.container.runtime == "pod":
            raise Problem(
                f"{where('container-runtime')}: pod, but Slurm starts no pods", "apptainer, podman, docker, pyxis"
            )

    def existing_nodes(self, hosts: Sequence[str], environ: Mapping[str, str]) -> Set[str]:
        """Return the hosts that Slurm has: sbatch refuses a job that excludes any other."""
        try:
            done = _call(["sinfo", "--noheader", "--Node", "--format=%N"], environ)
        except Problem:
            return set(hosts)
        known = set(done.stdout.split())
        return set(hosts) & known if done.returncode == 0 and known else set(hosts)

    def missing(self, order: Order) -> List[str]:
        return directives.missing(order, os.environ, {**self.exported, "time": "SBATCH_TIMELIMIT"})

    def notes(self, order: Order) -> List[str]:
        return [*self.missing(order), *directives.no_gpus(order), *directives.notes(order)]

    def render(self, order: Order) -> Request:
        return render(order)

    def render_command(self, order: Order, word: str, request: str, text: str, why: str) -> Request:
        return render_command(order, word, request, text, why)

    def after(self, handles: Sequence[str]) -> str:
        return "afterok:" + ":".join(job_number(handle) for handle in handles)

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        script = os.path.join(request.order.folder, SCRIPT)
        # for the reader: sbatch gets the text itself, which nobody can have changed meanwhile
        replace(script, request.text)
        timed = request.order.time_limit is not None
        if not timed:
            limit = default_limit(request.order.resources.partition, environ)
            short = directives.too_short(limit, request.order.stop_grace, "Slurm's own limit for jobs without time")
            if short:
                raise Problem(short.what, f"time: in the job file; {short.fix}")
        env = sbatch_environment(environ, (*self.exported.values(), *(["SBATCH_TIMELIMIT"] * timed)))
        handle = submit(request.text, env, [node.host for node in request.order.resources.avoided])
        never = hopeless(handle, environ)
        if never:  # some clusters accept jobs beyond their limits and keep them pending forever
            cancel(handle, environ)
            why, _, fix = never.rpartition(": ")
            raise Problem(f"Slurm would never start this job: {why}", fix)
        return handle

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        return statuses([handle], environ)[handle]

    def statuses(self, handles: Sequence[str], environ: Mapping[str, str]) -> Dict[str, Status]:
        return statuses(handles, environ)

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        cancel(handle, environ)

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        """Return the command for a step beside the training step; without --overlap it would wait for training to end."""
        where = [f"--jobid={job_number(handle)}", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
        what = ["--quiet", *command] if command else ["--pty", environ.get("SHELL") or "/bin/bash"]
        return ["srun", *where, "--overlap", "--cpu-bind=none", *what]

    def fan_out(self, order: Order, environ: Mapping[str, str]) -> Launch:
        folder = RunFolder(order.folder)
        agent = list(start_argv(sys.executable, folder.order, dump_order(order)))
        if order.container:  # the same lines that a submitted job runs on each node
            if started_by_launcher(order):
                raise Problem(
                    f"{order.container.runtime} starts containers for srun itself",
                    "drumbeat submit does that; or put srun before it",
                )
            agent = ["sh", "-c", "\n".join(node_lines_of(order))]
        return Launch(tuple(steps.srun_argv(order, environ, agent)), steps.srun_environment(environ))
