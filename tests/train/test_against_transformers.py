"""Our models compute what Hugging Face's compute, from the same weights."""

from __future__ import annotations

from typing import Dict

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 1.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_llama(rope: str) -> None:
    from drumbeat.train.models.llama import Llama, config_of, segments, shape_from

    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_parameters=ROPES[rope],
    )
    theirs, shape = transformers.LlamaForCausalLM(config), shape_from(config.to_dict())
    again = transformers.LlamaConfig(**config_of(shape))
    assert again.rope_parameters == config.rope_parameters and shape_from(again.to_dict()) == shape
    if rope == "yarn":  # what a config leaves out
        short = {name: value for name, value in ROPES[rope].items() if "_fast" not in name and "_slow" not in name}
        assert shape_from({**config.to_dict(), "rope_parameters": short}) == shape
    ours = Llama(shape)
    state, pieces = theirs.state_dict(), segments(shape)
    ours.load_state_dict(
        {name: torch.cat([state[source][first:end] for source, first, end in some]) for name, some in pieces.items()}
    )
    tokens = torch.randint(0, 300, (2, 32))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    mean = ours(tokens[:, :-1], tokens[:, 1:]) / 62
    torch.testing.assert_close(mean, theirs(tokens, labels=tokens).loss)


def from_bert(theirs: Dict[str, torch.Tensor], layers: int, heads: int) -> Dict[str, torch.Tensor]:
    """The state of a transformers BertForMaskedLM under our names (its output bias is left out: ours has none)."""
    ours = {
        "words.weight": theirs["bert.embeddings.word_embeddings.weight"],
        "places.weight": theirs["bert.embeddings.position_embeddings.weight"],
        "kinds.weight": theirs["bert.embeddings.token_type_embeddings.weight"],
        "head.weight": theirs["bert.embeddings.word_embeddings.weight"],
    }
    pairs = {"norm": "bert.embeddings.LayerNorm", "transform": "cls.predictions.transform.dense"}
    pairs["transform_norm"] = "cls.predictions.transform.LayerNorm"
    for i in range(layers):
        old, new = f"bert.encoder.layer.{i}.", f"blocks.{i}."
        for kind in ("weight", "bias"):
            parts = [theirs[f"{old}attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            by_head = [t.unflatten(0, (heads, -1)) for t in parts]
            ours[f"{new}qkv.{kind}"] = torch.stack(by_head, dim=1).flatten(0, 2)
        pairs[new + "out"] = old + "attention.output.dense"
        pairs[new + "attention_norm"] = old + "attention.output.LayerNorm"
        pairs[new + "up"] = old + "intermediate.dense"
        pairs[new + "down"] = old + "output.dense"
        pairs[new + "mlp_norm"] = old + "output.LayerNorm"
    for new, old in pairs.items():
        ours[new + ".weight"], ours[new + ".bias"] = theirs[old + ".weight"], theirs[old + ".bias"]
    return ours


def test_bert() -> None:
    from drumbeat.train.models.bert import Bert, BertShape

    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    theirs, shape = transformers.BertForMaskedLM(config).eval(), BertShape(64, 2, 4, 128, 300, 32)
    ours = Bert(shape).eval()
    ours.load_state_dict(from_bert(theirs.state_dict(), shape.layers, shape.heads))
    tokens = torch.randint(0, 300, (2, 32))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_resnet() -> None:
    from drumbeat.train.models.resnet import ResNet

    config = transformers.ResNetConfig(
        embedding_size=64,
        hidden_sizes=[256, 512, 1024, 2048],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=10,
    )
    theirs, ours = transformers.ResNetForImageClassification(config), ResNet(50, 10)
    # Both list their parameters in the order of computation, but ours names a shortcut after its block's convolutions.
    state = theirs.state_dict()
    renamed = {name: state[_resnet_name(name)] for name in ours.state_dict()}
    ours.load_state_dict(renamed)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images).logits, rtol=1e-3, atol=1e-4)


def _resnet_name(name: str) -> str:
    part, _, rest = name.partition(".")
    if part in ("conv1", "bn1"):
        return f"resnet.embedder.embedder.{'convolution' if part == 'conv1' else 'normalization'}.{rest}"
    if part == "fc":
        return f"classifier.1.{rest}"
    stage, (block, piece, *tail) = int(part[-1]) - 1, rest.split(".")
    place = f"resnet.encoder.stages.{stage}.layers.{block}."
    if piece == "downsample":
        return place + f"shortcut.{'convolution' if tail[0] == '0' else 'normalization'}.{tail[1]}"
    kind = "convolution" if piece.startswith("conv") else "normalization"
    return place + f"layer.{int(piece[-1]) - 1}.{kind}.{tail[0]}"
