"""Real output of other people's machines, which we may read but not keep: used where it is, skipped where it is not."""

import os
from pathlib import Path

import pytest


def corpus(part):
    """The folder, from $DRUMBEAT_CORPUS or beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared/data/corpus"
    place = Path(os.environ.get("DRUMBEAT_CORPUS", beside)) / part
    if not place.is_dir():
        pytest.skip(f"no corpus at {place} (set DRUMBEAT_CORPUS)")
    return place
