"""Variables for torchrun (PET_*), and those that it sets for the processes below it (TORCHELASTIC_*, GROUP_*)."""

from __future__ import annotations

from typing import List, Mapping, Optional

from drumbeat.machine.parse import integer


def below(environ: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return bool(environ.get("TORCHELASTIC_RUN_ID"))


def fixed_nodes(environ: Mapping[str, str], notes: List[str]) -> Optional[int]:
    """PET_NNODES, where it is one number; `2:4` is a range for elastic jobs."""
    text = environ.get("PET_NNODES", "")
    low, _, high = text.partition(":")
    nodes = integer(low) if low and (not high or high == low) else None
    if text and nodes is None:
        notes.append(f"identity: PET_NNODES={text[:40]} is not one number of nodes")
    return nodes
