"""Attention alone on a Hopper GPU: cuDNN's beside FlashAttention 4's (the package flash-attn-4), forward and backward.

    PYTHONPATH=src python3 bench/attention.py [--seconds 4] [--out FILE]

Causal, bf16, 32 heads of queries and 8 of keys, sequences of 8,192. The kernels take turns, twice; each figure is over all of its
turns: milliseconds per call, TFLOP/s as executed (half of the square), joules per call by the card's own counter. The last column
is how far results or gradients are off from plain attention in fp32, on shorter sequences.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from gpu import energy_j
from torch import Tensor

from drumbeat.train.layers import attention as layer
from drumbeat.train.layers.attention import refused

LENGTH, HEADS, KEY_HEADS = 8192, 32, 8
SHAPES = ((8, 64), (1, 128))  # sequences, head width: Llama 1B and 8B
TURNS = 2

Figures = Dict[str, Any]
Call = Callable[[], Any]


def inputs(sequences: int, length: int, width: int) -> Tuple[List[Tensor], Tensor]:
    """Queries, keys and values; the gradient of the result."""
    shapes = [(sequences, length, heads, width) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *qkv, up = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return [x.requires_grad_() for x in qkv], up


def attention(kernel: str, qkv: List[Tensor]) -> Tensor:
    usual, layer.has_flash4 = layer.has_flash4, lambda _q, _k: kernel != "cuDNN"
    try:
        return layer.causal_attention(*qkv)
    finally:
        layer.has_flash4 = usual


def backward(kernel: str, out: Tensor, qkv: List[Tensor], up: Tensor) -> Tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(kernel.endswith("in order"))
    try:
        return torch.autograd.grad(out, qkv, up, retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(False)


def error(kernel: str, width: int) -> Tuple[float, float, bool]:
    """Of the result and of the worst gradient; and whether a second backward pass gives the same bits."""
    qkv, up = inputs(2, 1024, width)
    out = attention(kernel, qkv)
    got = (out, *backward(kernel, out, qkv, up))
    again = backward(kernel, out, qkv, up)
    wide = [x.detach().float().requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in wide)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(
            q, layer.repeat_heads(k, HEADS), layer.repeat_heads(v, HEADS), is_causal=True
        ).transpose(1, 2)
    want = (plain, *torch.autograd.grad(plain, wide, up.float()))
    off = [float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in zip(got, want)]
    return off[0], max(off[1:]), all(torch.equal(a, b) for a, b in zip(got[1:], again))


def turn(call: Call, seconds: float) -> Tuple[int, float, float]:
    """Calls, seconds and joules."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    joules, began, count = -energy_j(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            call()
        count += 20
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    return count, took, joules + energy_j()


def cases(sequences: int, width: int) -> List[Tuple[str, str, float, Call, float]]:
    """Pass, kernel, FLOPs, the call, its error."""
    qkv, up = inputs(sequences, LENGTH, width)
    flops = 4 * sequences * HEADS * LENGTH**2 * width / 2
    found: List[Tuple[str, str, float, Call, float]] = []
    for kernel in ("cuDNN", "FlashAttention 4", "FlashAttention 4, in order"):
        off_out, off_gradient, same = error(kernel, width)
        if kernel.endswith("in order") and not same:
            raise SystemExit(f"{kernel}: two backward passes differ")
        out = attention(kernel, qkv)
        if not kernel.endswith("in order"):  # its forward pass is the same
            found.append(("forward", kernel, flops, lambda kernel=kernel: attention(kernel, qkv), off_out))
        step = lambda kernel=kernel, out=out: backward(kernel, out, qkv, up)  # noqa: E731
        found.append(("backward", kernel, 2.5 * flops, step, off_gradient))
    return sorted(found, key=lambda case: case[0] != "forward")


def measured(sequences: int, width: int, seconds: float) -> List[Figures]:
    every = cases(sequences, width)
    totals = [[0.0, 0.0, 0.0] for _ in every]
    for _ in range(TURNS):
        for total, case in zip(totals, every):
            total[:] = [a + b for a, b in zip(total, turn(case[3], seconds))]
    rows = []
    for (count, took, joules), (which, kernel, flops, _, off) in zip(totals, every):
        row: Figures = {"pass": which, "kernel": kernel, "head_width": width, "sequences": sequences}
        row.update(ms=took / count * 1e3, tflops=flops * count / took / 1e12, joules=joules / count, error=off)
        rows.append({**row, "watts": joules / took, "seconds": took})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4, help="of each kernel's turn, of which it has two")
    parser.add_argument("--out", default="", help="file for the figures")
    args = parser.parse_args()
    rows: List[Figures] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for sequences, width in SHAPES:
        reason = refused(0, torch.bfloat16, width, HEADS // KEY_HEADS)
        if reason:
            print(f"head width {width}: {reason}", file=sys.stderr)
            return 1
        rows += measured(sequences, width, args.seconds)
    print(f"{'':37} {'width':>5} {'ms':>7} {'TFLOP/s':>8} {'J':>6} {'W':>5} {'error':>7}")
    for row in rows:
        name = f"{row['pass']}, {row['kernel']}"
        figures = f"{row['ms']:7.2f} {row['tflops']:8.0f} {row['joules']:6.2f} {row['watts']:5.0f} {row['error']:7.4f}"
        print(f"{name:37} {row['head_width']:5} {figures}")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
