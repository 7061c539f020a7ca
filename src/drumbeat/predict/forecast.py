"""One prediction: from a model, its layout and a machine to the step time by terms, memory with a verdict, and the interval."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict import cost, shapes
from drumbeat.predict.cost import Constants, Layout, Work, plain
from drumbeat.predict.machine import PRODUCTS, UNCALIBRATED, Basis, Cluster, Framework, interval, machine_of, states_of
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
                "libraries": cost.CONTEXT + cost.COMMUNICATOR * (layout.dp > 1),
            }
        ]
    beside = cost.libraries(model, layout, software)
    return [{**parts, "libraries": beside} for parts in cost.stages(model, case.work, layout, software, states)]


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


# From a step's time to a whole run: goodput, time, GPU-hours, energy, money, and the time limit to request.
#
# Goodput (effective training time ratio, ETTR) is the share of a run's time that contributes to the model: the rest is saving
# checkpoints, repeating work lost in failures, and restarting. `goodput` is the only place that computes it, for predicted,
# measured and simulated runs.


# 419 unexpected interruptions of 16,384 GPUs in 54 days (Llama 3, arXiv:2407.21783, section 3.3.4).
GPU_HOURS_PER_FAILURE = 50_000.0
FAILURE_SOURCE = "Llama 3's 419 interruptions in 54 days on 16,384 GPUs"


@dataclass(frozen=True)
class Goodput:
    """Shares of a run's time; they add up to 1."""

    share: float  # contributes to the model
    saving: float
    repeated: float
    restarting: float


def goodput(
    checkpoint: float, interval: float, restart: float, failures: float, repeated: Optional[float] = None
) -> Goodput:
    """Return the shares of a run's time.

    `checkpoint`: seconds that training stops for each one; `interval`: seconds of training between two; `restart`: seconds
    from a failure to the next step; `failures`: per second of the run; `repeated`: seconds of work lost in each failure, half
    a checkpoint interval if not measured. A run that fails faster than it restarts has a share of 0.
    """
    cycle = interval + checkpoint
    undone = (cycle / 2 if failures > 0 else 0.0) if repeated is None else repeated
    lost = failures * (undone + restart)
    moving = max(0.0, 1 - lost)  # training or saving
    saving = moving * checkpoint / cycle if 0 < cycle < math.inf else 0.0
    scale = failures / max(1.0, lost)
    return Goodput(moving - saving, saving, scale * undone, scale * restart)


def best_interval(checkpoint: float, failures: float) -> float:
    """Return the optimal seconds of training between checkpoints (Young and Daly)."""
    return math.sqrt(2 * checkpoint / failures) if failures > 0 else math.inf


@dataclass(frozen=True)
class Reliability:
    """Seconds between failures of the whole job, and the cost of each failure and each checkpoint."""

    between_failures: float
    checkpoint: float = 30.0  # seconds that training stops for a checkpoint
    restart: float = 300.0  # seconds until it trains again
    source: str = FAILURE_SOURCE

    @property
    def goodput(self) -> Goodput:
        """Return the shares of the time with the best checkpoint interval."""
        failures = 1 / self.between_failures
        return goodput(self.checkpoint, best_interval(self.checkpoint, failures), self.restart, failures)


def reliability_of(
    gpus: int,
    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE,
    source: str = FAILURE_SOURCE,
    checkpoint: float = 30.0,
    restart: float = 300.0,
) -> Reliability:
    return Reliability(gpu_hours_per_failure * 3600 / max(1, gpus), checkpoint, restart, source)


@dataclass(frozen=True)
class Whole:
    """A whole run over a number of tokens (or images)."""

    units: float
    seconds: float
    low: float
    high: float
    gpu_hours: float
    goodput: float
    kwh: Optional[float]
    money: Optional[float]
    limit: float  # seconds to request from the scheduler


def whole_run(units: float, found: Forecast, r: Reliability, price: Optional[float]) -> Whole:
    """Return the cost of `units` at the predicted step time."""
    share = max(1e-3, r.goodput.share)
    steps = units / found.per_step / share
    hours = found.case.gpus * steps * found.seconds / 3600
    # GPUs in training draw about 0.85 of their board's power; a node's other parts add about half of that again.
    watts = found.case.cluster.watts * 0.85 * 1.5
    kwh = hours * watts / 1000 if watts else None
    money = hours * price if price is not None else None
    low, high = steps * found.low, steps * found.high
    # The upper end of the interval, ten minutes for the start, and the last checkpoint.
    return Whole(units, steps * found.seconds, low, high, hours, share, kwh, money, high + 600 + r.checkpoint)


def affordable(gpu_hours: float, seconds: float, found: Forecast, r: Reliability) -> float:
    """Return the tokens (or images) that a budget of GPU-hours pays for at a step of `seconds`."""
    return gpu_hours * 3600 / found.case.gpus * r.goodput.share / seconds * found.per_step


def limit_words(seconds: float) -> str:
    """Format a time limit for batch systems: D-HH:MM:00, rounded up to ten minutes."""
    minutes = math.ceil(seconds / 600) * 10
    days, rest = divmod(int(minutes), 1440)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock
