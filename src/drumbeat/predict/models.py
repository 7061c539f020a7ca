"""Models as people have them: a name, a Hugging Face config.json, or the arguments of a training framework.

What cannot be read is said with its name; nothing is guessed.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from typing import Any, Dict, List, Optional, Union

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict.cost import Layout
from drumbeat.predict.shapes import ConvNet, Model, resnet


@dataclass(frozen=True)
class Described:
    """A model and what else its description said. None: not said."""

    model: Union[Model, ConvNet]
    seq: int
    framework: Optional[str] = None
    layout: Optional[Layout] = None
    batch: Optional[int] = None
    steps: Optional[int] = None
    precision: Optional[str] = None
    shape_only: bool = True


_DEFAULTS: Dict[str, Any] = {"gated": 1, "tied": 0, "causal": 1}


@functools.cache
def _shapes() -> Any:
    return load("drumbeat.predict", "shapes")


def named(name: str) -> Described:
    """Find a model by its name in shapes.yaml, or a ResNet."""
    spelled = name.lower().replace("_", "-")
    rows = _shapes()
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
    near = difflib.get_close_matches(spelled, known, 3)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise Problem(f"unknown model {name!r}", hint + "; or give a config.json")


def _model(row: Dict[str, Any]) -> Model:
    values = {key: value for key, value in row.items() if key not in ("alias", "seq")}
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    return check(Model(**values))


def check(model: Model) -> Model:
    """Refuse sizes that no model can have."""
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
        value = getattr(model, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Problem(f"{model.name}: {name} is {value!r}", "a whole number above 0 is needed")
        if value > 10_000_000:
            raise Problem(f"{model.name}: {name} is {value:,}", "no model is that large")
    if model.heads % model.kv_heads:
        raise Problem(
            f"{model.name}: {model.heads} heads do not divide by {model.kv_heads} key-value heads", "check the config"
        )
    if not model.ffn and not model.expert_ffn:
        raise Problem(f"{model.name}: the width of its MLP is missing", "check the config")
    if model.experts and not 0 < model.topk <= model.experts:
        raise Problem(f"{model.name}: {model.topk} of {model.experts} experts per token", "check the config")
    return model


def from_config(path: str) -> Described:
    """Read a Hugging Face config.json."""
    try:
        with open(path, encoding="utf-8") as stream:
            config = json.load(stream)
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}", "give a config.json or a model's name") from None
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is not JSON: {error}", "give the model's config.json") from None
    if not isinstance(config, dict):
        raise Problem(f"{path} is not a config.json", "it must be an object with the model's sizes")
    return config_model(config, os.path.basename(os.path.dirname(os.path.abspath(path))) or path)


_LLAMA_LIKE = (
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "deepseek_v2", "deepseek_v3", "gpt_oss", "olmo", "olmo2", "phi3", "granite", "smollm3", "internlm2", "cohere", "starcoder2",
)  # fmt: skip
_CLASSIC = (
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "opt",
    "bloom",
    "bert",
    "roberta",
    "vit",
    "mpt",
    "falcon",
    "gpt_bigcode",
)


def config_model(config: Dict[str, Any], name: str) -> Described:
    """Turn the values of a config.json into a model."""
    kind = config.get("model_type")
    if kind not in _LLAMA_LIKE + _CLASSIC:
        known = ", ".join(_LLAMA_LIKE + _CLASSIC)
        raise Problem(f"config.json: model_type {kind!r} is not modelled", f"modelled: {known}")

    def first(*keys: str, default: Any = None) -> Any:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        if default is None:
            raise Problem(f"config.json: {' or '.join(keys)} is missing", "a complete config.json is needed")
        return default

    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "n_heads")
    for key, value in (("hidden size", hidden), ("number of heads", heads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Problem(f"config.json: the {key} is {value!r}", "a whole number above 0 is needed")
    head_dim = config.get("head_dim") or (
        hidden // heads if not config.get("qk_nope_head_dim") else config["qk_nope_head_dim"]
    )
    if not config.get("head_dim") and not config.get("qk_nope_head_dim") and hidden % heads:
        raise Problem(
            f"config.json: {heads} heads do not divide {hidden}", "hidden_size must be a multiple of the heads"
        )
    classic = kind in _CLASSIC
    ffn = (
        config.get("intermediate_size")
        or config.get("n_inner")
        or config.get("ffn_dim")
        or (4 * hidden if classic else 0)
    )
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    expert_ffn = (config.get("moe_intermediate_size") or ffn) if experts else 0
    dense = int(config.get("first_k_dense_replace") or 0)
    layers = first("num_hidden_layers", "n_layer", "n_layers")
    shared = int(config.get("n_shared_experts") or 0) * int(expert_ffn or 0) or int(
        config.get("shared_expert_intermediate_size") or 0
    )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    every = 2 if kind == "gemma2" else 1
    seq = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    values = {
        "name": str(config.get("_name_or_path") or name),
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads),
        "head_dim": head_dim,
        "ffn": 0 if experts and not dense else ffn,
        "vocab": first("vocab_size", default=len(config.get("id2label") or {}) or 1000)
        if kind == "vit"
        else first("vocab_size"),
        "gated": int(not classic and kind != "starcoder2"),
        "tied": int(config.get("tie_word_embeddings", classic or kind.startswith("gemma"))),
        "causal": int(kind not in ("bert", "roberta", "vit")),
        "classic": int(classic),
        "experts": experts,
        "topk": config.get("num_experts_per_tok") or config.get("experts_per_token") or (2 if experts else 0),
        "expert_ffn": expert_ffn,
        "shared_ffn": shared,
        "dense_layers": dense,
        "q_rank": int(config.get("q_lora_rank") or 0) if config.get("kv_lora_rank") else 0,
        "kv_rank": int(config.get("kv_lora_rank") or 0),
        "rope_dim": int(config.get("qk_rope_head_dim") or 0),
        "value_dim": int(config.get("v_head_dim") or 0),
        "window": int(window or 0),
        "window_layers": (layers // every) if window and isinstance(layers, int) else 0,
        "heads_out": int(kind != "vit"),
    }
    return Described(check(Model(**values)), min(seq, 8192))


def describe(text: str) -> Described:
    """Return the model of --model: a file (config.json, or a folder with one), or a name."""
    if os.path.isdir(text):
        text = os.path.join(text, "config.json")
    if text.endswith(".json") or os.path.sep in text:
        return from_config(text)
    return named(text)


# --- arguments of frameworks --------------------------------------------------------------------------------------------


def from_command(argv: List[str]) -> Optional[Described]:
    """Read the model and layout from a training command; None if it is none that is known."""
    words = [str(word) for word in argv]
    joined = " ".join(words)
    if "--num-layers" in joined and "--hidden-size" in joined:
        return _megatron(options(words))
    if "torchtitan" in joined or "--model.flavor" in joined:
        return _torchtitan(options(words), words)
    if "maxtext" in joined.lower() or any(word.startswith("model_name=") for word in words):
        return _maxtext(dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-")))
    if "train" in words and any(
        os.path.basename(word) in ("drumbeat", "drumbeat.pyz") for word in words[: words.index("train")]
    ):
        return _recipe(words[words.index("train") + 1 :])
    if words[1:3] == ["-m", "drumbeat"] and len(words) > 4 and words[3] == "train":
        return _recipe(words[4:])
    return None


def options(words: List[str]) -> Dict[str, str]:
    """Return `--name value` and `--name=value` as a dictionary; a name alone is "yes"."""
    found: Dict[str, str] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < len(words) else "--"
            found[name] = value if equals else (following if not following.startswith("--") else "yes")
    return found


def _number(found: Dict[str, str], name: str, default: Optional[int] = None) -> int:
    text = found.get(name)
    if text is None:
        if default is None:
            raise Problem(f"--{name} is missing", "the model's size follows from it")
        return default
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise Problem(f"--{name} {text}: a whole number is needed", "check the command") from None


def _megatron(found: Dict[str, str]) -> Described:
    hidden, heads = _number(found, "hidden-size"), _number(found, "num-attention-heads")
    if heads < 1 or hidden < 1:
        raise Problem(f"--hidden-size {hidden} --num-attention-heads {heads}", "whole numbers above 0 are needed")
    gated = "swiglu" in found
    experts = _number(found, "num-experts", 0)
    ffn = _number(found, "ffn-hidden-size", 4 * hidden if not gated else int(4 * hidden * 2 / 3) // 64 * 64)
    modern = found.get("normalization") == "RMSNorm" or gated
    padded = _number(found, "vocab-size", 0) or _number(found, "padded-vocab-size", 51200)
    model = Model(
        f"megatron {hidden} x {_number(found, 'num-layers')}",
        _number(found, "num-layers"), hidden, heads,
        _number(found, "num-query-groups", heads) if "group-query-attention" in found else heads,
        _number(found, "kv-channels", hidden // heads), 0 if experts else ffn, padded, gated=int(gated),
        tied=int("untie-embeddings-and-output-weights" not in found), classic=int(not modern), experts=experts,
        topk=_number(found, "moe-router-topk", 2) if experts else 0,
        expert_ffn=_number(found, "moe-ffn-hidden-size", ffn) if experts else 0,
        positions=0 if found.get("position-embedding-type") in ("rope", "none") else _number(found, "max-position-embeddings", 0),
    )  # fmt: skip
    pp = _number(found, "pipeline-model-parallel-size", 1)
    per_virtual = _number(found, "num-layers-per-virtual-pipeline-stage", 0)
    if pp < 1 or per_virtual < 0:
        raise Problem("--pipeline-model-parallel-size must be at least 1, and layers per virtual stage not negative")
    recompute = 2 if found.get("recompute-granularity") == "full" or "checkpoint-activations" in found else 0
    recompute = (
        1 if found.get("recompute-granularity") == "selective" or "recompute-activations" in found else recompute
    )
    tp = _number(found, "tensor-model-parallel-size", 1)
    zero = 1 if "use-distributed-optimizer" in found else _number(found, "zero-stage", 0)
    layout = Layout(
        tp=tp, pp=pp, cp=_number(found, "context-parallel-size", 1), ep=_number(found, "expert-model-parallel-size", 1), dp=0,
        vp=max(1, model.layers // pp // per_virtual) if per_virtual else 1, zero=zero,
        micro=_number(found, "micro-batch-size", 1), recompute=recompute, sp=int("sequence-parallel" in found and tp > 1),
    )  # fmt: skip
    old = not (
        found.get("attention-backend") == "flash" or "use-flash-attn" in found or modern or "transformer-impl" in found
    )
    precision = (
        "fp8" if "fp8-format" in found else ("bf16" if "bf16" in found else ("fp16" if "fp16" in found else "fp32"))
    )
    return Described(
        check(model), _number(found, "seq-length", 2048), "megatron-classic" if old else "megatron", layout,
        _number(found, "global-batch-size", 0) or None, _number(found, "train-iters", 0) or None, precision, False,
    )  # fmt: skip


_FLAVORS = {
    "llama3": {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"},
    "deepseek_v3": {"671B": "deepseek-v3"},
}


def _torchtitan(found: Dict[str, str], words: List[str]) -> Described:
    name, flavor = found.get("model.name", "llama3"), found.get("model.flavor", "")
    config = found.get("job.config_file") or found.get("job.config-file") or ""
    base = os.path.basename(config)
    if not flavor and base:  # llama3_8b.toml
        stem = base.rsplit(".", 1)[0].replace("_", "-")
        described = named(stem)
    elif name in _FLAVORS and flavor in _FLAVORS[name]:
        described = named(_FLAVORS[name][flavor])
    else:
        raise Problem(f"torchtitan model {name!r}, flavor {flavor!r} is not known", "give --model config.json too")
    cut = {key.replace("_", "-"): value for key, value in found.items()}
    layout = Layout(
        tp=_number(cut, "parallelism.tensor-parallel-degree", 1), pp=_number(cut, "parallelism.pipeline-parallel-degree", 1),
        cp=_number(cut, "parallelism.context-parallel-degree", 1), dp=0, zero=3,
        shard=max(0, _number(cut, "parallelism.data-parallel-shard-degree", -1)),
        micro=_number(cut, "training.local-batch-size", _number(cut, "training.batch-size", 1)),
        recompute={"full": 2, "selective": 1, "none": 0}.get(cut.get("activation-checkpoint.mode", "selective"), 1),
        sp=int(_number(cut, "parallelism.tensor-parallel-degree", 1) > 1),
    )  # fmt: skip
    return Described(
        described.model, _number(cut, "training.seq-len", described.seq), "torchtitan", layout,
        _number(cut, "training.global-batch-size", 0) or None, _number(cut, "training.steps", 0) or None, "bf16", False,
    )  # fmt: skip


def _maxtext(found: Dict[str, str]) -> Described:
    if "model_name" not in found:
        raise Problem("MaxText: model_name= is missing", "the model's size follows from it")
    described = named(found["model_name"])
    layout = Layout(
        tp=max(1, _number(found, "ici_tensor_parallelism", 1)), dp=0, zero=3, micro=_number(found, "per_device_batch_size", 1),
        recompute={"full": 2, "minimal": 1, "none": 0}.get(found.get("remat_policy", "full"), 2),
    )  # fmt: skip
    length = _number(found, "max_target_length", described.seq)
    return Described(
        described.model, length, "maxtext", layout, None, _number(found, "steps", 0) or None, "bf16", False
    )


def _recipe(words: List[str]) -> Described:
    """Read `drumbeat train NAME --layout LAYOUT --set key=value...`."""
    if not words or words[0].startswith("-"):
        raise Problem("drumbeat train: no recipe is named", "llama, bert, resnet or wide-resnet")
    recipe = words[0]
    found = {key: value for key, _, value in (word.partition("=") for word in words[1:]) if _}
    chosen = options(words[1:]).get("layout") or found.get("layout", "ddp")
    if recipe == "llama":
        shape = found.get("model", "byte-tiny")
        if shape == "byte-tiny":
            described = Described(Model("byte-tiny", 2, 64, 4, 2, 16, 192, 256), 64)
        else:
            described = named(shape)
    elif recipe == "bert":
        described = named("bert-base")
    elif recipe == "resnet":
        described = named(f"resnet-{found.get('depth', '50')}")
    elif recipe == "wide-resnet":
        raise Problem("drumbeat train wide-resnet: images of 32 x 32 are not modelled", "predict resnet, llama or bert")
    else:
        raise Problem(f"drumbeat train {recipe}: no such recipe", "llama, bert, resnet or wide-resnet")
    batch = _number(found, "batch", 256 if recipe == "resnet" else 32)
    degrees = parse_layout(chosen)
    recompute = {"none": 0, "selective": 1, "full": 2}.get(found.get("recompute", "auto"), -1)
    layout = Layout(
        tp=degrees.get("tp", 1), pp=degrees.get("pp", 1), cp=degrees.get("cp", 1), dp=0,
        zero=3 if degrees.get("dp_shard", 1) != 1 else 0, shard=degrees["dp_shard"] if degrees.get("dp_shard", 1) > 1 else 0,
        micro=-(_number(found, "accumulate", 0)), recompute=recompute, sp=int(degrees.get("tp", 1) != 1),
    )  # fmt: skip
    precision = found.get("precision", "auto")
    if precision == "auto":
        precision = "bf16" if layout.zero or recipe == "resnet" else "bf16-master"
    seq = _number(found, "length", 0) or described.seq
    return Described(
        described.model,
        seq,
        "drumbeat",
        layout,
        batch,
        _number(found, "steps", 600 if recipe == "llama" else 100),
        precision,
        False,
    )


def parse_layout(text: str, per_node: int = 8) -> Dict[str, int]:
    """Read `ddp`, `fsdp`, ... or `dp_shard=4,tp=2`; -1 is the rest. `per_node`: GPUs of a node, the shards of `hsdp`."""
    words = {
        "ddp": {"dp_replicate": -1},
        "fsdp": {"dp_shard": -1},
        "hsdp": {"dp_shard": per_node},
        "tp": {"tp": -1},
        "pp": {"pp": -1},
        "cp": {"cp": -1},
    }
    if text in words:
        return words[text]
    known = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "vp")
    found: Dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in known or not value.strip().lstrip("-").isdigit():
            raise Problem(
                f"layout {text!r}: {part!r} is not a degree",
                f"write degrees such as dp_shard=4,tp=2 ({', '.join(known)})",
            )
        found[key.strip()] = int(value)
    return found
