"""Who starts the ranks, read from the command."""

from __future__ import annotations

import os
from typing import Sequence, Tuple

_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def choose_launcher(command: Sequence[str], wanted: str) -> Tuple[str, str]:
    """The launcher and the reason for it, in words."""
    if wanted != "auto":
        return wanted, "as the job asks"
    said = _launcher_word(command)
    if said:
        return "torchrun", f"the command says {said}"
    return "ranks", "the default: the agent starts the ranks itself, no torch needed"


def _launcher_word(command: Sequence[str]) -> str:
    first = os.path.basename(command[0]) if command else ""
    if first in ("torchrun", "deepspeed"):
        return first
    if first == "accelerate" and tuple(command[1:2]) == ("launch",):
        return "accelerate launch"
    if first.startswith("python") and "-m" in command[1:-1]:
        module = command[list(command).index("-m") + 1]
        return module if module in _TORCH_MODULES else ""
    return ""
