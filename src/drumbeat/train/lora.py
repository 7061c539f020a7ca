"""LoRA: a frozen model learns small matrices beside its linear layers. Adapters are in peft's format, in and out."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Entry, Tensors, write

_PREFIX = "base_model.model."  # what peft puts before a model's own names
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "lora"  # in a model's config beside its checkpoints


class LoraLinear(nn.Linear):
    """A linear layer that has become one of these in place: its own weight keeps its name."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + self.lora_B(self.lora_A(input)) * self.scale


def add_lora(model: nn.Module, rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = ()) -> nn.Module:
    """Freeze `model` and give the linear layers whose names end in one of `targets` (none: all but the head) an adapter of
    `rank`, which starts as nothing. Call it first, and give the optimizer what then requires a gradient."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    model.requires_grad_(False)
    found = []
    for name, module in list(model.named_modules()):
        wanted = [target for target in targets if f".{name}".endswith(f".{target}")]
        if type(module) is nn.Linear and (wanted if targets else module is not head):
            found += wanted or [name.rpartition(".")[2]]
            like: Dict[str, Any] = {"bias": False, "device": module.weight.device, "dtype": module.weight.dtype}
            module.__class__ = LoraLinear
            module.lora_A = nn.Linear(module.in_features, rank, **like)
            module.lora_B = nn.Linear(rank, module.out_features, **like)
            nn.init.zeros_(module.lora_B.weight)
            module.scale = alpha / rank  # type: ignore[assignment]
    if missing := [name for name in targets if name not in found] or ([] if found else ["any linear layer"]):
        raise Refusal(f"lora: the model has no linear layer called {missing[0]}", "name the ends of its layers' names")
    model.drumbeat_lora = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(set(found))}  # type: ignore[assignment]
    return model


def load_adapter(model: nn.Module, folder: str, rank: int = 0) -> nn.Module:
    """Add the adapter of a folder that peft or an export wrote, if it is of `rank` (0: of any)."""
    try:
        with open(os.path.join(folder, CONFIG), encoding="utf-8") as file:
            config: Dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder}/{CONFIG}: {error}", "give a folder as peft's save_pretrained writes it") from None
    others = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
    odd = [name for name in others if config.get(name)]
    if config.get("peft_type") != "LORA" or odd:
        what = f"{folder}: {(odd or [str(config.get('peft_type'))])[0]} is not built"
        raise Refusal(what, "give a plain LoRA adapter")
    if rank not in (0, config["r"]):
        raise Refusal(f"lora={rank}, and the adapter in {folder} has the rank {config['r']}", "leave one of them out")
    tensors = Tensors(os.path.join(folder, WEIGHTS))
    # The config may name layers by patterns; the tensors are those of the layers that they have met.
    end = ".lora_A.weight"
    layers = [name[len(_PREFIX) : -len(end)] for name in tensors.places if name.endswith(end)]
    add_lora(model, config["r"], config["lora_alpha"], layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if _PREFIX + name not in tensors:
                    raise Refusal(f"{folder}: {name} is not in it", "give the adapter of this model")
                parameter.copy_(tensors.read(_PREFIX + name, tuple(slice(0, size) for size in parameter.shape)))
    return model


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def merged(weight: Tensor, a: Tensor, b: Tensor, lora: Mapping[str, Any]) -> Tensor:
    scale = lora["lora_alpha"] / lora["r"]
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def write_adapter(folder: str, entries: Mapping[str, Entry], read: Any, lora: Mapping[str, Any], base: str) -> None:
    os.makedirs(folder, exist_ok=True)
    named = {_PREFIX + name: entry for name, entry in entries.items() if is_adapter(name)}
    (path,) = write(folder, named, lambda name: read(name[len(_PREFIX) :]))
    os.replace(os.path.join(folder, os.path.basename(path)), os.path.join(folder, WEIGHTS))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
              "lora_dropout": 0.0, "inference_mode": True, "fan_in_fan_out": False, **lora}  # fmt: skip
    with open(os.path.join(folder, CONFIG), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2, sort_keys=True)
