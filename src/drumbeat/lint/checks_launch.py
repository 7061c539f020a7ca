"""Checks of the launch line: rendezvous, ports, ranks, and what reaches the container."""

from __future__ import annotations

import re
from typing import Dict, Iterator, Set

from drumbeat.commands.script import Command, options
from drumbeat.lint.context import Context, Hit

_LOCAL = re.compile(r"(?:localhost|127\.\d+\.\d+\.\d+|::1)(?::|$)")
_PORT_FLAG = re.compile(
    r"--(?:rdzv[-_]endpoint|master[-_]port|main[-_]process[-_]port)[= ][ \t]*(?:[^\s:]*:)?(\d{2,5})(?!\S)"
)
_TORCHRUN = re.compile(r"\btorchrun\b|\bTORCHRUN\w*\b|-m torch\.distributed\.(?:run|launch)\b")


def _flags(command: Command) -> Dict[str, str]:
    return dict(options(command.names))


def _launch_lines(context: Context) -> Iterator[Command]:
    for command in context.script.commands:
        if command.name not in ("export", "echo", "printf", "declare") and _TORCHRUN.search(command.text):
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
        flags = _flags(command)
        for name in ("master-addr", "rdzv-endpoint"):
            if _LOCAL.match(flags.get(name, "")):
                yield Hit(command.line, {"shown": flags[name], "nodes": str(nodes)})


def localhost_after_failure(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        if command.follows == "||" and re.fullmatch(r"echo (?:localhost|127\.0\.0\.1)", command.text):
            yield Hit(command.line)


def rendezvous_mixed(context: Context) -> Iterator[Hit]:
    for command in _launch_lines(context):
        flags = _flags(command)
        dynamic = flags.get("rdzv-backend", "static") not in ("static", "") or "standalone" in flags
        if dynamic and ("master-addr" in flags or "master-port" in flags):
            name = "--standalone" if "standalone" in flags else "--rdzv-backend=" + flags["rdzv-backend"]
            yield Hit(command.line, {"name": name})


def rendezvous_missing(context: Context) -> Iterator[Hit]:
    elsewhere = any(each.name.startswith("PET_") for each in context.script.assignments)
    for command in _launch_lines(context):
        flags = _flags(command)
        nodes = flags.get("nnodes", "1")
        if not re.fullmatch(r"\d{1,6}", nodes) or int(nodes) < 2:
            continue
        if "standalone" in flags:
            yield Hit(command.line, {"shown": "--standalone"})
        elif not elsewhere and not {"rdzv-endpoint", "master-addr"} & set(flags):
            yield Hit(command.line, {"shown": "neither --master-addr nor --rdzv-endpoint"})


def local_rank_missing(context: Context) -> Iterator[Hit]:
    exported = {each.name: each.line for each in context.script.assignments if each.how == "export"}
    if "RANK" in exported and "WORLD_SIZE" in exported and "LOCAL_RANK" not in exported:
        yield Hit(exported["RANK"])


def container_variable_twice(context: Context) -> Iterator[Hit]:
    carried: Set[str] = {
        each.name for each in context.script.assignments if each.spelt != each.name and each.how == "export"
    }
    twice = [each for each in context.script.assignments if each.how == "option" and each.name in carried]
    if twice:
        names = sorted({each.name for each in twice})
        yield Hit(twice[0].line, {"names": ", ".join(names[:3]) + (" …" if len(names) > 3 else "")})


def fabric_unset(context: Context) -> Iterator[Hit]:
    """Several nodes on a fabric that NCCL only uses when told; silence there means TCP."""
    if "drumbeat.pyz" in context.script.text:
        return  # the agents decide it on the nodes
    if not context.slurm or (context.nodes or 1) < 2 or not re.search(context.settings["signs"], context.script.text):
        return
    named = {each.name for each in context.script.assignments}
    if not named & {"NCCL_SOCKET_IFNAME", "NCCL_NET", "FI_PROVIDER"} and not re.search(
        r"(?:module load|ml) [^\n]*(?i:nccl|rccl|ofi)", context.script.text
    ):
        for command in context.script.commands:
            if "srun" in command.names and "substitution" not in command.within:
                yield Hit(command.line)
                return


def launcher_per_task(context: Context) -> Iterator[Hit]:
    """A launcher that starts all ranks of a node, itself started once per rank."""
    said = context.script.option("ntasks-per-node", "tasks-per-node")
    for command in context.script.commands:
        if command.name != "srun" or "substitution" in command.within or not _NODE_LAUNCHER.search(command.text):
            continue
        flags = dict(options(command.names))
        asked = flags.get("ntasks-per-node") or flags.get("tasks-per-node") or (said.value if said else "")
        total, nodes = flags.get("ntasks", ""), flags.get("nodes", "") or str(context.nodes or "")
        if total.isdecimal() and nodes.isdecimal() and int(nodes):
            asked = str(max(1, int(total) // int(nodes)))
        started = re.search(r"--nproc[-_]per[-_]node[= ](\d{1,4})", command.text)
        if asked.isdecimal() and int(asked) > 1 and (started is None or int(started.group(1)) > 1):
            ranks = f"{int(asked) * int(started.group(1))}" if started else f"{asked} times as many"
            yield Hit(command.line, {"tasks": asked, "ranks": ranks})


_NODE_LAUNCHER = re.compile(r"\btorchrun\b|-m torch\.distributed\.(?:run|launch)\b|\baccelerate launch\b")

CHECKS = {
    "launcher-per-task": launcher_per_task,
    "port-fixed": port_fixed,
    "master-is-localhost": master_is_localhost,
    "localhost-after-failure": localhost_after_failure,
    "rendezvous-mixed": rendezvous_mixed,
    "rendezvous-missing": rendezvous_missing,
    "local-rank-missing": local_rank_missing,
    "container-variable-twice": container_variable_twice,
    "fabric-unset": fabric_unset,
}
