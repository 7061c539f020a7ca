"""Checks of what reaches the ranks: the batch script runs once, on the first node, and every task inherits what it exported."""

from __future__ import annotations

import re
from typing import Iterator, Optional, Set, Tuple

from drumbeat.base.regex import regex
from drumbeat.commands.launch import NODE_BY_NODE, started_per_node
from drumbeat.commands.script import number
from drumbeat.commands.starts import OF_LAUNCHERS, PER_TASK, Start
from drumbeat.commands.syntax import names_read
from drumbeat.lint.checks_shell import NODE_LOCAL
from drumbeat.lint.context import Context, Hit, by_name
from drumbeat.machine.vendors import visibility_names
from drumbeat.plan.variables import SPELT

_RANK = ("RANK", "LOCAL_RANK", "NODE_RANK")
_DEVICES = visibility_names()


def rank_in_batch_scope(context: Context) -> Iterator[Hit]:
    """Find variables that must differ by task but are set once, in the batch script, and that a task reads."""
    seen: Set[Tuple[str, int]] = set()
    for start in context.script.starts if context.batch else ():
        if not start.step or context.script.extent(start).tasks == 1:
            continue
        for name, (value, line) in start.inherited.items():
            if start.launcher and name in OF_LAUNCHERS and name not in start.reads or (name, line) in seen:
                continue
            frozen = PER_TASK & names_read(value)
            apart = frozen == {"SLURM_NODEID"} and NODE_LOCAL.match(value)  # another folder on each node all the same
            read = name in (*_RANK, *_DEVICES) or name in start.reads or name in SPELT
            if read and not apart and (frozen or name in _RANK and value.isdecimal()):
                seen.add((name, line))
                yield Hit(line, {"name": name, "value": value})


def _overridden(context: Context, name: str, line: int) -> bool:
    """Return true if all that inherits this assignment is launchers, which set the variable for their ranks themselves."""
    heirs = [each for each in context.script.starts if name in each.inherited and each.inherited[name].line == line]
    heirs = [each for each in heirs if each.launcher or each.python or each.step]
    return bool(heirs) and name in OF_LAUNCHERS and all(each.launcher and name not in each.reads for each in heirs)


def local_rank_missing(context: Context) -> Iterator[Hit]:
    exported = {each.name: each.line for each in context.script.assignments if each.how == "export"}
    half = "RANK" in exported and "WORLD_SIZE" in exported and "LOCAL_RANK" not in exported
    if half and not _overridden(context, "RANK", exported["RANK"]):
        yield Hit(exported["RANK"])


_GLOBAL = regex(r"\$\{?(?:SLURM_PROCID|RANK|OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK)\}?")


def rank_as_local_rank(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        wrong = each.name in ("LOCAL_RANK", *_DEVICES) and _GLOBAL.fullmatch(each.text)
        if wrong and not _overridden(context, each.name, each.line):
            yield Hit(each.line, {"name": each.name, "value": each.text})


def master_is_literal(context: Context) -> Iterator[Hit]:
    """Find a host that the script names as rank 0's although Slurm chooses the nodes."""
    script = context.script
    nodes = context.script.job_nodes or 1
    if nodes < 2 or not script.directives or script.option("nodelist", "nodefile", "reservation"):
        return
    seen: Set[int] = set()
    for start in context.script.starts:
        launcher, line = start.launcher, start.line
        if start.flags.keys() & {"nodelist", "nodefile"} or context.script.extent(start).nodes == 1 and start.step:
            continue
        if launcher:
            outside = launcher.said("--rdzv-backend").startswith("etcd")  # a server of its own
            host = "" if outside else launcher.master.partition(":")[0]
        elif start.step or start.python:
            host = start.value("MASTER_ADDR")
            line = start.inherited["MASTER_ADDR"].line if "MASTER_ADDR" in start.inherited else line
        else:
            continue
        literal = re.fullmatch(r"[A-Za-z0-9][\w.-]*", host) and not re.match(r"localhost|127\.|0\.0\.0\.0", host)
        if literal and line not in seen:
            seen.add(line)
            yield Hit(line, {"value": host, "nodes": str(nodes)})


def devices_hidden(context: Context) -> Iterator[Hit]:
    """Find a list of visible GPUs that is shorter than the node has ranks."""
    by_task = ("gpus-per-task", "gpu-bind", "ntasks-per-gpu")
    if context.script.option(*by_task):
        return
    seen: Set[int] = set()
    for start in context.script.starts:
        nodes, tasks = context.script.extent(start).nodes or 1, context.script.extent(start).tasks_per_node
        ranks = (started_per_node(start.launcher, nodes) if start.launcher else tasks) or 0
        if start.flags.keys() & set(by_task) or (start.wrapped and not start.launcher):
            continue
        for name in _DEVICES:
            value = start.value(name)
            count = value.count(",") + 1
            line = start.inherited[name].line if name in start.inherited else start.line
            if re.fullmatch(r"\d+(?:,\d+)*", value) and count < ranks and line not in seen:
                seen.add(line)
                words = {"name": name, "value": value, "ranks": str(ranks), "gpus": str(count), "s": "s" * (count > 1)}
                # Slurm may set it anew for each step
                yield Hit(line, words, severity="warning" if start.step and name in start.inherited else "error")


def _asked(start: Start) -> Tuple[str, Optional[int]]:
    """Return what a launcher is told about the number of nodes: as written, and the number if it says one."""
    launcher = start.launcher
    if launcher is None or launcher.kind not in NODE_BY_NODE or "--standalone" in launcher.flags:
        return "", 1
    given = launcher.said("--nnodes", "--num-machines") or start.value("PET_NNODES")
    return given, (int(given) if given.isdecimal() else None) if given else 1


def nodes_apart(context: Context) -> Iterator[Hit]:
    """Find launchers, one on each of several nodes, that are not told about the others."""
    for start in context.script.starts if context.batch else ():
        launcher, (nodes, tasks) = start.launcher, context.script.extent(start)
        if launcher is None or launcher.kind not in NODE_BY_NODE or not nodes or nodes < 2 or _het(start, context):
            continue
        given, asked = _asked(start)
        words = launcher.script
        told = "--config-file" in launcher.flags or not words or words[0].startswith("$")  # perhaps by what is not seen
        by_task = any(PER_TASK & names_read(word) for word in words)  # a training of its own for each task, on purpose
        if asked == 1 and tasks and tasks >= nodes and not told and not by_task:
            option = "--num_machines" if launcher.kind == "accelerate" else "--nnodes"
            shown = (
                f"{option}={given}" if given else "--standalone" if "--standalone" in launcher.flags else f"no {option}"
            )
            severity = "warning" if launcher.kind == "accelerate" and not given else ""  # its own file may tell it
            yield Hit(start.line, {"nodes": str(nodes), "name": launcher.words, "shown": shown}, severity=severity)


def nodes_unlike_job(context: Context) -> Iterator[Hit]:
    job = context.script.job_nodes
    for start in context.script.starts if job else ():
        given, asked = _asked(start)
        if given and asked and asked not in (1, job, context.script.extent(start).nodes) and not _het(start, context):
            words = {
                "asked": str(asked),
                "nodes": str(job),
                "s": "s" * (job != 1),
                "name": start.launcher.words if start.launcher else "",
            }
            what = (
                "wait for nodes that never come"
                if asked > (job or 0)
                else "refuse the nodes beyond them, or start without them"
            )
            yield Hit(start.line, {**words, "what": what})


def _het(start: Start, context: Context) -> bool:
    """Return true for a job of several components, each with nodes of its own."""
    return "het-group" in start.flags or bool(re.search(r"(?m)^#SBATCH\s+(?:het|pack)job", context.script.text))


_READS_RANK = regex(
    r"(?:environ(?:\.get)?|getenv)[\[(]\s*['\"](?:RANK|LOCAL_RANK|WORLD_SIZE|SLURM_(?:PROC|LOCAL)ID)\b|init_process_group\("
)
_STARTS_ITS_OWN = regex(r"\bspawn\b|multiprocessing|Process\(|\bPopen\b|\bsubprocess\b|\bray\b|submitit|SlurmCluster")
# Whatever may start tasks elsewhere, also in a part of the script that is not followed.
_REACHES_OUT = regex(r"\b(?:srun|mpirun|mpiexec|ssh|pdsh|clush|parallel|ray|flux|jsrun|aprun|prun|drumbeat\S*)\b")


def tasks_without_step(context: Context) -> Iterator[Hit]:
    """Find a training that the batch script starts itself, although the job asks for several tasks."""
    step = Start(0, "srun", {}, (), None, {}, {}, frozenset())
    nodes, tasks = context.script.extent(step)
    if not context.script.directives or not tasks or tasks < 2 or not context.script.gpus:
        return
    written = "\n".join(line for _, line in context.script.code_lines())
    if _REACHES_OUT.search(written) or any(start.step or start.launcher for start in context.script.starts):
        return
    for start in context.script.starts:
        name = start.program
        if not (name and start.python and not start.background) or "-m" in start.words[:-1]:
            continue
        text = context.read(name)
        numbered = any(PER_TASK & names_read(start.value(each)) for each in _RANK)
        if numbered or text and _READS_RANK.search(text) and not _STARTS_ITS_OWN.search(text):
            yield Hit(start.line, {"tasks": str(tasks), "name": name, "unread": ""})
        elif not text and "train" in name and (nodes or 1) * context.script.gpus == tasks and tasks > 1:
            words = {"tasks": str(tasks), "name": name, "unread": " (the program was not read)"}
            yield Hit(start.line, words, severity="warning")


def cores_of_a_task(context: Context) -> Iterator[Hit]:
    """Find tasks with fewer cores than their threads, than the job asks for, or than a list of masks allows."""
    asked = context.script.option("cpus-per-task")
    whole = number(asked.value) if asked else None
    for start in context.script.starts:
        if start.step != "srun" or not (start.launcher or start.python):
            continue
        own, tasks = number(start.flags.get("cpus-per-task", "")), context.script.extent(start).tasks_per_node
        if own == 1 and whole and whole > 1:
            yield Hit(
                start.line, {"what": f"each task of this step gets 1 core, and the job asks for {whole} per task"}
            )
        cores = own or whole
        threads = number(start.value("OMP_NUM_THREADS"))
        if cores and threads and threads > cores > 1 and not start.wrapped:
            line = start.inherited["OMP_NUM_THREADS"].line if "OMP_NUM_THREADS" in start.inherited else start.line
            yield Hit(line, {"what": f"OMP_NUM_THREADS={threads}, and a task has {cores} cores"})
        kind, _, masks = start.flags.get("cpu-bind", "").rpartition(":")
        count = masks.count(",") + 1
        if kind.endswith(("mask_cpu", "map_cpu")) and "$" not in masks and tasks and 1 < count < tasks:
            yield Hit(
                start.line, {"what": f"{count} entries of --cpu-bind for {tasks} tasks per node: they share cores"}
            )


CHECKS = by_name(
    cores_of_a_task, local_rank_missing, rank_as_local_rank, master_is_literal, tasks_without_step, nodes_apart,
    nodes_unlike_job, rank_in_batch_scope, devices_hidden,
)  # fmt: skip
