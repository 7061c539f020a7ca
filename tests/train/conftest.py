from __future__ import annotations

import gc
from typing import Iterator

import pytest

pytest.importorskip("torch", reason="the training room needs torch: pip install '.[cpu]'")

from gloo_world import GlooWorld, freeze_libraries  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def frozen_libraries() -> Iterator[None]:
    """For the recipes that run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", gc.freeze)
        patch.setattr(gc, "unfreeze", gc.unfreeze)
        freeze_libraries()
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[GlooWorld]:
    made = GlooWorld()
    yield made
    made.close()
