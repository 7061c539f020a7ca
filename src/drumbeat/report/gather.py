"""Reads a run folder into Figures. Steps, loss, speed and times are those that `Run` gives to every other view."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from dataclasses import field, replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.regex import regex
from drumbeat.base.text import count, duration
from drumbeat.desk.runs import find_run, runs_of_sweep
from drumbeat.desk.state import state_of
from drumbeat.findings.model import CERTAIN, INFO, OK, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import GpuSample
from drumbeat.machine.peaks import peak_of
from drumbeat.report.figures import (
    LOSS,
    MEAN_STATED,
    OWN_SUMMARY,
    VALIDATION,
    Figures,
    GpuUse,
    Note,
    Phases,
    Point,
    Slowest,
    Speed,
    Steps,
    Traffic,
    Utilisation,
    of_whole_job,
)  # fmt: skip
from drumbeat.report.intervals import CLOSE, Reports, spread, steps_at, thinned
from drumbeat.report.printed_log import figures_of_log, of_progress
from drumbeat.report.scaling import Comparison, compare
from drumbeat.report.setting import compared, gpus_of, remember_run, setting_of, target_of
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.files import decode
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.lines import end_words, lasted_words, trend, without_words
from drumbeat.runfolder.progress import Progress, StepTimes, slowest_rank, stands_out, step_times
from drumbeat.runfolder.records import Metric, Sample, parse_metric
from drumbeat.runfolder.run import Run, lead_now
from drumbeat.runfolder.state import (
    QUEUE,
    Hang,
    hangs_of,
    ranks_seen,
    refutes,
    seconds_of,
    stood_still,
    training_share,
    verdicts_of,
    withdrawn,
    world_of,
)

# Telemetry of a run's GPUs and network ports, added up over all nodes.


_LONGEST_GAP = 60.0  # seconds between two samples over which power is taken to be steady


@dataclass
class Devices:
    of: float = 1.0  # nodes for each of those whose samples were read
    count: int = 0  # samples with at least one GPU
    _gpus: Dict[Tuple[int, int], List[Tuple[float, GpuSample]]] = field(default_factory=dict)  # node, index -> readings
    _ports: Dict[Tuple[str, str], List[Tuple[Optional[int], Optional[int]]]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        self.count += 1 if sample.gpus else 0
        for gpu in sample.gpus:
            self._gpus.setdefault((sample.node, gpu.index), []).append((sample.t, gpu))
        for port, value in sample.network.items():
            if isinstance(value, dict):
                counted = (_whole(value.get("received")), _whole(value.get("sent")))
                self._ports.setdefault((sample.host, port), []).append(counted)

    def mean(self, name: str) -> Optional[float]:
        """Return the mean over all GPUs, weighted by the time between samples."""
        total = seconds = 0.0
        known: List[float] = []
        for readings in self._gpus.values():
            seen = [(t, getattr(gpu, name)) for t, gpu in readings if getattr(gpu, name) is not None]
            known += [value for _, value in seen]
            for (begin, before), (end, after) in zip(seen, seen[1:]):
                total, seconds = total + (end - begin) * (before + after) / 2, seconds + end - begin
        return total / seconds if seconds > 0 else statistics.fmean(known) if known else None

    def slowed(self) -> Dict[str, float]:
        """Return what kept the GPUs below their full clock, and for which share of the time, the longest first."""
        seconds = 0.0
        by: Dict[str, float] = {}
        for readings in self._gpus.values():
            seen = [(t, gpu.throttle) for t, gpu in readings if gpu.throttle is not None]
            for (begin, reasons), (end, _) in zip(seen, seen[1:]):
                seconds += end - begin
                by.update({reason: by.get(reason, 0.0) + end - begin for reason in reasons})
        return {reason: by[reason] / seconds for reason in sorted(by, key=lambda reason: -by[reason]) if seconds}

    def most(self, name: str, unit: float = 1.0) -> Optional[float]:
        values = [getattr(gpu, name) for readings in self._gpus.values() for _, gpu in readings]
        return max((value / unit for value in values if value is not None), default=None)

    def energy(self, begin: float = -math.inf, end: float = math.inf) -> Optional[float]:
        """Return joules of all GPUs between two times: by their energy counters, else power integrated over the samples."""
        total, measured = 0.0, False
        for readings in self._gpus.values():
            for first, second, joules in _spent(readings):
                low, high = max(first, begin), min(second, end)
                if high > low:
                    total, measured = total + joules * (high - low) / (second - first), True
        return total * self.of if measured else None

    @property
    def nodes(self) -> int:
        return len({node for node, _ in self._gpus})

    def energy_how(self) -> str:
        if self.of > 1:
            return f"measured on {self.nodes} nodes, times {self.of:.4g}"
        counters = sum(_counts(readings) for readings in self._gpus.values())
        sensors = sum(any(gpu.power is not None for _, gpu in readings) for readings in self._gpus.values())
        if counters == len(self._gpus):
            return f"energy counters of {counters} GPU{'s' * (counters != 1)}"
        return f"power of {sensors} of {len(self._gpus)} GPUs, sampled and integrated" if sensors else ""

    def curve(self, name: str) -> List[Tuple[float, float]]:
        """Return the mean over all GPUs, at most one point per second."""
        at: Dict[int, List[float]] = {}
        for t, gpu in itertools.chain.from_iterable(self._gpus.values()):
            value = getattr(gpu, name)
            if value is not None:
                at.setdefault(int(t), []).append(value)
        return [(float(t), statistics.fmean(values)) for t, values in sorted(at.items())]

    def traffic(self) -> Dict[str, Traffic]:
        """Return traffic from the first sample to the last; RDMA ports (`mlx5_0:1`) count apart from network interfaces."""
        found: Dict[str, List[Tuple[int, int]]] = {}
        for (_, port), counted in self._ports.items():
            received, sent = map(_passed, zip(*counted))
            if received is not None and sent is not None:
                found.setdefault("rdma" if ":" in port else "ethernet", []).append((received, sent))
        return {
            kind: Traffic(*(round(part * self.of) for part in (len(ports), *map(sum, zip(*ports)))))
            for kind, ports in found.items()
        }


def _counts(readings: List[Tuple[float, GpuSample]]) -> bool:
    return sum(gpu.energy is not None for _, gpu in readings) > 1


def _spent(readings: List[Tuple[float, GpuSample]]) -> Iterator[Tuple[float, float, float]]:
    """Yield start, end and joules of each interval between two samples of one GPU."""
    if _counts(readings):
        counted = [(t, gpu.energy) for t, gpu in readings if gpu.energy is not None]
        for (first, before), (second, after) in zip(counted, counted[1:]):
            if after >= before and second > first:  # a driver that was loaded again counts from 0
                yield first, second, after - before
        return
    known = [(t, gpu.power) for t, gpu in readings if gpu.power is not None]
    for (first, watts), (second, later) in zip(known, known[1:]):
        if 0 < second - first <= _LONGEST_GAP:
            yield first, second, (watts + later) / 2 * (second - first)


def _passed(counter: Sequence[Optional[int]]) -> Optional[int]:
    """Return how far a counter went up; after a reset it continues from there."""
    known = [value for value in counter if value is not None]
    if len(known) < 2:
        return None
    return sum(after - before if after >= before else after for before, after in zip(known, known[1:]))


def _whole(value: object) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_AT = RunFolder("")  # names relative to the run folder
_LATE_MS, _LATE_SHARE = 5.0, 0.02  # a rank stands out if it is later by both of these
_FEW_SPANS = 3  # spans in a row for which a rank must be slower to count
_READ_MS = 250.0  # to which the times of printed lines are known


def read_figures(wanted: Optional[str], environ: Mapping[str, str]) -> Figures:
    """Read the run with this id, folder or handle, or the file that a program printed; None: the newest run."""
    if wanted and os.path.isfile(wanted):
        return figures_of_log(wanted)
    run = find_run(wanted, environ)
    figures = figures_of(run)
    remember_run(run, figures, environ)
    return figures


_STAMP = regex(r"-\d{8}-\d{6}-\w+")  # what a run id adds to the name


def compare_named(wanted: Sequence[str], environ: Mapping[str, str]) -> Comparison:
    """Compare runs or logs; the name of a sweep stands for all of its runs. Runs are called as they were given if that is their
    name; files of the same name are told apart by their paths; a run given twice counts once."""
    swept = {name: () if os.path.exists(name) else runs_of_sweep(name, environ) for name in wanted}
    if sum(len(runs) or 1 for runs in swept.values()) < 2 and len(wanted) < 2:
        raise Problem(
            "compare takes two runs or more, or the name of a sweep",
            "drumbeat compare RUN RUN; drumbeat list shows them",
        )
    found = [
        (label, read_figures(place, environ))
        for name in wanted
        for label, place in [(run.record.name, run.path) for run in swept[name]] or [(name, name)]
    ]
    called = (
        replace(each, name=name) if _STAMP.fullmatch(each.name, len(name)) and each.name.startswith(name) else each
        for name, each in found
    )
    unique = list({each.source: each for each in called}.values())
    names = [each.name for each in unique]
    return compare([each if names.count(each.name) == 1 else replace(each, name=each.source) for each in unique])


def figures_of(run: Run, now: Optional[float] = None) -> Figures:
    now = lead_now(run) if now is None else now
    parts = run.parts(paced=True)
    state, events, order = state_of(run, now, parts), run.run_events(), _order(run)
    progress, summary = state.progress, state.summary
    ledger = run.ledger(now, progress)
    if not any(part.reports for part in parts.values()):  # the last attempt made no step
        parts = run.parts(paced=True, stepped=True)
    reports = _reports(run, events, progress, parts)
    devices = _devices(run)
    nodes_here = run.nodes()
    facts = {node: run.facts(node) for node in nodes_here[:: 1 + len(nodes_here) // _MANY]}
    gpus = gpus_of(order, facts, len(nodes_here))
    planned = sum(member.ranks for member in run.members()) or None
    ranks = summary.ranks if summary else ranks_seen(events) or planned
    seconds = sum(ledger.values()) - ledger.get(QUEUE, 0.0) if ledger else state.seconds
    setting = setting_of(run, order, facts.get(0), reports.setup, run.record.created + sum(ledger.values()))
    speed = _speed(state.rate, progress, reports, gpus, ranks)
    target = target_of(order.command if order else ())
    reached = progress.target_reached
    if reached is None and target is not None and progress.accuracy is not None:
        reached = progress.accuracy >= target
    batch = None if progress.laps else reports.work_per_step()
    utilisation, why_not = _utilisation(speed, reports.setup, gpus, facts)
    slowest, no_slowest = _slowest(reports, progress.step_seconds)
    phases = Phases() if progress.laps or progress.rough else _phases(reports, speed, batch, progress.step_seconds)
    nodes = summary.nodes if summary else (order.nodes if order else None)
    seen = next(reversed(verdicts_of("world", events)), None)
    certain = seen is not None and seen.confidence == CERTAIN
    cut_short = state.condition.detail and state.condition.detail == progress.short_words
    unused = () if not (order and order.emulated) else ("traffic",) if gpus else ("traffic", "transport")
    made = [(max(0.0, step.t - run.record.created), float(number)) for number, step in reports.steps.items()]
    curves = _curves(reports, devices, run.record.created, speed)
    return Figures(
        name=run.run_id,
        source=run.path,
        outcome=state.condition.word,
        exit_code=summary.exit_code if summary else None,
        end=end_words(summary) if summary and state.condition.word == summary.outcome else "",
        created=run.record.created or None,
        nodes=nodes,
        ranks=ranks,
        gpus=gpus,
        cores=_cores(run) if nodes_here and len(nodes_here) <= _MANY else None,
        threads=_threads(run) if nodes_here and len(nodes_here) <= _MANY else None,
        one_world=bool(seen and certain and not (state.world or seen.findings)),
        world=state.world.title if state.world else "",
        world_unproven=seen.summary if seen and not (state.world or certain or seen.unseen) else "",
        emulated=bool(order and order.nodes_emulated),
        seconds=seconds,
        gpu_hours=gpus * seconds / 3600 if gpus and seconds is not None else None,
        training_s=reports.summary.get("total_s") or progress.seconds or None,
        ledger=ledger,
        training_share=training_share(ledger),
        attempts=len(summary.attempts) if summary else max(1, len(run.attempts())),
        resumed_from=reports.began,
        starts=max(1, sum(isinstance(event, kinds.RunStarted) for event in events)),
        loss_trend=trend(run.losses()),
        target=target,
        target_reached=reached,
        speed=speed,
        no_speed="" if speed else progress.no_rate,
        batch=batch,
        batch_unit=reports.unit.partition("/")[0] if batch else "",
        utilisation=utilisation,
        no_utilisation=why_not,
        gpu=_gpu_use(devices, progress, speed, gpus),
        network={} if order and order.emulated else devices.traffic(),
        network_why="not used: the ranks are on one machine" if order and order.emulated else "",
        slowest=slowest,
        no_slowest=no_slowest,
        steps_by_rank=None if progress.laps else _steps_by_rank([part.times for part in parts.values()]),
        phases=phases,
        foreseen=compared(order, facts.get(0), nodes, gpus, phases, ledger),
        notes=(
            *_unread(run),
            *([Note(WARNING, f"finished, but {state.condition.detail}")] if cut_short else ()),
            *_notes(events, state.failure, hangs_of(events), unused),
        ),
        setting=setting,
        curves=curves,
        steps_at=[] if progress.laps else steps_at(made, curves.get(VALIDATION, ())),
        **of_progress(progress),
    )


def _cores(run: Run) -> Optional[int]:
    """Count the cores that the ranks of the last attempt had, each once however many ranks or emulated nodes share it."""
    started = [each for node in run.nodes() for each in run.node_events(node) if isinstance(each, kinds.RankStarted)]
    last = max((each.attempt for each in started), default=0)
    return len({(each.host, cpu) for each in started if each.attempt == last for cpu in each.cpus}) or None


def _threads(run: Run) -> Optional[int]:
    """Add up OMP_NUM_THREADS of all ranks; None if a node does not say it, or says it per rank."""
    total = 0
    for member in run.members():
        told = {each.get("value") for each in _variables(run, member.node) if each.get("name") == "OMP_NUM_THREADS"}
        value = told.pop() if len(told) == 1 else ""
        if not (isinstance(value, str) and value.isdecimal() and len(value) < 6):
            return None
        total += int(value) * member.ranks
    return total or None


def _variables(run: Run, node: int) -> List[Dict[str, Any]]:
    found = run.environment(node).get("variables")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _order(run: Run) -> Optional[Order]:
    try:
        return run.order()
    except RecordError:
        return None


def _unread(run: Run) -> List[Note]:
    """Note that another version wrote the summary, so its content is not in the report."""
    try:
        run.summary()
    except RecordError as error:
        return [Note(WARNING, f"told from the run's events and metrics: {error}")]
    return []


# Large runs are read in part, so that a report costs about the same for any number of ranks: of metrics, the reports of the
# lowest rank, and for all others the sums that agents write into their metrics; of telemetry, some nodes.


_MOST_METRICS = 8 << 20  # bytes, over all nodes
_RANK = regex(r'"rank": ?"?(\d{1,9})\b')
_NO_STEP = regex(r'"kind": ?"(?!step")')
_MOST_TELEMETRY = 4 << 20
_MANY = 128  # nodes: of more, not all hardware is read


def _size(run: Run, name: str) -> int:
    found = run.files.chunk(name, 0, 0)
    return found.size if found else 0


def _devices(run: Run) -> Devices:
    nodes = run.nodes()
    whole = sum(_size(run, _AT.node(node).telemetry) for node in nodes)
    chosen = nodes[:: max(1, math.ceil(whole / _MOST_TELEMETRY))]
    devices = Devices(len(nodes) / len(chosen) if chosen else 1.0)
    for node in chosen:
        for sample in run.telemetry(node):
            devices.add(sample)
    return devices


def _lines(run: Run, parts: Mapping[int, Progress], lowest: Optional[int]) -> Iterator[Metric]:
    """Yield the steps of the lowest rank and the other reports of its node; those of other nodes too if there is
    little to read."""
    sizes = {node: _size(run, _AT.node(node).metrics) for node in parts}
    few = sum(sizes.values()) <= _MOST_METRICS
    for node in (each for each in parts if few or lowest in parts[each].paces):
        for line in run.metric_lines(node):
            rank = _RANK.search(line)
            if rank and int(rank[1]) != lowest and not _NO_STEP.search(line):
                continue  # most lines of a large run
            metric = parse_metric(decode(line) or {}, node)
            if metric:
                yield metric


def _reports(run: Run, events: Sequence[Event], progress: Progress, parts: Mapping[int, Progress]) -> Reports:
    starts = [event.t for event in events if isinstance(event, kinds.AttemptStarted)]
    stepped = [event.t for event in events if isinstance(event, kinds.FirstStep)]
    since = max(
        (t for t in starts if not stepped or t <= stepped[-1]), default=0.0
    )  # of the last attempt that made steps
    offsets = run.clock_offsets()
    paces = {
        rank: replace(pace, mean_t=pace.mean_t + shift, marks=tuple((many, mean + shift) for many, mean in pace.marks))
        for shift, part in ((offsets.get(node, 0.0), part) for node, part in parts.items())
        for rank, pace in part.paces.items()
    }
    reports = Reports(since, min(paces, default=None), paces, pauses=progress.pauses if progress.paused() else ())
    for metric in _lines(run, parts, reports.lowest):
        shift = offsets.get(metric.node, 0.0)
        reports.add(metric._replace(t=metric.t + shift) if shift else metric)
    unit = "tokens/s" if progress.tokens else "samples/s"
    reports.count_all(progress.tokens or progress.samples, unit, (progress.step or 0) - (progress.first_step or 0))
    return reports


def _speed(
    rate: Optional[Tuple[float, str]], progress: Progress, reports: Reports, gpus: Optional[int], ranks: Optional[int]
) -> Optional[Speed]:
    """Return the speed that `Run` gives; if a program states it for one device or rank, times their number."""
    if rate is None:
        return None
    value, unit = rate
    how = f"reported {progress.counts}s, first to last"
    how += "; times of printed lines, to about 0.25 s on an idle node" if reports.printed else ""
    if not (progress.tokens or progress.samples) and unit != f"{progress.counts}s/s":
        how = MEAN_STATED if reports.stated and "rate" not in reports.summary else OWN_SUMMARY
    factor, unit, how = of_whole_job(unit, how, gpus or ranks, ranks)
    how += without_words(progress)
    rates = [each * factor for _, each in reports.rates(paused=False) if each > 0]
    no_spread = f"steps are counted anew in each {progress.lap}" if progress.lap and not reports.stated else ""
    if reports.too_close:
        no_spread = f"printed lines are read every 0.25 s, too coarse for steps of less than {CLOSE:g} s"
    rates = [] if no_spread else rates
    return spread(value * factor, unit, how, rates, no_spread=no_spread, rough=progress.rough, hung=progress.paused())


def _utilisation(
    speed: Optional[Speed], setup: Dict[str, Any], gpus: Optional[int], facts: Dict[int, Any]
) -> Tuple[Optional[Utilisation], str]:
    if not gpus:
        return None, "no GPU" if gpus == 0 else ""
    if speed is None or speed.unit not in ("tokens/s", "samples/s"):
        return None, "no throughput in tokens or samples"
    name = f"flops_per_{speed.unit[:-3]}"
    flops = setup.get(name)
    if not isinstance(flops, (int, float)) or not 0 < flops < 1e30:
        return None, f"FLOPs are not known: metrics.report(kind='setup', {name}=...)"
    names = {gpu.name for each in facts.values() if each for gpu in each.gpus if not gpu.integrated}
    if len(names) != 1:
        return None, "GPUs of several kinds"
    gpu = str(names.pop())
    dtype = str(setup.get("flops_dtype") or setup.get("precision") or "")
    peak = peak_of(gpu)
    if peak is None or dtype not in peak.tflops:
        return None, f"the peak of {gpu} with '{dtype or 'unknown dtype'}' is not known"
    rate = speed.value * flops / gpus / 1e12
    formula = str(setup.get("flops_formula") or f"{flops:.4g} FLOPs as the program says")
    sheet = peak.tflops[dtype]
    return Utilisation(rate / sheet, rate, float(flops), formula, dtype, sheet, gpu, peak.source), ""


def _gpu_use(devices: Devices, progress: Progress, speed: Optional[Speed], gpus: Optional[int]) -> Optional[GpuUse]:
    if not gpus or not devices.count:
        return None
    work = progress.tokens or progress.samples
    unit = "token" if progress.tokens else "sample"
    if not work and speed and speed.unit in ("tokens/s", "samples/s"):
        work, unit = speed.value * progress.seconds, speed.unit[:-3]
    first, last, whole = progress.first_t, progress.last_t, devices.energy()
    training = devices.energy(-math.inf if first is None else first, math.inf if last is None else last)
    return GpuUse(
        devices.count, devices.mean("busy"), devices.mean("power"), devices.most("memory_used", 2**30),
        devices.most("temperature"), None if whole is None else whole / 3.6e6, devices.energy_how(),
        training / work if training is not None and work else None, unit if work else "", devices.slowed(),
        devices.nodes if devices.of > 1 else None,
    )  # fmt: skip


def _slowest(reports: Reports, step: Optional[float]) -> Tuple[Optional[Slowest], str]:
    """Return the rank that `watch` names as well, if one stands out; otherwise the rank for which the others wait: in collectives
    if those were measured, else by the time of its step reports. `step`: the mean seconds of a step."""
    slow = slowest_rank(reports.paces.values())
    if slow and slow.stands_out:
        also = f", and it is {count(slow.behind, 'step')} behind" if slow.behind else ""
        how = f"its steps take this much longer than the median rank's {1e3 * slow.median_seconds:.1f} ms{also}"
        return Slowest(slow.rank, slow.node, 1e3 * (slow.step_seconds - slow.median_seconds), how), ""
    exposed = reports.exposed()
    if len(exposed) > 1:
        rank = min(exposed, key=lambda each: exposed[each])
        behind = statistics.fmean(exposed.values()) - exposed[rank]
        how = "the others wait this long for it in collectives of a step (profile of single steps)"
    else:
        late = {rank: 1e3 * seconds for rank, seconds in reports.lateness().items()}
        if not late:
            return None, "one rank reports its steps" if len(reports.paces) == 1 else "not measured"
        rank = max(late, key=lambda each: late[each])
        behind, how = late[rank], "it reports a step this long after the first rank does, on average"
    if behind < max(_READ_MS if reports.printed and not exposed else _LATE_MS, 1e3 * _LATE_SHARE * (step or 0.0)):
        return None, f"none stands out (rank {rank}, {behind:.1f} ms)"
    return Slowest(rank, reports.paces[rank].node, behind, how), ""


def _steps_by_rank(nodes: Sequence[StepTimes]) -> Optional[Steps]:
    """Return the step times over all ranks, and the rank that stands out in the longest run of consecutive steps."""
    width, spans = step_times(nodes)
    if max((span.ranks for span in spans), default=0) < 2:
        return None
    median = statistics.median(span.median for span in spans)
    shown = tuple((each.number * width, (each.number + 1) * width - 1, *each[1:5]) for each in spans)
    steps = Steps(min(each.least for each in spans), median, max(each.most for each in spans), shown)
    rows = [list(row) for _, row in itertools.groupby(spans, lambda each: each.slowest if stands_out(each) else None)]
    longest = max((row for row in rows if stands_out(row[0])), key=len, default=[])
    if len(longest) < _FEW_SPANS:
        return steps
    first, last = longest[0].number * width, (longest[-1].number + 1) * width - 1
    most = max(each.most for each in longest)
    return replace(steps, slowest=longest[0].slowest, first=first, last=last, seconds=most)


def _phases(reports: Reports, speed: Optional[Speed], batch: Optional[float], seconds: Optional[float]) -> Phases:
    """Return the phases of a step. `seconds`: the mean step by its reports, where the speed does not give it."""
    step = None if seconds is None else 1e3 * seconds
    if speed and batch and speed.value:
        step = 1e3 * batch / speed.value
    exposed = reports.exposed()
    least = min(exposed.values()) if exposed else None
    waiting = statistics.fmean(exposed.values()) - least if least is not None and len(exposed) > 1 else None
    how = "input: reported data_ms; communication: torch's profiler on single steps" if reports.sums or exposed else ""
    return Phases(step, reports.mean("data_ms"), least, waiting, how)


def _notes(
    events: Sequence[Event], failure: Optional[Finding], hangs: Sequence[Hang], unused: Sequence[str] = ()
) -> List[Note]:
    """Return findings, and the last verdict of each check. `unused`: checks of features that the run does not use."""
    found: List[Note] = []
    given = [event for event in events if isinstance(event, kinds.VerdictGiven)]
    last = {(event.attempt, event.verdict.check, event.peer): event for event in given}.values()
    if failure is not None:
        found.append(_note(failure, seconds_of(failure, hangs)))
    world = world_of(events)
    for place, event in enumerate(events):
        later = (each for each in events[place + 1 :] if each.attempt == event.attempt)
        if isinstance(event, kinds.FindingMade) and any(refutes(each, event.finding) for each in later):
            found.append(_note(withdrawn(event.finding)))
        elif isinstance(event, kinds.FindingMade) and event.finding.severity != OK:
            mine = [hang for hang in hangs if hang.finding == event.finding and hang.t >= event.t]
            found.append(_note(event.finding, mine[0].seconds if mine else None))
        elif isinstance(event, kinds.VerdictGiven):
            verdict = event.verdict
            idle = verdict.answer == UNKNOWN and (
                verdict.check in unused or (verdict.check == "world" and world is not None)
            )
            if idle or all(event is not each for each in last):
                continue
            sure = "" if verdict.answer == UNKNOWN else f" ({verdict.confidence})"
            found.append(Note(INFO, f"{verdict.check}: {verdict.words}{sure}"))
        elif isinstance(event, kinds.Failed) and event.finding != failure:
            found.append(Note(INFO, f"attempt {event.attempt + 1} ended: {event.finding.title}"))
        elif isinstance(event, kinds.Decided):
            found += [Note(INFO, words) for words in event.replaced]
        elif isinstance(event, kinds.NodeLost) and event.spare:
            found.append(Note(WARNING, f"lost {event.words}"))
    stalls = {(event.attempt, event.rank): event.seconds for event in events if isinstance(event, kinds.Stalled)}
    still = stood_still(events)
    found += [Note(WARNING, still)] if still else []
    found += [Note(INFO, f"the others waited {duration(lost)} for rank {rank}") for (_, rank), lost in stalls.items()]
    return list(dict.fromkeys(found))


def _note(finding: Finding, hung: Optional[float] = None) -> Note:
    """Return a finding as a note. `hung`: duration of the hang that it reports."""
    where = "" if finding.rank is None else f"rank {finding.rank}{f' on {finding.host}' if finding.host else ''}: "
    cause = f" ({finding.cause})" if finding.cause else ""
    lasted = "" if hung is None else lasted_words(hung)
    return Note(finding.severity, f"{where}{finding.title}{lasted}{cause}", finding.fix)


def _curves(reports: Reports, devices: Devices, begin: float, speed: Optional[Speed]) -> Dict[str, List[Point]]:
    curves = {
        LOSS: reports.loss,
        VALIDATION: list(dict.fromkeys(reports.validation)),
        f"throughput, {speed.unit}" if speed else "throughput": [] if not speed or speed.no_spread else reports.rates(),
        "GPU busy, mean, %": devices.curve("busy"),
        "GPU power, mean, W": devices.curve("power"),
    }
    shifted = {name: [(max(0.0, t - begin), value) for t, value in sorted(points)] for name, points in curves.items()}
    return {name: thinned(points) for name, points in shifted.items() if len(points) > 1}
