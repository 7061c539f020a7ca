"""A submitted function in pods: it travels in a secret, and each pod puts it into its run folder, where the ranks look for it."""

from __future__ import annotations

import base64
import os
from typing import Any, Dict, List, Mapping

from drumbeat.base.order import FUNCTION, Order
from drumbeat.base.problem import Problem
from drumbeat.runfolder.layout import RunFolder

MOST = 900_000  # bytes of the function and its arguments: a secret holds 1 MiB
_KEY = os.path.basename(RunFolder("").call)


def function_secret_names(order: Order, name: str) -> List[str]:
    """The secret with the function; none unless one was submitted. `name` is that of the run's objects."""
    return [f"{name}-call"] if FUNCTION in order.brings else []


def function_secrets(order: Order, name: str, labels: Mapping[str, str]) -> List[Dict[str, Any]]:
    names = function_secret_names(order, name)
    if not names:
        return []
    with open(RunFolder(order.folder).call, "rb") as file:
        data = file.read()
    if len(data) > MOST:
        raise Problem(
            f"the function and its arguments take {len(data):,} bytes, and at most {MOST:,} are sent to pods",
            "put large arguments into a file on a claim or in the image, and send its path",
        )
    meta = {"name": names[0], "labels": dict(labels)}
    text = base64.b64encode(data).decode()
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": {_KEY: text}}]


def unpack_lines(order: Order, files: str) -> List[str]:
    """Lines of the pod's script; `files` is where the secret is mounted. Only this user may change what is unpickled."""
    if FUNCTION not in order.brings:
        return []
    folder = f'"$RUN/{os.path.dirname(RunFolder("").call)}"'
    partial = f"{folder}/$NODE.tmp"
    copy = f"rm -f {partial} && cp {files}/{_KEY} {partial} && mv -f {partial} {folder}/{_KEY}"
    return [f"(umask 077; mkdir -p {folder} && {copy}) || exit 74"]
