"""The command line of a launcher that drumbeat starts in the place of the user's own, once per node.

Where the launcher allows it, a driver around it reports how each rank ended, and a shim before each rank gives the rank
its own logs and cores. What it says about nodes and rendezvous is what the muster found; all else it says is kept.
"""

from __future__ import annotations

import base64
import json
import os.path
from dataclasses import replace
from typing import Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.find import Found
from drumbeat.machine.model import Peers

# Filled in by the shim, which alone knows it under a launcher.
LOCAL_RANK_LATER = "{local_rank}"

WITH_DRIVER = (
    "torchrun",
    "launch",
    "accelerate",
    "deepspeed",
    "fabric",
)  # kinds whose ranks get logs and cores of their own


@dataclass(frozen=True)
class Tools:
    """What the agent brings along to start ranks under a launcher of others."""

    shim: Tuple[str, ...] = ()  # argv of the process between the launcher and a rank
    driver: str = ""  # source of the program around the launcher
    settings: str = ""  # of the driver: where failures are written, and where ranks' output is copied
    python: Tuple[str, ...] = ()  # the interpreter that the launcher's `#!` names; empty: it was not looked up


def launcher_argv(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """What node `node` starts in the place of this launcher."""
    return (*found.prefix, *_BUILDERS[found.kind](found, peers, node, tools))


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


def driven(python: Tuple[str, ...], module: str, tools: Tools, behind_wrapper: bool) -> Tuple[str, ...]:
    """The driver around a launcher's module; the module's own arguments follow."""
    text = f"exec({tools.driver!r})" if behind_wrapper else tools.driver  # conda run takes no argument of several lines
    return (*python, "-c", text, tools.settings, module)


def torchrun_flags(peers: Peers, node: int) -> Tuple[str, ...]:
    """torchrun's static rendezvous: c10d would order the nodes by the text of their addresses, and a range of sizes
    would wait for nodes that do not come. Restarts are drumbeat's, with fresh launchers."""
    return (
        f"--nnodes={len(peers.nodes)}", f"--node-rank={node}", "--rdzv-backend=static",
        f"--master-addr={peers.master_addr}", f"--master-port={peers.master_port}",
        f"--nproc-per-node={peers.nodes[node].ranks}", "--max-restarts=0",
    )  # fmt: skip


def _torchrun(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """torch.distributed.run of the command's own interpreter."""
    python = launcher_python(found, tools)
    ours = (*torchrun_flags(peers, node), f"--local-addr={peers.nodes[node].address}", "--no-python")
    local_rank = "--local-rank" if found.kind == "launch" and "--use-env" not in found.flags else ""
    return (
        *driven(python, "torch.distributed.run", tools, bool(found.prefix)), *found.kept, *ours, "--",
        *tools.shim, *_worker(found, python[0], local_rank),
    )  # fmt: skip


def _worker(found: Found, python: str, local_rank: str = "") -> Tuple[str, ...]:
    """What the launcher would run for each rank. Some put the local rank before the script's own arguments."""
    head = 2 if found.script[:1] == ("-m",) else 1
    called = (
        *found.script[:head],
        *((f"{local_rank}={LOCAL_RANK_LATER}",) if local_rank else ()),
        *found.script[head:],
    )
    return called if "--no-python" in found.flags else (python, "-u", *called)


def _accelerate(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    python = launcher_python(found, tools)
    ours = (
        f"--num_machines={len(peers.nodes)}", f"--machine_rank={node}", f"--num_processes={peers.world_size}",
        f"--main_process_ip={peers.master_addr}", f"--main_process_port={peers.master_port}", "--rdzv_backend=static",
        "--deepspeed_multinode_launcher=standard",  # its other launchers would want ssh to every host
        "--no_python",
    )  # fmt: skip
    driver = driven(python, "accelerate.commands.launch", tools, bool(found.prefix))
    return (*driver, *found.kept, *ours, *tools.shim, *_worker(found, python[0]))


def _deepspeed(found: Found, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """DeepSpeed's own per-node launcher: its runner would want ssh to every host."""
    python = launcher_python(found, tools)
    world = {f"{peer.node}-{peer.host}": list(range(peer.ranks)) for peer in peers.nodes}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    ours = (
        f"--world_info={info}", f"--node_rank={node}", f"--master_addr={peers.master_addr}",
        f"--master_port={peers.master_port}", "--no_python", "--no_local_rank",
    )  # fmt: skip
    driver = driven(python, "deepspeed.launcher.launch", tools, bool(found.prefix))
    local_rank = "" if "--no-local-rank" in found.flags else "--local_rank"
    return (*driver, *ours, *found.kept, *tools.shim, *_worker(found, python[0], local_rank))


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
