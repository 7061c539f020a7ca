"""Everything that a report shows about one run, as data. None means `not measured`: nothing here is guessed."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import field
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.progress import speed

Point = Tuple[float, float]  # seconds since the start, value
Span = Tuple[int, int, float, float, float, int]  # first and last step, least, median, most, slowest rank
LOSS, VALIDATION = "loss", "validation loss"  # titles of curves that share a chart
PER = (" per device", " per rank")  # how the unit of a stated rate ends that is not the whole job's
MEAN_STATED, OWN_SUMMARY = "mean of what the program prints", "the program's own summary"  # how a speed is known
NOT_RECORDED = "how it ended is not recorded"  # the outcome of a log


@dataclass(frozen=True)
class Speed:
    """Throughput of the whole job. The spread is that of the intervals between two reports."""

    value: float
    unit: str  # tokens/s, samples/s, steps/s
    how: str  # where the value comes from
    intervals: int = 0
    low: Optional[float] = None  # 10 % of the intervals are slower
    median: Optional[float] = None
    high: Optional[float] = None  # 10 % are faster
    error: Optional[float] = None  # half of the 95 % interval of the mean; None: too few intervals
    no_spread: str = ""  # why there is none
    rough: bool = False  # measured over a short time between printed lines
    hung: float = 0.0  # seconds in which the run had paused; a speed that is not the program's own leaves them out

    def __str__(self) -> str:
        return f"{speed(self.value, self.unit, rough=self.rough)} ({self.how})"


def of_whole_job(unit: str, how: str, devices: Optional[int], ranks: Optional[int]) -> Tuple[int, str, str]:
    """Return the factor from a program's stated speed to that of the whole job, its unit, and how it is known."""
    for words, many in zip(PER, (devices, ranks)):
        if unit.endswith(words) and many:
            return many, unit[: -len(words)], f"the program's own figure{words}, times {many}"
    return 1, unit, how


@dataclass(frozen=True)
class Utilisation:
    """MFU = throughput x FLOPs per token or sample / (GPUs x dense peak of the dtype)."""

    mfu: float
    tflops_per_gpu: float
    flops: float  # per token or sample
    formula: str
    dtype: str
    peak_tflops: float
    gpu: str
    source: str  # of the peak


@dataclass(frozen=True)
class GpuUse:
    """Use of the GPUs that the job could open, sampled every few seconds from the start of the agents to their end."""

    samples: int
    busy: Optional[float] = None  # mean, per cent of the time with a kernel running
    power_w: Optional[float] = None  # mean of one GPU
    memory_gib: Optional[float] = None  # most of one GPU
    temperature: Optional[float] = None  # highest, degrees Celsius
    energy_kwh: Optional[float] = None  # of all GPUs, over the whole run
    energy_how: str = ""
    joules_per_unit: Optional[float] = None  # per token or sample, over the training steps
    unit: str = ""  # token, sample
    slowed: Dict[str, float] = field(default_factory=dict)  # reason -> share of the time below the full clock for it
    sampled_nodes: Optional[int] = None  # whose samples were read, where that is not all of them


@dataclass(frozen=True)
class Traffic:
    """Bytes that passed one kind of port, over all hosts: everything on the host, not only this job."""

    ports: int
    received: float
    sent: float


@dataclass(frozen=True)
class Slowest:
    rank: int
    node: int
    ms: float
    how: str


@dataclass(frozen=True)
class Steps:
    """Seconds per step of all ranks, over spans of steps. Its slowest rank is the one that stands out for the longest time."""

    least: float
    median: float
    most: float
    spans: Tuple[Span, ...]
    slowest: Optional[int] = None
    first: int = 0  # to
    last: int = 0  # it stands out in these steps,
    seconds: float = 0.0  # in which it needs this long


@dataclass(frozen=True)
class Phases:
    """Milliseconds of one step; None: not measured."""

    step: Optional[float] = None
    input: Optional[float] = None  # waiting for data, on the lowest rank
    communication: Optional[float] = None  # not hidden behind computing, on the rank that waits least
    waiting: Optional[float] = None  # mean over ranks above that: for slower ranks
    how: str = ""


@dataclass(frozen=True)
class Note:
    """A finding or a verdict, in one line."""

    severity: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Setting:
    """Setting of a run: what was run, on what. Runs are compared by it. Unknown values are empty."""

    command: str = ""
    precision: str = ""
    layout: str = ""
    code: str = ""  # commit, and a digest of what differs from it
    image: str = ""
    software: Dict[str, str] = field(default_factory=dict)
    hardware: Dict[str, str] = field(default_factory=dict)
    site: str = ""
    outputs: Tuple[str, ...] = ()  # words of the command that name a file or folder which the run wrote


@dataclass(frozen=True)
class Foreseen:
    """A step as it was predicted from the command and the GPUs, beside the measured one."""

    predicted: float  # seconds
    low: float  # 90 % interval
    high: float
    measured: float
    basis: str
    term: str  # what is off; empty: nothing
    advice: str = ""


@dataclass(frozen=True)
class Figures:
    name: str
    source: str  # run folder or file
    outcome: str
    exit_code: Optional[int] = None
    end: str = ""  # how it ended, in words
    created: Optional[float] = None  # seconds since 1970
    nodes: Optional[int] = None
    ranks: Optional[int] = None
    gpus: Optional[int] = None  # of all nodes; 0: none
    cores: Optional[int] = None  # distinct ones that its ranks had; None: not known
    threads: Optional[int] = None  # OMP_NUM_THREADS of all ranks together; None: not known
    one_world: bool = False  # its ranks were seen to be one training, for certain
    world: str = ""  # why its ranks are not the one training that was planned
    world_unproven: str = ""  # what was seen of its world, where that does not prove one training
    emulated: bool = False
    seconds: Optional[float] = None  # without the time in a queue
    gpu_hours: Optional[float] = None
    training_s: Optional[float] = None  # as the program says, or from its first to its last step
    ledger: Dict[str, float] = field(default_factory=dict)
    training_share: Optional[float] = None
    attempts: int = 1
    step: Optional[int] = None
    steps: Optional[int] = None
    resumed_from: Optional[int] = None  # step of the checkpoint that its first attempt began with
    starts: int = 1  # of the job: more where it was queued again
    step_is: str = ""  # `epoch` where the program counts nothing but epochs
    steps_of: str = ""  # stage, `epoch or stage`: where the step number begins anew with each of them
    epoch: Optional[float] = None  # the last one, and the last learning rate, of a file
    lr: Optional[float] = None
    loss: Optional[Tuple[float, float]] = None  # first, last finite one
    no_speed: str = ""  # why the speed is not known
    loss_trend: str = ""  # in words, where the first and the last loss alone mislead
    loss_not_finite: str = ""  # the loss reported last, where it is nan, inf or -inf, and since which step
    validation: Optional[Tuple[float, float]] = None
    validation_not_finite: str = ""
    validation_measures: Dict[str, float] = field(
        default_factory=dict
    )  # beside its loss, by the names that are printed
    accuracy: Optional[float] = None
    target: Optional[float] = None  # accuracy that the command asks for
    target_reached: Optional[bool] = None
    speed: Optional[Speed] = None
    batch: Optional[float] = None  # tokens or samples of one step, all ranks
    batch_unit: str = ""
    utilisation: Optional[Utilisation] = None
    no_utilisation: str = ""  # why there is no MFU
    gpu: Optional[GpuUse] = None
    network: Dict[str, Traffic] = field(default_factory=dict)  # ethernet, rdma
    network_why: str = ""  # why nothing is measured of it
    slowest: Optional[Slowest] = None
    no_slowest: str = ""
    steps_by_rank: Optional[Steps] = None
    phases: Phases = field(default_factory=Phases)
    foreseen: Optional[Foreseen] = None
    notes: Tuple[Note, ...] = ()
    setting: Setting = field(default_factory=Setting)
    curves: Dict[str, List[Point]] = field(default_factory=dict)  # title with its unit -> points
    steps_at: List[Point] = field(default_factory=list)  # seconds as in the curves, step made then; empty: not known

    def losses_by_step(self) -> Dict[str, List[Point]]:
        """Return the curves of the losses over the steps; over seconds if the times of steps are not known."""
        found = {name: self.curves[name] for name in (LOSS, VALIDATION) if name in self.curves}
        if len(self.steps_at) < 2:
            return found
        return {name: [(_step_at(t, self.steps_at), value) for t, value in each] for name, each in found.items()}

    @property
    def size(self) -> Optional[int]:
        """Size that scaling counts: GPUs, or ranks if there are none."""
        return self.gpus or self.ranks


def _step_at(t: float, steps: Sequence[Point]) -> float:
    """Return the step made at a time, between those that are known."""
    place = min(max(bisect_left(steps, (t, -1.0)), 1), len(steps) - 1)
    (before, first), (after, second) = steps[place - 1], steps[place]
    share = (t - before) / (after - before) if after > before else 1.0
    return round(first + (second - first) * min(max(share, 0.0), 1.0))
