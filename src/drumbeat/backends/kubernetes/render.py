"""The manifest: the text that `plan --render` shows and that `submit` sends, byte for byte.

Two things are not in it, and it names them: the secret (the run's token and the values of variables that are passed on) and the
config map with drumbeat.pyz. Both are made at submit.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, List, Tuple

import yaml

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.kubernetes.code import check_code, inside, pieces_of
from drumbeat.backends.kubernetes.function import function_secret_names
from drumbeat.backends.kubernetes.kinds import objects
from drumbeat.backends.kubernetes.options import Settings, settings_of
from drumbeat.backends.kubernetes.pod import TOKEN, Plain, labels_of, program_name
from drumbeat.backends.kubernetes.script import LOCAL, PACKED, SCRIPT, pod_folder, pod_script, python_of
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem

MANIFEST = "manifest.yaml"
_LONGEST = 45  # characters: a pod's host name is the object's with up to 18 more, and may have 63
_UNIQUE = 21  # of a run id: -YYYYmmdd-HHMMSS-abcd


def object_name(run_id: str) -> str:
    """The run id as a DNS label; its end makes it unique."""
    text = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if not text[:1].isalpha():
        text = f"r-{text}"
    if len(text) > _LONGEST:
        text = text[: _LONGEST - _UNIQUE].rstrip("-") + text[-_UNIQUE:]
    return text


def render(order: Order, kind: str, why: str, version: Tuple[int, int]) -> Request:
    """`kind` and its reason, and the API server's version, are what was found out before (choice.py)."""
    check(order)
    settings = settings_of(order)
    name = object_name(order.run_id)
    documents = [_files(order, settings, name, kind), *objects(kind, order, settings, name, version)]
    for document in documents if settings.namespace else ():
        document["metadata"] = {"namespace": settings.namespace, **document["metadata"]}
    text = _header(order, name, kind, why) + "".join("---\n" + dump(document) for document in documents)
    return Request("kubernetes", order, text)


def check(order: Order) -> None:
    if order.container is None:
        raise Problem(
            "a pod is made from an image, and the job names none",
            "write container: registry.example.org/team/image:tag in the job file, or --container",
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,499}", order.container.image):
        raise Problem(
            f"container: {order.container.image[:80]!r} is not the name of an image",
            "write it as its registry calls it: registry.example.org/team/image:tag",
        )
    if order.launcher == "tasks":
        raise Problem(
            "launcher: tasks needs a scheduler that starts one task per rank, and a pod is a node", "leave it out"
        )
    if order.resources.array:
        raise Problem("arrays are not submitted to Kubernetes", "submit the job once for each value")
    if order.modules:
        raise Problem("a pod has no environment modules", "put what they bring into the image; leave modules out")
    check_code(order)


def sent_order(order: Order, settings: Settings) -> Order:
    """The order as pods read it: the run folder is theirs, and images may have to be pulled before all are there."""
    timing = dataclasses.replace(order.timing, muster=float(settings.muster))
    workdir = inside(order, LOCAL) if order.code == "sync" else order.workdir
    return dataclasses.replace(order, folder=pod_folder(order, settings), workdir=workdir, timing=timing)


def _files(order: Order, settings: Settings, name: str, kind: str) -> Plain:
    """The order and the script; its annotations are what status, logs and cancel need to know later."""
    notes = {
        "drumbeat/kind": kind,
        "drumbeat/nodes": str(order.nodes),
        "drumbeat/folder": pod_folder(order, settings),
        "drumbeat/shared": "yes" if settings.claim_of(pod_folder(order, settings)) else "no",
        "drumbeat/python": python_of(order),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels_of(name), "annotations": notes},
        "data": {"order.json": dump_order(sent_order(order, settings)), SCRIPT: pod_script(order, settings)},
    }


def _header(order: Order, name: str, kind: str, why: str) -> str:
    secrets = ", ".join((TOKEN, *order.passed))
    lines = [
        f"Written by drumbeat {__version__} for run {order.run_id}: `drumbeat submit` sends exactly this text.",
        f"kind {kind}: {why}",
        f"Made at submit and not shown: Secret {name} ({secrets}), ConfigMap {program_name(name)} ({PACKED}).",
        *_about_code(order, name),
        *(f"Also Secret {secret}: the function and its arguments." for secret in function_secret_names(order, name)),
        *(f"{option.text}: {option.why}" for option in order.resources.options),
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _about_code(order: Order, name: str) -> List[str]:
    pieces = pieces_of(order)
    if not pieces:
        return []
    last = f" to {name}-{pieces[-1]}" if len(pieces) > 1 else ""
    sent = f"{order.code_bytes:,} bytes packed, sha256 {order.code_digest}"
    return [f"Also Secret {name}-{pieces[0]}{last}: the code of {order.code_root}, {sent}."]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no aliases: the file is to be read by people."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_OTHER_BREAKS = {"\x85", "\u2028", "\u2029", "\ufeff"}  # YAML changes these in a block, and escapes them in quotes


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text and not _OTHER_BREAKS & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Plain) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=4000, allow_unicode=True)


def documents_of(text: str) -> List[Plain]:
    return [document for document in yaml.safe_load_all(text) if document]
