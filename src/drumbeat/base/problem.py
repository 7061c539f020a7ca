"""Problem: something the user can fix. It ends a command with one clear message that says what to type, never a traceback."""

from __future__ import annotations

import json
from typing import Optional

from drumbeat.base.redact import indented


class Problem(Exception):
    """An error that the user can fix: `what` is wrong and where, and its `fix`, the next thing to do."""

    def __init__(self, what: str, fix: str = "", exit_code: int = 2) -> None:
        self.what = indented(what)  # names of files stand in it
        self.fix = indented(fix)
        super().__init__(self.what)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.what}\n  {self.fix}" if self.fix else self.what


def pip_install(extra: str) -> str:
    """Return the pip command that adds an extra, for the way drumbeat was installed: from a wheel, the source tree or an
    index."""
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
