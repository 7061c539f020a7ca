"""`code: sync` in pods: the archive travels in secrets, in pieces, because a secret holds 1 MiB. Every pod unpacks it, also one
that takes the place of a lost one while no desk is there."""

from __future__ import annotations

import base64
import os
from typing import Any, Dict, List, Mapping

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.runfolder.layout import RunFolder

PIECE = 900_000  # bytes
MOST = 8 << 20  # bytes of the archive: it lies in the cluster's own database as long as the job does
FOLDER = "code"  # where it is unpacked, in the pod's own volume: a run folder on a claim is shared by all pods


def check_code(order: Order) -> None:
    if order.code_bytes > MOST:
        raise Problem(
            f"the code takes {order.code_bytes / 2**20:.1f} MiB packed, and at most {MOST >> 20} MiB are sent to pods",
            "name what is not code in .gitignore; or put it into the image (code: image) or on a claim (code: shared, "
            "--pvc CLAIM:PATH)",
        )


def pieces_of(order: Order) -> List[str]:
    """The names of the files, in each pod; none unless the job has code: sync."""
    return [f"code-{number}" for number in range(-(-order.code_bytes // PIECE))]


def secret_name(name: str, piece: str) -> str:
    """The secret that holds a piece; `name` is that of the run's objects."""
    return f"{name}-{piece}"


def inside(order: Order, local: str) -> str:
    """The work folder in a pod; `local` is the pod's own volume."""
    below = os.path.relpath(order.workdir, RunFolder(order.folder).code_copy)
    return os.path.normpath(os.path.join(local, FOLDER, below))


def code_secrets(order: Order, name: str, labels: Mapping[str, str]) -> List[Dict[str, Any]]:
    pieces = pieces_of(order)
    if not pieces:
        return []
    with open(RunFolder(order.folder).code_archive, "rb") as file:
        data = file.read()
    made = []
    for number, piece in enumerate(pieces):
        text = base64.b64encode(data[number * PIECE : (number + 1) * PIECE]).decode()
        meta = {"name": secret_name(name, piece), "labels": dict(labels)}
        made.append({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": {piece: text}})
    return made
