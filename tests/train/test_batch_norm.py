"""Batch norm with its ReLU and the residual sum: our kernels, run by Triton's interpreter, and plain torch elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drumbeat.train.layers import batch_norm as layer


def test_the_kernels_compute_what_plain_torch_does() -> None:
    """Sizes that fill no whole rows, means far from zero, where sums of squares alone would lose the variance, gradients that
    arrive by several ways, and blocks of a ResNet."""
    pytest.importorskip("triton", reason="the kernels' language: pip install triton")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_kernels.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case, distances in json.loads(done.stdout).items():
        assert {name: value for name, value in distances.items() if not value < 1e-4} == {}, case


def test_on_a_cpu_it_is_plain_torch() -> None:
    torch.manual_seed(0)
    ours, plain = nn.BatchNorm2d(64), nn.BatchNorm2d(64)
    x, shortcut = torch.randn(2, 64, 4, 4), torch.randn(2, 64, 4, 4)
    assert not layer.fusable(ours, x)
    torch.testing.assert_close(layer.norm_relu(ours, x), F.relu(plain(x)))
    torch.testing.assert_close(layer.norm_add_relu(ours, x, shortcut).main, F.relu(plain(x) + shortcut))


def test_a_recorded_model_on_a_cpu_is_the_model_itself() -> None:
    from drumbeat.train.images import record_first_call
    from drumbeat.train.models.resnet import ResNet

    torch.manual_seed(0)
    model = ResNet(18, 4).eval()
    x = torch.randn(1, 3, 32, 32)
    want, names = model(x), list(model.state_dict())
    record_first_call(model)
    assert torch.equal(model(x), want) and list(model.state_dict()) == names


def test_without_triton_plain_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumbeat.train import kernels
    from drumbeat.train.layers.batch_norm import fusable

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    x = torch.ones(2, 16, 4, 4).to(memory_format=torch.channels_last).as_subclass(OnGpu)
    for there in (True, False):
        monkeypatch.setattr(kernels, "_TRITON", there)
        assert fusable(nn.BatchNorm2d(16), x) is there


def test_recording_that_fails_is_said_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumbeat.train import images

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(images, "_Recorded", refuse)
    model = nn.Linear(2, 1)
    images.record_first_call(model)
    x = torch.ones(1, 2)
    with pytest.warns(UserWarning, match="one by one: recording failed: operation not permitted"):
        first = model(x.as_subclass(OnGpu))
    assert float(first) == float(model(x))


def test_what_cannot_be_recorded_is_refused_or_left_alone() -> None:
    from drumbeat.train.images import records
    from drumbeat.train.parallel import Layout
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.recipes.resnet import ResNetSettings
    from drumbeat.train.refusal import Refusal

    alone = Meshes(Layout(), "cpu")
    plain, compiled = ResNetSettings(recompute="none"), ResNetSettings(recompute="none", compile=True)
    assert records("auto", plain, alone) and records("yes", plain, alone) and not records("no", plain, alone)
    assert not records("auto", compiled, alone)
    with pytest.raises(Refusal, match="graph=yes with compile=yes"):
        records("yes", compiled, alone)
    with pytest.raises(Refusal, match="'on' is unknown"):
        records("on", plain, alone)
