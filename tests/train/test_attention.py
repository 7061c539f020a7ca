"""Attention by FlashAttention 4, as far as a CPU can show it: when it is chosen, what is said, and that it is one operation
with gradients. A stand-in takes the place of the package's kernels."""

from __future__ import annotations

import importlib.metadata
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Iterator, List, Tuple

import pytest
import torch
from torch import Tensor

from drumbeat.base.problem import pip_install
from drumbeat.train.layers import attention
from drumbeat.train.layers.attention import block_attention, block_attention_backward
from drumbeat.train.precision import Precision

GPU = torch.device("cuda", 0)
SELECTED: List[int] = []  # numbers of GPUs that a thread chose as its own


class Kernels(SimpleNamespace):
    """What is used of `flash_attn.cute.interface`, computed plainly."""

    in_order = False

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, return_lse: bool) -> Tuple[Any, ...]:
        out, lse = block_attention(*(x.float().transpose(1, 2) for x in (q, k, v)), causal)
        return out.transpose(1, 2).to(q.dtype).contiguous(), lse.float().contiguous(), None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **more: Any
    ) -> None:
        Kernels.in_order = more["deterministic"]
        wide = [x.float().transpose(1, 2) for x in (dout, q, k, v, out)]
        for name, grad in zip(("dq", "dk", "dv"), block_attention_backward(*wide, lse, more["causal"])):
            more[name].copy_(grad.transpose(1, 2))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_package", lambda: Kernels())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(SELECTED.append(index)))
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "4.0.0b36")
    SELECTED.clear()
    known = attention._refused
    known.cache_clear()
    yield
    known.cache_clear()


def tensors(time: int = 7, dtype: torch.dtype = torch.float32) -> Tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((2, time, 6, 8), (2, time, 2, 8), (2, time, 2, 8))
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def test_the_operation_is_attention_with_its_gradients() -> None:
    q, k, v = tensors()
    out, lse = attention.flash4(q, k, v)
    want = attention.causal_attention(q, k, v)
    torch.testing.assert_close(out, want)
    assert lse.shape == (2, 6, 7) and not lse.requires_grad
    up = torch.randn_like(q)
    ours, plain = (torch.autograd.grad((y * up).sum(), (q, k, v), retain_graph=True) for y in (out, want))
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b)


def test_tracing_sees_the_same_shapes_and_strides() -> None:
    q, k, v = tensors()
    turned = (
        v.detach().permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3).requires_grad_()
    )  # as a part of one product
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention.flash4, (q, k, turned), test_utils=checks)
    out, lse = (x.detach() for x in attention.flash4(q, k, turned))
    args = [x.detach() for x in (q, q, k, turned, out)]
    torch.library.opcheck(attention.flash4_backward, (*args, lse), test_utils=checks)


def test_a_run_that_must_repeat_itself_adds_in_order() -> None:
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            attention.flash4(*tensors())[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert Kernels.in_order is wanted


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = attention.trial
    monkeypatch.setattr(attention, "trial", lambda _device, *kind: tried(torch.device("cpu"), *kind))


def test_it_is_chosen_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    before = torch.get_rng_state()
    assert attention.refused(0, torch.bfloat16, 64, 4) == ""
    assert torch.equal(before, torch.get_rng_state()), "a trial draws none of the run's random numbers"
    assert attention.attention_kernel(GPU, torch.bfloat16, 8192, 64, 4, False) == "FlashAttention 4"
    in_order = attention.attention_kernel(GPU, torch.bfloat16, 8192, 64, 4, True)
    assert in_order == "FlashAttention 4, adding in a fixed order"


def test_a_rank_tries_it_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        attention, "trial", lambda device, *_: float(seen.append((device.index, list(SELECTED))) or 0.0)
    )
    assert attention.refused(3, torch.bfloat16, 64, 4) == attention.refused(3, torch.bfloat16, 64, 4) == ""
    assert seen == [(3, [3])], "once, and that GPU is the thread's own then"


def test_short_sequences_are_left_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "refused", lambda *_: "")
    said = attention.attention_kernel(GPU, torch.bfloat16, 383, 64, 4, False)
    assert said == "cuDNN (FlashAttention 4 is used from 384 tokens on)"
    for length, taken in ((383, False), (384, True)):
        q = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, length, 32, 64), device=GPU)
        k = SimpleNamespace(shape=(1, length, 8, 64))
        assert attention.has_flash4(q, k) is taken  # type: ignore[arg-type]


def test_a_compiled_block_holds_the_choice_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_refused", lambda *kind: repr(kind))

    @torch.compile(backend="eager", fullgraph=True)
    def block(q: Tensor) -> Tensor:
        return q * len(attention.refused(0, q.dtype, q.shape[-1], 4))

    assert float(block(torch.ones(1, 64))[0, 0]) == len("(0, torch.float32, 64, 4)")


def test_one_that_gives_wrong_numbers_or_fails_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(
        Kernels, "_flash_attn_bwd", lambda self, *_args, dq, dk, dv, **_: [x.zero_() for x in (dq, dk, dv)]
    )
    assert attention.refused(0, torch.bfloat16, 64, 4) == "flash-attn-4 gives wrong numbers here, off by 1.000"
    attention._refused.cache_clear()
    monkeypatch.setattr(attention, "_package", lambda: SimpleNamespace())  # another version, without these functions
    said = attention.attention_kernel(GPU, torch.bfloat16, 8192, 64, 4, False)
    assert said.startswith("cuDNN (flash-attn-4 does not work here: AttributeError: "), said


def test_a_result_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "trial", lambda *_: float("nan"))
    assert "wrong numbers" in attention.refused(0, torch.bfloat16, 64, 4)


@pytest.mark.parametrize(
    ("capability", "width", "said"),
    [
        ((9, 0), 64, f"cuDNN (flash-attn-4 is not installed: {pip_install('fast')})"),
        ((10, 0), 64, "cuDNN (flash-attn-4 was measured on Hopper GPUs only)"),
        ((9, 0), 96, "cuDNN (flash-attn-4 was measured for heads of 64 and 128 numbers only, not of 96)"),
        ((8, 0), 64, "torch's (the faster kernels take a Hopper GPU or newer)"),
    ],
)
def test_what_is_said_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capability: Tuple[int, int], width: int, said: str
) -> None:
    def missing(_name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    assert attention.attention_kernel(GPU, torch.bfloat16, 8192, width, 4, False) == said


def test_in_32_bits_and_on_a_cpu_nothing_is_asked() -> None:
    q, k, _ = tensors(dtype=torch.bfloat16)
    assert not attention.has_flash4(q, k)
    said = "torch's (the faster kernels take an NVIDIA GPU and 16 bits)"
    for device, precision in ((GPU, "fp32"), (torch.device("cpu"), "bf16")):
        assert attention.attention_kernel(device, Precision(precision).compute_dtype, 8192, 64, 4, False) == said
