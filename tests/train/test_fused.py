"""Fused operations, in their plain form: what the GPU's kernels are compared with by bench/gpu_checks.py."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from drumbeat.train.kernel_cache import keep_kernels
from drumbeat.train.layers import float8
from drumbeat.train.layers.cross_entropy import linear_cross_entropy
from drumbeat.train.layers.norm_pool import norm_relu_pool
from drumbeat.train.layers.swiglu import gate_gradient, gate_product
from drumbeat.train.precision import Precision


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


def test_fp8_changes_the_head_but_not_what_a_cpu_computes() -> None:
    """Only the gradient of its weights is made in 8 bits, and only on a GPU."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(16, 16)])
            self.head = nn.Linear(16, 32, bias=False)

    model = Model()
    Precision("fp8").prepare(model, False, "blocks")
    assert type(model.head) is float8.Float8Head and type(model.blocks[0]) is float8.Float8Linear
    hidden = torch.randn(3, 5, 16, dtype=torch.bfloat16)
    targets = torch.randint(0, 32, (3, 5))
    linear_cross_entropy(hidden, model.head, targets).backward()
    got, model.head.weight.grad = model.head.weight.grad, None
    plain = nn.functional.cross_entropy(
        hidden.flatten(0, 1).float() @ model.head.weight.float().t(), targets.flatten(), reduction="sum"
    )
    plain.backward()
    torch.testing.assert_close(got, model.head.weight.grad, rtol=0.05, atol=0.05)


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
