"""Backend `kubernetes`: one pod per node, started by whatever the cluster offers; docs/kubernetes.md."""

from __future__ import annotations

import os
from typing import Callable, List, Mapping, Optional, Sequence

from drumbeat.backends.contract import Backend, Request, Status
from drumbeat.backends.kubernetes import choice
from drumbeat.backends.kubernetes.client import Cluster, handle_of
from drumbeat.backends.kubernetes.job import PodFiles, SubmittedJob
from drumbeat.backends.kubernetes.options import settings_of
from drumbeat.backends.kubernetes.pod import gpu_resource
from drumbeat.backends.kubernetes.render import check, object_name, render
from drumbeat.backends.kubernetes.submit import remove, submit
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.runfolder.mirror import Mirror, is_complete


class Kubernetes(Backend):
    name = "kubernetes"
    title = "Kubernetes"
    no_spares = "a pod that is lost is replaced by the cluster itself"
    default_site = "kubernetes"
    specific = ("qos", "gpus-as")
    leaves_objects = True

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        super().check(order, where)
        check(order)
        settings = settings_of(order)
        if order.resources.gpus:
            gpu_resource(order)
        if settings.run_folder and settings.claim_of(settings.run_folder) is None:
            raise Problem(
                f"--run-folder={settings.run_folder} is on no claim", "add --pvc CLAIM:PATH with a PATH above it"
            )

    def notes(self, order: Order) -> List[str]:
        settings = settings_of(order)
        binds = order.container.binds if order.container else ()
        seen = settings.claim_of(order.workdir) or any(
            (order.workdir + "/").startswith((bind.partition(":")[2] or bind).rstrip("/") + "/") for bind in binds
        )
        said = []
        if os.path.isdir(order.workdir) and not seen:
            said.append(
                f"{order.workdir} is a folder of this machine: in a pod it must be part of the image, or on a claim "
                "(--pvc CLAIM:PATH); workdir: names another"
            )
        if not settings.run_folder:
            said.append(
                f"the run folder is fetched from the pods: `drumbeat logs --follow` or `status` within {settings.linger} s "
                "after the end; with --run-folder on a claim it stays"
            )
        return said

    def render(self, order: Order) -> Request:
        check(order)
        settings = settings_of(order)
        cluster = Cluster(os.environ, settings.context, settings.namespace)
        chosen = choice.choose(settings, choice.ask(cluster))
        return render(order, chosen.kind, chosen.why, chosen.version)

    def handle(self, order: Order, environ: Mapping[str, str]) -> str:
        settings = settings_of(order)
        return handle_of(Cluster(environ, settings.context, settings.namespace).settled(), object_name(order.run_id))

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        return submit(request, environ)

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        return SubmittedJob(handle, environ).status()

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        SubmittedJob(handle, environ).cancel()

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        return SubmittedJob(handle, environ).shell(host, command)

    def run_files(self, folder: str, handle: str, environ: Mapping[str, str]) -> Optional[Mirror]:
        return None if is_complete(folder) else PodFiles(folder, SubmittedJob(handle, environ)).mirror()

    def finish(self, handle: str, environ: Mapping[str, str]) -> None:
        job = SubmittedJob(handle, environ)
        remove(job.cluster, job.name)
