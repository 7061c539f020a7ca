"""Train BERT to fill in masked tokens.

drumbeat train bert --set model=base data=tokens.bin steps=1000000 checkpoint=ckpt save_every=10000
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Dict

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from drumbeat.train.data import Samples
from drumbeat.train.data.text import Masked, byte_text, standard_library, token_file
from drumbeat.train.loop import Result, train
from drumbeat.train.measure import transformer_flops, utilisation
from drumbeat.train.models.bert import SHAPES, Bert, BertShape
from drumbeat.train.optim import SCHEDULES
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.recipes import TOKENS, Transformer, build, kept_batches, meshes_for, optimizer_of, resolved, set_up
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import TokenSettings, option
from drumbeat.train.world import join


@dataclass(frozen=True)
class BertSettings(TokenSettings):
    model: str = option("byte-tiny", "shape: byte-tiny, base, large")
    data: str = option(
        "python", "python (its own source), a folder of text (bytes), or a .bin or .npy token file", reads=("python",)
    )
    mask: int = option(0, "the mask token; 0: the shape's last one")
    length: int = option(0, "tokens a sequence; 0: the shape's context")
    steps: int = option(400, "optimizer steps")


SettingsClass = BertSettings

RATES = {"byte-tiny": 2e-3}  # highest learning rates; other shapes: 1e-4


def samples(settings: BertSettings, length: int, part: str) -> Samples:
    shape = SHAPES[settings.model]
    if settings.data.endswith((".bin", ".npy")):
        text = token_file(settings.data, length, part, settings.token_type, shape.vocabulary)
    elif settings.data == "python":
        text = byte_text(standard_library(), length, part, limit=4_000_000)
    else:
        text = byte_text(os.path.expanduser(settings.data), length, part)
    return Masked(text, shape.vocabulary, settings.mask or shape.vocabulary - 1, settings.seed)


def tensor_plan() -> Dict[str, ParallelStyle]:
    """Cut along heads, inner width and vocabulary; between those the sequence is cut (sequence parallelism)."""
    along_time = SequenceParallel(use_local_output=True)
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": ColwiseParallel(output_layouts=Shard(1)),
        "kinds": ColwiseParallel(output_layouts=Shard(1)),
        "norm": along_time,
        "blocks.*.qkv": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.attention_norm": along_time,
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp_norm": along_time,
        "transform": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)),
        "transform_norm": along_time,
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def transformer(shape: BertShape, length: int) -> Transformer:
    """Return the shape for the memory estimate: the blocks keep two inner widths, not three, and masks of dropout instead, so the
    estimate for three covers both."""
    count = shape.matmul_parameters + shape.width * (shape.context + (0 if shape.tied else shape.vocabulary))
    return Transformer(count, shape.layers, shape.width, 2 * shape.width, shape.inner, shape.vocabulary, length)


def check(shape: BertShape, meshes: Meshes, length: int) -> None:
    tp = meshes.layout.tp
    if meshes.layout.cp > 1:
        what = f"bert with context parallelism: its sequences have {length} tokens, too few to be worth cutting"
        raise Refusal(what, "use tp, which cuts them between the layers as well, or fsdp")
    if shape.heads % tp or shape.inner % tp or length % tp or shape.vocabulary % tp:
        raise Refusal(
            f"tensor parallelism {tp}: it must divide {shape.heads} heads, an inner width of {shape.inner}, {length} "
            f"tokens and {shape.vocabulary} words",
            "choose a smaller degree",
        )
    if length > shape.context:
        raise Refusal(f"sequences of {length} tokens; this shape was made for {shape.context}")


def run(settings: BertSettings) -> Result:
    if settings.model not in SHAPES:
        raise Refusal(f"no bert shape '{settings.model}'", f"known: {', '.join(SHAPES)}")
    settings = replace(settings, lr=settings.lr or RATES.get(settings.model, 1e-4))
    shape = replace(SHAPES[settings.model], tied=not settings.untie)
    world = join()
    meshes = meshes_for(settings, world)
    length = settings.length or shape.context
    check(shape, meshes, length)
    settings = resolved(settings, world, meshes, transformer(shape, length))
    model = build(settings, world, lambda: Bert(shape))
    rate = SCHEDULES[settings.rate](settings.steps, settings.warmup)
    optimizer = optimizer_of(settings, model)
    trainer = set_up(settings, model, optimizer, scheduler=rate, plan=tensor_plan(), blocks="blocks", ema=settings.ema)
    stream = trainer.stream(samples(settings, length, "train"), settings.batch)
    # The head is computed at every position, so every position counts, masked or not.
    flops = transformer_flops(shape.matmul_parameters, shape.layers, shape.width, length, causal=False) / 0.15
    use = utilisation(flops, "6 N + 12 L h s FLOPs per token", settings.precision, world.device, settings.measure_peak)
    kept = samples(settings, length, "validation") if settings.validation else stream.samples

    def validate() -> Dict[str, float]:
        batches = kept_batches(trainer, kept, settings.validation, stream.micro)
        with trainer.averaged() if settings.ema else nullcontext():
            return trainer.evaluate(batches, TOKENS, split=False)

    return train(settings, trainer, stream, TOKENS, validate if settings.validation else None, use)
