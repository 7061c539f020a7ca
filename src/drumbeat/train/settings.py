"""Settings of a recipe: a dataclass whose fields carry their own help, filled from `key=value` texts."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Sequence, Tuple, Type, TypeVar, get_type_hints

from drumbeat.train.refusal import Refusal

T = TypeVar("T", bound="Settings")
# The least values of numbers, by the name of the setting in any recipe; that of all others is 0.
_LEAST = {"warmup": -1, **dict.fromkeys(("batch", "size", "classes", "images", "widening"), 1)}
_LINES = 10  # steps between two lines by default, and the lines that a training has at least

# Values that only some layouts use: a wrong one is told at once, and not first on the cluster.
WORDS = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"),
    "context": ("auto", "ulysses", "ring"),
    "optimizer": ("adamw", "adamw-8bit", "adamw-offload", "muon"),
    "rate": ("wsd", "cosine", "linear", "constant"),
}


# Samples per step unless a command says otherwise, for whoever has no torch to ask the recipes; finetune's follow from its data.
BATCHES = {"llama": 32, "experts": 32, "bert": 32, "resnet": 256, "wide-resnet": 2048}


def option(default: Any, help: str, *, reads: Optional[Sequence[str]] = None, holds: str = "") -> Any:
    """Make a field of the settings. `reads`: a path that must exist, or one of these words. `holds`: a file that the folder must
    have."""
    return field(default=default, metadata={"help": help, "reads": reads, "holds": holds})


@dataclass(frozen=True)
class Settings:
    """Settings that all recipes share. A recipe that has no use for one of these names it in UNUSED, with what to use instead."""

    UNUSED: ClassVar[Dict[str, str]] = {}

    layout: str = option(
        "ddp", "ddp, fsdp, hsdp, tp, pp, cp, ep, or degrees: dp_replicate=2,dp_shard=4,tp=1,pp=1,cp=1,ep=1"
    )
    precision: str = option(
        "auto",
        "fp32, tf32, bf16, bf16-master, fp16, fp8; auto: on a GPU bf16 or bf16-master",
    )
    steps: int = option(100, "optimizer steps")
    batch: int = option(BATCHES["llama"], "samples per step, on all ranks together")
    accumulate: int = option(0, "micro-batches per step (a pipeline's too); 0: as few as fit into the GPU")
    lr: float = option(1e-3, "highest learning rate")
    warmup: int = option(
        -1, "steps over which the learning rate rises; -1: a tenth of all, 10 (large models: 100) to 2,000"
    )
    decay: float = option(0.1, "weight decay")
    clip: float = option(1.0, "largest norm of the gradients; 0: no limit")
    stop_after: int = option(0, "rehearse a stop signal after this step: save, exit code 75; 0: never")
    seed: int = option(0, "of weights and of the order of samples")
    deterministic: bool = option(False, "the same numbers every time, at some speed; prints a hash of the state")
    compile: bool = option(False, "torch.compile, block by block")
    recompute: str = option(
        "auto", "activations: none (keep), selective, lean, full (recompute each block); auto: what fits"
    )
    hook: str = option("all-reduce", "how DDP sends gradients: all-reduce, fp16, bf16, powersgd[:rank[:first step]]")
    offload: bool = option(False, "FSDP: parameters, gradients and optimizer state in CPU memory")
    prefetch: int = option(1, "FSDP: blocks gathered ahead")
    smallest: int = option(100_000, "FSDP without named blocks: a module of so many parameters is a unit")
    schedule: str = option("1f1b", "pipeline: gpipe, 1f1b, interleaved, zero-bubble, zbv")
    checkpoint: str = option("", "folder to save to and to resume from")
    save_every: int = option(0, "steps between checkpoints; 0: only at the end, or when stopped by a signal")
    keep: int = option(2, "how many checkpoints stay")
    snapshot_every: int = option(
        0, "steps between snapshots in the memory of this node and the next, from which a run comes back; 0: none"
    )
    report_every: int = option(0, "steps between lines; 0: 10, fewer in a training of less than 100 steps")
    validate_every: int = option(0, "steps between validations; 0: at the end")
    on_nan: str = option(
        "stop", "a NaN or inf in the gradients: stop, skip the step, or back: to the last good checkpoint"
    )
    on_spike: str = option(
        "warn", "a loss far above the usual: warn, stop, or back: leave out the batches that led there"
    )
    profile: str = option(
        "", "RANKS[:START[:STEPS]], such as 0:10:3: torch.profiler traces, into the run folder or ./profile"
    )
    watch_communication: int = option(1000, "steps between steps whose communication is timed; 0: never")
    figures: str = option(
        "", "also write figures to: jsonl=FILE, tensorboard=FOLDER, wandb=PROJECT, mlflow=NAME; comma"
    )
    measure_peak: bool = option(False, "measure a matrix product first, for a second MFU")

    @property
    def steps_per_line(self) -> int:
        """Return the steps between two lines: by default fewer in a short training, so that its speed can be told."""
        return self.report_every or max(1, min(_LINES, self.steps // _LINES))


@dataclass(frozen=True)
class TokenSettings(Settings):
    """Settings that recipes of language models share."""

    token_type: str = option("uint16", "integers in a .bin file without .idx: uint16, int32, uint32, int64")
    untie: bool = option(False, "embedding and head as two matrices (a pipeline needs it)")
    optimizer: str = option(
        "adamw",
        "adamw, adamw-8bit (small moments), adamw-offload (state in CPU memory), or muon for matrices of blocks",
    )
    rate: str = option("wsd", "learning rate after the warm-up: wsd (level, then down), cosine, linear, constant")
    ema: float = option(0.0, "validate with a running mean of the weights that keeps this share per step; 0: none")
    lr: float = option(0.0, "highest learning rate; 0: the shape's")
    validation: int = option(64, "sequences to validate on; 0: none")

    UNUSED: ClassVar[Dict[str, str]] = {"smallest": "its blocks are FSDP's units"}


# What changes no number that is trained, or only the order of additions.
_BESIDE = {
    "layout", "accumulate", "compile", "recompute", "offload", "prefetch", "smallest", "schedule", "context", "stop_after",
    "checkpoint", "save_every", "keep", "snapshot_every", "report_every", "validate_every", "profile", "watch_communication",
    "figures", "measure_peak", "deterministic", "check_plan", "export", "workers", "decode",
}  # fmt: skip


def deciding(settings: Settings) -> Dict[str, Any]:
    """Return the settings on which the numbers depend."""
    return {name: value for name, value in vars(settings).items() if name not in _BESIDE}


def fill(kind: Type[T], texts: List[str]) -> T:
    """Turn `["steps=20", "lr=1e-3"]` into settings; an unknown key or a wrong value is refused in one line."""
    kinds = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.replace("-", "_")
        if not equals:
            raise Refusal(f"'{text}' is no setting", "write key=value")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise Refusal(f"no setting '{key}'", hint)
        if key in kind.UNUSED:
            raise Refusal(f"this recipe does not use '{key}'", kind.UNUSED[key])
        values[key] = _read(key, value, kinds[key])
    for each in dataclasses.fields(kind):
        if values.get(each.name) and each.metadata.get("reads") is not None:
            values[each.name] = os.path.expanduser(values[each.name])
            _check_path(each, values[each.name])
    return kind(**values)


def _check_path(option: Any, value: str) -> None:
    """Refuse a folder or file that is not there, before anything is loaded; of several with weights, each."""
    fix = f"{option.name} takes: {option.metadata['help']}"
    for path, _ in weighted(value):
        if path in option.metadata["reads"]:
            continue
        if not os.path.exists(path):
            raise Refusal(f"{option.name}={path}: no such file or folder", fix)
        if option.metadata["holds"] and not os.path.isfile(os.path.join(path, option.metadata["holds"])):
            raise Refusal(f"{option.name}={path}: there is no {option.metadata['holds']} in it", fix)


def weighted(value: str) -> List[Tuple[str, float]]:
    """Split folders with weights, a:0.7,b:0.3; without one it is 1. A path that exists is taken as it is."""
    if os.path.exists(whole := os.path.expanduser(value)):
        return [(whole, 1.0)]
    found = []
    for path in value.split(","):
        folder, colon, weight = path.rpartition(":")
        has_weight = bool(colon and weight.replace(".", "", 1).isdigit())
        if has_weight and not float(weight):
            raise Refusal(f"{path}: a weight of 0", "give a larger one, or leave it out")
        found.append((os.path.expanduser(folder if has_weight else path), float(weight) if has_weight else 1.0))
    return found


def _read(key: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise Refusal(f"{key}={value}: yes or no is needed")
        return value.lower() in ("true", "1", "yes")
    if kind not in (int, float):
        if value not in WORDS.get(key, (value,)):
            raise Refusal(f"{key} '{value}' is unknown", f"known: {', '.join(WORDS[key])}")
        return value
    name = "a whole number" if kind is int else "a number"
    try:
        number = kind(value.replace("_", ""))
    except ValueError:
        raise Refusal(f"{key}={value}: {name} is needed") from None
    least = _LEAST.get(key, 0)
    if number < least or (kind is float and not math.isfinite(number)):
        raise Refusal(f"{key}={value}: {name} of at least {least} is needed")
    return number


def help_of(kind: Type[Settings]) -> str:
    used = [f for f in dataclasses.fields(kind) if f.name not in kind.UNUSED]
    rows = [(f.name, f.default, f.metadata["help"]) for f in used]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:<{width}}  {text} [{default}]" for name, default, text in rows]
    return "\n".join(lines + [f"  {name:<{width}}  not used here: {why}" for name, why in kind.UNUSED.items()])
