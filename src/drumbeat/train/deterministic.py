"""The same numbers every time: what torch and the GPU libraries may choose freely is fixed while a run lasts.

It costs speed: FlashAttention 4's backward pass adds in order; cuDNN's attention gives way to FlashAttention 2, which can too.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """An operation without a deterministic form raises a RuntimeError that names it."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would choose by speed, and so by chance
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
