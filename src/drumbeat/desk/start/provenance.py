"""Which code and which image a run used: the commit, what differs from it, and the image's own identity."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import Any, Dict, Optional, Tuple

from drumbeat.base.order import Order
from drumbeat.base.secret import redact
from drumbeat.containers.image import image_identity

_LONGEST_DIFF = 256 << 10  # bytes that are kept
_MOST_CHANGED = 200  # names
_DEADLINE = 5.0  # seconds per question to git


def code_state(order: Order) -> Tuple[Dict[str, Any], str]:
    """code.json, and the text of code.diff. `commit` is 'unknown' outside a git checkout; the digest is that of the whole
    diff, the text may be cut and has no secrets in it."""
    workdir = order.source_workdir
    found: Dict[str, Any] = {"commit": "unknown", "dirty": None, "branch": None, "changed": []}
    if order.code == "sync":
        found["sent"] = {"archive": "code.tar.gz", "sha256": order.code_digest, "from": order.code_root}
    if order.container is not None:
        found["image"] = order.container.image
        found["image_digest"] = image_identity(os.path.join(workdir, order.container.image)) or None
    commit = _git(workdir, "rev-parse", "HEAD")
    if commit is None:
        return found, ""
    changed = _lines(_git(workdir, "status", "--porcelain", "--untracked-files=no"))
    branch = _git(workdir, "rev-parse", "--abbrev-ref", "HEAD") or b""
    found.update(commit=commit.decode().strip(), dirty=bool(changed), branch=branch.decode("utf-8", "replace").strip())
    found["changed"] = changed[:_MOST_CHANGED]
    diff = _git(workdir, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color") if changed else b""
    if not diff:
        return found, ""
    found["diff_digest"] = hashlib.sha256(diff).hexdigest()
    text = redact(diff[:_LONGEST_DIFF].decode("utf-8", "replace"))
    return found, text + (f"\n(cut: {len(diff):,} bytes in all)\n" if len(diff) > _LONGEST_DIFF else "")


def _lines(output: Optional[bytes]) -> Any:
    return (output or b"").decode("utf-8", "replace").splitlines()


def _git(workdir: str, *words: str) -> Optional[bytes]:
    argv = ["git", "-C", workdir, "-c", "core.fsmonitor=false", *words]  # a checkout's own hooks must not run
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_DEADLINE, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
