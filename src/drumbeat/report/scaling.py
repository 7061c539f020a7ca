"""Several runs side by side: speed-up and efficiency against the smallest, and whether that comparison is fair. Pure.

Ideal is the baseline's throughput times the size's ratio. Strong scaling keeps the batch of one step, weak scaling keeps the
batch of one GPU; where the runs say neither, that is said.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from difflib import SequenceMatcher
from functools import reduce
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.report.figures import LOSS, NOT_RECORDED, VALIDATION, Figures, Phases, Point
from drumbeat.report.intervals import error_of_mean
from drumbeat.runfolder.progress import AS_PRINTED
from drumbeat.runfolder.state import GOING_ON

# Differences between runs besides their size. Pure.


# Options of a command that only change with the size of a job, or tell repetitions apart.
_SIZE_OR_SEED = regex(
    r"--?(?:nnodes|nproc[-_]per[-_]node|node[-_]rank|nodes|ranks[-_]per[-_]node|num[-_]processes|num[-_]machines|gpus"
    r"|(?:\w+[-_])?seed)(?:[= ]\S+)?|--(?:master|rdzv)[-_]\w+(?:[= ]\S+)?|(?<!\S)seed=\S+"
)
_MOST = 60  # characters of a value
_MINOR = ("cores",)  # part of a node's description that may change with its ranks


@dataclass(frozen=True)
class Difference:
    what: str
    values: Dict[str, str]  # run -> value; `not known` where it does not say
    breaks: bool  # the comparison does not measure scaling alone

    def text(self) -> str:
        groups: Dict[str, List[str]] = {}
        for run, value in self.values.items():
            groups.setdefault(value, []).append(run)
        return f"{self.what}: " + "; ".join(f"{value} ({', '.join(runs)})" for value, runs in groups.items())


def differences(runs: Sequence[Figures], batch_is_explained: bool) -> List[Difference]:
    """List differences between runs. `batch_is_explained`: it stays, or grows with the size. A value that only some runs
    tell counts as a possible difference."""
    found: List[Difference] = []
    if not batch_is_explained:
        batches = {run.name: f"{run.batch:,.0f} {run.batch_unit}" if run.batch else "" for run in runs}
        found += _difference("batch of a step", batches, breaks=True)
    settings = {run.name: run.setting for run in runs}
    for what in ("precision", "code", "image", "site"):
        values = {name: str(getattr(setting, what)) for name, setting in settings.items()}
        found += _difference(what, values, breaks=what != "site")
    commands = {run.name: work for run, work in zip(runs, _works(runs))}
    long = any(len(command) > _MOST for command in commands.values())
    found += _difference("command", cut_alike(commands) if long else commands, breaks=True)
    found += _each("hardware", {name: setting.hardware for name, setting in settings.items()})
    found += _each("software", {name: setting.software for name, setting in settings.items()})
    return found


def _works(runs: Sequence[Figures]) -> List[str]:
    """Return each command without what does not change its work: its size, its seed, and the names of what the runs wrote."""
    written = {word for run in runs for word in run.setting.outputs}
    plain = (" ".join("..." if word in written else word for word in run.setting.command.split()) for run in runs)
    return [" ".join(_SIZE_OR_SEED.sub("", command).split()) for command in plain]


def _each(room: str, values: Mapping[str, Mapping[str, str]]) -> List[Difference]:
    found: List[Difference] = []
    for name in sorted({key for each in values.values() for key in each}):
        told = {run: each.get(name, "") for run, each in values.items()}
        found += _difference(f"{room}: {name}", told, breaks=name not in _MINOR)
    if room == "software" and len(found) > 8:
        found = found[:8] + [Difference(f"software: {len(found) - 8} more packages", {}, True)]
    return found


def _difference(what: str, values: Mapping[str, str], breaks: bool) -> List[Difference]:
    """Return no difference if all values are the same, or none is known."""
    told = {value for value in values.values() if value}
    if len(set(values.values())) < 2:
        return []
    shown = {run: value if len(value) <= _MOST else value[: _MOST - 3] + "..." for run, value in values.items()}
    return [Difference(what, {run: value or "not known" for run, value in shown.items()}, breaks and len(told) > 1)]


def cut_alike(commands: Mapping[str, str]) -> Dict[str, str]:
    """Shorten commands: what all have in common becomes `...`, except the name of an option whose value differs."""
    words = {name: command.split() for name, command in commands.items()}
    told = [each for each in words.values() if each]
    if len({*map(tuple, told)}) < 2:
        return dict(commands)
    return {name: _own_words(each, reduce(_common, told)) for name, each in words.items()}


def _common(one: Sequence[str], other: Sequence[str]) -> Sequence[str]:
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return [word for block in blocks for word in one[block.a : block.a + block.size]]


def _own_words(words: Sequence[str], common: Sequence[str]) -> str:
    left, shown = list(common), [""]
    for word, value in zip(words, [*words[1:], ""]):
        shared = left[:1] == [word]
        del left[:shared]
        kept = not shared or (word.startswith("-") and left[:1] != [value])
        shown += [word] if kept else ["..."] * (shown[-1] != "...")
    return " ".join(shown[1:])


STRONG, WEAK, NEITHER, NOT_KNOWN, REPEATED = "strong", "weak", "neither", "not known", "repeated"
_SAME = 0.01  # batches closer than this are equal
_SUPER_LINEAR = 1.05  # efficiency above which it is questioned
_MORE_OF_THE_SAME = 1.2  # speed-up on the same cores above which it is questioned: a busy machine varies as much
_LONG_ENOUGH = 60.0  # seconds of training
NOT = "not measured"
FINISHED = "finished"
_SHARED = ("steps/s", "epochs/s")  # speeds that all ranks make together: the work in one is not told
_TELL_BATCH = "add metrics.report(step, samples=...) to the program (docs page metrics)"


@dataclass(frozen=True)
class Loss:
    """Time of one step beyond that of the ideal run; `ms` None: not measured."""

    kind: str  # communication, input, imbalance, compute
    ms: Optional[float]
    source: str  # the counter or profile it comes from


@dataclass(frozen=True)
class Row:
    name: str
    nodes: Optional[int]
    size: int  # GPUs, or ranks where there are none
    throughput: float
    speedup: Optional[float]  # None as the efficiency
    efficiency: Optional[float]  # None: steps per second of a batch that is not known say nothing about it
    error: Optional[float]  # half of the 95 % interval of the efficiency; None: too few reports, or too wide to tell
    ideal: Optional[float]
    seconds: Optional[float]
    accuracy: Optional[float]
    target_reached: Optional[bool]
    step_ms: Optional[float]
    lost_ms: Optional[float]  # of one step, against the ideal
    losses: Tuple[Loss, ...] = ()
    outcome: str = FINISHED  # how the run ended
    no_error: str = ""  # why there is no interval, or no efficiency
    loss: Optional[float] = None  # the last one that is finite
    source: str = ""  # its run folder or file


@dataclass(frozen=True)
class Repeats:
    """Runs of one size that differ in nothing but the seed: their means, with half of the 95 % interval."""

    runs: Tuple[str, ...]
    nodes: Optional[int]
    size: int
    throughput: float
    throughput_error: Optional[float]
    loss: Optional[float]
    loss_error: Optional[float]


@dataclass(frozen=True)
class Comparison:
    unit: str
    size_is: str  # GPUs, ranks
    baseline: str
    kind: str  # one of the words above
    kind_why: str
    rows: Tuple[Row, ...]
    differences: Tuple[Difference, ...] = ()
    questions: Tuple[str, ...] = ()
    left_out: Dict[str, str] = field(default_factory=dict)  # run -> why
    repeats: Tuple[Repeats, ...] = ()
    # Of variants: training loss, ... -> run -> curve.
    losses: Dict[str, Dict[str, List[Point]]] = field(default_factory=dict)
    counts: str = "step"  # what these curves are over

    @property
    def variants(self) -> bool:
        """Return true for runs of one size with other settings: they say nothing about scaling."""
        return self.kind == REPEATED and any(each.breaks for each in self.differences)

    @property
    def fair(self) -> Optional[bool]:
        """Return whether only the size differs; None for variants, which do not measure scaling."""
        return None if self.variants else not any(each.breaks for each in self.differences)


def compare(runs: Sequence[Figures]) -> Comparison:
    """Compare runs. Problem if fewer than two runs have a throughput in the same unit and a known size."""
    left_out = {run.name: why for run in runs for why in [_unusable(run)] if why}
    usable = [run for run in runs if run.name not in left_out]
    units = {run.speed.unit for run in usable if run.speed}
    if len({unit.replace(AS_PRINTED, "") for unit in units}) == 1:
        units = {min(units, key=len)}  # one program, which says of some runs whose figure it is
    if len(units) > 1:
        counted = {unit: [run.name for run in usable if run.speed and run.speed.unit == unit] for unit in sorted(units)}
        words = "; ".join(f"{unit} ({', '.join(names)})" for unit, names in counted.items())
        raise Problem(f"the runs count different things: {words}", f"compare those of one kind, or {_TELL_BATCH}")
    if len(usable) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        words = f"fewer than two runs can be compared ({why or 'give at least two'})"
        raise Problem(words, "drumbeat list shows the runs, and which of them have a speed")
    ordered = sorted(usable, key=lambda run: run.size or 0)  # those of one size as they were named
    baseline = ordered[0]
    kind, why = scaling_kind(ordered)
    rows = tuple(_row(run, baseline, kind) for run in ordered)
    batches = [run.batch for run in ordered if run.batch]
    same = kind == REPEATED and (len(batches) < len(ordered) or _equal(batches))
    found = differences(ordered, same or kind in (STRONG, WEAK))
    size_is = "GPUs" if all(run.gpus for run in ordered) else "ranks"
    questions = tuple(_questions(rows, ordered, kind))
    repeats = tuple(repeated(ordered))
    made = Comparison(units.pop(), size_is, baseline.name, kind, why, rows, tuple(found), questions, left_out, repeats)
    return _of_variants(made, ordered) if made.variants else made


def _of_variants(made: Comparison, runs: Sequence[Figures]) -> Comparison:
    """Leave out what only scaling has, and put the losses side by side."""
    rows = tuple(
        replace(row, speedup=None, efficiency=None, error=None, ideal=None, lost_ms=None, losses=(), no_error="")
        for row in made.rows
    )
    curves = {run.name: run.losses_by_step() for run in runs}
    losses = {
        title: {name: each[kind] for name, each in curves.items() if kind in each}
        for title, kind in (("training loss", LOSS), (VALIDATION, VALIDATION))
    }
    by_step = all(len(run.steps_at) > 1 for run in runs)
    named = {run.step_is or "step" for run in runs} if by_step else {"seconds since the command"}
    counts = named.pop() if len(named) == 1 else "step or epoch"
    shown = {title: each for title, each in losses.items() if each}
    return replace(made, rows=rows, questions=(), losses=shown, counts=counts)


def repeated(runs: Sequence[Figures]) -> Iterator[Repeats]:
    """Yield the groups of runs that repeat one another, if what they ran is known."""
    groups: Dict[object, List[Figures]] = {}
    for run, command in zip(runs, _works(runs)):
        own, work = run.setting, round(run.batch) if run.batch else None
        same = (run.size, run.nodes, work, own.precision, own.layout, own.code, own.image, own.site)
        groups.setdefault((command or run.name, same), []).append(run)
    for group in groups.values():
        speeds = [run.speed.value for run in group if run.speed]
        last = [run.loss[1] for run in group if run.loss]
        if len(group) > 1:
            loss = sum(last) / len(last) if len(last) == len(group) else None
            yield Repeats(
                tuple(run.name for run in group), group[0].nodes, group[0].size or 0, sum(speeds) / len(speeds),
                error_of_mean(speeds, fewest=2), loss, error_of_mean(last, fewest=2) if loss is not None else None,
            )  # fmt: skip


def scaling_kind(runs: Sequence[Figures]) -> Tuple[str, str]:
    """Return strong, weak or neither, and the evidence for it."""
    nodes = sorted({run.nodes for run in runs if run.nodes})
    if len({run.size for run in runs}) == 1 and len(nodes) > 1:
        size = f"{runs[0].size} {'GPUs' if runs[0].gpus else 'ranks'}"
        many = " or ".join(map(str, nodes))
        return REPEATED, f"every run has {size}, on {many} nodes: only the nodes differ in number"
    if len({run.size for run in runs}) == 1:
        return REPEATED, "all runs have the same size: they repeat or vary one another"
    whole = [run.batch for run in runs]
    if any(batch is None for batch in whole):
        missing = ", ".join(run.name for run in runs if run.batch is None)
        return NOT_KNOWN, f"the batch of a step is not reported by {missing}: {_TELL_BATCH}"
    each = [(run.batch or 0.0) / (run.size or 1) for run in runs]
    unit = runs[0].batch_unit
    if _equal([batch or 0.0 for batch in whole]):
        return STRONG, f"every run has {whole[0]:,.0f} {unit} per step"
    if _equal(each):
        return WEAK, f"every run has {each[0]:,.0f} {unit} per step and {'GPU' if runs[0].gpus else 'rank'}"
    shown = ", ".join(f"{batch:,.0f} on {run.size}" for run, batch in zip(runs, whole) if batch is not None)
    return NEITHER, f"{unit} per step change neither in proportion nor stay: {shown}"


def _equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _SAME * max(values)


def _unusable(run: Figures) -> str:
    if run.speed is None or run.speed.value <= 0:
        return "no throughput is known" + (f" yet: it is {run.outcome}" if run.outcome in GOING_ON else "")
    if not run.size:
        return "how many GPUs or ranks it used is not known"
    return ""


def _row(run: Figures, baseline: Figures, kind: str) -> Row:
    assert run.speed and baseline.speed and run.size and baseline.size
    ratio = run.size / baseline.size
    speedup = run.speed.value / baseline.speed.value
    parts = [each.error / each.value for each in (run.speed, baseline.speed) if each.error is not None]
    grown = _grown(run, baseline, ratio, kind)
    unknown = _no_efficiency(run.speed.unit, baseline.speed.unit, grown, kind)
    ideal: Optional[float] = None if unknown else ratio
    if run.speed.unit.startswith("steps/s"):
        ideal = ratio / grown if grown else None
    efficiency = speedup / ideal if ideal else None
    error: Optional[float] = None
    no_error = "" if run is baseline else "too few reports, or too coarse times, to give an interval"
    if efficiency is None:
        no_error = unknown
    elif len(parts) == 2:
        error = 0.0 if run is baseline else efficiency * math.hypot(*parts)
        no_error = "" if 2 * error <= efficiency else "the spread within the runs is too large to give an interval"
        error = None if no_error else error
    step = run.phases.step
    told = grown and step is not None and efficiency is not None and run is not baseline
    lost = (step or 0.0) * (1 - (efficiency or 0.0)) if told else None
    return Row(
        run.name, run.nodes, run.size, run.speed.value, speedup if ideal else None, efficiency, error,
        baseline.speed.value * ideal if ideal else None,
        run.training_s or run.seconds, run.accuracy, run.target_reached, step, lost,
        () if run is baseline else losses(run.phases, baseline.phases, (grown or ratio) / ratio, lost, baseline.ranks == 1),
        run.outcome, no_error, run.loss[1] if run.loss else None, run.source,
    )  # fmt: skip


def _no_efficiency(unit: str, base: str, grown: Optional[float], kind: str) -> str:
    """Explain why two speeds do not give an efficiency; '' if they do."""
    if unit.startswith(_SHARED):
        return "" if grown else "the batch of a step is not known"
    if kind != REPEATED and AS_PRINTED in unit + base:
        return f"whether the printed {unit.replace(AS_PRINTED, '')} are of one rank or of all ranks is not known"
    return ""


def _grown(run: Figures, baseline: Figures, ratio: float, kind: str) -> Optional[float]:
    """Return how many times the baseline's batch this run's is; None if that is not known."""
    if kind in (STRONG, WEAK):
        return 1.0 if kind == STRONG else ratio
    if run.batch and baseline.batch:
        return run.batch / baseline.batch
    return 1.0 if kind == REPEATED else None


def losses(run: Phases, baseline: Phases, share: float, lost: Optional[float], one_rank: bool) -> Tuple[Loss, ...]:
    """Return the losses of each step by cause. What is left when all others were measured is compute. `share`: the work per GPU
    and step, divided by the baseline's. `one_rank`: the baseline's only rank has nobody to talk to or to wait for; of a
    larger baseline that was not measured, nothing is known."""
    profile = "communication_exposed_ms of the rank that waits least (torch's profiler on single steps)"
    others = "communication_exposed_ms, mean of all ranks above the least"
    alone, waits = (0.0, 0.0) if one_rank else (baseline.communication, baseline.waiting)
    fed = None if baseline.input is None else baseline.input * share
    found = [
        Loss("communication", _more(run.communication, alone), profile),
        Loss("input", _more(run.input, fed), "data_ms of the lowest rank"),
        Loss("imbalance", _more(run.waiting, waits), others),
    ]
    known = [each.ms for each in found if each.ms is not None]
    rest = lost - sum(known) if lost is not None and len(known) == len(found) else None
    found.append(Loss("compute", rest, "what the other three leave of the step"))
    return tuple(found)


def _more(value: Optional[float], before: Optional[float]) -> Optional[float]:
    return None if value is None or before is None else value - before


def _same_cores(run: Figures, baseline: Figures) -> str:
    """Explain what makes more ranks faster on the same cores, except causes that the records exclude."""
    causes = [f"{baseline.name} did not keep its cores busy (small operators, input)"]
    if baseline.threads is None:
        causes[0] = f"{baseline.name} left cores idle (OMP_NUM_THREADS, small operators, input)"
    elif baseline.cores is not None and baseline.threads < baseline.cores:
        causes[0] = f"{baseline.name} left cores idle (OMP_NUM_THREADS: {baseline.threads} in all)"
    causes.append("the machine was busy with other work")
    if not run.one_world:
        causes.append("each rank trained a copy of its own")
    return f"{', '.join(causes[:-1])}, or {causes[-1]}"


def _questions(rows: Sequence[Row], runs: Sequence[Figures], kind: str) -> List[str]:
    found = []
    for row, run in zip(rows, runs):
        same = not run.gpus and run.cores is not None and run.cores == runs[0].cores and row.size > rows[0].size
        if same and row.speedup is not None:
            if row.speedup > _MORE_OF_THE_SAME:
                found.append(
                    f"{row.name}: its {row.size} ranks had no more cores ({run.cores}) than the {rows[0].size} of "
                    f"{rows[0].name}, so a speed-up of {row.speedup:.2f} is not that of more hardware. Possible causes: "
                    f"{_same_cores(run, runs[0])}"
                )
        elif not run.gpus and run.cores and row.size > run.cores:
            found.append(f"{row.name}: its {row.size} ranks shared {run.cores} cores")
        elif row.efficiency is not None and row.efficiency - (row.error or 0.0) > _SUPER_LINEAR:
            found.append(
                f"{row.name}: {row.efficiency:.0%} of ideal is more than the hardware grew. Usual causes: the baseline was "
                "held up (input, too little GPU memory, cold caches), or the runs differ in precision, batch or code"
            )
    why = {row.no_error: None for row in rows if row.efficiency is None}
    fix = "" if kind == NOT_KNOWN else f"; {_TELL_BATCH}"  # else it stands beside the kind
    found += [f"efficiency is not known, nor a speed-up: {each}{fix}" for each in why]
    printed = [run.name for run in runs if run.speed and run.speed.unit.endswith(AS_PRINTED)]
    if 0 < len(printed) < len(runs):
        who = ", ".join(printed)
        found.append(f"{who}: the program does not say whether its figure is one rank's or the whole job's")
    for run in runs:
        if run.world:
            found.append(f"{run.name} is not one training: {run.world}")
        if run.world_unproven:
            found.append(f"{run.name} is not proven to be one training: {run.world_unproven}")
        if run.outcome not in (FINISHED, NOT_RECORDED):
            found.append(f"{run.name} did not finish ({run.outcome}): its figures are those of the part that was done")
        if run.loss_not_finite:
            found.append(f"{run.name}: loss {run.loss_not_finite}")
    steps = {run.name: run.step for run in runs if run.loss and run.step}
    if len(set(steps.values())) > 1:
        found.append(f"losses after different steps: {', '.join(f'{step} ({name})' for name, step in steps.items())}")
    if any(run.emulated for run in runs):
        found.append("emulated nodes share one machine: their speed-up says nothing about a cluster")
    brief = [run.name for run in runs if run.training_s is not None and run.training_s < _LONG_ENOUGH]
    if brief:
        words = f"less than {_LONG_ENOUGH:g} s of training in {', '.join(brief)}"
        found.append(f"{words}: start-up effects may weigh more than scaling")
    return found
