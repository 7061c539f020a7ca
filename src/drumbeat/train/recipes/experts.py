"""Train a decoder with experts, as Mixtral's: a Llama whose blocks choose among several feed-forwards for each token.

drumbeat train experts                                            the smallest shape, on Python's own source
drumbeat run --nodes 2 -- drumbeat train experts --layout ep --set model=8x7b precision=bf16 data=tokens.bin
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Dict

from drumbeat.train.loop import Result
from drumbeat.train.models.llama import SHAPES
from drumbeat.train.recipes import llama
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import option


@dataclass(frozen=True)
class ExpertSettings(llama.LlamaSettings):
    model: str = option("byte-experts", "shape: byte-experts, 8x1b, 8x7b")
    experts: int = option(0, "per block; 0: the shape's")
    chosen: int = option(0, "of them, per token; 0: the shape's")
    balance: float = option(0.01, "weight of the loss for using experts unevenly; 0: none")

    UNUSED: ClassVar[Dict[str, str]] = {
        **llama.LlamaSettings.UNUSED,
        "weights": "train.setup takes transformers' Mixtral and Qwen MoE with their weights",
    }


SettingsClass = ExpertSettings


def run(settings: ExpertSettings) -> Result:
    base = SHAPES.get(settings.model)
    if base is None or not base.experts:
        known = ", ".join(name for name, shape in SHAPES.items() if shape.experts)
        raise Refusal(f"no shape with experts '{settings.model}'", f"known: {known}")
    experts, chosen = settings.experts or base.experts, settings.chosen or base.chosen
    if chosen > experts:
        raise Refusal(f"chosen={chosen} of {experts} experts", "a token takes some of them")
    return llama.run(settings, replace(base, experts=experts, chosen=chosen, balance=settings.balance))
