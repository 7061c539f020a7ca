"""The two generations of the `runai` command: CLI 1 has `runai submit-dist pytorch`, CLI 2 `runai training pytorch submit`.

Both make a PyTorchJob of it: one master and nodes - 1 workers, whose pods are NAME-master-0 and NAME-worker-0 and so on.
What differs between releases of CLI 2 is looked up in its own help: `--env-secret` came after `-e NAME=SECRET:...`,
`--preemptibility` and the master's cores and memory came later too.
"""

from __future__ import annotations

import difflib
from typing import Dict, FrozenSet, List, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem

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
    flags: FrozenSet[str] = frozenset()  # that its help lists for `submit`; none: it was not asked, or does not say


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
    for flag, text in ((cli.cpus, str(request.cpus or "")), (cli.memory, request.memory)):
        if text:
            lines += [(flag, text), *_of_the_master(cli, flag, text)]
    lines.append((f"--backoff-limit={request.requeues}",))
    lines += _preemption(cli, request.specific.get("qos", ""))
    for option in request.options:
        words = words_of(option.text)
        _check_flag(cli, words[0])
        lines.append(words)
        if words[0] == "--extended-resource" and len(words) > 1:
            lines += _of_the_master(cli, *words)
    lines += [("-e", f"{variable}={text}") for variable, text in plain.items()]
    if "--env-secret" in cli.flags:
        lines += [("--env-secret", f"{variable}={name},key={key}") for variable, key in secret.items()]
    else:
        lines += [("-e", f"{variable}=SECRET:{name},{key}") for variable, key in secret.items()]
    lines.append(("--", *command))
    return lines


def _of_the_master(cli: Cli, flag: str, value: str) -> List[Tuple[str, ...]]:
    """CLI 2 asks for some resources of the master by options of their own; node 0 is a node like any other."""
    own = flag.replace("--", "--master-", 1)
    return [(own, value)] if cli.generation > 1 and own in cli.flags else []


def _check_flag(cli: Cli, flag: str) -> None:
    flag = flag.partition("=")[0]
    if not cli.flags or not flag.startswith("--") or flag in cli.flags:
        return
    close = difflib.get_close_matches(flag, cli.flags, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise Problem(
        f"{flag[:80]!r} is not an option of `runai {' '.join(cli.submit)}` here", f"{hint}its --help lists them"
    )


def _preemption(cli: Cli, qos: str) -> List[Tuple[str, ...]]:
    if not qos:
        return []
    if qos not in PREEMPTIBLE:
        raise Problem(
            f"qos: {qos[:80]!r} is not one of {', '.join(PREEMPTIBLE)}", "leave it out: the project's own counts"
        )
    if "--preemptibility" in cli.flags:
        return [("--preemptibility", qos)]
    if qos == "non-preemptible":
        raise Problem("this runai has no word for a training job that is not preemptible", "leave qos out")
    return []  # a training job is preemptible unless something else is said


def words_of(text: str) -> Tuple[str, ...]:
    """`--annotation a=b` is an option and its value."""
    flag, blank, value = text.partition(" ")
    return (flag, value.strip()) if blank else (flag,)
