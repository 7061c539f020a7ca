"""Models by name or by config.json. An unreadable value is an error that names it; nothing is guessed."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from typing import Any, Dict, Optional, Tuple, Union

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict.cost import Layout
from drumbeat.predict.shapes import ConvNet, Model, check, resnet


@dataclass(frozen=True)
class Described:
    """A model and the other settings in its description; None: not given."""

    model: Union[Model, ConvNet]
    seq: int
    framework: Optional[str] = None
    layout: Optional[Layout] = None
    batch: Optional[int] = None
    steps: Optional[int] = None
    precision: Optional[str] = None
    assumed: str = ""  # said in the output
    per_replica: Optional[int] = None  # samples of a replica and step, where the batch follows from it


def named(name: str) -> Described:
    """Find a model by its name in shapes.yaml, or a ResNet."""
    spelled = name.lower().replace("_", "-")
    rows = load("drumbeat.predict", "shapes")
    for row in rows:
        if spelled in (row["name"], *row.get("alias", [])):
            return Described(_model(row), int(row["seq"]))
    nets = {"resnet-18": 18, "resnet-34": 34, "resnet-50": 50, "resnet-101": 101, "resnet-152": 152}
    plain = spelled if "-" in spelled else spelled.replace("resnet", "resnet-")
    if plain in nets:
        return Described(resnet(nets[plain]), 224)
    if spelled in ("wide-resnet", "wide-resnet-50", "wide-resnet-50-2"):
        return Described(resnet(50, wide=2), 224)
    known = [row["name"] for row in rows] + list(nets) + ["wide-resnet-50-2"]
    near = [each for each in known if spelled in each.split("-")][:8]  # only a size or a family: 7b, llama3
    near = near or difflib.get_close_matches(spelled, known, 3, 0.3)
    hint = f"did you mean {', '.join(near)}? " if near else "docs page predict lists the known names; "
    raise Problem(f"unknown model {name!r}", f"{hint}{'Or' if near else 'or'} give a config.json")


def _model(row: Dict[str, Any]) -> Model:
    values = {key: value for key, value in row.items() if key not in ("alias", "seq")}
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    return check(Model(**values))


def describe(text: str) -> Described:
    """Return the model of --model: a file (config.json, or a folder with one), or a name."""
    if os.path.isdir(text):
        text = os.path.join(text, "config.json")
    if text.endswith(".json") or os.path.sep in text:
        return Described(*from_config(text))
    return named(text)


# Models by their Hugging Face config.json: one row per architecture adds what the sizes do not give.


@dataclass(frozen=True)
class Family:
    """An architecture. `bias`: products with a bias: q, k, v, o(utput of attention), i(nto the MLP), f(rom it), h(ead)."""

    norms: float = 2  # per layer, of the hidden size
    norm_bias: int = 0
    qk: str = ""  # norms of queries and keys: per "head", or of their "whole" width
    bias: str = ""
    gated: int = 1
    classic: int = 0  # GELU and dropout masks
    tied: int = 0  # default if the config does not say
    positions: int = -1  # learned positions beyond max_position_embeddings; -1: none
    causal: int = 1
    head: int = 1  # 0: no head over the vocabulary


def _classic(
    bias: str = "qkvoif", norms: float = 2, tied: int = 1, positions: int = -1, causal: int = 1, head: int = 1
) -> Family:
    return Family(norms, 1, "", bias, 0, 1, tied, positions, causal, head)


FAMILIES: Dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "granite", "smollm3", "phi3", "internlm2"), Family()),
    "qwen2": Family(bias="qkv"),
    "qwen2_moe": Family(bias="qkv"),
    "qwen3": Family(qk="head"),
    "qwen3_moe": Family(qk="head"),
    "gemma": Family(tied=1),
    "gemma2": Family(4, tied=1),
    "gemma3_text": Family(4, qk="head", tied=1),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "gpt_oss": Family(bias="qkvo"),
    "olmo": Family(0),
    "olmo2": Family(qk="whole"),
    "olmo3": Family(qk="whole"),
    "cohere": Family(1, tied=1),
    "starcoder2": Family(2, 1, bias="qkvoif", gated=0, tied=1),
    "phi": _classic("qkvoifh", 1, 0),
    "gpt2": _classic(positions=0),
    "gpt_bigcode": _classic(positions=0),
    "gpt_neo": _classic("oif", positions=0),
    "gptj": _classic("ifh", 1, 0),
    "gpt_neox": _classic(tied=0),
    "opt": _classic(positions=2),
    "bloom": _classic(),
    "falcon": _classic("", 1),
    "mpt": Family(gated=0, classic=1, tied=1),
    "bert": _classic(positions=0, causal=0),
    "roberta": _classic(positions=0, causal=0),
    "vit": _classic(positions=0, causal=0, head=0),
}


# transformers' defaults for values missing in a published config.json.
_LEFT_OUT = {
    "gemma3_text": {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
}  # fmt: skip


class Config:
    """The values of a config.json, checked as they are read."""

    def __init__(self, values: Dict[str, Any]) -> None:
        self.values = values

    def count(self, *keys: str, default: Any = None, least: int = 1) -> int:
        """Return the first of `keys` that is there, as a whole number."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not good or value != int(value) or not least <= value <= 10_000_000:
                fix = f"a whole number from {least} to 10,000,000 is needed"
                raise Problem(f"config.json: {key} is {str(value)[:40]!r}", fix)
            return int(value)
        if default is None:
            raise Problem(f"config.json: {' or '.join(keys)} is missing", "a complete config.json is needed")
        return int(default)

    def yes(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if not isinstance(value, (bool, int, type(None))):
            raise Problem(f"config.json: {key} is {str(value)[:40]!r}", "true or false is needed")
        return default if value is None else bool(value)


def from_config(path: str) -> Tuple[Model, int]:
    """Return the model of a Hugging Face config.json, and the length of its sequences."""
    try:
        with open(path, encoding="utf-8") as stream:
            config = json.load(stream)
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}", "give a config.json or a model's name") from None
    except (ValueError, RecursionError) as error:
        why = str(error).splitlines()[0][:100]
        raise Problem(f"{path} is not JSON: {why}", "give the model's config.json") from None
    if not isinstance(config, dict):
        raise Problem(f"{path} is not a config.json", "it must be an object with the model's sizes")
    folder, file = os.path.split(os.path.abspath(path))
    name = os.path.splitext(file)[0] if file != "config.json" else os.path.basename(folder) or path
    try:
        return config_model(config, name)
    except Problem as problem:
        raise Problem(re.sub("^config.json:", f"{file}:", problem.what), problem.fix) from None


def config_model(config: Dict[str, Any], name: str) -> Tuple[Model, int]:
    """Turn the values of a config.json into a model and a length."""
    inner = config.get("text_config")
    if isinstance(inner, dict):  # a vision-language model: its language part
        config, name = inner, f"{name} (language model only)"
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise Problem(f"config.json: model_type {str(kind)[:40]!r} is not modelled", f"modelled: {', '.join(FAMILIES)}")
    config = {**_LEFT_OUT.get(kind, {}), **config}
    family, c = FAMILIES[kind], Config(config)
    hidden = c.count("hidden_size", "n_embd", "n_embed", "d_model")
    heads = c.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = c.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    nope = c.count("qk_nope_head_dim", default=0)
    if not nope and not config.get("head_dim") and hidden % heads:
        words = f"config.json: {heads} heads do not divide {hidden}"
        raise Problem(words, "hidden_size must be a multiple of the heads")
    head_dim = nope or c.count("head_dim", default=hidden // heads)
    kv = _kv_heads(kind, c, heads)
    usual = 4 * hidden if family.classic else None
    if kind == "mpt":
        usual = c.count("expansion_ratio", default=4) * hidden
    experts = c.count("num_local_experts", "num_experts", "n_routed_experts", default=0, least=0)
    ffn = c.count(
        "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=0 if experts and not usual else usual
    )
    expert_ffn = c.count("moe_intermediate_size", default=ffn) if experts else 0
    dense = _dense_layers(c, config, layers) if experts else 0
    shared = c.count("n_shared_experts", default=0, least=0) * expert_ffn if experts else 0
    if experts and not shared:
        shared = c.count("shared_expert_intermediate_size", default=0, least=0)
    seq = c.count("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=2048)
    learned = seq + family.positions if family.positions >= 0 else 0
    q_rank = c.count("q_lora_rank", default=0, least=0)
    kv_rank = c.count("kv_lora_rank", default=0, least=0)
    if kind == "vit":
        image, patch = c.count("image_size", default=224), c.count("patch_size", default=16)
        seq = learned = (image // patch) ** 2 + 1
        labels = config.get("id2label")
        vocab = c.count("num_labels", default=len(labels) if isinstance(labels, dict) and labels else 2)
    else:
        vocab = c.count("vocab_size")
    tied = c.yes("tie_word_embeddings", bool(family.tied))
    bias = family.bias
    if c.yes("attention_bias"):
        bias += "qkvo"
    if c.yes("mlp_bias"):
        bias += "if"
    if kind == "starcoder2" and not c.yes("use_bias", True):
        bias = ""
    if kind == "falcon" and c.yes("bias"):
        bias = "qkvoif"
    norms = family.norms
    if kind == "falcon":
        new = c.yes("new_decoder_architecture")
        two = c.count("num_ln_in_parallel_attn", default=2) == 2 if new else not c.yes("parallel_attn", True)
        norms = 2 if two else norms
    moe = layers - dense if experts else 0
    size = {
        "q": heads * head_dim, "k": kv * head_dim, "v": kv * head_dim, "o": hidden,
        "i": (1 + family.gated) * ffn * (layers - moe) / layers, "f": hidden * (layers - moe) / layers, "h": 0,
    }  # fmt: skip
    small = norms * hidden * (1 + family.norm_bias) + sum(size[letter] for letter in set(bias))
    small += {"": 0, "head": 2 * head_dim, "whole": (heads + kv) * head_dim}[family.qk]
    if kv_rank:
        small += q_rank + kv_rank - (size["q"] + size["k"] + size["v"] if "q" in bias else 0)
        small += q_rank + kv_rank + c.count("qk_rope_head_dim", default=0) if "q" in bias else 0
    if kind == "qwen2_moe":
        small += hidden * moe / layers  # the gate of the shared expert
    if kind == "gpt_oss":
        small += heads + experts * (1 + 2 * expert_ffn + hidden)
    once = hidden * (1 + family.norm_bias) * (norms > 0) + ("h" in bias) * vocab
    if kind == "bloom":
        once += 2 * hidden
    elif kind in ("bert", "roberta"):  # types, a norm of the embeddings instead of a last one, the head's transform
        once += c.count("type_vocab_size", default=2) * hidden + hidden * hidden + 3 * hidden + vocab
    elif kind == "vit":
        channels = c.count("num_channels", default=3)
        once += channels * patch * patch * hidden + 2 * hidden + vocab
    local = _local_layers(kind, c, config, layers)
    model = Model(
        str(config.get("_name_or_path") or name)[:80], layers, hidden, heads, heads if kv_rank else kv, head_dim,
        ffn if moe < layers else 0, vocab, gated=family.gated, tied=int(tied), causal=family.causal, classic=family.classic,
        experts=experts, topk=c.count("num_experts_per_tok", "experts_per_token", default=2) if experts else 0,
        expert_ffn=expert_ffn, shared_ffn=shared, dense_layers=dense,
        q_rank=q_rank if kv_rank else 0, kv_rank=kv_rank, rope_dim=c.count("qk_rope_head_dim", default=0) if kv_rank else 0,
        value_dim=c.count("v_head_dim", default=nope) if kv_rank else 0, positions=learned,
        window=c.count("sliding_window", default=0, least=0) if local else 0, window_layers=local,
        heads_out=family.head, small=small, once=once,
    )  # fmt: skip
    return check(model), min(seq, 8192)


def _kv_heads(kind: str, c: Config, heads: int) -> int:
    if kind == "gpt_bigcode" or (kind == "falcon" and not c.yes("new_decoder_architecture")):
        return 1 if c.yes("multi_query", True) else heads
    return c.count("num_key_value_heads", "num_kv_heads", default=heads)


def _dense_layers(c: Config, config: Dict[str, Any], layers: int) -> int:
    """Return how many layers of a mixture of experts have a dense MLP."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and kinds:
        return sum(each == "dense" for each in kinds[:layers])
    dense = config.get("mlp_only_layers")
    sparse = c.count("decoder_sparse_step", "moe_layer_freq", default=1)
    first = c.count("first_k_dense_replace", default=0, least=0)
    named = set(dense) if isinstance(dense, list) and all(isinstance(each, int) for each in dense) else set()
    phase = 1 if "decoder_sparse_step" in config else 0
    return sum(n < first or n in named or (n + phase) % sparse != 0 for n in range(layers))


def _local_layers(kind: str, c: Config, config: Dict[str, Any], layers: int) -> int:
    """Return the number of layers with windowed attention."""
    if not config.get("sliding_window") or not c.yes("use_sliding_window", not kind.startswith("qwen")):
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return sum(each == "sliding_attention" for each in kinds[:layers])
    if kind in ("gemma2", "gpt_oss"):
        return (layers + 1) // 2
    if kind == "gemma3_text":
        every = c.count("sliding_window_pattern", default=6)
        return layers - layers // every
    return layers
