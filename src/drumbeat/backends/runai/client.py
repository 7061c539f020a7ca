"""Talking to Run:ai through `runai`, and to its cluster through `kubectl` for the secret alone; each call with a deadline."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import subprocess
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Tuple

from drumbeat.backends import contract
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem

# The two generations of the `runai` command: CLI 1 has `runai submit-dist pytorch`, CLI 2 `runai training pytorch
# submit`. Both make a PyTorchJob of it: one master and nodes - 1 workers, whose pods are NAME-master-0 and NAME-
# worker-0 and so on. What differs between releases of CLI 2 is looked up in its own help: `--env-secret` came after
# `-e NAME=SECRET:...`, `--preemptibility` and the master's cores and memory came later too.


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
    1, ("submit-dist", "pytorch"), ("describe", "job"), ("delete", "job"), ("logs",), ("exec",), ("bash",), "--cpu", "--memory"
)  # fmt: skip
_2 = ("training", "pytorch")
CLI_2 = Cli(
    2, (*_2, "submit"), (*_2, "describe"), (*_2, "delete"), (*_2, "logs"), (*_2, "exec"), (*_2, "bash"),
    "--cpu-core-request", "--cpu-memory-request",
)  # fmt: skip


def submit_lines(
    cli: Cli, order: Order, name: str, plain: Dict[str, str], secret: Dict[str, str], command: List[str]
) -> List[Tuple[str, ...]]:
    """Return the words after `runai`, grouped as they are shown: one option with its value per line. `secret`: variable ->
    its key in the secret called `name`."""
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
    # the pod's script starts its agent again; a run that failed must not be repeated
    lines += [(flag, "Never") for flag in ("--restart-policy", "--master-restart-policy") if flag in cli.flags]
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
    lines += [("--command",), ("--", *command)]  # without it the words would be arguments of the image's entrypoint
    return lines


def _of_the_master(cli: Cli, flag: str, value: str) -> List[Tuple[str, ...]]:
    """Return the master's own form of an option if this CLI has one, else nothing: node 0 needs the same as any other node."""
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
        raise Problem("this version of runai cannot express a training job that is not preemptible", "leave qos out")
    return []  # training jobs are preemptible by default


def words_of(text: str) -> Tuple[str, ...]:
    """Split `--annotation a=b` into an option and its value."""
    flag, blank, value = text.partition(" ")
    return (flag, value.strip()) if blank else (flag,)


_SECONDS = 60.0
_STATES = {
    **dict.fromkeys(("pending", "creating", "initializing", "containercreating"), contract.QUEUED),
    **dict.fromkeys(("resuming", "suspended", "preempted"), contract.QUEUED),
    **dict.fromkeys(("running", "degraded", "updating", "terminating", "deleting"), contract.RUNNING),
    **dict.fromkeys(("succeeded", "completed"), contract.FINISHED),
    **dict.fromkeys(("failed", "error", "timedout", "stopped"), contract.FAILED),
}
_KEYS = ("phase", "status", "jobStatus", "workloadPhase", "state")


def call(
    argv: List[str], environ: Mapping[str, str], stdin: Optional[bytes] = None, seconds: float = _SECONDS
) -> subprocess.CompletedProcess[bytes]:
    silent = "try again; runai login may be needed"
    missing = "your Run:ai control plane has its installer (docs page runai)"
    return contract.ask_tool(argv, environ, missing, silent, seconds, input=stdin or b"")


def find_cli(environ: Mapping[str, str]) -> Tuple[Cli, str]:
    """Find the installed generation, and the reason. Both use version numbers such as 2.18, so its commands decide."""
    try:
        numbers = re.search(r"\d+\.\d+[\w.+-]*", contract.text_of(call(["runai", "version"], environ).stdout))
    except Problem as problem:
        raise contract.Unreachable(problem.what, problem.fix) from None
    version = numbers.group() if numbers else "of an unknown version"
    shown = contract.text_of(call(["runai", "--help"], environ).stdout)
    if re.search(r"^\s+submit-dist\b", shown, re.MULTILINE):
        return CLI_1, f"runai {version} has submit-dist (CLI 1)"
    if re.search(r"^\s+(training|pytorch)\b", shown, re.MULTILINE):
        return CLI_2, f"runai {version} has training pytorch (CLI 2)"
    raise Problem(
        f"runai {version} has neither submit-dist nor training pytorch", "multi-node jobs need runai 2.13 or newer"
    )


def with_flags(cli: Cli, environ: Mapping[str, str]) -> Cli:
    """Add the options that the help of its `submit` lists to the CLI."""
    shown = contract.text_of(call(["runai", *cli.submit, "--help"], environ).stdout)
    return dataclasses.replace(
        cli, flags=frozenset(re.findall(r"^\s+(?:-\w, )?(--[a-z][a-z0-9-]+)", shown, re.MULTILINE))
    )


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    return (
        contract.complaint(contract.text_of(done.stderr or done.stdout).partition("\nUsage")[0])[:400]
        or "it does not say why"
    )


_ADVICE = (
    ("login", "runai login"),
    ("unauthorized", "runai login"),
    ("token", "runai login"),
    ("project", "runai project list shows yours; account: NAME in the job file, or --account"),
    ("unknown flag", "this version of runai does not know that option: leave it out of the profile or the job"),
)


def refusal(done: subprocess.CompletedProcess[bytes], what: str) -> Problem:
    fix = contract.advised(said(done), _ADVICE, "drumbeat plan --render JOB.yaml shows the command")
    return Problem(f"Run:ai {what}: {said(done)}", fix)


def is_gone(done: subprocess.CompletedProcess[bytes]) -> bool:
    """Return true if `runai` answered that there is no such job."""
    return bool(re.search(r"not found|does not exist|no such", said(done), re.IGNORECASE))


def read_status(handle: str, done: subprocess.CompletedProcess[bytes]) -> contract.Status:
    """Read the status from `describe -o json`; its layout is not documented, so the first word that is a state counts."""
    text = contract.text_of(done.stdout)
    if done.returncode != 0:
        return contract.Status(
            handle, contract.UNKNOWN, "Run:ai no longer knows this job" if is_gone(done) else said(done)
        )
    try:
        words = list(_words(json.loads(text)))
    except ValueError:
        words = re.findall(r"^\s*(?:STATUS|Status|Phase|Job Status)\s*[:|]?\s+(\w+)", text, re.MULTILINE)
    for word in words:
        state = _STATES.get(word.lower().replace(" ", ""))
        if state:
            return contract.Status(handle, state, word.lower())
    return contract.Status(
        handle, contract.UNKNOWN, f"Run:ai answered with an unknown state: {', '.join(words[:3]) or 'none'}"
    )


def _words(value: Any) -> Iterator[str]:
    """Yield the values of keys that may hold a state, the outermost first."""
    level = [value]
    while level:
        below: List[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in _KEYS:
                    if isinstance(item.get(key), str):
                        yield item[key]
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
