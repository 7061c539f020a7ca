"""Writing a state that is on a GPU without a copy of it in host memory.

Torch's writer (2.13) holds every tensor that it has brought to the host until the tensor's file is complete: in the end, a copy
of the whole state. Here a tensor's host memory is given back as soon as its thread asks for the next one.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem


class OneAtATime(DefaultSavePlanner):
    """For a writer that copies nothing ahead (`per_thread_copy_ahead=0`): when a thread asks for a tensor, the one before it
    has been written."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.local()  # .tensor: this thread's last copy

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        written = getattr(self._written, "tensor", None)
        if written is not None:
            written.untyped_storage().resize_(0)
        self._written.tensor = None
        if not isinstance(data, Tensor):
            return data
        host = on_host(data)
        if host is not data:  # a copy, which nothing else needs
            self._written.tensor = host
        return host


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu() if not tensor.is_cpu else tensor
