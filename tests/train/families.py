"""Small models of transformers' families, trained on one layout or another: what one process computes must come out."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from drumbeat import train

STEPS = 20 if "DRUMBEAT_PROOFS" in os.environ else 6
ROWS = 8
LENGTH = 16
_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_PLAIN = {**_SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Words(Dataset[Dict[str, Tensor]]):
    """Tokens with labels; rows are padded on the right, unevenly, and the last batch is short."""

    def __init__(self, causal: bool) -> None:
        random = torch.Generator().manual_seed(1)
        first = torch.randint(3, 9, (STEPS * ROWS - 3, 1), generator=random)
        self.tokens = first + torch.arange(LENGTH)
        self.lengths = torch.randint(2, LENGTH + 1, (len(self.tokens),), generator=random)
        self.causal = causal

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Dict[str, Tensor]:
        tokens, labels, length = self.tokens[i].clone(), self.tokens[i].clone(), int(self.lengths[i])
        labels[length:] = -100
        if not self.causal:  # some of them are hidden, and to be guessed
            labels[1::2] = -100
            tokens[::4] = 2
        mask = (torch.arange(LENGTH) < length).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Pictures(Dataset[Dict[str, Tensor]]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.pixels = torch.randn(STEPS * ROWS, 3, 16, 16, generator=random)
        self.labels = self.pixels.mean((2, 3)).argmax(1)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> Dict[str, Tensor]:
        return {"pixel_values": self.pixels[i], "labels": self.labels[i]}


def _causal(kind: str, **more: Any) -> Callable[[bool], nn.Module]:
    def make(tied: bool) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**_PLAIN, "tie_word_embeddings": tied, **more})
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]

    return make


def _gpt2(tied: bool) -> nn.Module:
    import transformers

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tied, **dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _bert(tied: bool) -> nn.Module:
    import transformers

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**_SHAPE, max_position_embeddings=32, tie_word_embeddings=tied, **dropout)
    return transformers.BertForMaskedLM(config)


def _vit(tied: bool) -> nn.Module:
    import transformers

    shape = {name: value for name, value in _SHAPE.items() if name != "vocab_size"}
    config = transformers.ViTConfig(
        **shape, image_size=16, patch_size=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config)


_HEAD = {"head_dim": 8}
FAMILIES: Dict[str, Callable[[bool], nn.Module]] = {
    "Llama": _causal("Llama"),
    "Qwen 2": _causal("Qwen2"),
    "Qwen 3": _causal("Qwen3", **_HEAD),
    "Mistral": _causal("Mistral", sliding_window=None),
    "Mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Qwen 3 MoE": _causal(
        "Qwen3Moe", **_HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "Gemma 2": _causal("Gemma2", **_HEAD),
    "Gemma 3": _causal("Gemma3Text", **_HEAD),
    "Phi": _causal("Phi"),
    "GPT-2": _gpt2,
    "BERT": _bert,
    "ViT": _vit,
}


def data_of(family: str) -> Dataset[Any]:
    return Pictures() if family == "ViT" else Words(causal=family != "BERT")


def trained(
    family: str, layout: str, tied: Optional[bool] = None, freeze: str = "", **more: Any
) -> Tuple[str, List[float]]:
    """Losses of all steps, or the words of a refusal."""
    torch.manual_seed(0)
    model = FAMILIES[family](bool(tied))
    unused = "cls.predictions.bias"  # BERT's, where its decoder has one of its own
    for name, parameter in model.named_parameters():
        if name == unused or (freeze and freeze in name):
            parameter.requires_grad_(False)
    # With AdamW's usual eps of 1e-8 a gradient that is zero but for rounding (Qwen 2's key biases) becomes a step of full size.
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3 if family == "ViT" else 5e-3, eps=1e-5)
    try:
        trainer = train.setup(model, optimizer, layout=layout, **{"clip": 1.0, **more})
        batches = trainer.batches(data_of(family), batch_size=ROWS)
        return "", [float(trainer.step(batch).loss) for batch in batches]
    except train.Refusal as refusal:
        return str(refusal), []


def largest_difference(got: List[float], want: List[float]) -> float:
    """Of two losses, as a part of them; below 1, as it is."""
    return (
        max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(got, want)) if got and len(got) == len(want) else float("inf")
    )


LAYOUTS: Dict[str, Tuple[str, int, Mapping[str, Any]]] = {
    "ddp": ("ddp", 2, {}),
    "fsdp": ("fsdp", 2, {}),
    "tp": ("tp", 2, {}),
    "pp": ("pp", 2, {"accumulate": 4}),
    "cp": ("cp", 2, {}),
    "ep": ("ep", 2, {}),
    "hsdp": ("hsdp", 4, {}),
    "fsdp+tp": ("dp_shard=2,tp=2", 4, {}),
    "ep+fsdp": ("ep=2,dp_shard=2", 4, {}),
    "pp+fsdp": ("pp=2,dp_shard=2", 4, {"accumulate": 2}),
}


def trained_with(family: str, layout: str, more: Mapping[str, Any]) -> Tuple[str, List[float]]:
    return trained(family, layout, **more)


VARIANTS: Dict[str, Mapping[str, Any]] = {
    "tied embedding": {"tied": True},
    "accumulate=2": {"accumulate": 2},
    "frozen embedding": {"freeze": "embed_tokens"},
    "recompute=full": {"recompute": "full"},
    "recompute=selective": {"recompute": "selective"},
}
