"""A Llama 3 decoder. It knows nothing of parallelism: `parallelize` is told about it from outside, by module names.

q, k, v are one matrix, and so are gate and up: fewer, larger products. Their rows are stored by groups ((q.. k v) a
key-value head; (gate, up) for each eighth of the width), so tensor parallelism can cut the matrix along its rows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from drumbeat.train.layers.attention import causal_attention
from drumbeat.train.layers.cross_entropy import linear_cross_entropy
from drumbeat.train.layers.swiglu import GatedMLP

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def matmul_parameters(self) -> int:
        """Parameters that take part in matrix products: the input embedding is a lookup, the head is not."""
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * self.head_width
        return self.layers * (attention + 3 * self.width * self.inner) + self.width * self.vocabulary


SHAPES: Dict[str, LlamaShape] = {
    "byte-tiny": LlamaShape(64, 2, 4, 2, 192, 256, 64),
    "1b": LlamaShape(2048, 16, 32, 8, 8192, 128_256, 8192, tied=True),
    "3b": LlamaShape(3072, 28, 24, 8, 8192, 128_256, 8192, tied=True),
    "8b": LlamaShape(4096, 32, 32, 8, 14_336, 128_256, 8192),
    "70b": LlamaShape(8192, 80, 64, 8, 28_672, 128_256, 8192),
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
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = GatedMLP(shape.width, shape.inner, shape.gate_groups)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed: Optional[nn.Embedding] = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.norm: Optional[nn.RMSNorm] = nn.RMSNorm(shape.width, eps=1e-5)
        self.head: Optional[nn.Linear] = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.tie()
        if self.norm.weight.device.type != "meta":
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    self.init_weights(name, parameter)

    def init_weights(self, name: str, out: Tensor) -> None:
        """Fill one parameter. Its random numbers come from torch's seed and its name, so it does not matter which others
        are filled here, or before.
        The last product of each block is scaled down by depth, so the residual sum keeps its size."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        else:
            last = name.endswith(("out.weight", "down.weight"))
            own = torch.Generator(out.device).manual_seed(torch.initial_seed() + zlib.crc32(name.encode()))
            out.normal_(std=0.02 / (2 * self.shape.layers) ** 0.5 if last else 0.02, generator=own)

    def tie(self) -> None:
        if self.shape.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Optional[Tensor] = None, positions: Optional[Tensor] = None) -> Tensor:
        """Logits; or, with targets (-100 = no target), the *sum* of the losses, whose logits never stand whole.

        A pipeline stage lacks the embedding, the norm and head, or both: it then takes or gives hidden states.
        """
        x = self.embed(tokens) if self.embed is not None else tokens
        cos, sin = self.angles(x.device, positions)
        for block in self.blocks.values():
            x = block(x, cos, sin)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is None:
            return x
        if targets is None:
            return self.head(x)
        return linear_cross_entropy(x, self.head, targets)

    def angles(self, device: torch.device, positions: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        """cos and sin by position, made anew each time: 1 MB that would otherwise have to follow the model about."""
        if positions is None:
            positions = torch.arange(self.shape.context, device=device)
        half = torch.arange(0, self.shape.head_width, 2, device=device, dtype=torch.float32) / self.shape.head_width
        angle = positions.float()[:, None] * self.shape.rope_base**-half
        return angle.cos(), angle.sin()


def from_hugging_face(theirs: Dict[str, Tensor], shape: LlamaShape) -> Dict[str, Tensor]:
    """The state of a transformers LlamaForCausalLM under our names and in our row order."""
    ours = {"embed.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    ours["head.weight"] = theirs["lm_head.weight"] if "lm_head.weight" in theirs else ours["embed.weight"]
    for i in range(shape.layers):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        q, k, v = (theirs[f"{old}self_attn.{name}_proj.weight"] for name in "qkv")
        by_kv_head = [t.view(shape.kv_heads, -1, shape.head_width, shape.width) for t in (q, k, v)]
        ours[new + "attention.qkv.weight"] = torch.cat(by_kv_head, dim=1).reshape(-1, shape.width)
        pair = [theirs[f"{old}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        by_group = [t.view(shape.gate_groups, 1, -1, shape.width) for t in pair]
        ours[new + "mlp.gate_up.weight"] = torch.cat(by_group, dim=1).reshape(-1, shape.width)
        ours[new + "attention.out.weight"] = theirs[old + "self_attn.o_proj.weight"]
        ours[new + "mlp.down.weight"] = theirs[old + "mlp.down_proj.weight"]
        ours[new + "attention_norm.weight"] = theirs[old + "input_layernorm.weight"]
        ours[new + "mlp_norm.weight"] = theirs[old + "post_attention_layernorm.weight"]
    return ours
