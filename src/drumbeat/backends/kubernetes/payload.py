"""Objects in which files travel to pods: a config map or a secret holds 1 MiB."""

from __future__ import annotations

import base64
import os
from typing import Any, Dict, List, Mapping

from drumbeat.base.order import FUNCTION, Order
from drumbeat.base.problem import Problem
from drumbeat.runfolder.layout import RunFolder


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


# `code: sync` in pods: the archive travels in secrets, in pieces, because a secret holds 1 MiB. Every pod unpacks
# it, also one that takes the place of a lost one while no desk is there.


PIECE = 900_000  # bytes
MOST_CODE = 8 << 20  # bytes of the archive: it lies in the cluster's own database as long as the job does
FOLDER = "code"  # where it is unpacked, in the pod's own volume: a run folder on a claim is shared by all pods


def check_code(order: Order) -> None:
    if order.code_bytes > MOST_CODE:
        raise Problem(
            f"the code takes {order.code_bytes / 2**20:.1f} MiB packed, and at most {MOST_CODE >> 20} MiB are sent to pods",
            "name what is not code in .gitignore; or put it into the image (code: image) or on a claim (code: shared, "
            "--pvc CLAIM:PATH)",
        )


def pieces_of(order: Order) -> List[str]:
    """Return the names of the files in each pod; none unless the job has code: sync."""
    return [f"code-{number}" for number in range(-(-order.code_bytes // PIECE))]


def secret_name(name: str, piece: str) -> str:
    """Return the name of the secret that holds a piece; `name` is that of the run's objects."""
    return f"{name}-{piece}"


def inside(order: Order, local: str) -> str:
    """Return the work folder in a pod; `local` is the pod's own volume."""
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


# A submitted function in pods: it travels in a secret, and each pod puts it into its run folder, where the ranks
# look for it.


MOST_CALL = 900_000  # bytes of the function and its arguments: a secret holds 1 MiB
_KEY = os.path.basename(RunFolder("").call)


def function_secret_names(order: Order, name: str) -> List[str]:
    """Return the name of the secret with the function; none unless one was submitted. `name` is that of the run's objects."""
    return [f"{name}-call"] if FUNCTION in order.brings else []


def function_secrets(order: Order, name: str, labels: Mapping[str, str]) -> List[Dict[str, Any]]:
    names = function_secret_names(order, name)
    if not names:
        return []
    with open(RunFolder(order.folder).call, "rb") as file:
        data = file.read()
    if len(data) > MOST_CALL:
        raise Problem(
            f"the function and its arguments take {len(data):,} bytes, and at most {MOST_CALL:,} are sent to pods",
            "put large arguments into a file on a claim or in the image, and send its path",
        )
    meta = {"name": names[0], "labels": dict(labels)}
    text = base64.b64encode(data).decode()
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": {_KEY: text}}]


def unpack_lines(order: Order, files: str) -> List[str]:
    """Return lines of the pod's script that unpack the function; `files` is where the secret is mounted. Only this user
    may change what is unpickled."""
    if FUNCTION not in order.brings:
        return []
    folder = f'"$RUN/{os.path.dirname(RunFolder("").call)}"'
    partial = f"{folder}/$NODE.tmp"
    copy = f"rm -f {partial} && cp {files}/{_KEY} {partial} && mv -f {partial} {folder}/{_KEY}"
    return [f"(umask 077; mkdir -p {folder} && {copy}) || exit 74"]
