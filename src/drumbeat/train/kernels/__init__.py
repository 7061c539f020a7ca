"""Triton kernels, each with the one thing that torch.compile does not do as well. Their modules import Triton, so ask first."""

import importlib.util

from torch import Tensor

_TRITON = (
    importlib.util.find_spec("triton") is not None
)  # comes with torch's own builds for GPUs, not with every site's


def kernels_for(x: Tensor) -> bool:
    return x.is_cuda and _TRITON
