"""The training loop. It reads top to bottom; everything it calls can be called from a loop of your own."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from drumbeat.base.signals import EXIT_REQUEUE
from drumbeat.train.checkpoint.checkpoints import Checkpoints, Saved
from drumbeat.train.checkpoint.snapshots import Snapshots
from drumbeat.train.checkpoint.state import Digest, TrainingState, digest
from drumbeat.train.data import Stream
from drumbeat.train.judge import Judge
from drumbeat.train.measure import VALIDATION, Communication, Meter, Reporter, Utilisation, own_seconds
from drumbeat.train.refusal import Refusal, Stopped
from drumbeat.train.settings import Settings
from drumbeat.train.step import Outcome
from drumbeat.train.trainer import Loss, Trainer
from drumbeat.train.world import StopTogether

_QUIET = 10.0  # seconds without a line, between two reports, after which one says where training is


class Result(NamedTuple):
    step: int
    losses: List[float]  # of every reported step
    validation: List[Dict[str, float]]
    stopped: bool  # by a signal
    figures: Dict[str, float]
    step_ms: List[float]  # every step after the warm-up
    exit_code: int = 0  # 75: stopped and saved, start me again; 128 + N: stopped by signal N, nothing saved
    digests: Tuple[Digest, ...] = ()  # deterministic runs: of the state after a resume, and at the end


def train(
    settings: Settings,
    trainer: Trainer,
    stream: Stream,
    loss: Optional[Loss] = None,
    validate: Optional[Callable[[], Dict[str, float]]] = None,
    utilisation: Optional[Utilisation] = None,
    finished: Optional[Callable[[Dict[str, float]], bool]] = None,
    unit: str = "tokens",
) -> Result:
    """Train until `settings.steps`, or until `finished(validation figures)`, or until a signal stops all ranks. `unit`: what a
    loss counts, tokens or samples."""
    with deterministic(settings.deterministic):
        return _train(settings, trainer, stream, loss, validate, utilisation, finished, unit)


def _train(
    settings: Settings,
    trainer: Trainer,
    stream: Stream,
    loss: Optional[Loss],
    validate: Optional[Callable[[], Dict[str, float]]],
    utilisation: Optional[Utilisation],
    finished: Optional[Callable[[Dict[str, float]], bool]],
    unit: str,
) -> Result:
    world = trainer.world
    reporter = Reporter(world.lead, [text for text in settings.figures.split(",") if text])
    meter = Meter(world.device)
    communication = Communication(world, settings.watch_communication)
    stop = StopTogether()
    losses: List[float] = []
    checks: List[Dict[str, float]] = []
    gathered: List[Outcome] = []
    figures: Dict[str, float] = {}
    digests: List[Digest] = []
    checkpoints = trainer.checkpoints(settings.checkpoint, settings.keep) if settings.checkpoint else None
    snapshots = _snapshots(settings, trainer)
    done = first = trainer.load(settings.checkpoint) if checkpoints is not None else 0
    if done and settings.deterministic:
        digests.append(_digest(reporter, trainer, stream))
    reporter.figures("setup", done, {}, _setup_words(unit, trainer, utilisation))
    trouble = Trouble(settings, trainer, stream)
    gc.collect()
    gc.disable()  # a collection on one rank makes all others wait; it is run between steps, on all at once
    stopped, spoke, problem = False, (began := time.monotonic()), None
    if done >= settings.steps:
        reporter.say(f"nothing left to train: {done} of {settings.steps} steps are made")
    try:
        while done < settings.steps:
            meter.start()
            batches = next(stream)
            meter.mark("data")
            last = done + 1 == settings.steps
            every = (settings.steps_per_line, settings.save_every, settings.snapshot_every)
            reporting = last or any(_due(steps, done + 1) for steps in every)  # what is saved is looked at before
            look = reporting and communication.due(done + 1) and not trainer.profiler.active
            with communication.watch(done + 1) if look else nullcontext():
                gathered.append(trainer.advance(batches, loss, meter.mark))
            if look:
                meter.leave_out()
            done += 1
            if done == first + 1:
                if checkpoints is not None and (words := checkpoints.prepare()):
                    reporter.say(words)
                gc.collect()
                gc.freeze()  # what compiling left behind stays: later collections need not look at it
            stopped = (stop.agreed() or done == settings.stop_after) and not last
            quiet = time.monotonic() - spoke > _QUIET
            if (quiet or done == first + 1) and not (reporting or stopped):
                reporter.passes(done, settings.steps, unit, _work(stream, gathered) / world.size)
            if quiet and not (reporting or stopped):
                reporter.say(f"at step {done}/{settings.steps}, {time.monotonic() - began:.0f} s after the start")
                spoke = time.monotonic()
            if reporting or stopped:
                spoke = time.monotonic()
                work = _work(stream, gathered)
                now = _report_step(settings, unit, reporter, meter, trainer, gathered, work, utilisation, communication)
                figures |= now
                losses.append(now["loss"])
                gathered.clear()
                gc.collect(1)
                skipped = int(now.get("skipped_steps", 0))
                # A stop adds no look of its own: a resumed run decides at the steps at which one that never stopped does.
                usual = trainer.usual if reporting else list(trainer.usual)
                problem = trouble.judge(done, now["loss"], skipped, usual, reporter.say)
                if problem and reporting:
                    _saved(reporter, checkpoints.finish() if checkpoints is not None else None)
                    trouble.go_back(problem, reporter.say)
                    done = trainer.steps
                    continue
            if stopped or last:
                meter.start()  # the last step is over: a last save is no part of it
            wanted = stopped or last or _due(settings.save_every, done)
            save = checkpoints is not None and wanted and not problem
            if checkpoints is not None:
                _saved(reporter, checkpoints.poll())
                if save:  # before validating: what has been trained is not lost to whatever happens there
                    for saved in _save(checkpoints, reporter, trainer, wait=stopped or last):
                        _saved(reporter, saved)
                        if saved.waited > 1 and saved.copied and not (stopped or last):
                            reporter.say(_too_often(saved))
                elif snapshots is not None and _due(settings.snapshot_every, done) and not last:
                    _take(snapshots, reporter, trainer)
                meter.mark("checkpoint")
            if validate is not None and not stopped and (last or _due(settings.validate_every, done)):
                checks.append(_validated(validate, reporter, done))
                meter.mark(VALIDATION)
                if not last and finished is not None and finished(checks[-1]):
                    last = True
                    meter.start()
                    if checkpoints is not None:
                        for saved in _save(checkpoints, reporter, trainer, wait=True):
                            _saved(reporter, saved)
            if stopped:
                where = "; saved" if checkpoints is not None else "; nothing is saved: no checkpoint folder was given"
                if problem:
                    where = f"; not saved, so that a resumed run goes back to the checkpoint before: {problem.what}"
                reporter.say(f"stopped by a signal after step {done}{where}")
            if stopped or last:
                break
        if checkpoints is not None:
            _saved(reporter, checkpoints.finish())
        if snapshots is not None:
            snapshots.finish()
        if settings.deterministic:
            digests.append(_digest(reporter, trainer, stream))
    finally:
        gc.unfreeze()
        gc.enable()
        stop.close()
        trainer.profiler.close()
        stream.close()
        reporter.close()
    meter.take()
    if meter.step_ms:
        reporter.say(meter.summary())
    code = 0
    if stopped:
        code = EXIT_REQUEUE if checkpoints is not None else 128 + (stop.number or signal.SIGTERM)
    figures |= meter.percentiles()
    return Result(done, losses, checks, stopped, figures, meter.step_ms, code, tuple(digests))


def _setup_words(unit: str, trainer: Trainer, utilisation: Optional[Utilisation]) -> Dict[str, Any]:
    """Return what a report on this run needs to compare runs and compute MFU."""
    layout = {name: degree for name, degree in vars(trainer.meshes.layout).items() if degree > 1}
    words: Dict[str, Any] = {"precision": trainer.precision.name}
    words["layout"] = ",".join(f"{name}={degree}" for name, degree in layout.items()) or "one rank"
    if utilisation is not None:
        words[f"flops_per_{unit[:-1]}"] = utilisation.flops_per_sample
        words.update(flops_formula=utilisation.formula, flops_dtype=utilisation.dtype)
    return words


def _work(stream: Stream, outcomes: List[Outcome]) -> float:
    """Count the tokens or samples of the last steps on all ranks. The host waits for the device only here, and where figures
    are reported."""
    return stream.tokens(len(outcomes)) or float(torch.stack([outcome.targets for outcome in outcomes]).sum())


def _report_step(
    settings: Settings,
    unit: str,
    reporter: Reporter,
    meter: Meter,
    trainer: Trainer,
    gathered: List[Outcome],
    work: float,
    utilisation: Optional[Utilisation],
    communication: Communication,
) -> Dict[str, float]:
    """Report the figures of the steps since the last report; `work` is that of all ranks in them."""
    phases = meter.take()
    done, step, world = trainer.steps, trainer.inner, trainer.world
    last = trainer.result(gathered[-1])
    shared: Dict[str, float] = {"loss": float(last.loss), "grad_norm": float(last.norm)}
    shared.update({name: float(value) for name, value in last.metrics.items()})
    skipped = int(step.skipped)
    if skipped:
        shared["skipped_steps"] = skipped
    if step.scaler is not None and int(step.rescaled):
        shared["rescaled_steps"] = int(step.rescaled)
    step_ms = sum(phases.values())
    if step_ms:
        shared[f"{unit}_per_s"] = work / len(gathered) / step_ms * 1e3
        shared.update({f"{phase}_ms": ms for phase, ms in phases.items()})
        if utilisation is not None:
            shared.update(utilisation.of(shared[f"{unit}_per_s"] / world.size))
    if world.device.type == "cuda":
        shared["memory_gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30
    watched = communication.take()
    own = {unit: round(work / world.size), **watched, **own_seconds(phases, watched)}
    reporter.figures("step", done, own, shared, settings.steps)
    reporter.say(_line(done, settings.steps, unit, {**own, **shared}))
    return {**own, **shared}


def _line(done: int, steps: int, unit: str, shared: Dict[str, float]) -> str:
    parts = [f"step {done}/{steps}", f"loss {shared['loss']:.4f}", f"grad norm {shared['grad_norm']:.3f}"]
    if f"{unit}_per_s" in shared:
        parts.append(f"{shared[f'{unit}_per_s']:,.0f} {unit}/s")
    if "mfu" in shared:
        parts.append(f"MFU {shared['mfu']:.1%}")
    if "communication_ms" in shared:
        whole, open_ = shared["communication_ms"], shared["communication_exposed_ms"]
        parts.append(f"communication {whole:.1f} ms, {open_:.1f} not hidden")
    return "  ".join(parts)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Compute the same numbers every time, at the cost of speed: FlashAttention 4 adds in order, cuDNN's attention gives way to
    FlashAttention 2. An operation without a deterministic form raises a RuntimeError that names it."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would choose by speed, and so by chance
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]


def _digest(reporter: Reporter, trainer: Trainer, stream: Stream) -> Digest:
    step = trainer.inner
    others = {"step": step.state_dict(), "rank": step.rank_state(), "stream": stream.state_dict()}
    found = digest(trainer.steps, TrainingState(step.parts, step.optimizer), others)
    reporter.say(f"state after step {trainer.steps}: {found.of_all_ranks()}")
    return found


def _due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def _validated(validate: Callable[[], Dict[str, float]], reporter: Reporter, done: int) -> Dict[str, float]:
    began = time.perf_counter()
    reporter.begins("validation", done)
    values = validate()
    reporter.figures("validation", done, {"seconds": round(time.perf_counter() - began, 3)}, values)
    reporter.say(f"step {done}  validation  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return values


def _save(checkpoints: Checkpoints, reporter: Reporter, trainer: Trainer, wait: bool) -> List[Saved]:
    """Save, and report how long training stood still for it."""
    reporter.begins("checkpoint", trainer.steps)
    began = time.perf_counter()
    ended = checkpoints.save(trainer.steps, trainer.state(), wait=wait)
    reporter.figures("checkpoint", trainer.steps, {"seconds": round(time.perf_counter() - began, 3)}, {})
    return ended


def _snapshots(settings: Settings, trainer: Trainer) -> Optional[Snapshots]:
    if not settings.snapshot_every:
        return None
    if not settings.checkpoint:
        raise Refusal("snapshot_every without checkpoints", "give checkpoint=FOLDER: memory does not outlive the run")
    return trainer.use_snapshots(settings.checkpoint)


def _take(snapshots: Snapshots, reporter: Reporter, trainer: Trainer) -> None:
    began = time.perf_counter()
    snapshots.take(trainer.steps, trainer.state())
    reporter.figures("checkpoint", trainer.steps, {"seconds": round(time.perf_counter() - began, 3)}, {})
    for saved in snapshots.poll():
        if saved.error:
            reporter.say(f"the snapshot of step {saved.step} FAILED: {saved.error}; training goes on without it")
        elif saved.waited > 1:
            reporter.say(
                f"training waited {saved.waited:.1f} s for the snapshot of step {saved.step}, which took "
                f"{saved.seconds:.0f} s: take snapshots less often"
            )


def _saved(reporter: Reporter, saved: Optional[Saved]) -> None:
    """Report a save that has ended. Training goes on if it failed: the checkpoint before it is still the latest."""
    if saved is None:
        return
    outcome: Dict[str, Any] = {"path": os.path.abspath(saved.path)}
    if saved.error:
        outcome["error"] = saved.error
        reporter.say(f"the checkpoint of step {saved.step} FAILED: {saved.error}; training goes on without it")
    reporter.figures("checkpoint", saved.step, {"save_s": round(saved.seconds, 3)}, outcome)


def _too_often(saved: Saved) -> str:
    return (
        f"training waited {saved.waited:.1f} s for the checkpoint of step {saved.step}, which took {saved.seconds:.0f} s "
        "to write: save less often, or to faster storage"
    )


# Losses that are not numbers, and losses that jump: reported, stopped at, or gone back from, leaving out the samples that led
# there. The steps that are reported are examined, and every step before it is saved: the newest checkpoint and the newest
# snapshot are always good. Every rank has the same figures, so every rank decides the same.


_SO_OFTEN = 5  # times to go back to the same step
SKIPPED = "skipped.jsonl"


class Trouble(Judge):
    """The judge of a recipe, which can go back: it has the stream of samples and a folder of checkpoints."""

    def __init__(self, settings: Settings, trainer: Trainer, stream: Stream) -> None:
        super().__init__(settings.on_nan, settings.on_spike, back=True)
        self.settings, self.trainer, self.stream = settings, trainer, stream
        self.start(trainer.skipped)
        self._back_to = self._times = self._left_out = 0
        for name in ("on_nan", "on_spike"):
            if getattr(settings, name) == "back" and not (settings.checkpoint and settings.save_every):
                raise Refusal(f"{name}=back without checkpoints", "give checkpoint=FOLDER and save_every=STEPS")

    def go_back(self, problem: Stopped, say: Callable[[str], None]) -> None:
        """Load the newest state that was saved, and leave out the samples since then."""
        done, sample = self.trainer.steps, self.stream.sample
        step = self.trainer.restore(self.settings.checkpoint)
        self._times = self._times + 1 if step == self._back_to else 1
        if not step or self._times > _SO_OFTEN:
            why = f"tried {_SO_OFTEN} times from step {step}" if step else "nothing is saved yet"
            raise type(problem)(f"{problem.what}; going back does not help: {why}", problem.fix)
        first = max(self.stream.sample, self._left_out)  # the note of the last time names those before
        self._back_to, self._left_out = step, sample
        self.start(self.trainer.skipped)
        self.stream.load_state_dict({"sample": sample})
        say(
            f"{problem.what}: back to step {step}{self.trainer.loaded_from}; samples {first} to {sample - 1} are left out"
        )
        if self.trainer.world.lead:
            note = {"why": problem.what, "step": done, "back_to": step, "samples": [first, sample - 1]}
            with open(os.path.join(self.settings.checkpoint, SKIPPED), "a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
