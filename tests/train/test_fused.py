"""Fused operations, in their plain form: what the GPU's kernels are compared with by bench/gpu_checks.py."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Tuple

import pytest
import torch
from torch import Tensor, nn

from drumbeat.train.layers import cross_entropy, float8
from drumbeat.train.layers.batch_norm import norm_relu_pool
from drumbeat.train.layers.feed_forward import GatedMLP, gate_gradient, gate_product
from drumbeat.train.precision import Precision
from drumbeat.train.world import keep_kernels


def test_the_gate_and_its_gradient_in_8_bits() -> None:
    torch.manual_seed(0)
    pairs = torch.randn(32, 64, requires_grad=True)
    up = torch.randn(32, 32)
    out = gate_product(pairs, 16)
    (want,) = torch.autograd.grad((out * up).sum(), pairs)
    torch.testing.assert_close(gate_gradient(pairs.detach(), up, 16), want)
    for made, whole in (
        (float8.quantize_gate(pairs.detach(), 16), out.detach()),
        (float8.quantize_gate_gradient(pairs.detach(), up, 16), want),
        (float8.quantize(want, True), want),
    ):
        straight, turned, back = made
        assert torch.equal(straight.float(), turned.float().t())
        assert (straight.float() * back - whole).norm() < 0.06 * whole.norm()


def test_the_stems_end_is_plain_torch_on_a_cpu() -> None:
    norm = nn.BatchNorm2d(64)
    x = torch.randn(2, 64, 6, 5)
    want = nn.functional.max_pool2d(nn.BatchNorm2d(64)(x).relu(), 3, 2, 1)
    torch.testing.assert_close(norm_relu_pool(norm, x), want)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("sharp", [0.5, 2.0])
def test_a_head_in_8_bits_is_closer_than_8_bits_of_all_of_its_gradient(
    sharp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's part stays exact: p - 1 has two bits of fraction too few, and its error would not average out."""
    monkeypatch.setattr(cross_entropy, "_SLICE_BYTES", 1 << 22)  # several slices
    torch.manual_seed(0)
    weight, hidden = torch.randn(4096, 256) * 0.05, torch.randn(2048, 256) * sharp
    targets = torch.multinomial((hidden @ weight.t()).softmax(-1), 1)[:, 0]
    targets[:9] = cross_entropy.IGNORE
    head = nn.Linear(256, 4096, bias=False)

    def gradients(dtype: torch.dtype) -> Tuple[Tensor, ...]:
        head.weight.data = weight.to(dtype)
        x = hidden.to(dtype).detach().requires_grad_()
        loss = cross_entropy.linear_cross_entropy(x, head, targets)
        return (loss.detach(), *torch.autograd.grad(loss, (x, head.weight)))

    def far(got: Tensor, want: Tensor) -> float:
        return float((got.float() - want).norm() / want.norm())

    want = gradients(torch.float32)
    plain, linear = hidden.bfloat16().requires_grad_(), float8.Float8Linear(256, 4096, dtype=torch.bfloat16)
    linear.weight.data = weight.bfloat16()
    logits = linear(plain)
    logits.backward(cross_entropy._loss_and_gradient(logits.detach(), targets)[1])
    float8.mark(head)
    got = gradients(torch.bfloat16)
    assert far(got[0], want[0]) < 1e-3
    for ours, whole, exact in zip(got[1:], (plain.grad, linear.weight.grad), want[1:]):
        assert whole is not None and far(ours, exact) < 0.01 and far(ours, exact) < 0.5 * far(whole, exact)
    assert not got[1][:9].any(), "rows without a target have no gradient"


def test_a_head_whose_sizes_no_8_bit_product_takes_stays_in_16_bits() -> None:
    head = nn.Linear(24, 40, bias=False)
    float8.mark(head)
    x, targets = torch.randn(7, 24, requires_grad=True), torch.randint(0, 40, (7,))
    ours = torch.autograd.grad(cross_entropy.linear_cross_entropy(x, head, targets), x)[0]
    plain = torch.autograd.grad(cross_entropy.cross_entropy_sum(head(x), targets), x)[0]
    assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8", "fp8-head"])
def test_the_head_is_in_8_bits_too_but_only_where_its_loss_is(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(16, 16)])
            self.head = nn.Linear(16, 32, bias=False)

    model = Model()
    Precision(name).prepare(model, False, "blocks")
    assert type(model.head) is nn.Linear and float8.is_marked(model.head)
    assert type(model.blocks[0]) is float8.Float8Linear and not float8.is_marked(model.blocks[0])


def test_fp8_gradients_are_added_up_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast sums keep about 14 bits: those over all tokens of a batch would lose most of what comes late."""
    sums = []

    def scaled_mm(
        a: Tensor,
        b: Tensor,
        *,
        bias: None,
        scale_a: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        sums.append(use_fast_accum)
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    torch.manual_seed(0)
    for layer, products in ((nn.Linear(32, 48, bias=False), 1), (GatedMLP(32, 64, 2), 2)):
        x = torch.randn(16, 32)
        want = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
        float8.convert_linears(nn.ModuleList([layer]), lambda _, __: True)
        float8.fuse_mlps(layer)
        sums.clear()
        y = layer(x)
        assert sums == [True] * products
        sums.clear()
        got = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        assert sums == [False] * 2 * products
        for a, b in zip(got, want):
            assert (a - b).norm() < 0.15 * b.norm()


def test_compiled_kernels_are_kept_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    place = tmp_path / "drumbeat" / "kernels"
    place.mkdir(parents=True)
    place.chmod(0o777)
    assert keep_kernels() and "TORCHINDUCTOR_CACHE_DIR" not in os.environ, "others can write there: it is not used"
    place.rmdir()
    assert not keep_kernels() and stat.S_IMODE(place.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(place / "torchinductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/of/the/user"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_a_head_in_8_bits_does_not_push_the_model_below_it_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that differ from batch to batch average out. Words' rows that have a part in common must not round alike."""
    monkeypatch.setattr(cross_entropy, "_SLICE_BYTES", 1 << 19)  # two slices
    torch.manual_seed(0)
    words, width, batches = 512, 64, 24
    head = nn.Linear(width, words, bias=False)
    weight = torch.randn(words, width) * 0.1 + torch.randn(width) * 0.2
    weight[words // 2 :] += torch.randn(width)  # these never occur, as a large part of a vocabulary: they do not count
    common = torch.randn(width)
    data = []
    for _ in range(batches):
        hidden = torch.randn(1024, width) + common
        targets = torch.multinomial((hidden @ weight[: words // 2].t()).softmax(-1), 1)[:, 0]
        targets[:512] = cross_entropy.IGNORE
        data.append((hidden, targets))

    def pushed(dtype: torch.dtype) -> Tensor:
        """Return the mean of the gradient of the input."""
        head.weight.data = weight.to(dtype)
        total = torch.zeros(width)
        for hidden, targets in data:
            x = hidden.to(dtype).requires_grad_()
            loss = cross_entropy.linear_cross_entropy(x, head, targets)
            total += torch.autograd.grad(loss, x)[0].float().sum(0)
        return total / (512 * batches)

    want = pushed(torch.float32)
    float8.mark(head)
    got = pushed(torch.bfloat16)
    monkeypatch.setattr(cross_entropy, "_mean", lambda rows, counts: torch.zeros_like(rows[0]))
    uncentred = pushed(torch.bfloat16)
    assert (got - want).norm() < 0.1 * want.norm() < 0.25 * (uncentred - want).norm()
