"""Sizes of published models, and the FLOP convention."""

import pytest

from drumbeat.predict import shapes
from drumbeat.predict.models import named


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3-8b", 8.030261248),
        ("llama3-70b", 70.553706496),
        ("mixtral-8x7b", 46.70),
        ("deepseek-v3", 671.03),
        ("qwen3-235b-a22b", 235.09),
        ("gpt3-175b", 174.6),
        ("gpt2", 0.124),
        ("bert-large", 0.335),
        ("gemma2-9b", 9.24),
    ],
)
def test_parameters_are_those_of_the_published_model(name, billions):
    assert shapes.parameters(named(name).model) / 1e9 == pytest.approx(billions, rel=0.005)


def test_only_active_experts_count_as_work():
    model = named("deepseek-v3").model
    assert shapes.matmul_parameters(model) / 1e9 == pytest.approx(36.6, rel=0.01)


def test_flops_follow_the_convention_that_the_output_names():
    model = named("llama3-8b").model
    assert shapes.flops_per_token(model, 8192) / 1e9 == pytest.approx(51.47, rel=0.001)
    by_hand = shapes.transformer_flops(shapes.matmul_parameters(model), 32, 4096, 8192, causal=True)
    assert shapes.flops_per_token(model, 8192) == pytest.approx(by_hand)
    assert shapes.transformer_flops(1, 1, 1, 10, causal=False) == 6 + 120


def test_a_window_makes_attention_cheaper():
    whole, windowed = named("gemma-7b").model, named("gemma2-9b").model
    assert shapes.visible_keys(whole, 16384) == 8192
    assert shapes.visible_keys(windowed, 16384) == (8192 + 4096) / 2


def test_resnet_50_is_counted_layer_by_layer():
    net = shapes.resnet(50)
    assert net.parameters == 25_557_032  # torchvision's
    assert net.forward_flops / 1e9 == pytest.approx(8.18, rel=0.005)
    assert shapes.resnet(50, wide=2).parameters == pytest.approx(68.88e6, rel=0.001)
