"""A run beside its prediction: the part of a step that is off, judged by measurements, and what to do next."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.machine.model import Facts
from drumbeat.predict.cost import NETWORK
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.job import case_of_command
from drumbeat.predict.past import Seen, remember
from drumbeat.report.figures import Figures, Foreseen, Phases
from drumbeat.runfolder.run import Run

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
    lost = sum(ledger.get(name, 0.0) for name in ("lost", "restart", "hang"))
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
