"""The training runtime. `from drumbeat import train`, then `train.setup(model, optimizer, layout="fsdp")`: docs/train/.

Names are imported when they are first used, so that drumbeat itself installs and starts without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, List

from drumbeat.base.problem import Problem, pip_install
from drumbeat.base.signals import EXIT_REQUEUE

if TYPE_CHECKING:
    from drumbeat.train.data.loaders import Batches as Batches
    from drumbeat.train.parallel import Layout as Layout
    from drumbeat.train.prepare import setup as setup
    from drumbeat.train.refusal import Refusal as Refusal
    from drumbeat.train.trainer import Result as Result
    from drumbeat.train.trainer import Summed as Summed
    from drumbeat.train.trainer import Trainer as Trainer
    from drumbeat.train.weights import on_meta as on_meta

REQUEUE = EXIT_REQUEUE  # the exit code that says: saved after a stop signal, start me again

_HOME = {
    "setup": "prepare",
    "Trainer": "trainer",
    "Result": "trainer",
    "Summed": "trainer",
    "Batches": "data.loaders",
    "on_meta": "weights",
    "Layout": "parallel",
    "Refusal": "refusal",
}
_WITHOUT_TORCH = ("Layout", "Refusal")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'drumbeat.train' has no attribute '{name}'")
    if name not in _WITHOUT_TORCH:
        require_torch()
    return getattr(importlib.import_module(f"drumbeat.train.{_HOME[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*_HOME, "REQUEUE"])


def require_torch() -> None:
    for package in ("torch", "numpy"):
        if importlib.util.find_spec(package) is None:
            fix = f"{pip_install('torch')}, or install drumbeat into a Python that has it"
            raise Problem(f"training needs {package}, which this Python ({sys.executable}) does not have", fix)
