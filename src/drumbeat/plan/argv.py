"""From an order to the argv of each process of a node. Pure: nothing is looked up here, all is given."""

from __future__ import annotations

import base64
import json
import os.path
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.facts.model import Peers
from drumbeat.order import Order, Wrap
from drumbeat.plan.launchers.find import Found, find_launcher
from drumbeat.plan.launchers.others import refusal, starts_its_own_ranks
from drumbeat.plan.ranks import IDENTITY
from drumbeat.problem import Problem

# Filled in by the shim, which alone knows it under torchrun.
LOCAL_RANK_LATER = "{local_rank}"
SETUP_FAILED = "drumbeat: setup failed"  # the rank's own words, on standard error


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
    python: Tuple[str, ...] = ()  # the interpreter that the launcher's `#!` names; empty: it was not looked up


def choose_launcher(command: Sequence[str], wanted: str) -> Tuple[str, str]:
    """Which launcher, and why, in words for the user. A launcher that must stand before drumbeat is refused."""
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
    if own_ranks:
        return "once", f"{own_ranks}: started once per node"
    return "ranks", "default"


def replaced_flags(command: Sequence[str]) -> Dict[str, str]:
    """Flags of the user's launch command that the muster's answer takes the place of."""
    found = find_launcher(command)
    return dict(found.replaced) if found else {}


def processes(order: Order, peers: Peers, node: int, tools: Tools) -> List[Process]:
    """What node `node` starts."""
    first = sum(peer.ranks for peer in peers.nodes[:node])
    found = find_launcher(order.command)
    if order.launcher in ("ranks", "tasks"):
        command = _composer(found, tools) if found and found.kind == "composer" else order.command
        return [
            Process(rank, rank - first, _after_setup(order, wrapped(order.wrap, command, rank, node)))
            for rank in range(first, first + peers.nodes[node].ranks)
        ]
    if order.launcher == "torchrun":
        return [Process(first, 0, _after_setup(order, _torchrun(order, found, peers, node, tools)))]
    command = order.command
    if found and found.kind in _ONCE:
        command = (*found.prefix, *_ONCE[found.kind](found, peers, node, tools))
    return [Process(node, 0, _after_setup(order, wrapped(order.wrap, command, node, node)))]


def wrapped(wrap: Optional[Wrap], command: Sequence[str], rank: int, node: int) -> Tuple[str, ...]:
    """The command of one rank, behind its wrap if the job wraps this rank."""
    if wrap is None or rank not in wrap.ranks:
        return tuple(command)
    prefix = (word.replace("{rank}", str(rank)).replace("{node}", str(node)) for word in wrap.command)
    return (*prefix, *command)


def launcher_python(found: Found, tools: Tools) -> Tuple[str, ...]:
    """The interpreter of a launcher: the one it names, else its `#!`, else the one beside it, else PATH's."""
    if found.python:
        return found.python
    if found.other_python:
        return ("python3",)
    if tools.python:
        return tools.python
    folder = os.path.dirname(found.program)
    return (os.path.join(folder, "python"),) if folder else ("python3",)


def _after_setup(order: Order, argv: Sequence[str]) -> Tuple[str, ...]:
    """The user's setup is shell, and runs before the command, which never is."""
    if not order.setup:
        return tuple(argv)
    # bash, because `source` and `module` are what people write there; with -e a failed setup stops the rank.
    # The trap says which part failed: the command's own exit code may be the same. Who a rank is stays what it was,
    # whatever the setup exports. All before the setup is one line, so that bash counts its lines right.
    saved = " ".join(f'_drumbeat_{name}="${{{name}-}}";' for name in IDENTITY)
    failed = f"trap 'code=$?; echo \"{SETUP_FAILED} (exit $code)\" >&2' EXIT"
    again = "\n".join(f'[ -z "$_drumbeat_{name}" ] || export {name}="$_drumbeat_{name}"' for name in IDENTITY)
    text = f'{saved} set -e; {failed}; {order.setup}\ntrap - EXIT; set +e\n{again}\nexec "$@"'
    return ("bash", "-c", text, "setup", *argv)


def _torchrun(order: Order, found: Optional[Found], peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """torch.distributed.run of the command's own interpreter, through our driver; all is said, nothing guessed."""
    if found:
        python = launcher_python(found, tools)
        prefix, kept = found.prefix, found.kept
        worker = _worker(found, python[0])
    else:
        prefix, kept, worker = (), (), order.command
        python = (order.command[0] if "python" in order.command[0].rsplit("/", 1)[-1] else "python3",)
    ours = (*_static(peers, node), f"--local-addr={peers.nodes[node].address}", "--no-python")
    driver = f"exec({tools.driver!r})" if prefix else tools.driver  # conda run takes no argument of several lines
    return (*prefix, *python, "-c", driver, tools.failures, *kept, *ours, "--", *tools.shim, *worker)


def _static(peers: Peers, node: int) -> Tuple[str, ...]:
    """torchrun's static rendezvous: c10d would order the nodes by the text of their addresses, and a range of sizes
    would wait for nodes that do not come. Restarts are drumbeat's, with fresh launchers."""
    return (
        f"--nnodes={len(peers.nodes)}", f"--node-rank={node}", "--rdzv-backend=static",
        f"--master-addr={peers.master_addr}", f"--master-port={peers.master_port}",
        f"--nproc-per-node={peers.nodes[node].ranks}", "--max-restarts=0",
    )  # fmt: skip


def _worker(found: Found, python: str) -> Tuple[str, ...]:
    """What torchrun would run for each rank; torch.distributed.launch puts --local-rank before the script's arguments."""
    head = 2 if found.script[:1] == ("-m",) else 1
    local_rank = found.kind == "launch" and "--use-env" not in found.flags
    called = (
        *found.script[:head],
        *((f"--local-rank={LOCAL_RANK_LATER}",) if local_rank else ()),
        *found.script[head:],
    )
    return called if "--no-python" in found.flags else (python, "-u", *called)


def _composer(found: Found, tools: Tools) -> Tuple[str, ...]:
    python = () if "--command-mode" in found.flags else launcher_python(found, tools)
    return (*found.prefix, *python, *found.script)


def _accelerate(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    ours = (
        f"--num_machines={len(peers.nodes)}", f"--machine_rank={node}", f"--num_processes={peers.world_size}",
        f"--main_process_ip={peers.master_addr}", f"--main_process_port={peers.master_port}", "--rdzv_backend=static",
        "--deepspeed_multinode_launcher=standard",  # its other launchers would want ssh to every host
    )  # fmt: skip
    return (*launcher_python(found, tools), "-m", "accelerate.commands.launch", *found.kept, *ours, *_shape(found))


def _deepspeed(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """DeepSpeed's own per-node launcher: its runner would want ssh to every host."""
    world = {f"{peer.node}-{peer.host}": list(range(peer.ranks)) for peer in peers.nodes}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    ours = (
        f"--world_info={info}", f"--node_rank={node}", f"--master_addr={peers.master_addr}",
        f"--master_port={peers.master_port}",
    )  # fmt: skip
    return (*launcher_python(found, tools), "-m", "deepspeed.launcher.launch", *ours, *found.kept, *_shape(found))


def _tune(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    return (found.program, "run", *found.kept, *_static(peers, node), *found.script)


def _fabric(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    ours = (
        f"--num-nodes={len(peers.nodes)}", f"--node-rank={node}", f"--main-address={peers.master_addr}",
        f"--main-port={peers.master_port}", f"--devices={peers.nodes[node].ranks}",
    )  # fmt: skip
    return (found.program, "run", *found.kept, *ours, *found.script)


def _shape(found: Found) -> Tuple[str, ...]:
    """The script, and how it is called, in the words that accelerate and deepspeed share."""
    is_module = found.script[:1] == ("-m",)
    flags = [*(["--no_python"] if "--no-python" in found.flags else []), *(["--module"] if is_module else [])]
    return (*flags, *(found.script[1:] if is_module else found.script))


_ONCE = {"accelerate": _accelerate, "deepspeed": _deepspeed, "tune": _tune, "fabric": _fabric}
