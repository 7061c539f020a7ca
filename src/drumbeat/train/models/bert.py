"""BERT with its masked-language head. Like the Llama model it knows nothing of parallelism.

q, k and v are one matrix whose rows lie head by head (q k v, q k v, ..), so that it can be cut between heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.layers.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class BertShape:
    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    context: int = 512
    dropout: float = 0.1
    tied: bool = True  # the head is the word embedding

    @property
    def matmul_parameters(self) -> int:
        block = 4 * self.width**2 + 2 * self.width * self.inner
        return self.layers * block + self.width**2 + self.width * self.vocabulary


SHAPES: Dict[str, BertShape] = {
    "byte-tiny": BertShape(64, 2, 4, 256, 264, 64, 0.0),  # 256 bytes, the mask, and what makes it divisible
    "base": BertShape(768, 12, 12, 3072, 30_522),
    "large": BertShape(1024, 24, 16, 4096, 30_522),
}


class Block(nn.Module):
    """Add, then normalise: the order of 2018."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.head_width, self.dropout = shape.width // shape.heads, shape.dropout
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)
        self.attention_norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.mlp_norm = nn.LayerNorm(shape.width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is read from the tensor: under tensor parallelism a rank holds only its own.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2).unbind(-2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        x = self.attention_norm(x + self._dropped(self.out(y.transpose(1, 2).flatten(2))))
        return self.mlp_norm(x + self._dropped(self.down(F.gelu(self.up(x)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Bert(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.kinds = nn.Embedding(2, shape.width)  # first or second sentence; one sentence here
        self.norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.transform = nn.Linear(shape.width, shape.width)
        self.transform_norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.words.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Optional[Tensor] = None) -> Tensor:
        """Logits; or, with targets (-100 = not asked), the sum of the losses."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.words(tokens) + self.places(places) + self.kinds(torch.zeros_like(places))
        x = F.dropout(self.norm(x), self.shape.dropout, self.training)
        for block in self.blocks.values():
            x = block(x)
        x = self.transform_norm(F.gelu(self.transform(x)))
        return self.head(x) if targets is None else linear_cross_entropy(x, self.head, targets)
