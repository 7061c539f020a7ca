"""Checks of the launch line: rendezvous, ports, ranks, and what reaches the container."""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import re
from typing import Dict, Iterator, List, Mapping, Optional, Set, Tuple

from drumbeat.base.redact import in_text, is_secret
from drumbeat.base.regex import regex
from drumbeat.commands.launch import NODE_BY_NODE, Found, started_per_node
from drumbeat.commands.script import SUBSTITUTION, last_number, number
from drumbeat.commands.starts import Start
from drumbeat.lint.context import Context, Edit, Hit, by_name, rules
from drumbeat.lint.python_program import in_one_process
from drumbeat.plan.binding import ranks_without_gpu
from drumbeat.plan.variables import DEAD, DEBUGGING, FAMILIES, SPELT

_LOCAL = regex(r"(?:localhost|127\.\d+\.\d+\.\d+|::1)(?::|$)")
_PORT_FLAG = regex(
    r"--(?:rdzv[-_]endpoint|master[-_]port|main[-_]process[-_]port)[= ][ \t]*(?:[^\s:]*:)?(\d{2,5})(?!\S)"
)


def _torchruns(context: Context) -> Iterator[Tuple[Start, Found]]:
    for start in context.script.started_anywhere:
        if start.launcher and start.started_by("torchrun", "launch"):
            yield start, start.launcher


def port_fixed(context: Context) -> Iterator[Hit]:
    if not context.slurm:
        return
    for each in context.script.assignments:
        whole = re.fullmatch(r"(?:\S*:)?(\d{2,5})", each.text)
        named = each.name.endswith(("MASTER_PORT", "RDZV_ENDPOINT")) and whole
        found = named or _PORT_FLAG.search(each.text)  # a launch line may be kept in a variable
        if found:
            yield Hit(each.line, {"port": found.group(1)})
    for command in context.script.commands:
        for word, after in zip(command.words, [*command.words[1:], None]):
            found = _PORT_FLAG.match(f"{word.text} {after.text}" if after and "=" not in word.text else word.text)
            if found and command.name not in ("export", "echo", "printf", "declare"):
                yield Hit(word.line, {"port": found.group(1)})


def master_is_localhost(context: Context) -> Iterator[Hit]:
    nodes = context.script.nodes
    if not nodes or nodes < 2:
        return
    for each in context.script.assignments:
        if each.name == "MASTER_ADDR" and _LOCAL.match(each.text):
            yield Hit(each.line, {"shown": each.text, "nodes": str(nodes)})
    for start, found in _torchruns(context):
        for name in ("--master-addr", "--rdzv-endpoint"):
            if _LOCAL.match(found.said(name)):
                yield Hit(start.line, {"shown": found.said(name), "nodes": str(nodes)})


# GPUs are shown to a container, or are AMD's.
_SHOWN = regex(r"--nv\b|--nvccli\b|(?:APPTAINER|SINGULARITY)_NV|libcuda|(?i:rocm|\bhip|\bamd\b|\bmi[23]\d\d|\blumi\b)")
_SIF = ("apptainer", "singularity")
_SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def socket_interface(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments if (context.script.nodes or 1) > 1 else ():
        if each.name in _SOCKETS and re.fullmatch(context.settings["interfaces"], each.text):
            yield Hit(each.line, {"name": each.name, "value": each.text, "nodes": str(context.script.nodes)})


def localhost_after_failure(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        if command.follows == "||" and re.fullmatch(r"echo (?:localhost|127\.0\.0\.1)", command.text):
            yield Hit(command.line)


def rendezvous_mixed(context: Context) -> Iterator[Hit]:
    for start, found in _torchruns(context):
        dynamic = "--standalone" in found.flags or found.said("--rdzv-backend") not in ("static", "")
        if dynamic and found.flags.keys() & {"--master-addr", "--master-port"}:
            name = "--standalone" if "--standalone" in found.flags else f"--rdzv-backend={found.said('--rdzv-backend')}"
            yield Hit(start.line, {"name": name})


def rendezvous_missing(context: Context) -> Iterator[Hit]:
    elsewhere = any(each.name.startswith("PET_") for each in context.script.assignments)
    for start, found in _torchruns(context):
        if (number(found.said("--nnodes")) or 1) < 2:
            continue
        if "--standalone" in found.flags:
            yield Hit(start.line, {"shown": "--standalone"})
        elif not elsewhere and not found.flags.keys() & {"--rdzv-endpoint", "--master-addr"}:
            yield Hit(start.line, {"shown": "neither --master-addr nor --rdzv-endpoint"})


def container_variable_twice(context: Context) -> Iterator[Hit]:
    carried: Set[str] = {
        each.name for each in context.script.assignments if each.spelt != each.name and each.how == "export"
    }
    twice = [each for each in context.script.assignments if each.how == "option" and each.name in carried]
    if twice:
        names = sorted({each.name for each in twice})
        yield Hit(twice[0].line, {"names": ", ".join(names[:3]) + (" …" if len(names) > 3 else "")})


def fabric_unset(context: Context) -> Iterator[Hit]:
    """Find multi-node jobs on a fabric that NCCL uses only if configured; it silently falls back to TCP."""
    if "drumbeat.pyz" in context.script.text:
        return  # the agents decide it on the nodes
    if (
        not context.slurm
        or (context.script.nodes or 1) < 2
        or not re.search(context.settings["signs"], context.script.text)
    ):
        return
    named = {each.name for each in context.script.assignments}
    words = {word for command in context.script.commands for word in command.names}
    if any(word.endswith(".sh") and not context.read(word) for word in words):
        return  # it may tell NCCL, and cannot be read here
    if not named & {"NCCL_SOCKET_IFNAME", "NCCL_NET", "FI_PROVIDER"} and not re.search(
        r"(?:module load|ml) [^\n]*(?i:nccl|rccl|ofi)", context.script.text
    ):
        steps = (each for each in context.script.commands if "srun" in each.names and SUBSTITUTION not in each.within)
        yield from (Hit(each.line) for each in itertools.islice(steps, 1))


def container_without_gpus(context: Context) -> Iterator[Hit]:
    """Find programs in a container of apptainer that sees no GPU of the job, in a script that shows its GPUs to no container.
    ROCm's libraries are in the image and its devices are there anyway; NVIDIA's driver must come from the node."""
    script = context.script
    for start in script.started_anywhere if script.gpus and not _SHOWN.search(script.text) else ():
        words = [*start.before, *start.words]
        at = next((place for place, word in enumerate(words) if os.path.basename(word) in _SIF), len(words))
        options, known = words[at + 1 :], start.launcher or start.program
        if known and {"exec", "run"} & set(options[:4]) and "$" not in " ".join(options[: len(start.before) - at - 1]):
            yield Hit(start.line, {"name": os.path.basename(words[at]), "gpus": str(script.gpus)})
            return


def launcher_per_task(context: Context) -> Iterator[Hit]:
    """Find a launcher that starts all ranks of a node but is itself started once per rank."""
    for start in context.script.started_anywhere:
        tasks = context.script.likely(start).tasks_per_node or 1
        if tasks > 1 and start.step == "srun" and start.launcher and start.started_by(*NODE_BY_NODE):
            each = number(start.launcher.said("--nproc-per-node"))
            ranks = str(tasks * each) if each else f"{tasks} times as many"
            if each != 1:
                yield Hit(start.line, {"tasks": str(tasks), "ranks": ranks, "name": start.launcher.words})


def deepspeed_on_every_node(context: Context) -> Iterator[Hit]:
    """Find the launcher that goes to all nodes by itself, started by srun on each of them."""
    for start in context.script.started_anywhere:
        if start.launcher and start.step == "srun" and start.started_by("deepspeed"):
            flags, likely = start.launcher.flags.keys(), context.script.likely(start)
            nodes = start.launcher.nodes or context.script.nodes or 1
            tasks = likely.tasks or 2 * (likely.nodes or 1)
            alone = "--no-ssh" in flags or not flags & {"--hostfile", "--num-nodes"}  # it goes to no other node
            if nodes > 1 and tasks > 1 and not alone:
                yield Hit(start.line, {"tasks": str(tasks), "nodes": str(nodes)})


def more_tasks_than_gpus(context: Context) -> Iterator[Hit]:
    """Find more ranks on a node than the job has GPUs there: tasks of a Python program, or those of a launcher."""
    script, gpus = context.script, context.script.gpus
    for start in script.started_anywhere if gpus else ():
        ranks: Optional[int] = None
        if start.launcher:
            cpu = "--cpu" in start.launcher.flags
            what, ranks = "ranks", None if cpu else started_per_node(start.launcher, script.nodes or 1)
        elif start.step and start.program and "ntasks-per-gpu" not in start.flags:
            what, ranks = "tasks", script.likely(start).tasks_per_node
        if ranks and ranks_without_gpu(ranks, gpus):
            words = {"ranks": str(ranks), "what": what, "gpus": str(gpus)}
            yield Hit(start.line, words, severity="error" if start.launcher else "")


_READS_RANK = regex(r"(?:environ(?:\.get)?|getenv)[\[(]\s*['\"](?:RANK|LOCAL_RANK|WORLD_SIZE)\b|init_process_group\(")
# What gives the ranks their numbers otherwise: by the scheduler, by MPI, or in words of the program itself.
_NUMBERS_ITSELF = regex(
    r"SLURM_|PMI|MPI|mpi4py|submitit|init_method|[(,]\s*rank\s*=|store\s*=|environ\[['\"]RANK['\"]\]\s*=[^=]"
    r"|(?i:lightning|deepspeed|accelerate|jax|drumbeat|horovod|ignite)"
)


_JOINS = regex(r"\bdrumbeat(?:\.pyz)? run\b")  # which sets the ranks' variables


def ranks_unset(context: Context) -> Iterator[Hit]:
    """Find a Python program started as several tasks without rank variables; a note if the program cannot be read here."""
    given = {each.name for each in context.script.assignments}
    joined = _JOINS.search(context.script.text)
    for start in context.script.started_anywhere if context.batch and "RANK" not in given and not joined else ():
        program, likely = start.program, context.script.likely(start)
        tasks = likely.tasks or 2 * (likely.nodes or 1)
        if tasks < 2 or not program or start.step != "srun" or start.launcher or start.wrapped or "-m" in start.words:
            continue
        text = context.read(program)
        own = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.M)
        texts = [text, *(context.read(name.replace(".", "/") + ".py") for name in own)]
        words_of = {"name": program, "tasks": str(tasks)}
        if _READS_RANK.search(text) and not any(map(_NUMBERS_ITSELF.search, texts)):
            yield Hit(start.line, {**words_of, "what": "it reads RANK and WORLD_SIZE, and nothing sets them"})
        elif not text and context.script.gpus and "WORLD_SIZE" not in given and "train" in program:
            what = "nothing here sets RANK (the program was not read)"
            yield Hit(start.line, {**words_of, "what": what}, severity="info")


def _told_ranks(context: Context) -> Set[Tuple[int, int]]:
    """Return the lines of launchers that are told a number of ranks, with that number for one node."""
    flags, nodes = ("--nproc-per-node", "--num-processes", "--num-gpus"), context.script.nodes or 1
    found = ((each.line, each.launcher) for each in context.script.started_anywhere)
    told = ((line, started_per_node(each, nodes)) for line, each in found if each and each.said(*flags))
    return {(line, ranks) for line, ranks in told if ranks}


def gpus_unused(context: Context) -> Iterator[Hit]:
    """Find a script whose only launcher starts fewer ranks than a node has GPUs."""
    told = _told_ranks(context)
    for line, ranks in told if len(told) == 1 else ():
        if ranks < context.script.gpus:
            yield Hit(line, {"gpus": str(context.script.gpus), "ranks": str(ranks)})


def wait_returns_zero(context: Context) -> Iterator[Hit]:
    """Find background trainings followed by a bare `wait`, which returns 0 whatever they return."""
    starts = [each for each in context.script.commands if not each.within and _STARTS.search(each.text)]
    waits = [each for each in context.script.commands if each.name == "wait"]
    if context.batch and starts and all(each.background for each in starts):
        for each in waits[-1:] if all(len(wait.words) == 1 for wait in waits) else ():
            yield Hit(each.line, {"name": starts[0].name})


_STARTS = regex(
    r"^(?:\S*/)?(?:srun|torchrun|mpirun|mpiexec|accelerate launch|deepspeed|python[\d.]*)\s.*(?:\.py\b|\s-m\s|\.sh\b)"
)


def not_distributed(context: Context) -> Iterator[Hit]:
    """Find a program beside the script that trains in one process but is started with several GPUs."""
    asked = [context.script.option(*names) for names in (("gpus-per-node", "gres", "gpus"), ("ntasks-per-node",))]
    counts = [last_number(each.value) or 1 for each in asked if each]
    gpus = max([*counts, *(ranks for _, ranks in _told_ranks(context))], default=1)
    for command in context.script.commands:
        for word in command.words if gpus > 1 else ():
            program = context.read(word.text) if word.text.endswith(".py") else ""
            if in_one_process(program):
                yield Hit(word.line, {"name": word.text, "gpus": str(gpus)})


# Checks of variables against what `plan` knows of them: dead, misspelt, left on, contradicting, secret.


_NEAR = 0.92  # as in plan.question: from here an unknown name counts as a slip of the pen
_NO_SECRET = regex(r"(?i)disabled|your|x{4}|none|null|false|dummy|example|change|todo|\.\.\.|…")
MOST_NAMES = 300  # unknown names that are compared with all known ones
MOST_SOCKETS = 64  # NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD


def dead(context: Context) -> Iterator[Hit]:
    renamed = set()
    for each in context.script.assignments:
        entry = DEAD.get(each.name)
        if entry is None or set(entry.when) == {"vendor"}:  # the script does not say whose GPUs
            continue
        version = entry.when.get("rocm", "")
        words = {
            "name": each.name,
            "why": entry.why + (f" (ROCm {version})" if version else ""),
            "fix": f"use {entry.use}" if entry.use else "remove it",
        }
        edits: Tuple[Edit, ...] = ()
        if each.name in context.settings["rename"] and each.name not in renamed:
            renamed.add(each.name)
            edits = _renamed(context, each.name, entry.use)
        yield Hit(each.line, words, edits, "info" if version else "")


@functools.lru_cache(maxsize=1)
def _values() -> Mapping[str, str]:
    """Return patterns of all values that a variable may have."""
    return next(rule.settings["values"] for rule in rules() if rule.check == "value-unknown")


def _fits(name: str, value: str) -> bool:
    return "$" in value or not value or re.fullmatch(_values().get(name, "(?s:.*)"), value, re.I) is not None


def value_unknown(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        if not each.value.active and not _fits(each.name, each.text):
            yield Hit(each.line, {"name": each.name, "value": each.text})


def misspelt(context: Context) -> Iterator[Hit]:
    near: Dict[str, str] = {}
    for each in context.script.assignments:
        if not each.name.startswith(FAMILIES) or each.name in SPELT or each.name in DEAD or each.name in DEBUGGING:
            continue
        if each.name not in near and len(near) < MOST_NAMES:
            likely = difflib.get_close_matches(each.name[:60], SPELT, 1, _NEAR) or _with_more_parts(each.name)
            near[each.name] = likely[0] if likely and _fits(likely[0], each.text) else ""
        if near.get(each.name):
            yield Hit(each.line, {"name": each.name, "near": near[each.name]})


def _with_more_parts(name: str) -> List[str]:
    """Return the known name with exactly one more part than this one: NCCL_SOCKET_IFNAME for NCCL_IFNAME."""
    parts = name.split("_")
    longer = [known for known in SPELT if known.startswith(parts[0] + "_") and known.endswith("_" + parts[-1])]
    longer = [
        known for known in longer if len(known.split("_")) == len(parts) + 1 and set(parts) <= set(known.split("_"))
    ]
    return longer if len(longer) == 1 and len(parts) > 1 else []


def _renamed(context: Context, name: str, new: str) -> Tuple[Edit, ...]:
    """Rename everywhere in the script, since a variable is often used again below."""
    return tuple(
        Edit(line, found.start(), name, new)
        for line, text in context.script.code_lines()
        for found in re.finditer(rf"(?<![A-Za-z0-9]){re.escape(name)}(?!\w)", text)
    )


def left_on(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        entry = DEBUGGING.get(each.name)
        if entry and each.text not in entry.harmless and not each.value.active and _fits(each.name, each.text):
            severity = "warning" if each.text.upper() == "TRACE" else entry.severity
            yield Hit(each.line, {"name": each.name, "value": each.text, "cost": entry.cost}, (), severity)


def too_many_sockets(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments}
    threads, sockets = values.get("NCCL_SOCKET_NTHREADS"), values.get("NCCL_NSOCKS_PERTHREAD")
    if not threads or not sockets:
        return
    numbers = [number(threads.text), number(sockets.text)]
    product = numbers[0] * numbers[1] if numbers[0] and numbers[1] else None
    if product and product > MOST_SOCKETS:
        yield Hit(sockets.line, {"shown": f"{numbers[0]} x {numbers[1]} = {product}"})


def sockets_without_tcp(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments}
    if "NCCL_IB_HCA" in values or "NCCL_IB_GID_INDEX" in values:
        for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
            if name in values:
                yield Hit(values[name].line, {"name": name})
                return


def rdma_off(context: Context) -> Iterator[Hit]:
    other = any(each.name in ("FI_PROVIDER", "NCCL_NET", "NCCL_NET_PLUGIN") for each in context.script.assignments)
    for each in context.script.assignments if not other else ():  # another network than InfiniBand is named
        if each.name == "NCCL_IB_DISABLE" and each.text == "1" and (context.script.nodes or 1) > 1:
            yield Hit(each.line, {"nodes": str(context.script.nodes)})


_MASKS = regex(r"(?:mask_cpu:|map_cpu:)?(?:0x[0-9a-fA-F]+,)+0x[0-9a-fA-F]+|(?:mask|map)_cpu:\S+")


def masks_unused(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        used = re.search(rf"\$\{{?{each.name}\b", context.script.text)
        if each.how == "plain" and not used and _MASKS.fullmatch(each.text.strip()):
            yield Hit(each.line, {"name": each.name})


def visibility_twice(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments if each.how in ("export", "option")}
    for first, second, severity in (
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "warning"),
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "info"),
    ):
        if first in values and second in values:
            yield Hit(values[second].line, {"first": first, "second": second}, (), severity)


def secret(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        literal = re.fullmatch(r"[^\s$<>{}()*]{8,}", each.text) and not _NO_SECRET.search(each.text)
        if literal and is_secret(each.name, each.text) and not each.text.startswith("/"):
            yield Hit(each.line, {"name": each.name})
    for command in context.script.commands:
        found = None if command.assignments else in_text(command.text)
        if found and not _NO_SECRET.search(command.text):
            yield Hit(command.line, {"name": found})


CHECKS = by_name(
    launcher_per_task, deepspeed_on_every_node, more_tasks_than_gpus, not_distributed, gpus_unused, wait_returns_zero,
    port_fixed, master_is_localhost, localhost_after_failure, socket_interface, ranks_unset, rendezvous_mixed,
    rendezvous_missing, container_variable_twice, container_without_gpus,
    fabric_unset, value_unknown, dead, misspelt, left_on, too_many_sockets,
    rdma_off, sockets_without_tcp, visibility_twice, masks_unused, secret,
)  # fmt: skip
