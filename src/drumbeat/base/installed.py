"""Tells how this drumbeat was installed, for messages that say what to type."""

from __future__ import annotations

import json
from typing import Optional


def pip_install(extra: str) -> str:
    """Return the command that adds an extra: from the wheel, the source tree or the index that this drumbeat came from."""
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    try:
        told: Optional[str] = metadata.distribution("drumbeat").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in drumbeat's source tree"
    url = json.loads(told).get("url", "") if told else ""
    place = unquote(urlsplit(url).path) if url.startswith("file:") else url
    if not place:
        return f"pip install 'drumbeat[{extra}]'"
    return (
        f"pip install '{place}[{extra}]'" if url.startswith("file:") else f"pip install 'drumbeat[{extra}] @ {place}'"
    )
