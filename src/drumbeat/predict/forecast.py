"""One prediction: from a model, its layout and a machine to the step time by terms, memory with a verdict, and the interval."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict import cost, memory, shapes
from drumbeat.predict.cost import Constants, Layout, Work, plain
from drumbeat.predict.frameworks import Framework, states_of
from drumbeat.predict.machine import PRODUCTS, UNCALIBRATED, Basis, Cluster, interval, machine_of
from drumbeat.predict.shapes import ConvNet, Model

ONLY_DATA_PARALLEL = "only data parallelism is modelled for convolutional networks"


@dataclass(frozen=True)
class Case:
    """Input of a prediction."""

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
        """Return the tokens (or images) of one step."""
        work = self.case.work
        return float(work.batch if isinstance(self.case.model, ConvNet) else work.batch * work.seq)

    @property
    def rate(self) -> float:
        return self.per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Return model FLOPs by `shapes.CONVENTION` over the data sheet's dense peak in the products' precision."""
        from drumbeat.machine.peaks import peak_of

        peak = peak_of(self.case.cluster.gpu)
        assert peak is not None
        kind = PRODUCTS.get(self.case.precision, self.case.precision)
        model, seq = self.case.model, self.case.work.seq
        flops = 3 * model.forward_flops if isinstance(model, ConvNet) else shapes.flops_per_token(model, seq)
        return float(self.rate * flops / self.case.gpus / (peak.tflops[kind] * 1e12))


def forecast(case: Case, look_for_fix: bool = True) -> Forecast:
    """Predict one case. Raises a Problem for an impossible layout."""
    check(case)
    machine = machine_of(case.cluster, case.precision)
    model, work, layout, software = case.model, case.work, case.layout, case.framework.software
    step: Any = cost.conv_step if isinstance(model, ConvNet) else cost.step
    terms: Dict[str, float] = step(model, work, layout, software, machine, case.constants, plain)
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
    """Return fits, at risk or does not fit: the accuracy of a framework's estimates sets the limits."""
    share = needed / (case.cluster.memory_gib * 2**30)
    if share <= case.framework.fits:
        return "fits"
    return "at risk" if share <= case.framework.fails else "does not fit"


def check(case: Case) -> None:
    """Refuse a layout whose degrees do not divide the model or the batch."""
    a, work, model = case.layout, case.work, case.model
    if isinstance(model, ConvNet):
        if a.tp * a.pp * a.cp > 1:
            raise Problem(f"{model.name}: {ONLY_DATA_PARALLEL}", "leave tp, pp and cp at 1")
    else:
        rules = [
            (model.layers, "layers", a.pp, "pp"),
            (model.heads, "heads", a.tp, "tp"),
            (work.seq, "tokens of a sequence", a.cp, "cp"),
        ]
        if model.experts:
            rules += [(model.experts, "experts", a.ep, "ep"), (a.dp * a.cp, "replicas (dp x cp)", a.ep, "ep")]
        for whole, what, part, degree in rules:
            # Stages may differ by a layer.
            if part < 1 or whole < 1 or (whole % part and not (degree == "pp" and whole > part)):
                words = f"{int(whole)} {what} do not divide by {degree} {int(part)}"
                raise Problem(words, "choose another degree")
    share = work.batch // a.dp
    if a.micro < 1 or work.batch < 1:
        raise Problem(f"batch {work.batch:g}, micro-batch {a.micro:g}", "both must be at least 1")
    if work.batch % a.dp:
        words = f"a batch of {work.batch:g} does not divide by {a.dp:g} replicas"
        raise Problem(words, "choose another batch or layout")
    if share % a.micro:
        words = f"{share:g} samples per replica do not divide by a micro-batch of {a.micro:g}"
        raise Problem(words, "choose another micro-batch")


def find_fix(case: Case) -> str:
    """Return, in words, the change that makes a case fit and costs least time."""
    a = case.layout
    share = int(case.work.batch // a.dp)
    sizes = {n for n in (1, 2, 4, int(a.micro) // 2) if 0 < n < a.micro and share % n == 0}
    changes: List[Tuple[str, Dict[str, Any]]] = [
        (f"micro-batch {n}", {"micro": n}) for n in sorted(sizes, reverse=True)
    ]
    if not isinstance(case.model, ConvNet):
        for level, name in ((1, "selective"), (2, "full")):
            if level > a.recompute:
                changes.append((f"recompute {name}", {"recompute": level}))
                changes += [(f"recompute {name} and micro-batch 1", {"recompute": level, "micro": 1})] * (a.micro > 1)
        stages = [zero for zero in case.framework.stages if zero > a.zero and a.dp * a.cp > 1]
        changes += [(f"shard the states over the replicas (ZeRO-{zero})", {"zero": zero}) for zero in stages]
        wider = [(words, change) for degree, words, change in _wider(a) if degree in case.framework.degrees]
        least = min((zero for zero in case.framework.stages if zero), default=0)
        lean_states = {"recompute": 2, "zero": max(least, a.zero)}
        changes += wider
        changes += [(f"{words}, recompute full and ZeRO-{least}", {**change, **lean_states}) for words, change in wider]
    best: Optional[Tuple[float, str]] = None
    for words, change in changes:
        try:
            found = forecast(dataclasses.replace(case, layout=dataclasses.replace(a, **change)), look_for_fix=False)
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


def _wider(a: Layout) -> Iterator[Tuple[str, str, Dict[str, Any]]]:
    """Yield changes to twice, four or eight times the tensor or pipeline parallelism on the same GPUs."""
    for times in (times for times in (2, 4, 8) if a.dp % times == 0):
        dp = a.dp // times
        yield "tp", f"tp {int(a.tp * times)}", {"tp": a.tp * times, "dp": dp, "sp": 1}
        yield "pp", f"pp {int(a.pp * times)}", {"pp": a.pp * times, "dp": dp}
