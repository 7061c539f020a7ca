"""Data that a framework reported about its own build."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass

FRAMEWORKS = ("deepspeed", "horovod", "jax", "keras", "maxtext", "megatron", "mpi", "paddle", "ray", "tensorflow")


@dataclass(frozen=True)
class FrameworkAnswers:
    """`tools`: what each report tool printed; None where it failed or did not answer in time; left out where it is not there."""

    framework: str
    python: str
    probe: Mapping[str, Any] = field(default_factory=dict)  # empty: the interpreter did not answer
    tools: Mapping[str, Optional[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    stale_locks: Tuple[str, ...] = ()  # of extension builds that were killed
    gpus: Tuple[str, ...] = ()  # vendors, one per GPU of this node
