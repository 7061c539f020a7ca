"""The training loop. It reads top to bottom; everything it calls can be called from a loop of your own."""

from __future__ import annotations

import gc
import math
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from drumbeat.signals import EXIT_REQUEUE
from drumbeat.train.checkpoint.checkpoints import Checkpoints, Saved
from drumbeat.train.checkpoint.digest import Digest, digest
from drumbeat.train.checkpoint.state import TrainingState
from drumbeat.train.data.stream import Stream
from drumbeat.train.deterministic import deterministic
from drumbeat.train.measure.communication import Communication
from drumbeat.train.measure.meter import VALIDATION, Meter, own_seconds
from drumbeat.train.measure.mfu import Utilisation
from drumbeat.train.measure.profile import Profile, Profiler
from drumbeat.train.measure.reporting import Reporter
from drumbeat.train.refusal import Refusal
from drumbeat.train.step import Outcome, Step
from drumbeat.train.stopping import StopTogether
from drumbeat.train.world import World


@dataclass(frozen=True)
class Plan:
    """How long, and how often what."""

    steps: int
    lr: Callable[[int], float]  # by step, from 0
    report_every: int = 10
    validate_every: int = 0  # 0: only at the end, if there is a validation
    save_every: int = 0  # 0: only when stopped
    stop_after: int = 0  # rehearse a stop signal after this step
    on_nan: str = "stop"  # or skip
    unit: str = "tokens"  # what is counted: tokens or samples
    watch_communication: int = 1000  # steps between looks; 0: never
    profile: Profile = field(default_factory=Profile)
    sinks: List[str] = field(default_factory=list)
    deterministic: bool = False


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
            for words in loaded.left_out:
                reporter.say(words)
            done = first = loaded.step
            stream.load_state_dict({"sample": loaded.extra["sample"]})
            reporter.say(f"resumed after step {done}")
            if plan.deterministic:
                digests.append(_digest(reporter, step, stream, done))
    reporter.figures("setup", done, {}, _setup(plan, step, utilisation))
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
                if checkpoints is not None:
                    checkpoints.prepare()
                gc.collect()
                gc.freeze()  # what compiling left behind stays: later collections need not look at it
            if reporting:
                figures |= _report(plan, reporter, meter, step, gathered, done, utilisation, world, communication)
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
                        if saved.waited > 1 and not (stopped or last):
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


def _report(
    plan: Plan,
    reporter: Reporter,
    meter: Meter,
    step: Step,
    gathered: List[Outcome],
    done: int,
    utilisation: Optional[Utilisation],
    world: World,
    communication: Communication,
) -> Dict[str, float]:
    """The one place where the host waits for the device."""
    phases = meter.take()
    # Every rank has its share of each loss; targets and norm are known to all.
    loss = gathered[-1].loss.clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= step.meshes.layout.tp  # tensor-parallel ranks computed the same share
    targets = float(torch.stack([outcome.targets for outcome in gathered]).sum())
    shared: Dict[str, float] = {"loss": float(loss), "grad_norm": float(gathered[-1].norm)}
    skipped = int(step.skipped)
    if skipped:
        shared["skipped_steps"] = skipped
    if step.scaler is not None and int(step.rescaled):
        shared["rescaled_steps"] = int(step.rescaled)
    step_ms = sum(phases.values())
    if step_ms:
        shared[f"{plan.unit}_per_s"] = targets / len(gathered) / step_ms * 1e3
        shared.update({f"{phase}_ms": ms for phase, ms in phases.items()})
        if utilisation is not None:
            shared.update(utilisation.of(shared[f"{plan.unit}_per_s"] / world.size))
    if world.device.type == "cuda":
        shared["memory_gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30
    watched = communication.take()
    own = {plan.unit: round(targets / world.size), **watched, **own_seconds(phases, watched)}
    reporter.figures("step", done, own, shared, plan.steps)
    reporter.say(_line(done, plan, {**own, **shared}))
    if plan.on_nan == "stop" and (skipped or not math.isfinite(shared["loss"])):
        # Every rank has the same figures, so every rank stops here; no NaN has reached the weights.
        raise FloatingPointError(f"loss or gradients are not finite at or before step {done}; {skipped} steps left out")
    return {**own, **shared}


def _line(done: int, plan: Plan, shared: Dict[str, float]) -> str:
    parts = [f"step {done}/{plan.steps}", f"loss {shared['loss']:.4f}", f"grad norm {shared['grad_norm']:.3f}"]
    if f"{plan.unit}_per_s" in shared:
        parts.append(f"{shared[f'{plan.unit}_per_s']:,.0f} {plan.unit}/s")
    if "mfu" in shared:
        parts.append(f"MFU {shared['mfu']:.1%}")
    if "communication_ms" in shared:
        whole, open_ = shared["communication_ms"], shared["communication_exposed_ms"]
        parts.append(f"communication {whole:.1f} ms, {open_:.1f} not hidden")
    return "  ".join(parts)


def _validated(validate: Callable[[], Dict[str, float]], reporter: Reporter, done: int) -> Dict[str, float]:
    began = time.perf_counter()
    reporter.begins("validation", done)
    values = validate()
    reporter.figures("validation", done, {"seconds": round(time.perf_counter() - began, 3)}, values)
    reporter.say(f"step {done}  validation  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return values


def _setup(plan: Plan, step: Step, utilisation: Optional[Utilisation]) -> Dict[str, Any]:
    """What a report on this run has to know: it compares runs, and works out MFU."""
    layout = {name: degree for name, degree in vars(step.meshes.layout).items() if degree > 1}
    words: Dict[str, Any] = {"precision": step.precision.name}
    words["layout"] = ",".join(f"{name}={degree}" for name, degree in layout.items()) or "one rank"
    if utilisation is not None:
        words[f"flops_per_{plan.unit[:-1]}"] = utilisation.flops_per_sample
        words.update(flops_formula=utilisation.formula, flops_dtype=utilisation.dtype)
    return words


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
    outcome: Dict[str, Any] = {"path": saved.path}
    if saved.error:
        outcome["error"] = saved.error
        reporter.say(f"the checkpoint of step {saved.step} FAILED: {saved.error}; training goes on without it")
    reporter.figures("checkpoint", saved.step, {"save_s": round(saved.seconds, 3)}, outcome)


def _too_often(saved: Saved) -> str:
    return (
        f"training waited {saved.waited:.1f} s for the checkpoint of step {saved.step}, which took {saved.seconds:.0f} s "
        "to write: save less often, or to faster storage"
    )


def average(values: Tensor, group: Optional[Any]) -> Tensor:
    """Sums over ranks of (total, count) pairs -> total / count."""
    if group is not None:
        dist.all_reduce(values, group=group.get_group())
    return values[..., 0] / values[..., 1].clamp(min=1)
