"""Backend `slurm`: a readable batch script, sent by sbatch; srun starts the agents."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set

from drumbeat.backends.contract import Backend, Launch, Request, Status
from drumbeat.backends.slurm import client, directives
from drumbeat.backends.slurm import render as steps
from drumbeat.backends.slurm.render import SCRIPT, node_lines_of, render, render_command
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.bundle.pinned import start_argv
from drumbeat.containers import started_by_launcher
from drumbeat.machine.model import Identity, Pool
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.layout import RunFolder

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
        return client.cluster_name(environ) or None

    def pools(self, environ: Mapping[str, str]) -> List[Pool]:
        return client.pools(environ)

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
        return client.existing_nodes(hosts, environ)

    def missing(self, order: Order) -> List[str]:
        return directives.missing(order, os.environ, {**self.exported, "time": "SBATCH_TIMELIMIT"})

    def notes(self, order: Order) -> List[str]:
        return [*self.missing(order), *directives.no_gpus(order), *directives.notes(order)]

    def render(self, order: Order) -> Request:
        return render(order)

    def render_command(self, order: Order, word: str, request: str, text: str, why: str) -> Request:
        return render_command(order, word, request, text, why)

    def after(self, handles: Sequence[str]) -> str:
        return "afterok:" + ":".join(client.job_number(handle) for handle in handles)

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        script = os.path.join(request.order.folder, SCRIPT)
        # for the reader: sbatch gets the text itself, which nobody can have changed meanwhile
        replace(script, request.text)
        timed = request.order.time_limit is not None
        if not timed:
            limit = client.default_limit(request.order.resources.partition, environ)
            short = directives.too_short(limit, request.order.stop_grace, "Slurm's own limit for jobs without time")
            if short:
                raise Problem(short.what, f"time: in the job file; {short.fix}")
        env = client.sbatch_environment(environ, (*self.exported.values(), *(["SBATCH_TIMELIMIT"] * timed)))
        handle = client.submit(request.text, env, [node.host for node in request.order.resources.avoided])
        hopeless = client.hopeless(handle, environ)
        if hopeless:  # some clusters accept jobs beyond their limits and keep them pending forever
            client.cancel(handle, environ)
            why, _, fix = hopeless.rpartition(": ")
            raise Problem(f"Slurm would never start this job: {why}", fix)
        return handle

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        return client.statuses([handle], environ)[handle]

    def statuses(self, handles: Sequence[str], environ: Mapping[str, str]) -> Dict[str, Status]:
        return client.statuses(handles, environ)

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        client.cancel(handle, environ)

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        return client.shell_argv(handle, host, environ, command)

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
