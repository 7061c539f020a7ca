"""CONTRIBUTING.md names every room of src/drumbeat, and only paths that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src" / "drumbeat"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()}

PATH = re.compile(r"`([\w./-]+/[\w./-]*)`")


def test_every_path_exists():
    named = [path for path in PATH.findall(TEXT) if not path.startswith("RUN/")]
    assert len(named) > 40
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT, SRC, ROOT / "docs"))]
    assert missing == []


def test_the_table_has_every_room():
    table = TEXT[TEXT.index("| room |") : TEXT.index("## Add a cluster")]
    assert ROOMS - {path.split("/")[0] for path in PATH.findall(table)} == set()
