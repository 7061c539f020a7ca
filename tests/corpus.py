"""Real output of other people's machines, which we may read but not keep: used where it is, skipped where it is not."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


def folders():
    """The corpus folders that exist: $DRUMBEAT_CORPUS (separated by ':'), or shared/data near the repository."""
    places = [place for place in (HERE.parent, HERE.parent.parent) if (place / "shared/data").is_dir()]
    default = [str(place / "shared/data" / name) for place in places[:1] for name in ("corpus", "corpus-more")]
    given = os.environ.get("DRUMBEAT_CORPUS")
    return [Path(folder) for folder in (given.split(os.pathsep) if given else default) if Path(folder).is_dir()]


def corpus(part):
    """That part of the first folder."""
    place = next((folder / part for folder in folders() if (folder / part).is_dir()), None)
    if place is None:
        pytest.skip(f"no corpus with {part} (set DRUMBEAT_CORPUS)")
    return place
