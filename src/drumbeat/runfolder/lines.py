"""A run's progress and its end in words: printed last by `run`, and later by `status`."""

from __future__ import annotations

import math
import os
from typing import Collection, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import named_ranks, numbers
from drumbeat.base.text import count, duration
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding, shown
from drumbeat.runfolder.events import ORPHANED
from drumbeat.runfolder.progress import AS_PRINTED, Progress, median, speed
from drumbeat.runfolder.run import Log, Run, lost_spares
from drumbeat.runfolder.state import FIRST_STEP, TRAINING, UNKNOWN, stood_still, world_unproven
from drumbeat.runfolder.summary import Affected, Summary

# Current use of a run's GPUs: one line for `status`.


@dataclass(frozen=True)
class GpuUse:
    """GPU use over the latest samples of all nodes; None is unknown."""

    gpus: int
    use: Optional[float]  # per cent, mean
    memory: Optional[float]  # per cent of all memory
    power: Optional[float]  # watts, sum
    slowed: int  # GPUs that something slows down
    slowed_by: str = ""

    @property
    def words(self) -> str:
        parts = [f"{self.gpus:,}" if self.use is None else f"{self.gpus:,} at {self.use:.0f} %"]
        if self.memory is not None:
            parts.append(f"memory {self.memory:.0f} %")
        if self.power is not None:
            parts.append(f"{self.power:,.0f} W")
        if self.slowed:
            parts.append(f"{self.slowed:,} slowed down" + (f" by {self.slowed_by}" if self.slowed_by else ""))
        return ", ".join(parts)


def gpu_use(run: Run) -> Optional[GpuUse]:
    """Return the GPU use; None if no node has reported a GPU."""
    samples = [run.latest_sample(node) for node in run.nodes()]
    gpus = [gpu for sample in samples if sample for gpu in sample.gpus]
    if not gpus:
        return None
    power = [gpu.power for gpu in gpus if gpu.power is not None]
    sized = [gpu for gpu in gpus if gpu.memory_used is not None and gpu.memory_total]
    total = sum(gpu.memory_total or 0 for gpu in sized)
    reasons = sorted({reason for gpu in gpus for reason in gpu.throttle or ()})
    return GpuUse(
        gpus=len(gpus),
        use=mean_of([gpu.busy for gpu in gpus]),
        memory=100.0 * sum(gpu.memory_used or 0 for gpu in sized) / total if total else None,
        power=sum(power) if power else None,
        slowed=sum(1 for gpu in gpus if gpu.throttle),
        slowed_by=", ".join(reasons),
    )


def mean_of(values: List[Optional[float]]) -> Optional[float]:
    """Return the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


Lines = List[Tuple[str, str]]  # label, text

MOST_LINES = 12  # lines about an end, however much happened and however many ranks there were
_MOST_GROUPS = 3
_MOST_LOG = 6  # lines of the failed rank's log
_LONG = 60.0  # seconds: a shorter run that printed little is not expected to report anything
_MANY = 20  # lines of one rank: a program that prints this many probably reports its progress
_NO_METRICS = (
    "none recognised in what was printed: print lines such as `step 5 loss 0.31`, "
    "or call drumbeat.metrics.report (docs page metrics)"
)
WHOSE_RATE = "as printed: whether it is per rank or of all ranks, its lines do not say"
_LONGEST = 300  # characters of a line


def progress_line(progress: Progress, left: bool = True, now: Optional[float] = None) -> str:
    """Return the progress line. `left`: also say how long the run will take, if known. `now`, by the lead's clock, for a run that
    goes on: also say how long no step has been reported."""
    rest = progress.seconds_left() if left else None
    return progress_words(progress, rest, None if now is None else progress.quiet(now))


def progress_words(
    progress: Progress, left: Optional[float] = None, quiet: Optional[float] = None, rate: bool = True
) -> str:
    """Describe the progress in one line, in every view alike. `left`: seconds until the end. `quiet`: seconds without a step;
    then nothing is known of the end. `rate`: say how fast it is."""
    parts = [progress.place]
    parts[0] += f" of this {progress.lap}" if progress.lap else ""
    if progress.not_finite:
        parts.append(f"loss {not_finite_words(progress)}")
    elif progress.last_loss is not None:
        parts.append(f"loss {loss_text(progress.last_loss)}{of_step(progress)}")
    if progress.validation_not_finite:
        parts.append(f"validation {progress.validation_not_finite}")
    elif progress.last_validation is not None or progress.validation_measures:
        loss = [] if progress.last_validation is None else [loss_text(progress.last_validation)]
        parts.append("validation " + ", ".join([*loss, *measures(progress.validation_measures)[:_MEASURES]]))
    measured = progress.rate() if rate else None
    if measured:
        parts.append(speed(*measured, rough=progress.rough))
    if quiet is not None:
        parts.append(quiet_words(quiet))
    elif left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def measures(values: Mapping[str, float]) -> List[str]:
    """Return what a validation measured beside its loss: `perplexity 8.594`."""
    return [f"{name} {loss_text(value)}" for name, value in values.items()]


_MEASURES = 3  # in one line


def of_step(progress: Progress) -> str:
    """Name the step of the last loss if it differs from the last reported step."""
    same = progress.last_loss_step in (None, progress.step)
    return "" if same else f" ({progress.counts} {progress.last_loss_step})"


def quiet_words(seconds: float) -> str:
    return f"no step for {duration(seconds)}"


def without_words(progress: Progress) -> str:
    """Return the end of the words about a speed that leaves out pauses; what a program states itself is as it states it."""
    stated = progress.reported_rate and not (progress.tokens or progress.samples)
    paused = 0.0 if stated else progress.paused()
    return f"; without the {duration(paused)} in which it had paused" if paused else ""


def lasted_words(seconds: float) -> str:
    """Return the end of the title of a hang that is over: its whole duration. The title names the duration when it was found."""
    return f"; it lasted {duration(seconds)}"


def closing_lines(run: Run, summary: Summary, printed: Collection[int] = ()) -> Lines:
    """Return at most MOST_LINES lines. `printed`: nodes whose output the user has already seen, so it is not repeated."""
    progress = summary.progress
    after: Lines = [("end", end_words(summary))]
    still = stood_still(run.run_events())
    if still:
        after.append(("stopped", still))
    losses = loss_words(progress, run.losses())
    if losses:
        after.append(("loss", losses))
    if progress.not_finite:
        since, saved = progress.not_finite_since, progress.saved
        which = "what was saved since" if since is None else f"what was saved since step {since}"
        if saved is not None and (since is None or saved >= since):
            which = f"the checkpoint of step {saved}"
        words = f"{which} may hold NaN: check it before you use it"
        after.append(("warning", f"the last loss is {progress.not_finite}; {words}"))
    if summary.world:
        after.append(("warning", summary.world.title))
    elif summary.outcome == "finished" and (doubt := world_unproven(run.run_events(), progress)):
        after.append(("world", doubt))
    if progress.target_reached is not None:
        after.append(("target", "reached" if progress.target_reached else "not reached"))
    if summary.throughput:
        size = f"{count(summary.nodes, 'node')}, {count(summary.ranks, 'rank')}"
        told = summary.throughput
        unsure = f"; {WHOSE_RATE}" if told.unit.endswith(AS_PRINTED) else ""
        measured = speed(told.value, told.unit, rough=progress.rough)
        after.append(("speed", f"{measured} on {size}{unsure}{without_words(progress)}"))
    if summary.gpus:
        after.append(("GPUs", _gpus_words(run, summary)))
    if summary.ledger:
        after.append(("time", ledger_words(summary.ledger, summary.training_share, progress.counts)))
    if summary.failure is None and not summary.throughput and _no_metrics(run, progress, summary.elapsed):
        after.append(("metrics", _NO_METRICS))
    after += [("replaced", words) for words in summary.replaced[-2:]]
    if summary.spares:
        after += [("lost", words) for words in lost_spares(run.run_events())[-2:]]
    if len(summary.attempts) > 1:
        after.append(("attempts", ", ".join(attempt.outcome for attempt in summary.attempts)))
    after.append(("folder", near(run.path)))
    before: Lines = []
    lasted = "" if summary.hang_seconds is None else lasted_words(summary.hang_seconds)
    if summary.hang:
        before = [("hang", summary.hang.title + lasted), ("cause", summary.hang.cause), ("fix", summary.hang.fix)]
    if summary.failure:
        room = MOST_LINES - len(after) - len(before[:1])
        failed = failure_lines(run, summary.failure, summary.consequences, room, printed)
        failed[0] = (failed[0][0], failed[0][1] + ("" if summary.hang else lasted))
        before = before[:1] + failed
        if summary.outcome == "doubtful":
            before = [(failure_label(summary.outcome) if label == "failed" else label, text) for label, text in before]
    if summary.stopped.endswith(ORPHANED):
        gone = Catalog("logs")("cancelled", "orphaned", code=summary.exit_code)
        before += [("cause", gone.cause), ("fix", gone.fix)]
    return [(label, text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...") for label, text in before + after]


def failure_lines(
    run: Run,
    failure: Finding,
    affected: Tuple[Affected, ...] = (),
    room: int = MOST_LINES,
    printed: Collection[int] = (),
) -> Lines:
    """Return lines on what failed and why, the end of its log as far as there is room, the fix, and the fate of
    the other ranks."""
    same = [number for each in affected if each.what == failure.title for number in numbers(each.ranks)]
    affected = tuple(each for each in affected if each.what != failure.title)  # they failed alike, not because of it
    lines = [("failed", failed_words(failure, same))]
    if failure.cause:
        lines.append(("cause", failure.cause))
    last = [("fix", failure.fix)] if failure.fix else []
    if affected:
        last.append(("then", _affected_words(affected)))
    name = _log_name(run, failure)
    if name:
        texts: List[str] = []
        if failure.node not in printed:
            texts = _end_of_log(run, name, failure)[-max(0, min(_MOST_LOG, room - len(lines) - len(last) - 1)) :]
        path = near(os.path.join(run.path, name))
        empty = "" if texts or _end_of_log(run, name, failure) else " (empty)"
        lines.append(("log", f"the end of {path}:" if texts else f"{path}{empty}"))
        lines += [("", text) for text in texts]
    return lines + last


def failure_label(outcome: str) -> str:
    return "doubt" if outcome == "doubtful" else "failed"


def failed_words(failure: Finding, same: Sequence[int] = ()) -> str:
    """Describe what failed, and where. `same`: ranks that failed in the same way."""
    if failure.rank is None:
        return failure.title
    where = f" on {failure.host} (node {failure.node})" if failure.host and failure.node is not None else ""
    who = named_ranks([failure.rank, *same], 8) if same else f"rank {failure.rank}{where}"
    named = f"rank {failure.rank} "
    if failure.title.startswith(named):  # the rank is not named twice
        return f"{who} {failure.title[len(named) :]}"
    return f"{who}: {failure.title}"


def ledger_words(parts: Mapping[str, float], share: Optional[float], counts: str = "step") -> str:
    """Describe where the time went; training is given as a share of the time that the job held its nodes. `counts`: what the
    program counts."""
    words = [
        f"{part_words(name, parts, counts)} {duration(seconds)}" for name, seconds in parts.items() if seconds >= 0.05
    ]
    if share is not None:
        words = [f"{word} ({share:.0%})" if word.startswith("training ") else word for word in words]
    return ", ".join(words)


def part_words(name: str, parts: Mapping[str, float], counts: str = "step") -> str:
    """Name a part of the ledger; for the unknown part, say why it is unknown. A program that reports nothing before the end of an
    epoch has trained for most of the time until then."""
    counts = counts if counts == "epoch" else "step"
    if name == FIRST_STEP:  # a program may report every tenth step alone
        return "first report" if counts == "step" else f"through the first {counts}"
    if name != UNKNOWN:
        return name
    return f"after the last {counts}" if parts.get(TRAINING) else f"without a reported {counts}"


_DOUBTS = {
    "stage-failed": "although a stage of the script had failed",
    "launcher-unended": "but a launcher in the script had not ended",
    "early-exit": "but a rank ended before it had made its steps",
    "ranks-never-joined": "but its ranks trained apart from each other",
}


_GO_ON = "start the same command to go on"


def end_words(summary: Summary) -> str:
    took = duration(summary.elapsed)
    if summary.outcome == "requeue":
        return f"cancelled after {took}; its ranks ask to be started again (exit code 75): {_GO_ON}"
    if summary.outcome == "doubtful":
        why = _DOUBTS.get(summary.failure.code if summary.failure else "", "but what was written last is a failure")
        return f"doubtful: finished in {took}, {why}; exit code {summary.exit_code}"
    if summary.outcome == "time-limit":
        return f"time-limit reached after {took}, exit code {summary.exit_code}"
    short = summary.progress.short_words if summary.outcome == "finished" else ""
    if summary.outcome == "cancelled" and summary.attempts and summary.attempts[-1].resumable:
        return f"cancelled after {took}, exit code {summary.exit_code}; its ranks saved and ended with 75: {_GO_ON}"
    after = "after" if summary.outcome == "cancelled" else "in"
    return f"{summary.outcome} {after} {took}, exit code {summary.exit_code}" + (f", but {short}" if short else "")


def _gpus_words(run: Run, summary: Summary) -> str:
    words = [f"{summary.gpus:,}"]
    if summary.gpu_hours is not None:
        words.append(f"{summary.gpu_hours:.3g} GPU-hours")
    last = gpu_use(run)
    if last and last.slowed:
        words.append(f"{last.slowed} slowed down at the end by {last.slowed_by}")
    return ", ".join(words)


def code_words(run: Run) -> str:
    """Name the commit that was run, and say if files differed from it; empty outside a git checkout."""
    code = run.code()
    commit = str(code.get("commit") or "unknown")
    if commit == "unknown":
        return ""
    changed = f", changed ({str(code.get('diff_digest') or 'not known how')[:12]})" if code.get("dirty") else ""
    return commit[:12] + changed


def _no_metrics(run: Run, progress: Progress, elapsed: float) -> bool:
    """Return true if the ranks printed much, or ran long, but no metric could be read."""
    if progress.step is not None or progress.last_loss is not None or progress.not_finite:
        return False
    if any(True for node in run.nodes() for _ in run.metrics(node)):
        return False
    most = max((_lines_at_start(os.path.join(run.path, log.name)) for log in run.logs()), default=0)
    return most >= (1 if elapsed > _LONG else _MANY)


def _lines_at_start(path: str) -> int:
    """Count the lines that the program wrote in the first part of a log; updates of a progress bar count too."""
    try:
        with open(path, "rb") as file:
            lines = file.read(1 << 14).replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines()
    except OSError:
        return 0
    return sum(1 for line in lines if not line.startswith(b"drumbeat: "))  # of a stand-in launcher


_FEW = 5  # losses: with fewer, the first and the last one are enough
_BLOCKS = 20  # means of neighbours that are compared to find a lasting trend
_SURE = 3.0  # standard deviations
_TINY, _MUCH = 0.005, 0.1  # shares of the loss: a change too small to mention, and one that reads as a trend


def trend(losses: Sequence[float]) -> str:
    """Describe how the loss went if the first and the last one alone mislead; else ''. It has changed if nearly all losses follow
    one direction (Mann-Kendall's test), or if its ends lie further apart than the noise between neighbours."""
    size = max(1, len(losses) // 10)
    first, last = (median(losses[:size]), median(losses[-size:])) if losses else (0.0, 0.0)
    if len(set(losses)) < 2 or (len(losses) < _FEW and _changed(losses[0], losses[-1])):
        return ""
    of = f" (medians of {size} reports)" if size > 1 else ""
    if not _changed(first, last) or (
        abs(last - first) <= _SURE * _noise(losses) * math.sqrt(2 / size) and abs(_order(losses)) < _SURE
    ):
        ends = f"{loss_text(first)} at first and {loss_text(last)} at the end{of}"
        return f"too noisy to tell, {ends}" if _changed(first, last, _MUCH) else f"about the same, {ends}"
    if (last < first) == (losses[-1] < losses[0]):
        return ""
    return f"{'fell' if last < first else 'rose'} from {loss_text(first)} to {loss_text(last)}{of}"


def _changed(first: float, last: float, least: float = _TINY) -> bool:
    return abs(last - first) > least * max(abs(first), abs(last))


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of a loss, estimated from each value's distance to its neighbours' mean: a trend adds
    nothing."""
    bends = [abs(before - 2 * at + after) for before, at, after in zip(losses, losses[1:], losses[2:])]
    return 1.4826 / math.sqrt(6) * median(bends) if bends else 0.0


def _order(losses: Sequence[float]) -> float:
    """Return Mann-Kendall's statistic of the blocks' means, in standard deviations."""
    many = min(_BLOCKS, len(losses))
    edges = [at * len(losses) // many for at in range(many + 1)]
    means = [math.fsum(losses[low:high]) / (high - low) for low, high in zip(edges, edges[1:])]
    score = sum((after > before) - (after < before) for at, before in enumerate(means) for after in means[at + 1 :])
    return score / math.sqrt(many * (many - 1) * (2 * many + 5) / 18)


def loss_text(loss: float) -> str:
    return f"{loss:.3f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.2g}"


def loss_words(progress: Progress, losses: Sequence[float] = ()) -> str:
    """Describe how the loss and the validation loss developed, from the run's first reports to its last; empty if
    there is none."""
    last = None if progress.laps else progress.last_loss_step
    went = trend(losses)
    went = went or _went(progress.first_loss, progress.last_loss, progress.first_loss_step, last, progress.counts)
    if went and progress.laps:
        went += f"; steps are counted anew in each {progress.lap}"
    if went and progress.step is None and progress.place:
        went += f"; at {progress.place}"
    if progress.not_finite:
        went = not_finite_words(progress) + (f" (before that: {went})" if went else "")
    validation = _went(progress.first_validation, progress.last_validation, None, None)
    if progress.validation_not_finite:
        validation = progress.validation_not_finite + (f" (before that: {validation})" if validation else "")
    words = [went] * bool(went) + [f"validation loss {validation}"] * bool(validation)
    more = ", ".join(measures(progress.validation_measures))
    return "; ".join([*words, *([f"validation {more}"] if more else [])])


def not_finite_words(progress: Progress) -> str:
    since = progress.not_finite_since
    if since is None or progress.laps:
        return progress.not_finite
    words = progress.not_finite if progress.not_finite_first in ("", progress.not_finite) else "not finite"
    now = "" if words == progress.not_finite else f" (now {progress.not_finite})"
    return f"{words} since {progress.counts} {since}{now}"


def _went(
    first: Optional[float], last: Optional[float], begin: Optional[int], end: Optional[int], counts: str = "step"
) -> str:
    """Describe one loss. `begin` and `end` are the steps of the two losses; None: not named."""
    if first is None or last is None:
        return ""
    before, after = loss_text(first), loss_text(last)
    same = before == after  # also if a program both reports a loss and prints it, rounded
    if same and (begin == end or end is None):  # or there was only one
        return after + (f" at {counts} {end}" if end is not None else "")
    verb = "stayed at" if same else "fell from" if last < first else "rose from"
    words = f"{verb} {before}" + ("" if same else f" to {after}")
    if begin is None or end is None or begin >= end:
        return words
    if begin == 1 or same:
        return f"{words} over {end} {counts}s" if begin == 1 else f"{words} from {counts} {begin} to {end}"
    return f"{verb} {before} at {counts} {begin} to {after} at {counts} {end}"


def _affected_words(affected: Tuple[Affected, ...]) -> str:
    shown = [f"{_short_ranks(each)}: {each.what}" for each in affected[:_MOST_GROUPS]]
    rest = sum(each.count for each in affected[_MOST_GROUPS:])
    return "; ".join(shown + ([f"{count(rest, 'other rank')} in other ways"] if rest else []))


def _short_ranks(affected: Affected) -> str:
    parts = affected.ranks.split(",")
    ranks = affected.ranks if len(parts) <= 8 else f"{','.join(parts[:8])},... ({affected.count:,} ranks)"
    return f"rank {ranks}" if affected.count == 1 else f"ranks {ranks}"


def _log_name(run: Run, failure: Finding) -> str:
    """Return the failed rank's log, relative to the run folder: the one that the finding names, else its standard error, or its
    standard output if it wrote nothing else."""
    named = next((each.file for each in failure.evidence if each.file), None)
    if failure.rank is None or named:
        return named or ""
    logs = [log for log in run.logs(rank=failure.rank) if log.node == failure.node]
    own = sorted((log for log in logs if log.merged or log.stream in ("err", "out")), key=lambda log: log.stream)
    wrote = (log for log in own if log.merged or any(line.text.strip() for line in run.last_lines(log)))
    return next(wrote, own[0]).name if own else ""


def _end_of_log(run: Run, name: str, failure: Finding) -> List[str]:
    log = next((log for log in run.logs() if log.name == name), None) or Log(name, failure.node or 0, 0, failure.rank)
    lines = run.last_lines(log)
    mine = [line for line in lines if not log.merged or (line.rank == failure.rank and line.stream == "err")]
    return [shown(line.text) for line in mine if line.text.strip()]


def near(path: str) -> str:
    """Return the path relative to the current folder if it is below that; the whole path if the current folder is /."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or os.getcwd() == os.sep else relative
