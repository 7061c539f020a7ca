"""The states of this process's random generators, as tensors: torch's, the device's, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Dict

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generators() -> Dict[str, Tensor]:
    _, words, spare = random.getstate()
    drawn = np.random.get_state(legacy=False)
    assert isinstance(drawn, dict) and drawn["bit_generator"] == "MT19937"
    state = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
        "numpy": torch.from_numpy(drawn["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([drawn["state"]["pos"], drawn["has_gauss"]]),
        "numpy_spare": torch.tensor(drawn["gauss"], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: Dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    spare = state["python_spare"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), spare[0] if spare else None))
    position, has_spare = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_spare, float(state["numpy_spare"])))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
