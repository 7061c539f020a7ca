"""From an order to the argv of each process of a node. Pure: nothing is looked up here, all is given."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, Wrap
from drumbeat.base.problem import Problem
from drumbeat.commands.find import Found, find_launcher
from drumbeat.commands.inside import Script
from drumbeat.commands.others import refusal, starts_its_own_ranks
from drumbeat.machine.model import Peers
from drumbeat.plan.owned import WITH_DRIVER, Tools, driven, launcher_argv, launcher_python, torchrun_flags
from drumbeat.plan.ranks import ADAPTERS, IDENTITY

SETUP_FAILED = "drumbeat: setup failed"  # the rank's own words, on standard error
STAND_INS = "DRUMBEAT_LAUNCHERS"  # the folder of the stand-ins for launchers that a script starts itself


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
    """Which launcher, and why, in words for the user. A launcher that must stand before drumbeat is refused.

    `script` is what the command runs, `ranks_per_node` what the job itself says.
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


def replaced_flags(command: Sequence[str]) -> Dict[str, str]:
    """Flags of the user's launch command that the muster's answer takes the place of."""
    found = find_launcher(command)
    return dict(found.replaced) if found else {}


def has_launcher(order: Order) -> bool:
    """Whether another program than the agent starts this node's ranks, as the order says."""
    found = find_launcher(order.command)
    return order.launcher == "torchrun" or (order.launcher == "once" and found is not None)


def has_driver(order: Order) -> bool:
    """Whether this node's ranks are started by a launcher around which our driver stands."""
    if order.launcher == "torchrun":
        return True
    found = find_launcher(order.command) if order.launcher == "once" else None
    return found is not None and found.kind in WITH_DRIVER


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
    if order.launcher == "torchrun" and found is None:
        return [Process(first, 0, _after_setup(order, _torchrun_before(order, peers, node, tools)))]
    if has_driver(order) and found:
        return [Process(first, 0, _after_setup(order, launcher_argv(found, peers, node, tools)))]
    command = launcher_argv(found, peers, node, tools) if found else order.command
    return [Process(first, 0, _after_setup(order, wrapped(order.wrap, command, node, node)))]


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
    # bash, because `source` and `module` are what people write there; with -e a failed setup stops the rank.
    # The trap says which part failed: the command's own exit code may be the same. Who a rank is stays what it was,
    # whatever the setup exports. All before the setup is one line, so that bash counts its lines right.
    saved = " ".join(f'_drumbeat_{name}="${{{name}-}}";' for name in IDENTITY)
    failed = f"trap 'code=$?; echo \"{SETUP_FAILED} (exit $code)\" >&2' EXIT"
    again = "\n".join(f'[ -z "$_drumbeat_{name}" ] || export {name}="$_drumbeat_{name}"' for name in IDENTITY)
    path = f'[ -z "${{{STAND_INS}-}}" ] || export PATH="${STAND_INS}:$PATH"'  # a venv would stand before them
    python = f'[ ! -d "${{{ADAPTERS}-}}" ] || export PYTHONPATH="${ADAPTERS}${{PYTHONPATH:+:$PYTHONPATH}}"'
    text = f'{saved} set -e; {failed}; {order.setup}\ntrap - EXIT; set +e\n{again}\n{path}\n{python}\nexec "$@"'
    return ("bash", "-c", text, "setup", *argv)


def _torchrun_before(order: Order, peers: Peers, node: int, tools: Tools) -> Tuple[str, ...]:
    """`--launcher torchrun` before a command that names none: torch.distributed.run of the command's interpreter."""
    python = (order.command[0] if "python" in order.command[0].rsplit("/", 1)[-1] else "python3",)
    ours = (*torchrun_flags(peers, node), f"--local-addr={peers.nodes[node].address}", "--no-python")
    return (*driven(python, "torch.distributed.run", tools, False), *ours, "--", *tools.shim, *order.command)


def _composer(found: Found, tools: Tools) -> Tuple[str, ...]:
    python = () if "--command-mode" in found.flags else launcher_python(found, tools)
    return (*found.prefix, *python, *found.script)
