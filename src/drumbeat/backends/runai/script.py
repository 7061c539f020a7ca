"""What travels to Run:ai's pods: everything in one secret, as variables, because both generations can pass those on."""

from __future__ import annotations

import base64
import os
import secrets
import shlex
from typing import Dict, List, Mapping, Tuple

from drumbeat.backends.kubernetes.payload import packed
from drumbeat.backends.kubernetes.script import node_script, python_of
from drumbeat.backends.kubernetes.submit import passed_values
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem

LOCAL = "/tmp/drumbeat-run"  # noqa: S108 - in the pod, which nobody else is in
TOKEN, SCRIPT, ORDER, PROGRAM = "DRUMBEAT_TOKEN", "DRUMBEAT_SCRIPT", "DRUMBEAT_ORDER", "DRUMBEAT_PROGRAM"  # noqa: S105
PIECE = 120_000  # characters: the kernel takes no longer variable than 128 KiB
PIECES = 9  # so many are asked for, whatever the size: the command line must not depend on it
LARGEST = 1_040_000  # bytes: a secret holds 1 MiB

COMMAND = ["sh", "-c", f'exec sh -c "${SCRIPT}"']


def run_folder(order: Order, wanted: str) -> str:
    return os.path.join(wanted or LOCAL, order.run_id)


def secret_names(order: Order) -> Tuple[str, ...]:
    return (TOKEN, SCRIPT, ORDER, *(f"{PROGRAM}_{number}" for number in range(PIECES)), *order.passed)


def secret_values(
    order: Order, sent: str, folder: str, linger: int, bundle: str, environ: Mapping[str, str]
) -> Dict[str, str]:
    """`sent` is the order as pods read it."""
    text = base64.b85encode(packed(bundle)).decode()
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    if len(pieces) > PIECES:
        raise Problem(f"drumbeat.pyz has {len(text)} characters, more than {PIECES} variables of a pod can hold")
    pieces += [""] * (PIECES - len(pieces))
    values = {TOKEN: secrets.token_hex(32), ORDER: sent, SCRIPT: pod_script(order, folder, linger)}
    values.update({f"{PROGRAM}_{number}": piece for number, piece in enumerate(pieces)})
    values.update(passed_values(order, environ))
    if sum(map(len, values.values())) > LARGEST:
        raise Problem(f"what the pods need is more than a secret holds ({LARGEST} bytes)")
    return values


def pod_script(order: Order, folder: str, linger: int) -> str:
    names = " ".join((SCRIPT, ORDER, *(f"{PROGRAM}_{number}" for number in range(PIECES))))
    unpack = (
        "import base64, gzip, os, sys; "
        f"text = ''.join(os.environ['{PROGRAM}_%d' % number] for number in range({PIECES})); "
        "open(sys.argv[1], 'wb').write(gzip.decompress(base64.b85decode(text))); "
        f"open(sys.argv[2], 'w').write(os.environ['{ORDER}'])"
    )
    program, order_file = f"{LOCAL}/drumbeat.pyz", f"{LOCAL}/order.json"
    prepare: List[str] = [
        f"mkdir -p -m 700 {LOCAL} || exit 74",
        f"{shlex.quote(python_of(order))} -I -S -c {shlex.quote(unpack)} {program} {order_file} || exit 78",
        f"unset {names}  # ranks have no use for them",
    ]
    return node_script(order, folder, linger, prepare, program, order_file)
