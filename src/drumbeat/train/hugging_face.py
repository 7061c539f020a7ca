"""Models of transformers, known by what they bring: a config, plans for tensors and pipelines, blocks. transformers itself is not
imported: who trains such a model has it already."""

from __future__ import annotations

from typing import Any, List

from torch import nn


def configs(model: nn.Module) -> List[Any]:
    """The model's config and, where it has several parts, that of its text."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return [each for each in {id(config): config, id(text): text}.values() if each is not None]


def without_cache(model: nn.Module) -> None:
    """Keys and values kept for generating text: in training they only take memory, and recomputation would append to them."""
    for config in configs(model):
        if getattr(config, "use_cache", False):
            config.use_cache = False
