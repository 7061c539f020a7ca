"""Train BERT to fill in masked tokens.

drumbeat train bert --set model=base data=tokens.bin steps=1000000 checkpoint=ckpt save_every=10000
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict

import torch
from torch import Tensor, nn

from drumbeat.train.assemble import Anatomy, Assembly, adamw, assemble, meshes_for, plan_for, warm_then_down
from drumbeat.train.data.masked import Masked
from drumbeat.train.data.stream import Samples, Stream
from drumbeat.train.data.text import byte_text, standard_library
from drumbeat.train.data.tokens import token_file
from drumbeat.train.loop import Result, average, train
from drumbeat.train.loss import IGNORE
from drumbeat.train.mfu import transformer_flops, utilisation
from drumbeat.train.models.bert import SHAPES, Bert
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings, option
from drumbeat.train.world import join


@dataclass(frozen=True)
class BertSettings(Settings):
    model: str = option("byte-tiny", "shape: byte-tiny, base, large")
    data: str = option("python", "python (its own source), a folder of text (bytes), or a .bin or .npy token file")
    token_type: str = option("uint16", "integers in a .bin file without .idx: uint16, int32, uint32, int64")
    mask: int = option(0, "the mask token; 0: the shape's last one")
    length: int = option(0, "tokens a sequence; 0: the shape's context")
    lr: float = option(2e-3, "highest learning rate")
    steps: int = option(400, "optimizer steps")
    validation: int = option(64, "sequences to validate on; 0: none")


SettingsClass = BertSettings


def samples(settings: BertSettings, length: int, part: str) -> Samples:
    shape = SHAPES[settings.model]
    if settings.data.endswith((".bin", ".npy")):
        text = token_file(settings.data, length, part, settings.token_type, shape.vocabulary)
    elif settings.data == "python":
        text = byte_text(standard_library(), length, part, limit=4_000_000)
    else:
        text = byte_text(os.path.expanduser(settings.data), length, part)
    return Masked(text, shape.vocabulary, settings.mask or shape.vocabulary - 1, settings.seed)


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens, targets)  # type: ignore[no-any-return]


def run(settings: BertSettings) -> Result:
    if settings.model not in SHAPES:
        raise Refusal(f"no bert shape '{settings.model}'", f"known: {', '.join(SHAPES)}")
    shape = SHAPES[settings.model]
    world = join()
    meshes = meshes_for(settings, world)
    if meshes.layout.tp > 1 or meshes.layout.pp > 1 or meshes.layout.cp > 1:
        raise Refusal(
            "bert runs with layouts ddp, fsdp and hsdp", "it is small enough for them; llama takes every layout"
        )
    length = settings.length or shape.context
    anatomy = Anatomy(blocks="blocks")
    parts = assemble(settings, world, meshes, lambda: Bert(shape), loss, adamw(settings, meshes), anatomy)
    stream = Stream(
        samples(settings, length, "train"),
        settings.batch,
        data_rank=meshes.data_rank,
        data_ranks=meshes.layout.data_ranks,
        accumulate=settings.accumulate,
        seed=settings.seed,
        device=world.device,
    )
    # The head is computed at every place, so every place counts, asked or not.
    flops = transformer_flops(shape.matmul_parameters, shape.layers, shape.width, length, causal=False) / 0.15
    use = utilisation(flops, "6 N + 12 L h s FLOPs a token", settings.precision, world.device, settings.measure_peak)
    kept = samples(settings, length, "validation") if settings.validation else None
    validate = (lambda: masked_loss(settings, parts, kept)) if kept is not None else None
    plan = plan_for(settings, warm_then_down(settings), "tokens")
    return train(plan, world, parts.step, stream, parts.checkpoints, validate, use)


@torch.no_grad()
def masked_loss(settings: BertSettings, parts: Assembly, kept: Samples) -> Dict[str, float]:
    own = max(1, min(settings.validation, len(kept)) // parts.meshes.layout.data_ranks)
    first = parts.meshes.data_rank * own
    tokens, targets = (x.to(parts.world.device) for x in kept.read(list(range(first, first + own)), [0] * own))
    model = parts.parts[0].eval()
    with parts.precision.computing(parts.world.device, parts.step.sharded):
        total = sum((loss(model, x, y) for x, y in zip(tokens.split(32), targets.split(32))), torch.zeros(()))
    model.train()
    totals = torch.stack([total.to(parts.world.device), (targets != IGNORE).sum().float()])
    return {"loss": float(average(totals, parts.meshes.tokens))}
