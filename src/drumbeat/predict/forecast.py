"""One prediction: a model, its layout and a machine in; step time with its terms, memory with a verdict, and the interval out."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict import cost, memory, plain, shapes
from drumbeat.predict.cost import Constants, Layout, Work
from drumbeat.predict.frameworks import Framework, states_of
from drumbeat.predict.machine import PRODUCTS, UNCALIBRATED, Basis, Cluster, interval, machine_of
from drumbeat.predict.shapes import ConvNet, Model


@dataclass(frozen=True)
class Case:
    """Everything that a prediction follows from."""

    model: Union[Model, ConvNet]
    work: Work
    layout: Layout
    framework: Framework
    cluster: Cluster
    precision: str
    constants: Constants
    basis: Basis = UNCALIBRATED

    @property
    def gpus(self) -> int:
        a = self.layout
        return int(a.tp * a.pp * a.cp * a.dp)


@dataclass(frozen=True)
class Forecast:
    case: Case
    seconds: float
    low: float  # 90 % interval of the step's seconds
    high: float
    terms: Dict[str, float]
    stages: List[Dict[str, float]]  # bytes per pipeline stage, by part
    memory: float  # bytes of the largest stage, libraries included
    verdict: str  # fits, at risk, does not fit
    fix: str  # the cheapest change that makes it fit; empty where it fits

    @property
    def unit(self) -> str:
        return "images" if isinstance(self.case.model, ConvNet) else "tokens"

    @property
    def per_step(self) -> float:
        """Tokens (or images) of one step."""
        work = self.case.work
        return float(work.batch if isinstance(self.case.model, ConvNet) else work.batch * work.seq)

    @property
    def rate(self) -> float:
        return self.per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs by `shapes.CONVENTION` over the data sheet's dense peak of the products' precision."""
        from drumbeat.machine.peaks import peak_of

        peak = peak_of(self.case.cluster.gpu)
        assert peak is not None
        kind = PRODUCTS.get(self.case.precision, self.case.precision)
        model = self.case.model
        flops = (
            3 * model.forward_flops if isinstance(model, ConvNet) else shapes.flops_per_token(model, self.case.work.seq)
        )
        return float(self.rate * flops / self.case.gpus / (peak.tflops[kind] * 1e12))


def forecast(case: Case, look_for_fix: bool = True) -> Forecast:
    """Predict one case. Raises a Problem for a layout that cannot be."""
    check(case)
    machine = machine_of(case.cluster, case.precision)
    model, work, layout, software = case.model, case.work, case.layout, case.framework.software
    if isinstance(model, ConvNet):
        terms = cost.conv_step(model, work, layout, software, machine, case.constants, plain)
    else:
        terms = cost.step(model, work, layout, software, machine, case.constants, plain)
    seconds = terms.pop("total")
    low, high = interval(seconds, case.basis)
    stages = stage_bytes(case)
    most = max(sum(parts.values()) for parts in stages)
    verdict = judge(case, most)
    fix = find_fix(case) if verdict != "fits" and look_for_fix else ""
    terms = {name: value for name, value in terms.items() if abs(value) > 1e-4 * seconds}
    return Forecast(case, seconds, low, high, terms, stages, most, verdict, fix)


def stage_bytes(case: Case) -> List[Dict[str, float]]:
    """Return the bytes of each pipeline stage by part."""
    model, layout = case.model, case.layout
    states = states_of(case.framework, case.precision, layout.zero >= 3)
    software = case.framework.software
    if isinstance(model, ConvNet):
        wide = 4 if case.precision in ("fp32", "tf32") else 2
        return [
            {
                "weights": 4 * model.parameters,
                "gradients": 4 * model.parameters,
                "optimizer": 4 * model.parameters,
                "activations": wide * layout.micro * model.activations,
                "working set": 0.02 * wide * layout.micro * model.activations,
                "libraries": memory.CONTEXT + memory.COMMUNICATOR * (layout.dp > 1),
            }
        ]
    beside = memory.libraries(model, layout, software)
    return [{**parts, "libraries": beside} for parts in memory.stages(model, case.work, layout, software, states)]


def judge(case: Case, needed: float) -> str:
    """Return fits, at risk or does not fit: what an estimate of this framework is worth decides the bands."""
    share = needed / (case.cluster.memory_gib * 2**30)
    if share <= case.framework.fits:
        return "fits"
    return "at risk" if share <= case.framework.fails else "does not fit"


def check(case: Case) -> None:
    """Refuse a layout that does not divide."""
    a, work, model = case.layout, case.work, case.model
    if isinstance(model, ConvNet):
        if a.tp * a.pp * a.cp > 1:
            raise Problem(
                f"{model.name}: only data parallelism is modelled for convolutional networks",
                "leave tp, pp and cp at 1",
            )
    else:
        rules: List[Tuple[int, int, str]] = [
            (int(model.layers), int(a.pp), "layers by pp"),
            (int(model.heads), int(a.tp), "heads by tp"),
            (int(work.seq), int(a.cp), "tokens of a sequence by cp"),
        ]
        if model.experts:
            rules.append((int(model.experts), int(a.ep), "experts by ep"))
            rules.append((int(a.dp * a.cp), int(a.ep), "replicas (dp x cp) by ep"))
        for whole, part, what in rules:
            if part < 1 or whole < 1 or (whole % part and not (what == "layers by pp" and whole > part)):
                raise Problem(
                    f"{whole} {what.split(' by ')[0]} do not divide by {what.split(' by ')[1]} {part}",
                    "choose another degree",
                )
    if a.micro < 1 or work.batch < 1:
        raise Problem(f"batch {work.batch:g}, micro-batch {a.micro:g}", "both must be at least 1")
    if work.batch % a.dp:
        raise Problem(
            f"a batch of {work.batch:g} does not divide by {a.dp:g} replicas", "choose another batch or layout"
        )
    if (work.batch // a.dp) % a.micro:
        raise Problem(
            f"{work.batch // a.dp:g} samples per replica do not divide by a micro-batch of {a.micro:g}",
            "choose another micro-batch",
        )


def find_fix(case: Case) -> str:
    """Return the change that makes a case fit and costs least time, in words."""
    a = case.layout
    tries: List[Tuple[str, Layout]] = []
    share = int(case.work.batch // a.dp)
    for micro in sorted({n for n in (1, 2, 4, int(a.micro) // 2) if 0 < n < a.micro and share % n == 0}, reverse=True):
        tries.append((f"micro-batch {micro}", dataclasses.replace(a, micro=micro)))
    if not isinstance(case.model, ConvNet):
        for level, name in ((1, "selective"), (2, "full")):
            if level > a.recompute:
                tries.append((f"recompute {name}", dataclasses.replace(a, recompute=level)))
                if a.micro > 1:
                    tries.append(
                        (f"recompute {name} and micro-batch 1", dataclasses.replace(a, recompute=level, micro=1))
                    )
        for zero in case.framework.stages:
            if zero > a.zero and a.dp * a.cp > 1:
                tries.append((f"shard the states over the replicas (ZeRO-{zero})", dataclasses.replace(a, zero=zero)))
        wider = [each for each in _wider(a) if each[0] in case.framework.degrees]
        least = min((zero for zero in case.framework.stages if zero), default=0)
        tries += [(f"{name} {value}", changed) for name, value, changed in wider]
        tries += [
            (
                f"{name} {value}, recompute full and ZeRO-{least}",
                dataclasses.replace(changed, recompute=2, zero=max(least, a.zero)),
            )
            for name, value, changed in wider
        ]
    best: Optional[Tuple[float, str]] = None
    for words, layout in tries:
        try:
            found = forecast(dataclasses.replace(case, layout=layout), look_for_fix=False)
        except Problem:
            continue
        if found.verdict == "fits" and (best is None or found.seconds < best[0]):
            best = (found.seconds, words)
    if best:
        return best[1]
    lean = a if isinstance(case.model, ConvNet) else dataclasses.replace(a, micro=1, recompute=2)
    smallest = forecast(dataclasses.replace(case, layout=lean), look_for_fix=False)
    sample = max(parts.get("activations", 0) + parts.get("logits", 0) for parts in smallest.stages)
    states = max(sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer")) for parts in smallest.stages)
    return "shorter sequences, or a smaller model" if sample > states else "more GPUs, or a smaller model"


def _wider(a: Layout) -> List[Tuple[str, int, Layout]]:
    """Return layouts with twice, four or eight times the tensor or pipeline parallelism on the same GPUs."""
    found = []
    for times in (2, 4, 8):
        if a.dp % times == 0:
            found.append(("tp", int(a.tp * times), dataclasses.replace(a, tp=a.tp * times, dp=a.dp // times, sp=1)))
            found.append(("pp", int(a.pp * times), dataclasses.replace(a, pp=a.pp * times, dp=a.dp // times)))
    return found
