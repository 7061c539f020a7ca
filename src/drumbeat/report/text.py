"""A report as text: one subject per line, 80 columns, `not measured` where it was not."""

from __future__ import annotations

import textwrap
from typing import List, Optional, Tuple

from drumbeat.base.redact import printable
from drumbeat.base.text import count, duration, traffic
from drumbeat.predict.forecast import FAILURE_SOURCE, reliability_of
from drumbeat.report.figures import Figures, Foreseen, GpuUse, Steps
from drumbeat.runfolder.lines import WHOSE_RATE, ledger_words, loss_text, measures, part_words
from drumbeat.runfolder.progress import AS_PRINTED, speed
from drumbeat.runfolder.state import GOING_ON, HANGING, QUEUE, TRAINING

NOT = "not measured"
_LABEL = 11
_MOST_NOTES = 12
_COMMAND = 200  # characters: a program may stand in it
_LONG = 3600.0  # seconds: a shorter run is not compared with what is expected of long ones


def lines_of(figures: Figures, width: int = 80) -> List[str]:
    lines: List[str] = []
    for label, text in rows(figures):
        wrapped = textwrap.wrap(text, max(30, width - _LABEL), break_on_hyphens=False) or [""]
        lines.append(f"{label:<{_LABEL}}{wrapped[0]}")
        lines += [" " * _LABEL + more for more in wrapped[1:]]
    return lines


def rows(figures: Figures) -> List[Tuple[str, str]]:
    found = [("run", figures.name), ("end", end_words(figures)), ("size", size_words(figures))]
    if figures.ledger:
        found.append(("time", ledger_words(figures.ledger, figures.training_share, figures.step_is)))
    if figures.training_share is not None:
        found.append(("ETTR", ettr_words(figures)))
    hours = NOT if figures.gpu_hours is None else f"{figures.gpu_hours:.3g}"
    found.append(("GPU-hours", "0: no GPU" if figures.gpus == 0 else hours))
    if figures.step is not None:
        steps = f" of {figures.steps:,}" if figures.steps else ""
        counted = f" of this {figures.steps_of}" if figures.steps_of else ""
        resumed = f", resumed from {figures.resumed_from:,}" if figures.resumed_from else ""
        found.append((figures.step_is or "step", f"{figures.step:,}{steps}{counted}{resumed}"))
    losses = [_went(figures.loss, figures.loss_not_finite, figures.loss_trend)]
    validation = _went(figures.validation, figures.validation_not_finite)
    validation = ", ".join([*([validation] if validation else []), *measures(figures.validation_measures)])
    losses.append(f"validation {validation}" if validation else "")
    found += [
        ("loss", "; ".join(words for words in losses if words) or NOT),
        ("target", target_words(figures)),
        ("throughput", speed_words(figures)),
        ("spread", spread_words(figures)),
        ("batch", f"{figures.batch:,.0f} {figures.batch_unit} per step, all ranks" if figures.batch else NOT),
        ("MFU", mfu_words(figures)),
        *gpu_rows(figures.gpu, figures.gpus),
        ("network", network_words(figures)),
        ("slowest", slowest_words(figures)),
    ]
    if figures.steps_by_rank:
        found.append(("by rank", steps_words(figures.steps_by_rank, figures.step_is or "step")))
    found.append((f"per {figures.step_is or 'step'}", phase_words(figures)))
    if figures.foreseen:
        found.append(("predicted", foreseen_words(figures.foreseen)))
    notes = figures.notes[:_MOST_NOTES]
    found += [(note.severity, f"{note.text}: {note.fix}" if note.fix else note.text) for note in notes]
    if len(figures.notes) > _MOST_NOTES:
        found.append(("", f"{len(figures.notes) - _MOST_NOTES} more findings: --json shows them"))
    setting = figures.setting
    code = setting.code or "not known: no git checkout"
    command = setting.command if len(setting.command) <= _COMMAND else setting.command[:_COMMAND] + " ... (all: --json)"
    known = {"command": command, "code": code, "image": setting.image, "precision": setting.precision}
    known["layout"] = setting.layout
    found += [(name, value) for name, value in known.items() if value]
    if setting.hardware:
        found.append(("hardware", ", ".join(f"{name} {value}" for name, value in setting.hardware.items())))
    main = ("drumbeat", "torch", "torch-cuda", "torch-rocm", "cuda", "rocm", "nccl", "rccl", "jax", "nvidia-driver")
    shown = [software_words(name, setting.software[name], figures.gpus) for name in main if setting.software.get(name)]
    if shown:
        others = len(setting.software) - len(shown)
        found.append(("software", ", ".join(shown) + (f"; {count(others, 'more package')}: --json" if others else "")))
    found.append(("source", figures.source))
    return [(label, " ".join(printable(text).split())) for label, text in found]


def software_words(name: str, version: str, gpus: Optional[int]) -> str:
    """List the software. The toolkit is the installed one; the one that torch uses is part of torch."""
    what = {"cuda": "CUDA toolkit", "rocm": "ROCm", "torch-cuda": "torch built for CUDA"}
    what["torch-rocm"] = "torch built for ROCm"
    unused = " (installed, not used: no GPU)" if gpus == 0 and name in ("cuda", "rocm") else ""
    return f"{what.get(name, name)} {version}{unused}"


def ettr_words(figures: Figures) -> str:
    """Return the effective training time ratio with its parts; for a job that was queued again, over all of its starts."""
    parts, held = figures.ledger, sum(figures.ledger.values()) - figures.ledger.get(QUEUE, 0.0)
    lost = {name: spent for name, spent in parts.items() if name not in (QUEUE, TRAINING) and spent >= held / 1000}
    longest = sorted(lost, key=lambda name: -lost[name])
    most = ", ".join(f"{part_words(name, parts, figures.step_is)} {lost[name] / held:.1%}" for name in longest)
    words = [f"{figures.training_share:.1%} of the time on its nodes"]
    words += [f"over {figures.starts} starts of the job"] if figures.starts > 1 else []
    words += [f"the rest: {most}"] if most else []
    if parts.get(QUEUE, 0.0) > 0:
        words.append(f"{parts[TRAINING] / sum(parts.values()):.1%} with the queue")
    if figures.gpus and held > _LONG:
        words.append(f"{reliability_of(figures.gpus).goodput.share:.1%} expected ({FAILURE_SOURCE})")
    return "; ".join(words)


def end_words(figures: Figures) -> str:
    so_far = "for" if figures.outcome in GOING_ON else "after" if figures.outcome == "cancelled" else "in"
    lasted = figures.ledger.get("hang") if figures.outcome == HANGING else figures.seconds
    took = f" {so_far} {duration(lasted)}" if lasted is not None else ""
    code = f", exit code {figures.exit_code}" if figures.exit_code is not None else ""
    tries = f", {figures.attempts} attempts" if figures.attempts > 1 else ""
    return (figures.end or f"{figures.outcome}{took}{code}") + tries


def size_words(figures: Figures) -> str:
    parts = [count(figures.nodes, "node") if figures.nodes else "nodes not known"]
    parts += [count(figures.ranks, "rank")] if figures.ranks else []
    parts.append("GPUs not known" if figures.gpus is None else count(figures.gpus, "GPU") if figures.gpus else "no GPU")
    return ", ".join(parts) + (" (nodes emulated on one machine)" if figures.emulated else "")


def target_words(figures: Figures) -> str:
    accuracy = f"last accuracy {figures.accuracy:.4g}" if figures.accuracy is not None else ""
    if figures.target_reached is None:
        return f"none set ({accuracy})" if accuracy else "none set"
    target = f" {figures.target:g}" if figures.target is not None else ""
    return f"{'reached' if figures.target_reached else 'not reached'}{target}" + (f" ({accuracy})" if accuracy else "")


def speed_words(figures: Figures) -> str:
    found = figures.speed
    if found is None:
        return f"{NOT}: {figures.no_speed}" if figures.no_speed else NOT
    shared = not found.unit.startswith(("tokens", "samples"))  # all ranks make each step or epoch together
    size = 0 if shared or found.unit.endswith(AS_PRINTED) else figures.size
    whose = "GPU" if figures.gpus else "rank"
    each = f"; {speed(found.value / size, found.unit, rough=found.rough)} per {whose}" if size else ""
    how = WHOSE_RATE if found.unit.endswith(AS_PRINTED) else found.how
    return f"{speed(found.value, found.unit, rough=found.rough)}{each} ({how})"


def spread_words(figures: Figures) -> str:
    found = figures.speed
    if found is not None and found.no_spread:
        return f"{NOT}: {found.no_spread}"
    if found is None or found.low is None or found.median is None or found.high is None:
        return NOT
    low, median, high = (speed(each, "").strip() for each in (found.low, found.median, found.high))
    words = f"median {median}, 10 % of the intervals below {low}, 10 % above {high} {found.unit}"
    return f"{words} ({count(found.intervals, 'interval')} between reports)"


def mfu_words(figures: Figures) -> str:
    use = figures.utilisation
    if use is None:
        return f"{NOT}: {figures.no_utilisation}" if figures.no_utilisation else NOT
    return (
        f"{use.mfu:.1%} = throughput x {use.flops:.4g} FLOPs ({use.formula}) / ({figures.gpus} x {use.peak_tflops:g} "
        f"TFLOP/s {use.dtype} dense, {use.gpu}, {use.source}); {use.tflops_per_gpu:.4g} TFLOP/s per GPU"
    )


def gpu_rows(use: Optional[GpuUse], gpus: Optional[int]) -> List[Tuple[str, str]]:
    if use is None:
        why = "no GPU" if gpus == 0 else NOT
        return [("GPU use", why), ("energy", why)]
    figures = (
        ("busy {:.0f} %", use.busy), ("{:.0f} W per GPU", use.power_w), ("at most {:.1f} GiB", use.memory_gib),
        ("at most {:.0f} C", use.temperature),
    )  # fmt: skip
    parts = [words.format(value) for words, value in figures if value is not None]
    parts += [f"slowed by {reason} {share:.0%} of the time" for reason, share in use.slowed.items() if share >= 0.01]
    where = f" of {use.sampled_nodes} nodes" if use.sampled_nodes else ""
    words = f"{', '.join(parts)} ({count(use.samples, 'sample')}{where}, start to end)" if parts else NOT
    return [("GPU use", words), ("energy", energy_words(use))]


def energy_words(use: GpuUse) -> str:
    if use.energy_kwh is None:
        return NOT
    each = f", {use.joules_per_unit:.3g} J per {use.unit} in training" if use.joules_per_unit is not None else ""
    return f"{use.energy_kwh:.4g} kWh of the GPUs alone{each} ({use.energy_how})"


def network_words(figures: Figures) -> str:
    if figures.network_why:
        return figures.network_why
    if not figures.network:
        return NOT
    kinds = {"ethernet": "interfaces", "rdma": "RDMA ports"}
    words = "; ".join(
        f"{kinds[kind]} received {traffic(each.received)}, sent {traffic(each.sent)}"
        for kind, each in sorted(figures.network.items())
    )
    return f"{words} (everything on these hosts)"


def slowest_words(figures: Figures) -> str:
    slow = figures.slowest
    if slow is None:
        return figures.no_slowest or NOT
    return f"rank {slow.rank} on node {slow.node}: {slow.ms:.1f} ms; {slow.how}"


def steps_words(steps: Steps, counts: str) -> str:
    """`counts`: name of what a step number counts."""
    words = f"{steps.least:.3g} to {steps.most:.3g} s per {counts}, median {steps.median:.3g} s"
    if steps.slowest is None:
        return f"{words}; no rank is slower than the others for long"
    when = f"in {counts}s {steps.first:,} to {steps.last:,}, with up to {steps.seconds:.3g} s"
    return f"{words}; rank {steps.slowest} is slowest {when}"


def phase_words(figures: Figures) -> str:
    phases = figures.phases
    if phases.step is None:
        return NOT
    named = {"input": phases.input, "communication": phases.communication, "waiting for slower ranks": phases.waiting}
    parts = [f"{name} {ms:.1f} ms" if ms is not None else f"{name} {NOT}" for name, ms in named.items()]
    return f"mean {phases.step:.1f} ms: {', '.join(parts)}" + (f" ({phases.how})" if phases.how else "")


def foreseen_words(foreseen: Foreseen) -> str:
    ratio = foreseen.measured / foreseen.predicted - 1
    words = (
        f"{1e3 * foreseen.predicted:,.1f} ms per step (90 %: {1e3 * foreseen.low:,.1f} to {1e3 * foreseen.high:,.1f}), measured "
        f"{1e3 * foreseen.measured:,.1f} ms, {ratio:+.0%}; by {foreseen.basis}"
    )
    return f"{words}; {foreseen.term}: {foreseen.advice}" if foreseen.term else f"{words}; as predicted"


def _went(pair: Optional[Tuple[float, float]], not_finite: str, trend: str = "") -> str:
    went = trend or (" to ".join(dict.fromkeys(map(loss_text, pair))) if pair else "")
    if not_finite:
        return not_finite + (f" ({went} before that)" if went else "")
    return went
