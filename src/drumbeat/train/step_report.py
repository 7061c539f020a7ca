"""Reports of steps: loss, speed, where the time went; and once what they are steps of."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from drumbeat.train.measure.communication import Communication
from drumbeat.train.measure.meter import Meter, own_seconds
from drumbeat.train.measure.mfu import Utilisation
from drumbeat.train.measure.reporting import Reporter
from drumbeat.train.settings import Settings
from drumbeat.train.step import Outcome
from drumbeat.train.trainer import Trainer


def setup_words(unit: str, trainer: Trainer, utilisation: Optional[Utilisation]) -> Dict[str, Any]:
    """Return what a report on this run needs to compare runs and compute MFU."""
    layout = {name: degree for name, degree in vars(trainer.meshes.layout).items() if degree > 1}
    words: Dict[str, Any] = {"precision": trainer.precision.name}
    words["layout"] = ",".join(f"{name}={degree}" for name, degree in layout.items()) or "one rank"
    if utilisation is not None:
        words[f"flops_per_{unit[:-1]}"] = utilisation.flops_per_sample
        words.update(flops_formula=utilisation.formula, flops_dtype=utilisation.dtype)
    return words


def report_step(
    settings: Settings,
    unit: str,
    reporter: Reporter,
    meter: Meter,
    trainer: Trainer,
    gathered: List[Outcome],
    utilisation: Optional[Utilisation],
    communication: Communication,
) -> Dict[str, float]:
    """The figures of the steps since the last report. The one place where the host waits for the device."""
    phases = meter.take()
    done, step, world = trainer.steps, trainer.inner, trainer.world
    last = trainer.result(gathered[-1])
    targets = float(torch.stack([outcome.targets for outcome in gathered]).sum())
    shared: Dict[str, float] = {"loss": float(last.loss), "grad_norm": float(last.norm)}
    shared.update({name: float(value) for name, value in last.metrics.items()})
    skipped = int(step.skipped)
    if skipped:
        shared["skipped_steps"] = skipped
    if step.scaler is not None and int(step.rescaled):
        shared["rescaled_steps"] = int(step.rescaled)
    step_ms = sum(phases.values())
    if step_ms:
        shared[f"{unit}_per_s"] = targets / len(gathered) / step_ms * 1e3
        shared.update({f"{phase}_ms": ms for phase, ms in phases.items()})
        if utilisation is not None:
            shared.update(utilisation.of(shared[f"{unit}_per_s"] / world.size))
    if world.device.type == "cuda":
        shared["memory_gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30
    watched = communication.take()
    own = {unit: round(targets / world.size), **watched, **own_seconds(phases, watched)}
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
