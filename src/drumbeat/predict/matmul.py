"""The matrix products of a model's own shapes, measured on a device of this machine. Needs torch."""

from __future__ import annotations

import time
from typing import Any, List, Tuple

from drumbeat.base.problem import Problem
from drumbeat.predict import shapes
from drumbeat.predict.forecast import Case
from drumbeat.predict.machine import machine_of
from drumbeat.predict.shapes import ConvNet


def products_of(case: Case) -> List[Tuple[float, int, int, int]]:
    """Return (count, M, K, N) of the products of one layer and micro-batch, as `cost.step` counts them."""
    m, a = case.model, case.layout
    if isinstance(m, ConvNet):
        raise Problem(f"{m.name} has no matrix products of its own", "calibrate with a run")
    tokens = a.micro * case.work.seq / a.cp
    here = max(m.experts / a.ep, 1)
    each = tokens * m.topk / max(m.experts, 1) * a.ep
    found = shapes.layer_products(m, tokens, a.tp, here, each)
    return [(count, max(1, int(r)), max(1, int(k)), max(1, int(n))) for count, r, k, n in found if count]


def measured_rate(case: Case, device: str = "", repeat: int = 10) -> float:
    """Return the FLOP/s that the products of a case reach together; of this machine's GPU unless a device is named."""
    try:
        import torch
    except ImportError:
        raise Problem("--calibrate here measures matrix products with torch, which is not installed") from None
    place = device or ("cuda" if torch.cuda.is_available() else "")
    if not place:
        raise Problem("--calibrate here: no GPU here that torch can use", "leave it out, or give a run")
    seconds = flops = 0.0
    for count, rows, inner, columns in products_of(case):
        seconds += count * _seconds(torch, rows, inner, columns, place, repeat)
        flops += count * 2 * rows * inner * columns
    return flops / seconds


def _seconds(torch: Any, rows: int, inner: int, columns: int, place: str, repeat: int) -> float:
    """Return the median time of one product in 16 bits (on processors in 32)."""
    kind = torch.float32 if place == "cpu" else torch.bfloat16
    a, b = torch.ones(rows, inner, device=place, dtype=kind), torch.ones(inner, columns, device=place, dtype=kind)
    wait = torch.cuda.synchronize if place != "cpu" else (lambda: None)
    times = []
    for _ in range(repeat + 2):
        wait()
        began = time.perf_counter()
        torch.mm(a, b)
        wait()
        times.append(time.perf_counter() - began)
    return float(sorted(times[2:])[repeat // 2])


def share_of(case: Case, rate: float) -> float:
    """Return what Constants.product must be for the products of a case to be predicted at a measured rate."""
    machine = machine_of(case.cluster, "bf16" if case.cluster.gpu != "V100" else "fp16")
    flops = moved = 0.0
    for count, rows, inner, columns in products_of(case):
        flops += count * 2 * rows * inner * columns
        moved += count * 2 * (rows * inner + inner * columns + rows * columns)
    left = flops / rate - case.constants.bytes * moved / machine.memory_rate
    return float(min(1.2, max(0.3, flops / machine.flops / left))) if left > 0 else 1.2
