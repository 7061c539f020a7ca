"""Train a Llama 3 shape on bytes of any folder, on a token file, or on made-up tokens.

drumbeat train llama                                              the smallest shape, on Python's own source
drumbeat run --nodes 2 -- drumbeat train llama --layout hsdp --set model=8b precision=bf16 data=tokens.bin
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Dict, Optional

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from drumbeat.train.data import Samples
from drumbeat.train.data.text import SyntheticTokens, byte_text, standard_library, token_file
from drumbeat.train.export import read_config
from drumbeat.train.layers.attention import attention_kernel
from drumbeat.train.loop import Result, train
from drumbeat.train.measure import transformer_flops, utilisation
from drumbeat.train.models.llama import SHAPES, Llama, LlamaShape, RopeScaling, segments, shape_from
from drumbeat.train.optim import SCHEDULES
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import SummedGradients, shards
from drumbeat.train.precision import Precision
from drumbeat.train.recipes import TOKENS, Transformer, build, kept_batches, meshes_for, optimizer_of, resolved, set_up
from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Tensors
from drumbeat.train.settings import TokenSettings, option
from drumbeat.train.weights import Source
from drumbeat.train.world import join


@dataclass(frozen=True)
class LlamaSettings(TokenSettings):
    model: str = option("byte-tiny", "shape: byte-tiny, 1b, 3b, 8b, 70b")
    weights: str = option(
        "",
        "folder with config.json and safetensors: start from these weights, in their shape",
        reads=(),
        holds="config.json",
    )
    data: str = option(
        "python",
        "python (its own source), synthetic, a folder of text (bytes), or a .bin or .npy file",
        reads=("python", "synthetic"),
    )
    length: int = option(0, "tokens a sequence; 0: the shape's context")
    rope: str = option("", "longer sequences than the shape's: llama3:FACTOR or yarn:FACTOR times as long")
    context: str = option("auto", "cp: ulysses, ring, or auto: ulysses where the heads divide by it, else ring")
    steps: int = option(600, "optimizer steps")


SettingsClass = LlamaSettings

# Highest learning rates, for a quarter of a million tokens per step and the warm-up of the defaults.
RATES = {"byte-tiny": 5e-3, "1b": 2e-4, "3b": 1.5e-4, "8b": 1e-4, "70b": 5e-5, "byte-experts": 5e-3}
LARGE = 2_000_000_000  # parameters: from here on a rank never holds the whole model, not even at the start


def tensor_plan(experts: bool = False) -> Dict[str, ParallelStyle]:
    """Cut along heads and along the inner width; between them the sequence is cut (sequence parallelism), and the head
    leaves its logits cut along the vocabulary (loss parallelism). Experts take each rank's part of the sequence as it is."""
    if experts:
        own = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True)
        dense = {name: style for name, style in tensor_plan().items() if not name.startswith("blocks.*.mlp.")}
        return {**dense, "blocks.*.mlp": own, "blocks.*.mlp.router": SummedGradients()}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "blocks.*.mlp.gate_up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def transformer(shape: LlamaShape, length: int) -> Transformer:
    kv = 2 * shape.kv_heads * shape.head_width
    inner = shape.inner * (shape.chosen if shape.experts else 1)
    return Transformer(shape.parameters, shape.layers, shape.width, kv, inner, shape.vocabulary, length)


def check(shape: LlamaShape, meshes: Meshes, length: int) -> None:
    tp, own = meshes.layout.tp, length // meshes.layout.cp
    if shape.experts and meshes.layout.pp > 1:
        what = "layout pp with experts: the loss that keeps them evenly used is not carried between stages"
        raise Refusal(what, "use ep, fsdp, tp or cp")
    if shape.kv_heads % tp or (shape.gate_groups % tp and not shape.experts) or own % tp or shape.vocabulary % tp:
        raise Refusal(
            f"tensor parallelism {tp}: it must divide {shape.kv_heads} key-value heads, {shape.gate_groups} gate "
            f"groups, {own} tokens and {shape.vocabulary} words",
            "choose a smaller degree",
        )


def samples(settings: LlamaSettings, shape: LlamaShape, length: int, part: str) -> Samples:
    if settings.data == "synthetic":
        return SyntheticTokens(100_000, length, shape.vocabulary, seed=settings.seed + int(part == "validation"))
    if settings.data.endswith((".bin", ".npy")):
        return token_file(settings.data, length, part, settings.token_type, shape.vocabulary)
    if settings.data == "python":
        return byte_text(standard_library(), length, part, limit=4_000_000)
    return byte_text(os.path.expanduser(settings.data), length, part)


def run(settings: LlamaSettings, shape: Optional[LlamaShape] = None) -> Result:
    """`shape`: one with experts, from that recipe."""
    if settings.weights and settings.model != "byte-tiny":
        raise Refusal(f"weights and model={settings.model} together", "the folder's config.json says which shape it is")
    dense = [name for name, known in SHAPES.items() if not known.experts]
    if shape is None and settings.model not in dense:
        raise Refusal(f"no llama shape '{settings.model}'", f"known: {', '.join(dense)}")
    base = shape or (SHAPES[settings.model] if not settings.weights else shape_from(read_config(settings.weights)))
    if base.experts and shape is None:
        raise Refusal(f"{settings.weights} has experts", "train.setup takes it as it is: docs page train/experts")
    settings = replace(settings, lr=settings.lr or (2e-5 if settings.weights else RATES.get(settings.model, 2e-4)))
    world = join()
    meshes = meshes_for(settings, world)
    length = settings.length or min(base.context, 8192)
    shape = replace(base, tied=base.tied and not settings.untie, context=max(base.context, length))
    if settings.rope:
        shape = replace(shape, rope=RopeScaling.parse(settings.rope, base.context))
    check(shape, meshes, length)
    settings = resolved(settings, world, meshes, transformer(shape, length))
    layout = meshes.layout
    # Else a rank holds the whole model anyway.
    empty = shape.parameters > LARGE and (shards(meshes) or layout.tp > 1 or layout.pp > 1)
    model = build(settings, world, lambda: Llama(shape), empty)
    trainer = set_up(
        settings,
        model,
        optimizer_of(settings, model),
        scheduler=SCHEDULES[settings.rate](settings.steps, settings.warmup),
        plan=tensor_plan(bool(shape.experts)),
        blocks="blocks",
        ema=settings.ema,
        context=settings.context,
        weights=Source(Tensors(settings.weights), segments(shape, base.tied)) if settings.weights else "",
    )
    context = trainer.contexts.at(length) if trainer.contexts is not None else None
    stream = trainer.stream(samples(settings, shape, length, "train"), settings.batch)
    flops = transformer_flops(shape.matmul_parameters, shape.layers, shape.width, length, causal=True)
    formula = "6 N + 12 L h s / 2 FLOPs per token (causal attention counted as executed)"
    use = utilisation(flops, formula, settings.precision, world.device, settings.measure_peak)
    if world.lead:
        count = sum(p.numel() for p in trainer.parts[0].parameters())
        stage = " in the first stages" if meshes.layout.pp > 1 else ""
        name = settings.weights or f"{'experts' if shape.experts else 'llama'} {settings.model}"
        if length > base.context and shape.rope is None:
            fix = f"rope=yarn:{-(-length // base.context)} stretches it"
            print(f"sequences of {length} tokens, and the shape was made for {base.context}: {fix}", flush=True)
        print(f"{name}: {count:,} parameters{stage}; {meshes.layout.equation()}", flush=True)
        if world.device.type == "cuda" and (context is None or context.kind == "ulysses"):
            dtype, group = Precision(settings.precision).compute_dtype, shape.heads // shape.kv_heads
            kernel = attention_kernel(world.device, dtype, length, shape.head_width, group, settings.deterministic)
            print(f"attention: {kernel}", flush=True)
        if context is not None:
            print(f"context parallelism: {context.kind} ({context.why})", flush=True)
        print(f"MFU: {use.describe()}", flush=True)
    kept = samples(settings, shape, length, "validation") if settings.validation else stream.samples

    def validate() -> Dict[str, float]:
        batches = kept_batches(trainer, kept, settings.validation, stream.micro)
        with trainer.averaged() if settings.ema else nullcontext():
            return trainer.evaluate(batches, TOKENS, split=False)

    return train(settings, trainer, stream, TOKENS, validate if settings.validation else None, use)
