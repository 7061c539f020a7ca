"""Arguments that several commands share, so that they are called and described alike."""

from __future__ import annotations

from typing import Any


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_run(parser: Any, default: str) -> None:
    """`default` says which run is meant if none is named."""
    words = f"run id or the start of one, run folder, or scheduler job; {default}"
    parser.add_argument("run", nargs="?", metavar="RUN", help=words)
