"""The training loop. It reads top to bottom; everything it calls can be called from a loop of your own."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from drumbeat.base.signals import EXIT_REQUEUE
from drumbeat.train.checkpoint.checkpoints import Checkpoints, Saved
from drumbeat.train.checkpoint.digest import Digest, digest
from drumbeat.train.checkpoint.state import TrainingState
from drumbeat.train.data.stream import Stream
from drumbeat.train.deterministic import deterministic
from drumbeat.train.measure.communication import Communication
from drumbeat.train.measure.meter import VALIDATION, Meter
from drumbeat.train.measure.mfu import Utilisation
from drumbeat.train.measure.profile import Profiler
from drumbeat.train.measure.reporting import Reporter
from drumbeat.train.refusal import Refusal
from drumbeat.train.step import Outcome, Step
from drumbeat.train.step_report import report_step, setup_words
from drumbeat.train.stopping import StopTogether
from drumbeat.train.training_plan import Plan
from drumbeat.train.world import World


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
    plan: Plan,
    world: World,
    step: Step,
    stream: Stream,
    checkpoints: Optional[Checkpoints] = None,
    validate: Optional[Callable[[], Dict[str, float]]] = None,
    utilisation: Optional[Utilisation] = None,
    finished: Optional[Callable[[Dict[str, float]], bool]] = None,
) -> Result:
    """Train until `plan.steps`, or until `finished(validation figures)`, or until a signal stops all ranks."""
    with deterministic(plan.deterministic):
        return _train(plan, world, step, stream, checkpoints, validate, utilisation, finished)


def _train(
    plan: Plan,
    world: World,
    step: Step,
    stream: Stream,
    checkpoints: Optional[Checkpoints],
    validate: Optional[Callable[[], Dict[str, float]]],
    utilisation: Optional[Utilisation],
    finished: Optional[Callable[[Dict[str, float]], bool]],
) -> Result:
    if plan.on_nan not in ("stop", "skip"):
        raise Refusal(f"on_nan '{plan.on_nan}' is unknown", "known: stop, skip")
    reporter = Reporter(world.lead, plan.sinks)
    profiler = Profiler(plan.profile, world.rank, world.device)
    meter = Meter(world.device)
    communication = Communication(world, plan.watch_communication)
    stop = StopTogether()
    losses: List[float] = []
    checks: List[Dict[str, float]] = []
    gathered: List[Outcome] = []
    figures: Dict[str, float] = {}
    digests: List[Digest] = []
    done = first = 0
    if checkpoints is not None:
        loaded = checkpoints.load(["sample"])
        if loaded is not None:
            for words in loaded.notes:
                reporter.say(words)
            done = first = loaded.step
            stream.load_state_dict({"sample": loaded.extra["sample"]})
            reporter.say(f"resumed after step {done}")
            if plan.deterministic:
                digests.append(_digest(reporter, step, stream, done))
    reporter.figures("setup", done, {}, setup_words(plan, step, utilisation))
    gc.collect()
    gc.disable()  # a collection on one rank makes all others wait; it is run between steps, on all at once
    stopped = False
    try:
        while done < plan.steps:
            meter.start()
            batches = next(stream)
            meter.mark("data")
            for group in step.optimizer.param_groups:
                group["lr"] = plan.lr(done)
            last = done + 1 == plan.steps
            reporting = (done + 1) % plan.report_every == 0 or last
            look = reporting and communication.due(done + 1) and not profiler.active
            with communication.watch(done + 1) if look else nullcontext():
                gathered.append(step(batches, meter.mark))
            if look:
                meter.leave_out()
            done += 1
            if done == first + 1:
                if checkpoints is not None and (words := checkpoints.prepare()):
                    reporter.say(words)
                gc.collect()
                gc.freeze()  # what compiling left behind stays: later collections need not look at it
            if reporting:
                figures |= report_step(plan, reporter, meter, step, gathered, done, utilisation, world, communication)
                losses.append(figures["loss"])
                gathered.clear()
                gc.collect(1)
            stopped = (stop.agreed() or done == plan.stop_after) and not last
            if stopped or last:
                meter.start()  # the last step is over: a last save is no part of it
            save = checkpoints is not None and (stopped or (plan.save_every and (last or _due(plan.save_every, done))))
            if checkpoints is not None:
                _saved(reporter, checkpoints.poll())
                if save:  # before validating: what has been trained is not lost to whatever happens there
                    for saved in _save(checkpoints, reporter, done, stream, wait=stopped or last):
                        _saved(reporter, saved)
                        if saved.waited > 1 and saved.copied and not (stopped or last):
                            reporter.say(_too_often(saved))
                meter.mark("checkpoint")
            if validate is not None and not stopped and (last or _due(plan.validate_every, done)):
                checks.append(_validated(validate, reporter, done))
                meter.mark(VALIDATION)
                if not last and finished is not None and finished(checks[-1]):
                    last = True
                    meter.start()
                    if checkpoints is not None and plan.save_every:
                        for saved in _save(checkpoints, reporter, done, stream, wait=True):
                            _saved(reporter, saved)
            profiler.step()
            if stopped:
                where = "; saved" if checkpoints is not None else "; nothing is saved: no checkpoint folder was given"
                reporter.say(f"stopped by a signal after step {done}{where}")
            if stopped or last:
                break
        if checkpoints is not None:
            _saved(reporter, checkpoints.finish())
        if plan.deterministic:
            digests.append(_digest(reporter, step, stream, done))
    finally:
        gc.unfreeze()
        gc.enable()
        stop.close()
        profiler.close()
        stream.close()
        reporter.close()
    meter.take()
    if meter.step_ms:
        reporter.say(meter.summary())
    code = 0
    if stopped:
        code = EXIT_REQUEUE if checkpoints is not None else 128 + (stop.number or signal.SIGTERM)
    return Result(
        done, losses, checks, stopped, {**figures, **meter.percentiles()}, meter.step_ms, code, tuple(digests)
    )


def _digest(reporter: Reporter, step: Step, stream: Stream, done: int) -> Digest:
    others = {"step": step.state_dict(), "rank": step.rank_state(), "stream": stream.state_dict()}
    found = digest(done, TrainingState(step.parts, step.optimizer), others)
    reporter.say(f"state after step {done}: {found.of_all_ranks()}")
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


def _save(checkpoints: Checkpoints, reporter: Reporter, done: int, stream: Stream, wait: bool) -> List[Saved]:
    """Save, and report how long training stood still for it."""
    reporter.begins("checkpoint", done)
    began = time.perf_counter()
    ended = checkpoints.save(done, stream.state_dict(), wait=wait)
    reporter.figures("checkpoint", done, {"seconds": round(time.perf_counter() - began, 3)}, {})
    return ended


def _saved(reporter: Reporter, saved: Optional[Saved]) -> None:
    """A save has ended. One that failed is said and training goes on: the checkpoint before it is still the latest."""
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
