"""A Llama 3 decoder. It knows nothing of parallelism: `parallelize` finds its parts by their module names.

q, k, v are one matrix, and so are gate and up: fewer, larger products. Their rows are stored by groups ((q.. k v) a
key-value head; (gate, up) for each eighth of the width), so tensor parallelism can cut the matrix along its rows.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drumbeat.train.layers.attention import causal_attention
from drumbeat.train.layers.cross_entropy import linear_cross_entropy
from drumbeat.train.layers.feed_forward import GatedMLP, Mixture
from drumbeat.train.refusal import Refusal
from drumbeat.train.safetensors import Segment

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RopeScaling(NamedTuple):
    """Longer contexts than a model was first trained on: waves longer than that turn `factor` times slower, short ones as before.

    llama3: what lies between is mixed by how often a wave turns within the original context, from `low` to `high` times.
    yarn: by the wave's number, and attention is sharpened by `scale`."""

    kind: str  # llama3 or yarn
    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0
    scale: float = 1.0

    @staticmethod
    def parse(text: str, original: int) -> RopeScaling:
        """Parse `llama3:8` or `yarn:4`: how many times longer."""
        kind, _, factor = text.partition(":")
        if kind not in ("llama3", "yarn") or not factor.replace(".", "", 1).isdecimal() or float(factor) < 1:
            raise Refusal(f"rope={text} cannot be read", "write llama3:FACTOR or yarn:FACTOR, such as yarn:4")
        times = float(factor)
        if kind == "llama3":
            return RopeScaling(kind, times, original)
        return RopeScaling(kind, times, original, 1.0, 32.0, 0.1 * math.log(times) + 1)

    @staticmethod
    def read(rope: Mapping[str, Any], context: int) -> Optional[RopeScaling]:
        """Read it as a transformers config has it."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        original = rope.get("original_max_position_embeddings") or context
        if kind == "llama3":
            return RopeScaling(kind, rope["factor"], original, rope["low_freq_factor"], rope["high_freq_factor"])
        if kind == "yarn":
            scale = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1
            low, high = rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0
            return RopeScaling(kind, rope["factor"], original, low, high, scale)
        return None

    def config(self) -> Dict[str, Any]:
        words = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}[self.kind]
        rope = {"rope_type": self.kind, "factor": self.factor, "original_max_position_embeddings": self.original}
        rope.update(zip(words, (self.low, self.high)))
        return {**rope, "attention_factor": self.scale} if self.kind == "yarn" else rope

    def apply(self, rates: Tensor, base: float) -> Tensor:
        if self.kind == "llama3":
            turns = self.original * rates / (2 * math.pi)
            keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        else:
            count = len(rates)
            # The number of the wave that turns so often within the original context.
            number = lambda turns: count * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)  # noqa: E731
            first, last = max(math.floor(number(self.high)), 0), min(math.ceil(number(self.low)), 2 * count - 1)
            along = (torch.arange(count, device=rates.device) - first) / max(last - first, 1e-3)
            keep = 1 - along.clamp(0, 1)
        return rates * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True)
class LlamaShape:
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    context: int
    rope_base: float = 500_000.0
    tied: bool = False
    gate_groups: int = 8  # the largest tensor-parallel degree that cuts gate and up evenly
    norm_eps: float = 1e-5
    rope: Optional[RopeScaling] = None
    experts: int = 0  # feed-forwards per block between which a router chooses; 0: one that all tokens take
    chosen: int = 2  # of them, per token
    balance: float = 0.01  # weight of the loss for using them unevenly

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def matmul_parameters(self) -> int:
        """Count the parameters that a token is multiplied with: not the input embedding, which is a lookup, but the head, and
        only the chosen ones of the experts."""
        return self._matrices(self.chosen if self.experts else 1)

    @property
    def parameters(self) -> int:
        """Count all parameters except those of the norms."""
        return self._matrices(max(1, self.experts)) + (0 if self.tied else self.width * self.vocabulary)

    def _matrices(self, feed_forwards: int) -> int:
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * self.head_width
        block = attention + 3 * self.width * self.inner * feed_forwards + self.width * self.experts
        return self.layers * block + self.width * self.vocabulary


SHAPES: Dict[str, LlamaShape] = {
    "byte-tiny": LlamaShape(64, 2, 4, 2, 192, 256, 64),
    "1b": LlamaShape(2048, 16, 32, 8, 8192, 128_256, 8192, tied=True),
    "3b": LlamaShape(3072, 28, 24, 8, 8192, 128_256, 8192, tied=True),
    "8b": LlamaShape(4096, 32, 32, 8, 14_336, 128_256, 8192),
    "70b": LlamaShape(8192, 80, 64, 8, 28_672, 128_256, 8192),
    "byte-experts": LlamaShape(64, 2, 4, 2, 96, 256, 64, experts=8),
    "8x1b": LlamaShape(2048, 16, 32, 8, 4096, 128_256, 8192, tied=True, experts=8),
    "8x7b": LlamaShape(4096, 32, 32, 8, 14_336, 32_000, 8192, 1_000_000.0, experts=8),
}


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.group = shape.heads // shape.kv_heads  # query heads that share one key-value head
        self.qkv = nn.Linear(shape.width, shape.kv_heads * (self.group + 2) * shape.head_width, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The number of heads is read from the tensor: under tensor parallelism a rank holds only its own.
        grouped = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_width))
        q, k, v = grouped.split((self.group, 1, 1), dim=-2)
        cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.out(self.attend(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention; x: (batch, time, kv heads, heads, head width)."""
    cos, sin = cos[None, :, None, None], sin[None, :, None, None]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = (
            Mixture(shape.width, shape.inner, shape.experts, shape.chosen)
            if shape.experts
            else GatedMLP(shape.width, shape.inner, shape.gate_groups)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ExpertBlock(Block):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, uneven: Tensor) -> Tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y, more = self.mlp(self.mlp_norm(x))
        return x + y, uneven + more


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        kind = ExpertBlock if shape.experts else Block
        self.blocks = nn.ModuleDict({str(i): kind(shape) for i in range(shape.layers)})
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        if self.norm.weight.device.type != "meta":
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    self.init_parameter(name, parameter)

    @property
    def attention_heads(self) -> Tuple[int, int]:
        return self.shape.heads, self.shape.kv_heads

    def hugging_face_config(self) -> Dict[str, Any]:
        return config_of(self.shape)

    def init_parameter(self, name: str, out: Tensor) -> None:
        """Fill one parameter. Its random numbers come from torch's seed and its name, so it does not matter which others
        are filled here, or before.
        The last product of each block is scaled down by depth, so the residual sum keeps its size."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        else:
            last = name.endswith(("out.weight", "down.weight", "down_proj"))
            own = torch.Generator(out.device).manual_seed(torch.initial_seed() + zlib.crc32(name.encode()))
            out.normal_(std=0.02 / (2 * self.shape.layers) ** 0.5 if last else 0.02, generator=own)

    def forward(self, tokens: Tensor, targets: Optional[Tensor] = None, positions: Optional[Tensor] = None) -> Tensor:
        """Logits; or, with targets (-100 = no target), the *sum* of the losses, whose logits never stand whole."""
        x = self.embed(tokens)
        cos, sin = self.angles(x.device, positions)
        uneven = torch.zeros((), device=x.device)
        for block in self.blocks.values():
            if self.shape.experts:
                x, uneven = block(x, cos, sin, uneven)
            else:
                x = block(x, cos, sin)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        loss = linear_cross_entropy(x, self.head, targets)
        if not (self.shape.experts and self.training):
            return loss
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return whole + uneven * (self.shape.balance / self.shape.layers)

    def angles(self, device: torch.device, positions: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        """Return cos and sin by position, computed anew each time: 1 MB that would otherwise have to move with the model."""
        if positions is None:
            positions = torch.arange(self.shape.context, device=device)
        half = torch.arange(0, self.shape.head_width, 2, device=device, dtype=torch.float32) / self.shape.head_width
        rates = self.shape.rope_base**-half
        scale = 1.0
        if self.shape.rope is not None:
            rates, scale = self.shape.rope.apply(rates, self.shape.rope_base), self.shape.rope.scale
        angle = positions.float()[:, None] * rates
        return angle.cos() * scale, angle.sin() * scale


def segments(shape: LlamaShape, head_is_embedding: bool = False) -> Dict[str, List[Segment]]:
    """Map each of our matrices, in our order, to the rows of transformers' matrices (Llama or Mixtral) that it consists of.
    The rows of all experts' matrices follow each other."""
    head, group, part = shape.head_width, shape.heads // shape.kv_heads, shape.inner // shape.gate_groups
    names = {"embed": "model.embed_tokens", "norm": "model.norm"}
    if not shape.tied:
        names["head"] = "model.embed_tokens" if head_is_embedding else "lm_head"
    rows = {"embed": shape.vocabulary, "head": shape.vocabulary}
    found = {f"{ours}.weight": [(f"{theirs}.weight", 0, rows.get(ours, shape.width))] for ours, theirs in names.items()}
    for i in range(shape.layers):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        qkv: List[Segment] = []
        for kv in range(shape.kv_heads):
            qkv.append((f"{old}self_attn.q_proj.weight", kv * group * head, (kv + 1) * group * head))
            qkv += [(f"{old}self_attn.{name}_proj.weight", kv * head, (kv + 1) * head) for name in "kv"]
        found[new + "attention.qkv.weight"] = qkv
        whole = {"attention.out": "self_attn.o_proj"}
        if shape.experts:
            moe, inner, width = f"{old}block_sparse_moe.", (0, shape.inner), (0, shape.width)
            own = [f"{moe}experts.{number}.w" for number in range(shape.experts)]
            found[new + "mlp.router.weight"] = [(f"{moe}gate.weight", 0, shape.experts)]
            pairs: List[Segment] = [(f"{name}{gate_or_up}.weight", *inner) for name in own for gate_or_up in (1, 3)]
            found[new + "mlp.experts.gate_up_proj"] = pairs
            found[new + "mlp.experts.down_proj"] = [(f"{name}2.weight", *width) for name in own]
        else:
            whole["mlp.down"] = "mlp.down_proj"
            found[new + "mlp.gate_up.weight"] = [
                (f"{old}mlp.{name}_proj.weight", at * part, (at + 1) * part)
                for at in range(shape.gate_groups)
                for name in ("gate", "up")
            ]
        whole.update(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
        found.update(
            {f"{new}{ours}.weight": [(f"{old}{theirs}.weight", 0, shape.width)] for ours, theirs in whole.items()}
        )
    return found


def shape_from(config: Mapping[str, Any]) -> LlamaShape:
    """Return the shape that a transformers config.json describes; a Refusal if the model there needs something that ours does not
    compute."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    odd = {
        f"model_type {config.get('model_type')}": config.get("model_type") not in ("llama", "mixtral"),
        f"a window of {config.get('sliding_window')} tokens": config.get("sliding_window") is not None,
        f"rope_type {kind}": kind not in ("default", "llama3", "yarn"),
        "yarn with mscale, or without truncation": rope.get("mscale") or not rope.get("truncate", True),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        "biases": config.get("attention_bias") or config.get("mlp_bias"),
        "a head_dim of its own": (config.get("head_dim") or width // heads) * heads != width,
        f"a partial rotary factor of {rope.get('partial_rotary_factor')}": rope.get("partial_rotary_factor", 1.0)
        != 1.0,
    }
    if wrong := [name for name, so in odd.items() if so]:
        raise Refusal(f"the llama recipe does not compute {wrong[0]}", "train.setup takes any model of transformers")
    context = config.get("max_position_embeddings", 2048)
    inner = config["intermediate_size"]
    return LlamaShape(
        width,
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads") or heads,
        inner,
        config["vocab_size"],
        context,
        rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        config.get("tie_word_embeddings", False),
        max(groups for groups in (8, 4, 2, 1) if inner % groups == 0),
        config.get("rms_norm_eps", 1e-6),
        RopeScaling.read(rope, context),
        config.get("num_local_experts", 0),
        config.get("num_experts_per_tok", 2),
    )


def config_of(shape: LlamaShape) -> Dict[str, Any]:
    """Return the config.json with which transformers loads an exported model."""
    rope: Dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_base}
    if shape.rope is not None:
        rope.update(shape.rope.config())
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "router_aux_loss_coef": shape.balance,
        "sliding_window": None,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": rope,
        "rope_theta": shape.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **(experts if shape.experts else {}),
    }
