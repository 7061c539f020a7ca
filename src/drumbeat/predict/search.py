"""Evaluate all layouts of a model on a number of GPUs at once: memory first, then time for those that fit. Needs numpy."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict import cost
from drumbeat.predict.cost import Layout, need_numpy, take
from drumbeat.predict.forecast import ONLY_DATA_PARALLEL, Case, Forecast, forecast
from drumbeat.predict.machine import machine_of, states_of
from drumbeat.predict.shapes import ConvNet, Model

SAME = 0.03  # predicted times closer than this are considered equal
_PIECE = 16384  # rows computed together, so that they fit in the processor's cache


@dataclass(frozen=True)
class Ranking:
    layouts: Any  # Layout of arrays, best first
    seconds: Any
    bytes: Any
    tried: int
    fitting: int


def grid(case: Case) -> Layout:
    """Return every layout that divides the GPUs, the model and the batch of a case, as arrays."""
    numpy = need_numpy()
    model = _transformer(case)
    gpus, batch = case.gpus, int(case.work.batch)
    divisors = numpy.array([n for n in range(1, min(gpus, 4096) + 1) if gpus % n == 0])
    heads, kv = int(model.heads), int(model.kv_heads)
    can = case.framework.degrees
    tps = [n for n in divisors if heads % n == 0 and (kv % n == 0 or n % kv == 0) and n <= (64 if "tp" in can else 1)]
    pps = [n for n in divisors if model.layers % n == 0 and n <= (model.layers if "pp" in can else 1)]
    cps = [n for n in divisors if case.work.seq % (2 * n) == 0 and n <= (64 if "cp" in can else 1)] or [1]
    most = int(model.experts) if model.experts and "ep" in can else 1
    eps = [n for n in range(1, most + 1) if n == 1 or model.experts % n == 0]
    vps = [n for n in range(1, (24 if "vp" in can else 1) + 1) if model.layers % n == 0]
    zeros = list(case.framework.stages)
    micros = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if batch % n == 0]
    axes = numpy.meshgrid(tps, pps, cps, eps, vps, zeros, micros, [0, 1, 2], indexing="ij")
    tp, pp, cp, ep, vp, zero, micro, recompute = (axis.ravel().astype(numpy.float64) for axis in axes)
    fits = gpus % (tp * pp * cp) == 0
    dp = numpy.where(fits, gpus / (tp * pp * cp), 1)
    share = batch / dp
    fits &= (batch % dp == 0) & (share % micro == 0)
    fits &= numpy.where(pp > 1, (model.layers % (pp * vp) == 0) & ((vp == 1) | (share / micro % pp == 0)), vp == 1)
    if case.layout.flight == 1:  # V-shaped schedules have two chunks per stage
        fits &= (pp == 1) | (vp == 2)
    fits &= (dp * cp % ep == 0) & ~((zero > 0) & (dp * cp == 1)) & ~((zero == 3) & (pp > 1))
    rows = numpy.flatnonzero(fits)
    sp = (tp > 1) * float(case.framework.name != "megatron-classic")
    bubble, flight = case.layout.bubble, case.layout.flight
    return take(Layout(tp, pp, cp, ep, dp, vp, zero, numpy.zeros_like(tp), micro, recompute, sp, bubble, flight), rows)  # type: ignore[no-any-return]


def rank(case: Case, layouts: Layout) -> Ranking:
    """Compute memory of all layouts and time of those that fit; return the latter, fastest first."""
    numpy = need_numpy()
    model = _transformer(case)
    machine = machine_of(case.cluster, case.precision)
    room = case.framework.fits * case.cluster.memory_gib * 2**30
    count = len(layouts.tp)
    seconds = numpy.full(count, numpy.inf)
    needed = numpy.zeros(count)
    plain, sharded = states_of(case.framework, case.precision, False), states_of(case.framework, case.precision, True)
    software = case.framework.software
    for start in range(0, count, _PIECE):
        part = take(layouts, slice(start, start + _PIECE))
        whole = cost.peak(model, case.work, part, software, plain, numpy)
        if plain != sharded:
            whole = numpy.where(part.zero >= 3, cost.peak(model, case.work, part, software, sharded, numpy), whole)
        whole = whole + cost.libraries(model, part, software, numpy)
        needed[start : start + _PIECE] = whole
        fitting = numpy.flatnonzero(whole <= room)
        if len(fitting):
            found = cost.step(model, case.work, take(part, fitting), software, machine, case.constants, numpy)["total"]
            seconds[start + fitting] = found
    order = numpy.argsort(seconds, kind="stable")
    fitting = int(numpy.isfinite(seconds).sum())
    order = order[:fitting]
    return Ranking(take(layouts, order), seconds[order], needed[order], count, fitting)


def best(case: Case, many: int = 10) -> Tuple[List[Case], Ranking]:
    """Return the best layouts as cases, without those that differ from a better one only in irrelevant ways."""
    ranking = rank(case, grid(case))
    chosen: List[Case] = []
    seen = set()
    searched = [field.name for field in dataclasses.fields(Layout) if field.name not in ("bubble", "flight")]
    for i in range(len(ranking.seconds)):
        numbers = {name: float(getattr(ranking.layouts, name)[i]) for name in searched}
        values = {name: int(number) if number.is_integer() else number for name, number in numbers.items()}
        layout = dataclasses.replace(case.layout, **values)
        key = (layout.tp, layout.pp, layout.ep, layout.vp, layout.zero, layout.recompute, layout.micro / layout.cp)
        if key not in seen:
            seen.add(key)
            chosen.append(dataclasses.replace(case, layout=layout))
        if len(chosen) == many:
            break
    return chosen, ranking


def usual(case: Case, winner: float, best_layout: Layout) -> List[str]:
    """Explain why the usual first choices are not the best layouts. `winner`: seconds of the best."""
    gpus, node, zero = case.gpus, min(case.gpus, case.cluster.gpus_per_node), min(1, case.framework.stages[-1])
    tries = {
        "data parallelism alone": Layout(dp=gpus, zero=1 if gpus > 1 and 1 in case.framework.stages else 0),
        "sharded data parallelism (ZeRO-3, FSDP)": Layout(dp=gpus, zero=3),
        "tensor parallelism over a node": Layout(tp=node, dp=gpus // node, zero=zero, sp=1),
        "pipeline over nodes, tensor parallelism inside": Layout(tp=node, pp=max(1, gpus // node), dp=1, sp=1),
    }
    same = f"the best layout is one, with micro-batch {int(best_layout.micro)} (first row)"
    return [
        f"{name}: {same if _kind(layout) == _kind(best_layout) else _why_not(case, layout, winner)}"
        for name, layout in tries.items()
    ]


def _kind(layout: Layout) -> Tuple[float, ...]:
    """Return the key of a layout's family: the states it shards, and how it splits the model."""
    return (layout.zero, *(float(getattr(layout, name)) for name in ("tp", "pp", "cp", "ep", "dp")))


def _why_not(case: Case, layout: Layout, winner: float) -> str:
    found: Optional[Forecast] = None
    for recompute in (0, 1, 2):
        schedule = {"bubble": case.layout.bubble, "flight": case.layout.flight}
        changed = dataclasses.replace(layout, recompute=recompute, **schedule)
        try:
            found = forecast(dataclasses.replace(case, layout=changed), look_for_fix=False)
        except Problem as problem:
            return f"not possible: {problem.what}"
        if found.verdict == "fits":
            break
    assert found is not None
    if found.verdict != "fits":
        return f"{found.verdict}: {found.memory / 2**30:.0f} of {case.cluster.memory_gib:.0f} GiB"
    if layout.zero not in (*case.framework.stages, 0, 1):
        return f"{case.framework.name} cannot shard this way"
    slower = found.seconds / winner - 1
    if slower <= SAME:
        return f"{slower:+.0%}: as good, too close to tell apart"
    busy = ("products", "attention", "element-wise")
    lost = {key: value for key, value in found.terms.items() if key not in busy}
    most = max(lost, key=lambda key: lost[key]) if lost else "nothing"
    return f"{slower:+.0%}; largest loss: {most}, {lost.get(most, 0.0) / found.seconds:.0%} of the step"


def pareto(points: Sequence[Tuple[float, float]]) -> List[bool]:
    """Return, for each (time, GPU-hours) point, true if no other point is better in one and no worse in the other."""
    return [not any((t <= a and g < b) or (t < a and g <= b) for t, g in points) for a, b in points]


def simplest(layouts: Sequence[Layout], seconds: Sequence[float]) -> int:
    """Return the index of the recommended layout: among the fastest, the one that splits the model least."""
    near = [i for i in range(len(layouts)) if seconds[i] <= (1 + SAME) * min(seconds)]
    return min(near, key=lambda i: (layouts[i].pp, layouts[i].tp, layouts[i].cp, layouts[i].micro, seconds[i]))


def _transformer(case: Case) -> Model:
    if isinstance(case.model, ConvNet):
        raise Problem(f"{case.model.name}: {ONLY_DATA_PARALLEL}", "leave out --search")
    return case.model
