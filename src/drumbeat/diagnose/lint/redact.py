"""Secrets that stand in a script are reported, never repeated."""

from __future__ import annotations

import re

from drumbeat.secret import looks_secret

# Tokens that say themselves what they are.
TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{20,})"
)
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w{0,80})(=[\"']?)([^\s\"'$<>{}]{6,})")


def redact(text: str) -> str:
    text = TOKEN.sub(lambda found: found.group()[:3] + "…", text)
    return _ASSIGNED.sub(
        lambda found: found.group(1) + found.group(2) + "…" if looks_secret(found.group(1)) else found.group(), text
    )
