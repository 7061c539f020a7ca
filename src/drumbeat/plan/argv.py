"""From an order to the argv of each process of a node. Pure: nothing is looked up here, all is given."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.facts.model import Peers
from drumbeat.order import Order, Wrap
from drumbeat.plan.torchrun import Found, find_launcher

# Filled in by the shim, which alone knows it under torchrun.
LOCAL_RANK_LATER = "{local_rank}"


@dataclass(frozen=True)
class Process:
    """One process the agent starts: one rank under `ranks`, else a launcher that starts this node's ranks."""

    rank: int  # names its log; the node rank under `once`
    local_rank: int
    argv: Tuple[str, ...]


@dataclass(frozen=True)
class Tools:
    """What the agent brings along to start ranks under a launcher of others."""

    shim: Tuple[str, ...] = ()  # argv of the process between torchrun and a rank
    driver: str = ""  # source of the torchrun driver
    failures: str = ""  # file in which the driver names the failed ranks
    rdzv_id: str = ""


def choose_launcher(command: Sequence[str], wanted: str) -> Tuple[str, str]:
    """Which launcher, and why, in words for the user."""
    found = find_launcher(command)
    if found and found.kind in ("accelerate", "deepspeed"):
        return "once", f"the command says {found.words}: started once a node"
    if found:
        return "torchrun", f"the command says {found.words}: its torch.distributed.run is started once a node"
    if wanted != "auto":
        return wanted, "as the job asks"
    return "ranks", "default"


def replaced_flags(command: Sequence[str]) -> Dict[str, str]:
    """Flags of the user's launch command that the muster's answer takes the place of."""
    found = find_launcher(command)
    return dict(found.replaced) if found else {}


def processes(order: Order, peers: Peers, node: int, tools: Tools) -> List[Process]:
    """What node `node` starts."""
    first = sum(peer.ranks for peer in peers.nodes[:node])
    if order.launcher in ("ranks", "tasks"):
        return [
            Process(rank, rank - first, _after_setup(order, wrapped(order.wrap, order.command, rank, node)))
            for rank in range(first, first + peers.nodes[node].ranks)
        ]
    found = find_launcher(order.command)
    if order.launcher == "torchrun":
        return [Process(first, 0, _after_setup(order, _torchrun(order, found, peers, node, tools)))]
    command = order.command
    if found and found.kind == "accelerate":
        command = _accelerate(found, peers, node)
    elif found and found.kind == "deepspeed":
        command = _deepspeed(found, peers, node)
    return [Process(node, 0, _after_setup(order, wrapped(order.wrap, command, node, node)))]


def wrapped(wrap: Optional[Wrap], command: Sequence[str], rank: int, node: int) -> Tuple[str, ...]:
    """The command of one rank, behind its wrap if the job wraps this rank."""
    if wrap is None or rank not in wrap.ranks:
        return tuple(command)
    prefix = (word.replace("{rank}", str(rank)).replace("{node}", str(node)) for word in wrap.command)
    return (*prefix, *command)


def _after_setup(order: Order, argv: Sequence[str]) -> Tuple[str, ...]:
    """The user's setup is shell, and runs before the command, which never is."""
    if not order.setup:
        return tuple(argv)
    # bash, because `source` and `module` are what people write there; with -e a failed setup stops the rank
    return ("bash", "-c", f'set -e\n{order.setup}\nset +e\nexec "$@"', "setup", *argv)


def _torchrun(order: Order, found: Optional[Found], peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """torch.distributed.run of the command's own interpreter, through our driver; all is said, nothing guessed."""
    if found:
        python = found.python or "python3"
        kept, script = found.kept, found.script
        worker = script if "--no-python" in found.flags else (python, "-u", *script)
        if found.kind == "launch" and "--use-env" not in found.flags:
            worker = (*worker, f"--local-rank={LOCAL_RANK_LATER}")
    else:
        kept, worker = (), order.command
        python = order.command[0] if "python" in order.command[0].rsplit("/", 1)[-1] else "python3"
    me = peers.nodes[node]
    if found and found.elastic:
        # c10d only where the size may change: it orders nodes by the text of their address
        meet = (
            f"--nnodes={found.elastic}", "--rdzv-backend=c10d", f"--rdzv-endpoint={peers.master_addr}:{peers.master_port}",
            f"--rdzv-id={tools.rdzv_id}", f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr={me.address}",
        )  # fmt: skip
    else:
        meet = (
            f"--nnodes={len(peers.nodes)}", f"--node-rank={node}", "--rdzv-backend=static",
            f"--master-addr={peers.master_addr}", f"--master-port={peers.master_port}", f"--local-addr={me.address}",
        )  # fmt: skip
    ours = (*meet, f"--nproc-per-node={me.ranks}", "--max-restarts=0", "--no-python")
    return (python, "-c", tools.driver, tools.failures, *kept, *ours, "--", *tools.shim, *worker)


def _accelerate(found: Found, peers: Peers, node: int) -> Tuple[str, ...]:
    ours = (
        f"--num_machines={len(peers.nodes)}", f"--machine_rank={node}", f"--num_processes={peers.world_size}",
        f"--main_process_ip={peers.master_addr}", f"--main_process_port={peers.master_port}", "--rdzv_backend=static",
    )  # fmt: skip
    shape = tuple(flag for flag in ("--no_python",) if "--no-python" in found.flags)
    return (found.python or "python3", "-m", "accelerate.commands.launch", *found.kept, *ours, *shape, *found.script)


def _deepspeed(found: Found, peers: Peers, node: int) -> Tuple[str, ...]:
    """DeepSpeed's own per-node launcher: its runner would want ssh to every host."""
    world = {f"{peer.node}-{peer.host}": list(range(peer.ranks)) for peer in peers.nodes}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    ours = (
        f"--world_info={info}", f"--node_rank={node}", f"--master_addr={peers.master_addr}",
        f"--master_port={peers.master_port}",
    )  # fmt: skip
    is_module = found.script[:1] == ("-m",)
    module: Tuple[str, ...] = ("--module",) if is_module else ()
    script = found.script[1:] if is_module else found.script
    shape = tuple(flag for flag in ("--no_python",) if "--no-python" in found.flags)
    return (found.python or "python3", "-m", "deepspeed.launcher.launch", *ours, *found.kept, *shape, *module, *script)
