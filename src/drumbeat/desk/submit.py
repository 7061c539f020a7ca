"""`drumbeat submit`: from a job, or from an order that `plan --save` has kept, to a job in Slurm's queue."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import List, Mapping, Optional

from drumbeat.backends import slurm, slurm_client
from drumbeat.bundle.build import cached_bundle
from drumbeat.containers.image import check_image
from drumbeat.desk.create import create_run
from drumbeat.desk.surroundings import check_command, look_around
from drumbeat.order import Order, load_order
from drumbeat.problem import Problem
from drumbeat.record import RecordError
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.read import read_json
from drumbeat.runfolder.write import replace, replace_json
from drumbeat.spec.job import Job, job_from_file
from drumbeat.spec.presets import laid_over
from drumbeat.spec.resolve import resolve
from drumbeat.spec.site import Site
from drumbeat.spec.sites import find_site, load_site

_DEFAULTS = ("account", "partition", "qos", "mail", "constraint", "reservation", "container_runtime", "binds")


def make_order(job: Job, environ: Mapping[str, str]) -> Order:
    """The order of a job that a scheduler will start."""
    job = with_defaults(job, environ)
    here = dataclasses.replace(look_around(environ, gpus=None), job_id=None)
    site = scheduled_site(job, environ, here.hostname)
    order = resolve(job, site, here)
    if order.launcher == "tasks" and not order.ranks_per_node:
        raise Problem("one task a rank, but nobody says how many ranks a node has", "add ranks-per-node: M")
    return order


def scheduled_site(job: Job, environ: Mapping[str, str], hostname: str) -> Site:
    """On a Slurm cluster that has no profile, the general one: nothing is assumed about it."""
    site = find_site(job.site, environ, hostname, _cluster(environ), job.where("site"))
    if site.backend == "slurm":
        return site
    if job.site is None:
        return load_site("slurm", environ)
    raise Problem(f"site {site.name} has no scheduler to submit to", "drumbeat run starts the job here")


def _cluster(environ: Mapping[str, str]) -> Optional[str]:
    if environ.get("SLURM_CLUSTER_NAME"):
        return environ["SLURM_CLUSTER_NAME"]
    if shutil.which("scontrol", path=environ.get("PATH", os.defpath)) is None:
        return None
    name = slurm_client.cluster_name(environ)
    return None if name == "cluster" else name


def with_defaults(job: Job, environ: Mapping[str, str]) -> Job:
    """What the user keeps for all jobs, in a file of the same form; only what asks for resources counts."""
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "."), ".config")
    path = os.path.join(config, "drumbeat", "defaults.yaml")
    if not os.path.exists(path):
        return job
    kept = job_from_file(path)
    # sbatch's own variables are nearer than a file
    exported = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
    return laid_over(kept, job, [name for name in _DEFAULTS if not environ.get(exported.get(name, ""))])


def saved_order(path: str) -> Order:
    try:
        with open(path, encoding="utf-8") as file:
            order = load_order(file.read(), path)
    except (OSError, RecordError) as error:
        raise Problem(f"{path}: {error}") from None
    if order.backend != "slurm":
        raise Problem(f"{path}: this order is for backend {order.backend}, not for Slurm")
    return order


def notes(order: Order) -> List[str]:
    """What Slurm would take as asked for, and the user hardly meant."""
    asked = order.resources
    whole = asked.exclusive or any(option.text.startswith("--exclusive") for option in asked.options)
    if asked.gpus and asked.gpus > 1 and not asked.cpus and not whole:
        return [
            f"{asked.gpus} GPUs a node, and nothing is said of cores: most clusters then give 1 core for all ranks; "
            "say cpus: N, or exclusive: true"
        ]
    return []


def submit(order: Order, job_file: Optional[str], environ: Mapping[str, str]) -> slurm_client.Handle:
    check_image(order)
    if not (order.container or order.modules):
        check_command(order, environ)
    request = slurm.render(order)
    if os.path.exists(order.folder):
        raise Problem(
            f"{order.run_id} has been submitted already: {order.folder} is there", "make a new order: drumbeat plan"
        )
    folder = create_run(order, job_file, cached_bundle(environ), environ)
    try:
        replace(folder.script, request.text)
        env = slurm_client.sbatch_environment(environ)
        slurm_client.test_only(folder.script, env)
        handle = slurm_client.submit(folder.script, env)
    except (Problem, OSError) as error:
        _forget(folder, order, environ)
        if isinstance(error, OSError):
            raise Problem(f"cannot write {folder.script}: {error.strerror}", "say another place with --runs") from None
        raise
    record = read_json(folder.run_json) or {}
    record.pop("desk", None)  # nobody stays here
    replace_json(folder.run_json, {**record, "handle": str(handle)})
    return handle


def _forget(folder: RunFolder, order: Order, environ: Mapping[str, str]) -> None:
    """A refused job leaves nothing behind."""
    from drumbeat.desk.create import index_folder

    shutil.rmtree(folder.path, ignore_errors=True)
    link = os.path.join(index_folder(environ), order.run_id)
    if os.path.islink(link):
        os.unlink(link)
