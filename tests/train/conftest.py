from __future__ import annotations

from typing import Iterator

import pytest

pytest.importorskip("torch", reason="the training room needs torch: pip install '.[cpu]'")

from gloo_world import GlooWorld  # noqa: E402


@pytest.fixture(scope="session")
def world() -> Iterator[GlooWorld]:
    made = GlooWorld()
    yield made
    made.close()
