"""The two generations of the `runai` command: CLI 1 has `runai submit-dist pytorch`, CLI 2 `runai training pytorch submit`.

Both make a PyTorchJob of it: one master and nodes - 1 workers, whose pods are NAME-master-0 and NAME-worker-0 and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Tuple

from drumbeat.order import Order
from drumbeat.problem import Problem

PREEMPTIBLE = ("preemptible", "non-preemptible")


@dataclass(frozen=True)
class Cli:
    generation: int
    submit: Tuple[str, ...]
    describe: Tuple[str, ...]
    delete: Tuple[str, ...]
    logs: Tuple[str, ...]
    execute: Tuple[str, ...]
    shell: Tuple[str, ...]
    cpus: str  # the options' own names
    memory: str


CLI_1 = Cli(
    1,
    ("submit-dist", "pytorch"),
    ("describe", "job"),
    ("delete", "job"),
    ("logs",),
    ("exec",),
    ("bash",),
    "--cpu",
    "--memory",
)
_2 = ("training", "pytorch")
CLI_2 = Cli(
    2, (*_2, "submit"), (*_2, "describe"), (*_2, "delete"), (*_2, "logs"), (*_2, "exec"), (*_2, "bash"),
    "--cpu-core-request", "--cpu-memory-request",
)  # fmt: skip


def pods_of(name: str, nodes: int) -> Tuple[str, ...]:
    """The pod of each node."""
    return (f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(nodes - 1)))


def submit_lines(
    cli: Cli, order: Order, name: str, plain: Dict[str, str], secret: Dict[str, str], command: List[str]
) -> List[Tuple[str, ...]]:
    """The words after `runai`, grouped as they are shown: one option with its value per line. `secret`: variable -> its key
    in the secret called `name`."""
    assert order.container is not None
    request = order.resources
    lines: List[Tuple[str, ...]] = [(*cli.submit, name) if cli.generation > 1 else cli.submit]
    if cli.generation == 1:
        lines.append(("--name", name))
    if request.account:
        lines.append(("-p", request.account))
    lines += [(f"--workers={order.nodes - 1}",), ("-i", order.container.image)]
    if request.gpus:
        lines.append(("-g", str(request.gpus)))
        if cli.generation > 1:
            lines.append(("--master-gpu-devices-request", str(request.gpus)))
    if request.partition:
        lines.append(("--node-pools", request.partition))
    if request.cpus:
        lines.append((cli.cpus, str(request.cpus)))
    if request.memory:
        lines.append((cli.memory, request.memory))
    lines.append((f"--backoff-limit={request.requeues}",))
    lines += _preemption(cli, request.specific.get("qos", ""))
    lines += [words_of(option.text) for option in request.options]
    lines += [("-e", f"{variable}={text}") for variable, text in plain.items()]
    lines += [("-e", f"{variable}=SECRET:{name},{key}") for variable, key in secret.items()]
    lines.append(("--", *command))
    return lines


def _preemption(cli: Cli, qos: str) -> List[Tuple[str, ...]]:
    if not qos:
        return []
    if qos not in PREEMPTIBLE:
        raise Problem(f"qos: {qos!r} is not one of {', '.join(PREEMPTIBLE)}", "leave it out: the project's own counts")
    if cli.generation > 1:
        return [("--preemptibility", qos)]
    if qos == "non-preemptible":
        raise Problem("CLI 1 of Run:ai has no word for a training job that is not preemptible", "leave qos out")
    return [("--preemptible",)]


def words_of(text: str) -> Tuple[str, ...]:
    """`--annotation a=b` is an option and its value."""
    flag, blank, value = text.partition(" ")
    return (flag, value.strip()) if blank else (flag,)
