"""Setting of a run, and its hardware: the part of a report that says if runs can be compared."""

from __future__ import annotations

import os
import shlex
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.machine.model import Facts
from drumbeat.predict.cost import NETWORK
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.job import case_of_command
from drumbeat.predict.past import Seen, remember
from drumbeat.report.figures import Figures, Foreseen, Phases, Setting
from drumbeat.runfolder.lines import code_words
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import PAUSED
from drumbeat.runfolder.summary import gpus_of_run, gpus_used

_PRECISION = regex(r"(?:--)?(?:precision|mixed[-_]precision|dtype|torch[-_]dtype)[= ]+([\w.-]+)")
_SWITCH = regex(r"(?:^|\s)--(bf16|fp16|fp8|tf32|amp|fp32)(?=\s|$)")
_LATE = 1.0  # seconds by which clocks may differ
_TARGET = regex(r"--?target[-_](?:accuracy|acc)[= ]+([0-9.]+)")


def setting_of(
    run: Run, order: Optional[Order], facts: Optional[Facts], setup: Mapping[str, Any], end: float
) -> Setting:
    command = shlex.join(order.command) if order else ""
    packages = run.packages().get("packages")
    named = {str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    return Setting(
        command=command,
        precision=str(setup.get("precision") or precision_in(command)),
        layout=str(setup.get("layout") or ""),
        code=code_words(run),
        image=_image(run.code(), order),
        software={**(facts.versions if facts else {}), **named, "drumbeat": run.record.version},
        hardware=_hardware(facts),
        site=order.site if order else "",
        outputs=tuple(_outputs(order, run.record.created, end)) if order else (),
    )


def _outputs(order: Order, begin: float, end: float) -> Iterator[str]:
    """Yield the words of the command whose value is a file, or a folder of nothing but files, written during the run."""
    for word in order.command[1:]:
        path = os.path.join(order.workdir, word[word.find("=") + 1 :])
        try:
            inside = [entry.stat().st_mtime for entry in os.scandir(path)] if os.path.isdir(path) else []
            times = inside or [os.stat(path).st_mtime]
        except (OSError, ValueError):
            continue
        if begin <= min(times) and max(times) <= end + _LATE:
            yield shlex.quote(word)


def precision_in(command: str) -> str:
    """Read the precision from the command's options; empty: they do not say."""
    named = _PRECISION.search(command)
    switch = _SWITCH.search(command)
    return named.group(1) if named else switch.group(1) if switch else ""


def target_of(command: Sequence[str]) -> Optional[float]:
    """Return the target accuracy in the command; None: it has none."""
    found = _TARGET.search(" ".join(command))
    try:
        return float(found.group(1)) if found else None
    except ValueError:
        return None


def gpus_of(order: Optional[Order], facts: Mapping[int, Optional[Facts]], nodes: int) -> Optional[int]:
    """Count the GPUs of all nodes that the job used; None if a node's facts are missing, or if only some nodes' were read
    and these differ."""
    if order is None or not facts:
        return None
    known = [gpus_used(order, each) for each in facts.values() if each]
    if len(known) < len(facts) or (len(facts) < nodes and len(set(known)) > 1):
        return None
    return gpus_of_run(order, known if len(facts) == nodes else known[:1] * nodes)


def _image(code: Mapping[str, Any], order: Optional[Order]) -> str:
    if order is None or order.container is None:
        return ""
    image = os.path.basename(order.container.image.rstrip("/"))
    digest = code.get("image_digest")
    return f"{image} ({str(digest)[:19]})" if digest else image


def _hardware(facts: Optional[Facts]) -> Dict[str, str]:
    if facts is None:
        return {}
    gpus = sorted({gpu.name or gpu.vendor for gpu in facts.gpus if not gpu.integrated})
    links = sorted({device.driver or "rdma" for device in facts.rdma} | ({"cxi"} if facts.cxi else set()))
    found = {
        "GPU": ", ".join(gpus) or "none",
        "CPU": facts.cpus.model or "",
        "cores": str(len(facts.cpus.allowed) or ""),
        "network": ", ".join(links) or "ethernet",
        "architecture": facts.arch or "",
    }
    return {name: value for name, value in found.items() if value}


# A run beside its prediction: the part of a step that is off, judged by measurements, and what to do next.


_ADVICE = {
    "input": "the ranks wait for data: more workers, a faster store, or decoding on the GPU",
    "communication": "check which network carried it (drumbeat diagnose) and its bandwidth (drumbeat verify)",
    "stragglers": "one rank holds up the others: see `slowest`, and drumbeat nodes for that host",
    "restarts": "failures took a large part of the time: drumbeat diagnose names the first",
    "compute": "look at GPU clocks and power (throttling), and at attention and compile settings",
}


def case_of_run(
    order: Optional[Order], facts: Optional[Facts], nodes: Optional[int], gpus: Optional[int]
) -> Optional[Case]:
    """Return the prediction case that matches a run's command and GPUs; None if unknown."""
    if order is None or facts is None or not nodes or not gpus or gpus % nodes:
        return None
    own = [each for each in facts.gpus if not each.integrated]
    if len({each.name for each in own}) != 1 or not own[0].name:
        return None
    return case_of_command(order.command, own[0].name, nodes, gpus // nodes, (own[0].memory_bytes or 0) / 2**30)


def compared(
    order: Optional[Order], facts: Optional[Facts], nodes: Optional[int], gpus: Optional[int], phases: Phases,
    ledger: Mapping[str, float],
) -> Optional[Foreseen]:  # fmt: skip
    """Predict a run from its command and GPUs, and compare."""
    try:
        case = case_of_run(order, facts, nodes, gpus)
        if case is None or not phases.step:
            return None
        guess = forecast(case, look_for_fix=False)
    except Problem:
        return None
    measured = phases.step / 1e3
    term = _off(guess.terms, guess.seconds, guess.high, measured, phases, ledger)
    return Foreseen(guess.seconds, guess.low, guess.high, measured, case.basis.name, term, _ADVICE.get(term, ""))


def _off(
    terms: Mapping[str, float], predicted: float, high: float, measured: float, phases: Phases, ledger: Mapping[str, float]
) -> str:  # fmt: skip
    """Name what makes a run slower than predicted: the largest excess that was measured, else computing."""
    spent = sum(ledger.values())
    lost = sum(ledger.get(name, 0.0) for name in ("lost", "restart", PAUSED, "hang"))
    if measured <= high:
        return "restarts" if spent and lost > 0.1 * spent else ""
    network = sum(terms.get(name, 0.0) for name in NETWORK)
    excess: Dict[str, float] = {
        "input": (phases.input or 0.0) / 1e3,
        "communication": (phases.communication or 0.0) / 1e3 - network,
        "stragglers": (phases.waiting or 0.0) / 1e3,
    }
    name = max(excess, key=lambda each: excess[each])
    return name if excess[name] > 0.3 * (measured - predicted) else "compute"


def seen_of(run: Run, figures: Figures) -> Optional[Seen]:
    """Return a run as evidence for later predictions; None if its model, GPUs or step time are unknown."""
    foreseen = figures.foreseen
    if foreseen is None or figures.emulated:
        return None
    case = case_of_run(run.order(), run.facts(0), figures.nodes, figures.gpus)
    return Seen(run.run_id, case, foreseen.predicted, foreseen.measured) if case else None


def remember_run(run: Run, figures: Figures, environ: Mapping[str, str]) -> None:
    """Record the outcome of a prediction for later predictions on such GPUs."""
    seen = seen_of(run, figures)
    if seen is not None:
        remember(seen, environ)
