"""Checks of the launch line: rendezvous, ports, ranks, and what reaches the container."""

from __future__ import annotations

import difflib
import functools
import re
from typing import Dict, Iterator, List, Mapping, Optional, Set, Tuple

from drumbeat.base.redact import in_text, is_secret
from drumbeat.base.regex import regex
from drumbeat.commands.launch import started_per_node
from drumbeat.commands.script import Assignment, Command, options
from drumbeat.lint.context import Context, Edit, Hit, by_name, rules
from drumbeat.lint.python_program import in_one_process
from drumbeat.plan.binding import ranks_without_gpu
from drumbeat.plan.variables import DEAD, DEBUGGING, FAMILIES, SPELT

_LOCAL = regex(r"(?:localhost|127\.\d+\.\d+\.\d+|::1)(?::|$)")
_PORT_FLAG = regex(
    r"--(?:rdzv[-_]endpoint|master[-_]port|main[-_]process[-_]port)[= ][ \t]*(?:[^\s:]*:)?(\d{2,5})(?!\S)"
)
_TORCHRUN = regex(r"\btorchrun\b|\bTORCHRUN\w*\b|-m torch\.distributed\.(?:run|launch)\b")


def _launch_lines(context: Context) -> Iterator[Command]:
    for command in context.script.commands:
        if command.name not in ("export", "echo", "printf", "declare") and _TORCHRUN.search(
            context.script.line_of(command)
        ):
            yield command


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
    nodes = context.nodes
    if not nodes or nodes < 2:
        return
    for each in context.script.assignments:
        if each.name == "MASTER_ADDR" and _LOCAL.match(each.text):
            yield Hit(each.line, {"shown": each.text, "nodes": str(nodes)})
    for command in _launch_lines(context):
        flags = context.flags(command)
        for name in ("master-addr", "rdzv-endpoint"):
            if _LOCAL.match(flags.get(name, "")):
                yield Hit(command.line, {"shown": flags[name], "nodes": str(nodes)})


_SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def socket_on_loopback(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments if (context.nodes or 1) > 1 else ():
        if each.name in _SOCKETS and re.fullmatch(r"=?lo(?:,lo)*", each.text):
            yield Hit(each.line, {"name": each.name, "value": each.text, "nodes": str(context.nodes)})


def localhost_after_failure(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        if command.follows == "||" and re.fullmatch(r"echo (?:localhost|127\.0\.0\.1)", command.text):
            yield Hit(command.line)


def rendezvous_mixed(context: Context) -> Iterator[Hit]:
    for command in _launch_lines(context):
        flags = context.flags(command)
        dynamic = flags.get("rdzv-backend", "static") not in ("static", "") or "standalone" in flags
        if dynamic and ("master-addr" in flags or "master-port" in flags):
            name = "--standalone" if "standalone" in flags else "--rdzv-backend=" + flags["rdzv-backend"]
            yield Hit(command.line, {"name": name})


def rendezvous_missing(context: Context) -> Iterator[Hit]:
    elsewhere = any(each.name.startswith("PET_") for each in context.script.assignments)
    for command in _launch_lines(context):
        flags = context.flags(command)
        nodes = flags.get("nnodes", "1")
        if not re.fullmatch(r"\d{1,6}", nodes) or int(nodes) < 2:
            continue
        if "standalone" in flags:
            yield Hit(command.line, {"shown": "--standalone"})
        elif not elsewhere and not {"rdzv-endpoint", "master-addr"} & set(flags):
            yield Hit(command.line, {"shown": "neither --master-addr nor --rdzv-endpoint"})


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
    if not context.slurm or (context.nodes or 1) < 2 or not re.search(context.settings["signs"], context.script.text):
        return
    named = {each.name for each in context.script.assignments}
    words = {word for command in context.script.commands for word in command.names}
    if any(word.endswith(".sh") and not context.read(word) for word in words):
        return  # it may tell NCCL, and cannot be read here
    if not named & {"NCCL_SOCKET_IFNAME", "NCCL_NET", "FI_PROVIDER"} and not re.search(
        r"(?:module load|ml) [^\n]*(?i:nccl|rccl|ofi)", context.script.text
    ):
        for command in context.script.commands:
            if "srun" in command.names and "substitution" not in command.within:
                yield Hit(command.line)
                return


def launcher_per_task(context: Context) -> Iterator[Hit]:
    """Find a launcher that starts all ranks of a node but is itself started once per rank."""
    said = context.script.option("ntasks-per-node", "tasks-per-node")
    for command in context.script.commands:
        text = context.script.line_of(command)
        if command.name != "srun" or "substitution" in command.within or not _NODE_LAUNCHER.search(text):
            continue
        flags = context.flags(command)
        asked = flags.get("ntasks-per-node") or flags.get("tasks-per-node") or (said.value if said else "")
        total, nodes = flags.get("ntasks", ""), flags.get("nodes", "") or str(context.nodes or "")
        if total.isdecimal() and nodes.isdecimal() and int(nodes):
            asked = str(max(1, int(total) // int(nodes)))
        started = re.search(r"--nproc[-_]per[-_]node[= ](\d{1,4})", text)
        if asked.isdecimal() and int(asked) > 1 and (started is None or int(started.group(1)) > 1):
            ranks = f"{int(asked) * int(started.group(1))}" if started else f"{asked} times as many"
            name = "accelerate launch" if "accelerate launch" in text else "torchrun"
            yield Hit(command.line, {"tasks": asked, "ranks": ranks, "name": name})


def deepspeed_on_every_node(context: Context) -> Iterator[Hit]:
    """Find the launcher that goes to all nodes by itself, started by srun on each of them."""
    for command in context.script.commands:
        if command.name != "srun" or "deepspeed" not in command.names:
            continue
        flags = context.flags(command)
        many = _number(flags.get("num-nodes", "")) or context.nodes or 1
        tasks = _number(flags.get("ntasks", "")) or context.tasks_on_a_node(command) * (context.nodes or 1)
        alone = "no-ssh" in flags or not flags.keys() & {"hostfile", "num-nodes"}  # it goes to no other node
        if many > 1 and tasks > 1 and not alone:
            yield Hit(command.line, {"tasks": str(tasks), "nodes": str(many)})


def more_tasks_than_gpus(context: Context) -> Iterator[Hit]:
    """Find more ranks on a node than the job has GPUs there: tasks of a Python program, or those of a launcher."""
    gpus, nodes = context.gpus, context.nodes or 1
    for command in context.script.commands:
        text = context.script.line_of(command)
        starts = gpus and re.search(r"(?:^|\s)(?:srun|mpirun|mpiexec)\s.*\bpython[\d.]*\s.*\.py\b", text)
        if starts and not _NODE_LAUNCHER.search(text) and "ntasks-per-gpu" not in text:
            tasks = context.tasks_on_a_node(command)
            if ranks_without_gpu(tasks, gpus):
                yield Hit(command.line, {"ranks": str(tasks), "what": "tasks", "gpus": str(gpus)})
    for start in context.starts if gpus else ():
        line, found = start.line, start.launcher
        ranks = (started_per_node(found, nodes) or 0) if found else 0
        if found and ranks_without_gpu(ranks, gpus) and "--cpu" not in found.flags:
            yield Hit(line, {"ranks": str(ranks), "what": "ranks", "gpus": str(gpus)}, severity="error")


_READS_RANK = regex(r"(?:environ(?:\.get)?|getenv)[\[(]\s*['\"](?:RANK|LOCAL_RANK|WORLD_SIZE)\b|init_process_group\(")
# What gives the ranks their numbers otherwise: by the scheduler, by MPI, or in words of the program itself.
_NUMBERS_ITSELF = regex(
    r"SLURM_|PMI|MPI|mpi4py|submitit|init_method|[(,]\s*rank\s*=|store\s*=|environ\[['\"]RANK['\"]\]\s*=[^=]"
    r"|(?i:lightning|deepspeed|accelerate|jax|drumbeat|horovod|ignite)"
)


def ranks_unset(context: Context) -> Iterator[Hit]:
    """Find a Python program started as several tasks without rank variables; a note if the program cannot be read here."""
    given = {each.name for each in context.script.assignments}
    for command in context.script.commands:
        words = command.names
        place = next((at for at, word in enumerate(words) if re.fullmatch(r"python[\d.]*", word)), 0)
        script = next((word.text for word in command.words[place + 1 :] if not word.text.startswith("-")), "")
        if command.name != "srun" or not place or not script.endswith(".py") or "-m" in words[place:]:
            continue
        flags = dict(options(words[:place]))
        nodes = _number(flags.get("nodes", "")) or context.nodes or 1
        tasks = _number(flags.get("ntasks", "")) or context.tasks_on_a_node(command) * nodes
        if tasks < 2 or "RANK" in given or "substitution" in command.within or not context.batch:
            continue
        text = context.read(script)
        own = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.M)
        texts = [text, *(context.read(name.replace(".", "/") + ".py") for name in own)]
        words_of = {"name": script, "tasks": str(tasks)}
        if _READS_RANK.search(text) and not any(map(_NUMBERS_ITSELF.search, texts)):
            yield Hit(command.line, {**words_of, "what": "it reads RANK and WORLD_SIZE, and nothing sets them"})
        elif not text and context.gpus and "WORLD_SIZE" not in given and "train" in script:
            what = "nothing here sets RANK (the program was not read)"
            yield Hit(command.line, {**words_of, "what": what}, severity="info")


_RANKS = regex(r"--n(?:proc|um)[-_](?:per[-_]node|processes|gpus)[= ](\d{1,4})")


def gpus_unused(context: Context) -> Iterator[Hit]:
    """Find a script whose only launcher starts fewer ranks than a node has GPUs."""
    asked = context.script.option("gpus-per-node", "gres", *(("gpus",) if context.nodes in (None, 1) else ()))
    count = re.search(r"(?:^|:)(\d{1,4})$", asked.value) if asked else None
    found = [(command, _RANKS.search(context.script.line_of(command))) for command in context.script.commands]
    nodes = context.nodes or 1
    launches = [
        (command, int(ranks[1]) // (nodes if "processes" in ranks[0] else 1)) for command, ranks in found if ranks
    ]
    if count and len(launches) == 1 and launches[0][1] < int(count[1]):
        command, ranks = launches[0]
        yield Hit(command.line, {"gpus": count[1], "ranks": str(ranks)})


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
    counts = [re.search(r"(?:^|:)(\d{1,4})$", each.value) for each in asked if each]
    for command in context.script.commands:
        found = _RANKS.search(context.script.line_of(command))
        gpus = max((int(each[1]) for each in (*counts, found) if each), default=1)
        for word in command.words if gpus > 1 else ():
            program = context.read(word.text) if word.text.endswith(".py") else ""
            if in_one_process(program):
                yield Hit(word.line, {"name": word.text, "gpus": str(gpus)})


_NODE_LAUNCHER = regex(r"\btorchrun\b|-m torch\.distributed\.(?:run|launch)\b|\baccelerate launch\b")

# Checks of variables against what `plan` knows of them: dead, misspelt, left on, contradicting, secret.


_NEAR = 0.92  # as in plan.question: from here an unknown name counts as a slip of the pen
_NO_SECRET = regex(r"(?i)disabled|your|x{4}|none|null|false|dummy|example|change|todo|\.\.\.|…")
MOST_NAMES = 300  # unknown names that are compared with all known ones
MOST_SOCKETS = 64  # NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD


def _first(context: Context) -> List[Assignment]:
    """Return each variable's first assignment with a given value."""
    seen = set()
    found = []
    for each in context.script.assignments:
        if (each.name, each.line) not in seen:
            seen.add((each.name, each.line))
            found.append(each)
    return found


def dead(context: Context) -> Iterator[Hit]:
    renamed = set()
    for each in _first(context):
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
    for each in _first(context):
        if not each.value.active and not _fits(each.name, each.text):
            yield Hit(each.line, {"name": each.name, "value": each.text})


def misspelt(context: Context) -> Iterator[Hit]:
    near: Dict[str, str] = {}
    for each in _first(context):
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
    for each in _first(context):
        entry = DEBUGGING.get(each.name)
        if entry and each.text not in entry.harmless and not each.value.active and _fits(each.name, each.text):
            severity = "warning" if each.text.upper() == "TRACE" else entry.severity
            yield Hit(each.line, {"name": each.name, "value": each.text, "cost": entry.cost}, (), severity)


def too_many_sockets(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments}
    threads, sockets = values.get("NCCL_SOCKET_NTHREADS"), values.get("NCCL_NSOCKS_PERTHREAD")
    if not threads or not sockets:
        return
    numbers = [_number(threads.text), _number(sockets.text)]
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
        if each.name == "NCCL_IB_DISABLE" and each.text == "1" and (context.nodes or 1) > 1:
            yield Hit(each.line, {"nodes": str(context.nodes)})


def _number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


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
    port_fixed, master_is_localhost, localhost_after_failure, socket_on_loopback, ranks_unset, rendezvous_mixed,
    rendezvous_missing, container_variable_twice, fabric_unset, value_unknown, dead, misspelt, left_on, too_many_sockets,
    rdma_off, sockets_without_tcp, visibility_twice, masks_unused, secret,
)  # fmt: skip
