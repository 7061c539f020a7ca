from __future__ import annotations

import os
from typing import Iterator

import pytest

pytest.importorskip("torch", reason="the training room needs torch: pip install '.[cpu]'")

from gloo_world import GlooWorld  # noqa: E402


@pytest.fixture(scope="session")
def world() -> Iterator[GlooWorld]:
    made = GlooWorld(8 if os.environ.get("DRUMBEAT_ALL_LAYOUTS") else 4)
    yield made
    made.close()
