"""Turn an order into the argv of each process of a node. Pure: all input is passed in."""

from __future__ import annotations

import base64
import json
import os.path
from dataclasses import replace
from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order, Wrap
from drumbeat.base.problem import Problem
from drumbeat.commands.launch import Found, find_launcher, refusal, starts_its_own_ranks
from drumbeat.commands.program import Script
from drumbeat.machine.model import Peers

# The command line of a launcher that drumbeat starts in place of the user's own, once per node. If the launcher allows it, a
# driver around it reports how each rank ended, and a shim before each rank gives the rank its own logs and cores. Nodes and
# rendezvous come from the muster; all other options of the user are kept.


# Filled in by the shim, the only one to know it under a launcher.
LOCAL_RANK_LATER = "{local_rank}"

# kinds whose ranks get logs and cores of their own
WITH_DRIVER = ("torchrun", "launch", "accelerate", "deepspeed", "fabric")


@dataclass(frozen=True)
class Tools:
    """Tools that the agent provides to start ranks under another launcher."""

    shim: Tuple[str, ...] = ()  # argv of the process between the launcher and a rank
    driver: str = ""  # source of the program around the launcher
    settings: str = ""  # settings of the driver: where failures are written, and where ranks' output is copied
    python: Tuple[str, ...] = ()  # the interpreter in the launcher's `#!`; empty: not looked up


def launcher_argv(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """Return the argv that node `node` starts in place of this launcher."""
    return (*found.prefix, *_BUILDERS[found.kind](found, peers, node, tools))


def launcher_python(found: Found, tools: Tools) -> Tuple[str, ...]:
    """Return the interpreter of a launcher: the one in the command, else in its `#!`, else the one beside it, else PATH's."""
    if found.python:
        return found.python
    if found.other_python:
        return ("python3",)
    if tools.python:
        return tools.python
    folder = os.path.dirname(found.program)
    return (os.path.join(folder, "python"),) if folder else ("python3",)


def driven(python: Tuple[str, ...], module: str, tools: Tools, behind_wrapper: bool) -> Tuple[str, ...]:
    """Return the argv of the driver around a launcher's module; the module's own arguments follow."""
    text = f"exec({tools.driver!r})" if behind_wrapper else tools.driver  # conda run accepts no multi-line argument
    return (*python, "-c", text, tools.settings, module)


def torchrun_flags(peers: Peers, node: int) -> Tuple[str, ...]:
    """Return torchrun's flags for a static rendezvous: c10d orders nodes by the text of their addresses, and a node range
    waits for nodes that never come. drumbeat restarts by itself, with fresh launchers."""
    return (
        f"--nnodes={len(peers.nodes)}", f"--node-rank={node}", "--rdzv-backend=static",
        f"--master-addr={peers.master_addr}", f"--master-port={peers.master_port}",
        f"--nproc-per-node={peers.nodes[node].ranks}", "--max-restarts=0",
    )  # fmt: skip


def _torchrun(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """Return the argv of torch.distributed.run under the command's own interpreter."""
    python = launcher_python(found, tools)
    driver = driven(python, "torch.distributed.run", tools, bool(found.prefix))
    return (*driver, *found.kept, *_torchrun_words(peers, node, tools), *rank_argv(found, python[0]))


def _torchrun_words(peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """Return torchrun's own arguments, up to the command of a rank."""
    local = f"--local-addr={peers.nodes[node].address}"
    return (*torchrun_flags(peers, node), local, "--no-python", "--", *tools.shim)


# Launchers that put the local rank before the script's own arguments -> the argument, and the option that prevents it.
_LOCAL_RANK = {"launch": ("--local-rank", "--use-env"), "deepspeed": ("--local_rank", "--no-local-rank")}


def rank_argv(found: Found, python: str) -> Tuple[str, ...]:
    """Return what the launcher would run for each rank."""
    local_rank, without = _LOCAL_RANK.get(found.kind, ("", ""))
    local_rank = "" if without in found.flags else local_rank
    head = 2 if found.script[:1] == ("-m",) else 1
    called = (
        *found.script[:head],
        *((f"{local_rank}={LOCAL_RANK_LATER}",) if local_rank else ()),
        *found.script[head:],
    )
    return called if {"--no-python", "--command-mode"} & found.flags.keys() else (python, "-u", *called)


def _accelerate(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    python = launcher_python(found, tools)
    ours = (
        f"--num_machines={len(peers.nodes)}", f"--machine_rank={node}", f"--num_processes={peers.world_size}",
        f"--main_process_ip={peers.master_addr}", f"--main_process_port={peers.master_port}", "--rdzv_backend=static",
        "--deepspeed_multinode_launcher=standard",  # its other launchers need ssh to every host
        "--no_python",
    )  # fmt: skip
    driver = driven(python, "accelerate.commands.launch", tools, bool(found.prefix))
    return (*driver, *found.kept, *ours, *tools.shim, *rank_argv(found, python[0]))


def _deepspeed(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """Return the argv of DeepSpeed's per-node launcher: its runner needs ssh to every host."""
    python = launcher_python(found, tools)
    world = {f"{peer.node}-{peer.host}": list(range(peer.ranks)) for peer in peers.nodes}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    ours = (
        f"--world_info={info}", f"--node_rank={node}", f"--master_addr={peers.master_addr}",
        f"--master_port={peers.master_port}", "--no_python", "--no_local_rank",
    )  # fmt: skip
    driver = driven(python, "deepspeed.launcher.launch", tools, bool(found.prefix))
    return (*driver, *ours, *found.kept, *tools.shim, *rank_argv(found, python[0]))


def _tune(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    return (found.program, "run", *found.kept, *torchrun_flags(peers, node), *found.script)


def _fabric(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    ours = (
        f"--num-nodes={len(peers.nodes)}", f"--node-rank={node}", f"--main-address={peers.master_addr}",
        f"--main-port={peers.master_port}", f"--devices={peers.nodes[node].ranks}",
    )  # fmt: skip
    settings = json.dumps({**json.loads(tools.settings), "shim": tools.shim}) if tools.settings else ""
    python = launcher_python(found, tools)
    driver = driven(python, "lightning.fabric.cli", replace(tools, settings=settings), bool(found.prefix))
    return (*driver, *found.kept, *ours, *found.script)


_BUILDERS = {
    "torchrun": _torchrun, "launch": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed, "tune": _tune,
    "fabric": _fabric,
}  # fmt: skip


# Identity of a rank: the variables every training framework reads, each with its reason.


# Set last for every process, so nothing can override them. Their values are known when the run starts.
WHY = {
    "RANK": "this rank among all",
    "LOCAL_RANK": "this rank among those of its node",
    "NNODES": "nodes that mustered",
    "NODE_RANK": "this node's place among the nodes of the run",
    "GROUP_RANK": "the same, as torch elastic calls it",
    "LOCAL_WORLD_SIZE": "ranks on this node",
    "WORLD_SIZE": "ranks of all nodes",
    "MASTER_ADDR": "node 0, by the address at which the others reached it",
    "MASTER_PORT": "free on node 0 when this attempt began",
    "DRUMBEAT_RUN": "marks every process of this run",
    "DRUMBEAT_ATTEMPT": "counts the starts of this run",
    "DRUMBEAT_METRICS": "where drumbeat.metrics writes; one file per node",
    "DRUMBEAT_FOLDER": "this attempt's part of the run folder: profiles go there",
    "DRUMBEAT_MEMORY": "the agent's files in memory, PID:FD,...: snapshots of the training state outlive the ranks there",
}
IDENTITY = tuple(WHY)
ADAPTERS, TRACKERS = "DRUMBEAT_ADAPTERS", "DRUMBEAT_TRACKERS"
JAX_WHY = {
    "JAX_COORDINATOR_ADDRESS": "where JAX's processes meet",
    "JAX_NUM_PROCESSES": "JAX's processes on all nodes: the ranks, or one per node with `once`",
    "JAX_PROCESS_ID": "this process among them",
    "JAX_LOCAL_DEVICE_IDS": "the GPUs of this rank among those it sees; not with `once`: one process takes all",
}
_JAX_WHEN = "unless you set JAX_COORDINATOR_ADDRESS, or a launcher starts the ranks"
_ADAPTERS_WHY = {
    ADAPTERS: f"folder of the adapters that tell JAX who a rank is, and us where it waits; {ADAPTERS}=off does without",
    TRACKERS: "names of trackers' runs, which go on after a restart or a requeue; where the job can have one",
    "PYTHONPATH": f"begins with {ADAPTERS}, so that Python loads the adapter's sitecustomize and then your own",
}
WHO = {**WHY, **{name: f"{why}; {_JAX_WHEN}" for name, why in JAX_WHY.items()}, **_ADAPTERS_WHY}
_NCCL_LOG = (
    "NCCL's own log, in a file; where there are GPUs, or the job expects a transport (checks: {transport: off}: never)"
)
# All variables whose values are known only when the run starts.
AT_START = {**WHO, **{f"NCCL_DEBUG{name}": _NCCL_LOG for name in ("", "_SUBSYS", "_FILE")}}


def node_identity(
    order: Order, peers: Peers, node: int, attempt: int, metrics: str, folder: str, memory: str
) -> List[EnvVar]:
    """Return the variables that all processes of a node share."""
    values = {
        "NNODES": len(peers.nodes), "NODE_RANK": node, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": peers.nodes[node].ranks,
        "WORLD_SIZE": peers.world_size, "MASTER_ADDR": peers.master_addr, "MASTER_PORT": peers.master_port,
        "DRUMBEAT_RUN": order.run_id, "DRUMBEAT_ATTEMPT": attempt, "DRUMBEAT_METRICS": metrics, "DRUMBEAT_FOLDER": folder,
        "DRUMBEAT_MEMORY": memory,
    }  # fmt: skip
    return [_var(name, value, WHY[name]) for name, value in values.items()]


def rank_identity(rank: int, local_rank: int) -> List[EnvVar]:
    return [_var(name, value, WHY[name]) for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank))]


def flight_recorder(variables: Sequence[EnvVar]) -> List[EnvVar]:
    """Make torch keep its last collectives in memory, so that a hang can be named; not if the user has set the buffer size."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    if any(variable.name in names for variable in variables):
        return []
    why = "torch keeps its last collectives, so that a hang can be told by name (checks: {hang: off} leaves it alone)"
    return [EnvVar(names[0], "2000", why, "default")]


def jax_identity(known: Mapping[str, str], process: Optional[int], devices: Sequence[int]) -> List[EnvVar]:
    """Return JAX's variables. `known`: the variables so far; `process`: the rank, or None for one process per node; `devices`:
    the GPUs it uses of those it sees, if not all."""
    count, number = (known["NNODES"], known["NODE_RANK"]) if process is None else (known["WORLD_SIZE"], process)
    values = (f"{known['MASTER_ADDR']}:{known['MASTER_PORT']}", count, number, ",".join(map(str, devices)))
    return [_var(name, value, why) for (name, why), value in zip(JAX_WHY.items(), values) if value != ""]


def trace(log: str) -> List[EnvVar]:
    """Log NCCL, MIOpen and libfabric for `--trace`, one file per rank. Too verbose for daily use."""
    why = "the job asks for a trace"
    return [
        EnvVar("NCCL_DEBUG", "INFO", why, "user"),
        EnvVar("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET,BOOTSTRAP,GRAPH", why, "user"),
        EnvVar("NCCL_DEBUG_FILE", log, why + "; a file of its own keeps its lines whole", "user"),
        EnvVar("MIOPEN_ENABLE_LOGGING", "1", why + "; goes to the rank's standard error", "user"),
        EnvVar("FI_LOG_LEVEL", "info", why + "; goes to the rank's standard error", "user"),
    ]


def _var(name: str, value: object, why: str) -> EnvVar:
    return EnvVar(name, str(value), why, "detected")


SETUP_FAILED = "drumbeat: setup failed"  # the rank's own messages, on standard error
STAND_INS = "DRUMBEAT_LAUNCHERS"  # folder of the wrappers for launchers that a script starts itself


@dataclass(frozen=True)
class Process:
    """One process the agent starts: one rank under `ranks`, else a launcher that starts this node's ranks."""

    rank: int  # names its log; the node rank under `once`
    local_rank: int
    argv: Tuple[str, ...]


def choose_launcher(
    command: Sequence[str],
    wanted: str,
    script: Script = Script(),  # noqa: B008  # frozen
    environ: Optional[Mapping[str, str]] = None,
    ranks_per_node: Optional[int] = None,
) -> Tuple[str, str]:
    """Choose the launcher, and give the reason. A launcher that must precede drumbeat is refused.

    `script` is the script that the command runs, `ranks_per_node` the job's own setting.
    """
    found = find_launcher(command)
    if found and found.kind == "composer":
        return "ranks", "the command says composer: drumbeat starts its ranks, with the same variables"
    if found and found.kind in ("torchrun", "launch"):
        return "torchrun", f"the command says {found.words}: its torch.distributed.run is started once per node"
    if found:
        return "once", f"the command says {found.words}: started once per node"
    if wanted != "once":
        wrong = refusal(command)
        if wrong:
            raise Problem(*wrong)
    if wanted != "auto":
        return wanted, "as the job asks"
    own_ranks = starts_its_own_ranks(command)
    inside = script.launcher(environ or {})
    if inside:
        own_ranks = f"its script starts {inside}"
    elif script.spawns and not ("devices=" in script.spawns and ranks_per_node):
        own_ranks = script.spawns
    if own_ranks:
        return "once", f"{own_ranks}: started once per node"
    return "ranks", "default" + script.about_mpi


def replaced_flags(command: Sequence[str]) -> str:
    """Return the flags of the user's launch command that the muster's result replaces; '' if there are none."""
    found = find_launcher(command)
    replaced = dict(found.replaced) if found else {}
    return " ".join(f"{name}={value}" if value else name for name, value in replaced.items())


def has_launcher(order: Order) -> bool:
    """Return true if a program other than the agent starts this node's ranks."""
    found = find_launcher(order.command)
    return order.launcher == "torchrun" or (order.launcher == "once" and found is not None)


def has_driver(order: Order) -> bool:
    """Return true if a launcher with our driver around it starts this node's ranks."""
    if order.launcher == "torchrun":
        return True
    found = find_launcher(order.command) if order.launcher == "once" else None
    return found is not None and found.kind in WITH_DRIVER


def processes(order: Order, peers: Peers, node: int, tools: Tools) -> List[Process]:
    """Return the processes that node `node` starts."""
    first = sum(peer.ranks for peer in peers.nodes[:node])
    found = find_launcher(order.command)
    if order.launcher in ("ranks", "tasks"):
        command = _composer(found, tools) if found and found.kind == "composer" else order.command
        return [
            Process(rank, rank - first, after_setup(order, wrapped(order.wrap, command, rank, node)))
            for rank in range(first, first + peers.nodes[node].ranks)
        ]
    if order.launcher == "torchrun" and found is None:
        return [Process(first, 0, after_setup(order, _torchrun_before(order, peers, node, tools)))]
    if has_driver(order) and found:
        return [Process(first, 0, after_setup(order, launcher_argv(found, peers, node, tools)))]
    command = launcher_argv(found, peers, node, tools) if found else order.command
    return [Process(first, 0, after_setup(order, wrapped(order.wrap, command, node, node)))]


def wrapped(wrap: Optional[Wrap], command: Sequence[str], rank: int, node: int) -> Tuple[str, ...]:
    """Return the command of one rank, with its wrapper if the job wraps this rank."""
    if wrap is None or rank not in wrap.ranks:
        return tuple(command)
    prefix = (word.replace("{rank}", str(rank)).replace("{node}", str(node)) for word in wrap.command)
    return (*prefix, *command)


def after_setup(order: Order, argv: Sequence[str]) -> Tuple[str, ...]:
    """Return argv preceded by the user's setup, which is shell code; the command itself is never run by a shell."""
    if not order.setup:
        return tuple(argv)
    # bash, because people use `source` and `module` there; with -e a failed setup stops the rank. The trap tells setup
    # failures apart: the command's own exit code may be the same. The rank's identity is restored, whatever the setup
    # exports. Everything before the setup is one line, so that bash's line numbers are right.
    saved = " ".join(f'_drumbeat_{name}="${{{name}-}}";' for name in IDENTITY)
    failed = f"trap 'code=$?; echo \"{SETUP_FAILED} (exit $code)\" >&2' EXIT"
    again = "\n".join(f'[ -z "$_drumbeat_{name}" ] || export {name}="$_drumbeat_{name}"' for name in IDENTITY)
    path = f'[ -z "${{{STAND_INS}-}}" ] || export PATH="${STAND_INS}:$PATH"'  # a venv would come before them
    python = f'[ ! -d "${{{ADAPTERS}-}}" ] || export PYTHONPATH="${ADAPTERS}${{PYTHONPATH:+:$PYTHONPATH}}"'
    text = f'{saved} set -e; {failed}; {order.setup}\ntrap - EXIT; set +e\n{again}\n{path}\n{python}\nexec "$@"'
    return ("bash", "-c", text, "setup", *argv)


def _torchrun_before(order: Order, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """Return the argv for `--launcher torchrun` with a plain command: torch.distributed.run of the command's interpreter."""
    python = (order.command[0] if "python" in order.command[0].rsplit("/", 1)[-1] else "python3",)
    return (
        *driven(python, "torch.distributed.run", tools, False),
        *_torchrun_words(peers, node, tools),
        *order.command,
    )


def _composer(found: Found, tools: Tools) -> Tuple[str, ...]:
    python = () if "--command-mode" in found.flags else launcher_python(found, tools)
    return (*found.prefix, *python, *found.script)
