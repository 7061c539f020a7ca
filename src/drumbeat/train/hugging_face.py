"""Models of transformers, known by what they bring: a config, plans for tensors and pipelines, blocks. transformers itself is not
imported before it is needed: who trains such a model has it already."""

from __future__ import annotations

import inspect
import os
from typing import Any, Callable, Dict, List, Mapping, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from drumbeat.train import lora
from drumbeat.train.data.loaders import map_tensors, tensors_of
from drumbeat.train.layers.attention import causal_attention
from drumbeat.train.layers.cross_entropy import IGNORE, linear_cross_entropy
from drumbeat.train.parallel.context import Context
from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Segment, Tensors


def config_of(model: nn.Module) -> Optional[Dict[str, Any]]:
    """Return the config as config.json has it; None for a model of another kind."""
    if hasattr(model, "hugging_face_config"):
        return model.hugging_face_config()  # type: ignore[operator,no-any-return]
    config = getattr(model, "config", None)
    plain = getattr(config, "to_dict", None)
    if plain is None:
        return None
    learnt = {lora.KEY: model.drumbeat_lora} if hasattr(model, "drumbeat_lora") else {}
    # FSDP makes a class of its own.
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return {**plain(), "architectures": [kind.__name__], **learnt}


def folder_of(model: nn.Module) -> str:
    """Return the folder that from_pretrained read if it is on this machine: it holds the tokenizer."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    return name if os.path.isdir(name) else ""


def segments_of(model: nn.Module, tensors: Tensors) -> Dict[str, List[Segment]]:
    """Map each tensor of a transformers model to the tensors of the folder that it is loaded from, by transformers' own table:
    loading renames some, and stacks the matrices of experts."""
    if not hasattr(model, "base_model_prefix"):
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        raise Refusal("weights=FOLDER needs transformers 5", "update it, or use from_pretrained(FOLDER)") from None
    changes, own = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix or None
    found: Dict[str, Dict[Any, List[str]]] = {}
    for name in sorted(tensors.places, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target in own:
            found.setdefault(target, {}).setdefault(pattern, []).append(name)
    segments = {}
    for target, names in found.items():
        used = next((each for each in converters if set(names) <= set(each.source_patterns)), None)
        kind = [(type(each).__name__, getattr(each, "dim", None)) for each in used.operations] if used else []
        if kind and kind not in (_STACKED, [*_STACKED, ("Concatenate", 1)]):
            words = ", ".join(f"{name} {dim}" for name, dim in kind)
            what = f"weights: transformers changes {target} while it loads ({words})"
            raise Refusal(what, "use from_pretrained(FOLDER)")
        columns = [names.get(pattern, []) for pattern in used.source_patterns] if used else names.values()
        order = [name for together in zip(*columns) for name in together]
        segments[target] = [(name, 0, (tensors.places[name].shape or (1,))[0]) for name in order]
    return segments


def publisher(config: Optional[Mapping[str, Any]]) -> Callable[[str, Tensor], Dict[str, Tensor]]:
    """Return a function that turns one tensor of a model into those that save_pretrained writes: some have another name, and
    experts a matrix each."""
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion

        config = config or {}
        kind = getattr(transformers, config["architectures"][0])
    except (ImportError, AttributeError, KeyError, IndexError):  # not transformers' own: names stay
        return lambda name, tensor: {name: tensor}
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**config))
    tied = getattr(model, "all_tied_weights_keys", {})  # written once, under the other's name
    return lambda name, tensor: {} if name in tied else revert_weight_conversion(model, {name: tensor})


_STACKED = [("MergeModulelist", 0)]  # one expert after the other


def without_cache(model: nn.Module) -> None:
    """Turn off the cache of keys and values for text generation: in training it only takes memory, and recomputation would append
    to it."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(model: nn.Module, args: Any, more: Dict[str, Any]) -> Any:
    return args, {"use_cache": False, **more} if model.training else more


def is_causal(model: nn.Module) -> bool:
    return getattr(model, "loss_type", None) == "ForCausalLM" and hasattr(model, "set_attn_implementation")


def fast_attention(model: nn.Module, device: torch.device) -> bool:
    """Return true if there are faster kernels than torch's own choice and the user has not chosen others."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return is_causal(model) and chosen == "sdpa" and device.type == "cuda" and not torch.version.hip


class Attention:
    """Attention for transformers' models, which call it through a function registered by name. Ours takes the fastest kernel for
    plain causal attention, and works across ranks if sequences are cut (context parallelism)."""

    def __init__(self, model: nn.Module, contexts: Optional[Contexts]) -> None:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        self.contexts, self.otherwise = contexts, sdpa_attention_forward
        name = "drumbeat" if contexts is None else "drumbeat-context"
        transformers.AttentionInterface.register(name, _attend)
        transformers.AttentionMaskInterface.register(name, sdpa_mask if contexts is None else _no_mask)
        model.set_attn_implementation(name)  # type: ignore[operator]
        for module in model.modules():
            object.__setattr__(module, "drumbeat_attention", self)  # no submodule

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, more: Dict[str, Any]) -> Any:
        """Attend; q, k, v: (batch, heads, time, head width)."""
        scaling, length = more.get("scaling"), q.shape[2]
        if self.contexts is not None:
            length = self.contexts.length
        window = more.get("sliding_window")
        odd = {
            "attention that is not causal": not (more.get("is_causal") or getattr(module, "is_causal", True)),
            "an attention mask": mask is not None,
            "dropout in attention": bool(more.get("dropout")),
            f"a window of {window} tokens": window is not None and window < length,
            "capped attention": more.get("softcap") is not None,
            "a bias by position": more.get("position_bias") is not None,
            "another number of keys": k.shape[2] != q.shape[2],
        }
        wrong = next((name for name, so in odd.items() if so), "")
        if wrong and self.contexts is not None:
            raise Refusal(f"layout cp: the model has {wrong}, which is not built across ranks", "use another layout")
        if wrong:
            return self.otherwise(module, q, k, v, mask, **more)
        if scaling is not None and scaling != q.shape[-1] ** -0.5:
            q = q * (scaling * q.shape[-1] ** 0.5)
        attend = causal_attention if self.contexts is None else self.contexts.now.attend
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), None


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **more: Any) -> Any:
    return module.drumbeat_attention.attend(module, q, k, v, attention_mask, more)  # type: ignore[union-attr,operator]


def _no_mask(*_: Any, **__: Any) -> None:
    return None


class Contexts:
    """Split of a causal model's batch over the ranks of a context-parallel group, for sequences of any length.

    A model is one of transformers', or `plain`: it says its `attention_heads` (queries, keys and values), its attention layers
    have an `attend(q, k, v)`, its forward takes the `positions` of its tokens, and batches are tensors of (batch, time)."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, kind: str, tp: int) -> None:
        self.mesh, self.kind, self.length = mesh, kind, 0
        self._known: Dict[int, Context] = {}
        self.plain = hasattr(model, "attention_heads")
        if self.plain:
            heads, kv_heads = model.attention_heads  # type: ignore[misc]
            model.register_forward_pre_hook(self._add_positions, with_kwargs=True)
            for module in model.modules():
                if hasattr(module, "attend"):
                    module.attend = self.attend  # type: ignore[assignment]
        elif is_causal(model):
            config: Any = model.config
            config = config.get_text_config()
            heads = config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            Attention(model, self)
        else:
            raise Refusal(
                "layout cp: only causal language models of transformers, or with an attend(q, k, v), are cut along sequences",
                "use fsdp, hsdp, tp or pp; docs page train/own-loop says what a model of your own needs",
            )
        self.heads, self.kv_heads = heads // tp, kv_heads // tp

    @property
    def now(self) -> Context:
        return self._known[self.length]

    def at(self, length: int) -> Context:
        """Set the length of the sequences from now on."""
        self.length = length
        if length not in self._known:
            self._known[length] = Context(self.mesh, self.kind, length, self.heads, self.kv_heads)
        return self.now

    def __deepcopy__(self, _memo: Any) -> Contexts:
        return self  # of all stages of a pipeline

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.now.attend(q, k, v)

    def _add_positions(self, _model: nn.Module, args: Any, more: Dict[str, Any]) -> Any:
        return args, {**more, "positions": self.now.places}

    def share(self, batch: Any) -> Any:
        """Return this rank's part. For transformers' models each token's label is first taken from the next token, and rows are
        padded until they can be cut."""
        if self.plain:
            places = self.at(next(tensors_of(batch)).shape[1]).places
            return map_tensors(batch, lambda x: x[:, places])
        known = ("input_ids", "labels", "attention_mask")
        named = isinstance(batch, Mapping)
        odd = [name for name in batch if name not in known] if named else ["a batch that is no dict"]
        if odd or "labels" not in batch:
            raise Refusal(f"layout cp: {(odd or ['no labels'])[0]} in the batch", f"it takes {', '.join(known)}")
        mask, ids, labels = batch.get("attention_mask"), batch["input_ids"], batch["labels"]
        if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
            what = "layout cp: a row is padded on its left"
            raise Refusal(what, "pad on the right: causal attention never looks there")
        rows, length = ids.shape
        places = self.at(-(-length // (2 * self.mesh.size())) * 2 * self.mesh.size()).places
        shifted = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)), 1)
        ids, shifted = F.pad(ids, (0, self.length - length)), F.pad(shifted, (0, self.length - length), value=IGNORE)
        cut = {"input_ids": ids[:, places], "labels": shifted[:, places], "shift_labels": shifted[:, places]}
        return {**cut, "position_ids": places.expand(rows, -1)}


class FusedLoss:
    """The loss of a causal model without its logits: inside `with`, the head passes its input on, and the loss function makes the
    logits a slice at a time (layers/cross_entropy.py). A model that changes its logits in between does not pass on the same
    tensor: `changed` says so, and the model computes its loss itself."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self.on = self.changed = False
        handed: List[Tensor] = []
        plain_head, plain_loss = head.forward, getattr(model, "loss_function")  # noqa: B009

        def forward(x: Tensor) -> Tensor:
            if not self.on:
                return plain_head(x)
            handed[:] = [x]
            return x

        def loss(logits: Tensor, labels: Tensor, *args: Any, **more: Any) -> Any:
            if not self.on:
                return plain_loss(logits, labels, *args, **more)
            self.changed = self.changed or logits is not handed.pop()
            shifted = more.get("shift_labels")
            if shifted is None:
                shifted = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)), 1)
            return linear_cross_entropy(logits, head, shifted) / (shifted != IGNORE).sum()

        head.forward = forward  # type: ignore[method-assign,assignment]
        model.loss_function = loss  # type: ignore[assignment]

    @staticmethod
    def of(model: nn.Module) -> Optional[FusedLoss]:
        """Return the fused loss; None if a model has no plain head, or a loss that cannot be replaced."""
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        loss = getattr(model, "loss_function", None)
        fits = is_causal(model) and type(head) is nn.Linear and head.bias is None
        return FusedLoss(model, head) if fits and getattr(loss, "__name__", "") == "ForCausalLMLoss" else None

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: Any) -> None:
        self.on = False
