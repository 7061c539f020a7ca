"""Fine-tune a causal model of transformers on conversations, prompts with completions, or texts; whole, or with LoRA.

drumbeat train finetune --set weights=Llama-3.2-1B data=conversations lora=16 checkpoint=ckpt save_every=200 export=tuned
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Dict, Iterable, Iterator, Tuple

import torch
from torch import nn

from drumbeat.train.checkpoint.state import seed_generators
from drumbeat.train.data.conversations import Mixture, NamedStream, Packed, documents, lines_of, named
from drumbeat.train.loop import Result, train
from drumbeat.train.lora import add_lora, load_adapter
from drumbeat.train.optim import SCHEDULES
from drumbeat.train.recipes import decaying, kept_batches, meshes_for, resolved, set_up
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import Settings, option, weighted
from drumbeat.train.world import join

_BATCH = 32
_KEPT = 50  # one in this many documents is kept back for validation


@dataclass(frozen=True)
class FinetuneSettings(Settings):
    weights: str = option(
        "",
        "a downloaded folder with config.json, safetensors and tokenizer, as save_pretrained writes it",
        reads=(),
        holds="config.json",
    )
    data: str = option("", "folders or files of .jsonl and .parquet; several by weight: chat:0.7,code:0.3", reads=())
    length: int = option(2048, "tokens per row, into which documents are packed")
    batch: int = option(0, "rows per step, on all ranks together; 0: 32, or all rows where there are fewer")
    steps: int = option(0, "optimizer steps; 0: as many as `epochs` take")
    epochs: float = option(3.0, "times that all rows are seen, where steps is not given")
    lora: int = option(0, "rank of LoRA's matrices; 0: train all weights")
    alpha: float = option(0.0, "LoRA's scale is alpha / rank; 0: twice the rank")
    targets: str = option("", "layers with an adapter, comma between, such as q_proj,v_proj; none: all linear ones")
    adapter: str = option("", "folder with an adapter of peft's to go on from", reads=(), holds="adapter_config.json")
    export: str = option("", "folder for the weights at the end, with what LoRA has learnt added to them")
    rate: str = option("cosine", "learning rate after the warm-up: wsd (level, then down), cosine, linear, constant")
    lr: float = option(0.0, "highest learning rate; 0: 2e-4 with LoRA, 2e-5 without")
    decay: float = option(0.0, "weight decay")
    precision: str = option("auto", "fp32, tf32, bf16, bf16-master, fp8; auto: bf16 on a GPU")
    check_plan: bool = option(True, "tp: compare one sample's gradients with those of the uncut model first")
    validation: int = option(64, "rows to validate on; 0: none")

    UNUSED: ClassVar[Dict[str, str]] = {"smallest": "its blocks are FSDP's units"}


SettingsClass = FinetuneSettings


def samples(settings: FinetuneSettings, tokenizer: Any) -> Tuple[Mixture, Mixture, str]:
    """Return rows to train on, those of every 50th row of the data, which are kept back for validation, and words about documents
    that are not there whole."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    learnt, kept = [], []  # with their weights
    for folder, weight in weighted(settings.data):
        rows = list(lines_of(folder, lambda row: documents(row, tokenizer)))
        if not rows:
            raise Refusal(
                f"{folder}: no rows", "write one JSON object per line: messages, prompt and completion, or text"
            )
        held = range(_KEPT - 1, len(rows) if settings.validation else 0, _KEPT)
        packed = Packed([each for i, row in enumerate(rows) if i not in held for each in row], settings.length, padding)
        learnt.append((packed, weight))
        kept.append((Packed([each for i in held for each in rows[i]], settings.length, padding), weight))
        if not len(packed):
            raise Refusal(
                f"{folder}: nothing to learn from", "rows need a message of the assistant, a completion or a text"
            )
    every = [packed for packed, _ in learnt]
    cut, empty, count = (sum(getattr(packed, name) for packed in every) for name in ("cut", "empty", "documents"))
    parts = [f"{cut:,} cut to {settings.length} tokens"] if cut else []
    parts += [f"{empty:,} left out: nothing to learn"] if empty else []
    words = f"documents: {count:,}, of which {', '.join(parts)}" if parts else ""
    return Mixture(learnt), Mixture(kept), words


def fitted(settings: FinetuneSettings, rows: int, ranks: int) -> FinetuneSettings:
    """Choose batch and steps that fit the data if they are not given: no row twice in a step, and `epochs` in total."""
    pieces = ranks * (settings.accumulate or 1)  # into which a batch must divide
    batch = settings.batch or max(1, min(_BATCH, rows) // pieces) * pieces
    return replace(settings, batch=batch, steps=settings.steps or max(1, math.ceil(settings.epochs * rows / batch)))


def loaded(kind: Any, folder: str, **more: Any) -> Any:
    """Load a tokenizer or model from a folder of this machine; a broken one is refused in one line."""
    if not os.path.isfile(os.path.join(folder, "config.json")):  # transformers would take it for a name on a hub
        raise Refusal(f"weights={folder}: no folder with a config.json", "give a downloaded model's folder")
    try:
        return kind.from_pretrained(folder, local_files_only=True, **more)
    except Exception as error:  # whatever transformers, safetensors and a model's own code raise
        why = " ".join(str(error).split())[:300]
        raise Refusal(
            f"weights={folder} cannot be loaded: {why}", "check that its safetensors and tokenizer are complete"
        ) from error


def refuse_damaged(folder: str, model: nn.Module, missing: Iterable[str]) -> None:
    """Refuse weights of which a part is missing, for it would be drawn at random, or is not finite."""
    lost = sorted(missing)
    lost = lost or [name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())]
    if lost:
        what = f"weights={folder}: {lost[0]} is {'missing' if missing else 'not finite'}"
        raise Refusal(what + (f", and {len(lost) - 1} more" if lost[1:] else ""), "download or export the model again")


def run(settings: FinetuneSettings) -> Result:
    if not settings.weights or not settings.data:
        raise Refusal("finetune needs weights=FOLDER and data=FOLDER")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise Refusal("finetune needs transformers", "pip install transformers") from None
    if settings.rate not in SCHEDULES:
        raise Refusal(f"rate '{settings.rate}' is unknown", f"known: {', '.join(SCHEDULES)}")
    adapted = bool(settings.lora or settings.adapter)
    settings = replace(settings, lr=settings.lr or (2e-4 if adapted else 2e-5))
    world = join()
    folder = os.path.expanduser(settings.weights)
    tokenizer = loaded(AutoTokenizer, folder)
    rows, kept, words = samples(settings, tokenizer)
    meshes = meshes_for(settings, world)
    given, settings = settings, fitted(settings, len(rows), meshes.layout.data_ranks)
    settings = resolved(settings, world, meshes)
    if given.warmup < 0:
        settings = replace(settings, warmup=min(settings.warmup, settings.steps // 10))
    seed_generators(settings.seed)
    model, notes = loaded(AutoModelForCausalLM, folder, dtype=torch.float32, output_loading_info=True)
    refuse_damaged(folder, model, notes["missing_keys"])
    known, most = len(model.get_input_embeddings().weight), max(rows.largest, kept.largest)
    if most >= known:
        what = f"weights={folder}: the tokenizer gives token {most}, and the model has {known} embeddings"
        raise Refusal(what, "give the model's own tokenizer")
    if settings.adapter:
        load_adapter(model, os.path.expanduser(settings.adapter), settings.lora)
    elif settings.lora:
        targets = [name for name in settings.targets.split(",") if name]
        add_lora(model, settings.lora, settings.alpha or 2.0 * settings.lora, targets)
    optimizer = torch.optim.AdamW(
        decaying(model, settings.decay), lr=settings.lr, betas=(0.9, 0.95), fused=not settings.offload
    )
    schedule = SCHEDULES[settings.rate](settings.steps, settings.warmup)
    trainer = set_up(settings, model, optimizer, scheduler=schedule)
    stream = trainer.stream(rows, settings.batch, kind=NamedStream)
    if world.lead:
        learns, all_ = (
            sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True)
        )
        seen = f"{settings.steps} steps of {settings.batch}, {settings.steps * settings.batch / len(rows):.3g} epochs"
        rest = f"on {len(rows):,} rows of {settings.length} tokens: {seen}"
        if words:
            print(words, flush=True)
        if settings.batch > len(rows):
            print(f"batch={settings.batch}: each step sees every one of {len(rows)} rows more than once", flush=True)
        print(f"{folder}: {learns:,} of {all_:,} parameters are trained {rest}", flush=True)

    def validate() -> Dict[str, float]:
        def batches() -> Iterator[Dict[str, Any]]:
            return (named(x, y) for x, y in kept_batches(trainer, kept, settings.validation, stream.micro))

        return trainer.evaluate(batches(), split=False)

    result = train(settings, trainer, stream, None, validate if settings.validation and len(kept) else None)
    if settings.export and not result.stopped:
        trainer.export(os.path.expanduser(settings.export))
    return result
