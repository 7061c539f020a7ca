"""Models of transformers, known by what they bring: a config, plans for tensors and pipelines, blocks. transformers itself is not
imported: who trains such a model has it already."""

from __future__ import annotations

import inspect
import os
from typing import Any, Dict, Optional

from torch import nn


def config_of(model: nn.Module) -> Optional[Dict[str, Any]]:
    """As config.json has it; None for a model of another kind."""
    config = getattr(model, "config", None)
    plain = getattr(config, "to_dict", None)
    if plain is None:
        return None
    return {**plain(), "architectures": [type(model).__name__]}


def folder_of(model: nn.Module) -> str:
    """The folder that from_pretrained read, where it is one of this machine: the tokenizer lies there."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return name if os.path.isdir(name) else ""


def without_cache(model: nn.Module) -> None:
    """Keys and values kept for generating text: in training they only take memory, and recomputation would append to them."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(model: nn.Module, args: Any, more: Dict[str, Any]) -> Any:
    return args, {"use_cache": False, **more} if model.training else more
