"""Model FLOPs utilisation: how much of the device's arithmetic the model's own mathematics uses.

Recomputation is not counted, causal attention is counted as executed (half). The denominator is always printed: the
data sheet's dense peak of the dtype in use, and beside it a matrix product measured on this very device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional

import torch

from drumbeat.machine.peaks import peak_of
from drumbeat.predict.shapes import transformer_flops as transformer_flops

# What the products of a precision run in. fp8 mixes two dtypes, so a share of one peak would mean nothing.
_DTYPE = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16-master": "bf16", "fp16": "fp16"}
_TORCH = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Utilisation:
    formula: str
    flops_per_sample: float
    dtype: str
    device: str
    sheet_tflops: Optional[float]  # None: the device or dtype is unknown, so there is no MFU
    source: str
    measured_tflops: Optional[float]

    def of(self, samples_per_s_per_device: float) -> Dict[str, float]:
        rate = samples_per_s_per_device * self.flops_per_sample / 1e12
        shares = {"tflops": rate}
        if self.sheet_tflops:
            shares["mfu"] = rate / self.sheet_tflops
        if self.measured_tflops:
            shares["mfu_measured"] = rate / self.measured_tflops
        return shares

    def describe(self) -> str:
        sheet = f"no MFU: none is known for {self.dtype}"
        if self.sheet_tflops:
            sheet = f"{self.sheet_tflops:g} TFLOP/s {self.dtype} ({self.source})"
        matmul = f"; measured matmul {self.measured_tflops:.0f} TFLOP/s" if self.measured_tflops else ""
        return f"{self.formula}; peak of {self.device}: {sheet}{matmul}"


def utilisation(
    flops_per_sample: float, formula: str, precision: str, device: torch.device, measure: bool
) -> Utilisation:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = _DTYPE.get(precision, "mixed fp8 and bf16")
    peak = peak_of(name) if device.type == "cuda" else None
    sheet = peak.tflops.get(dtype) if peak else None
    measured = matmul_tflops(device, _TORCH[dtype]) if measure and device.type == "cuda" and dtype in _TORCH else None
    return Utilisation(formula, flops_per_sample, dtype, name, sheet, peak.source if peak else "", measured)


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int = 8192, count: int = 30) -> float:
    """A square product on random numbers (zeros would run faster than real data), the median of `count`."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for _ in range(5):
        a @ b
    marks[0].record()
    for mark in marks[1:]:
        a @ b
        mark.record()
    torch.cuda.synchronize(device)
    times = sorted(first.elapsed_time(second) for first, second in zip(marks, marks[1:]))
    return 2 * size**3 / times[count // 2] / 1e9
