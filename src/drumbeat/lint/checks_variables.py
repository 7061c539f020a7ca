"""Checks of variables against what `plan` knows of them: dead, misspelt, left on, contradicting, secret."""

from __future__ import annotations

import difflib
import re
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.base.secret import in_text, is_secret
from drumbeat.commands.script import Assignment
from drumbeat.lint.context import Context, Edit, Hit
from drumbeat.plan.known_variables import DEAD, DEBUGGING, FAMILIES, SPELT

_NEAR = 0.92  # as in plan.question: from here an unknown name counts as a slip of the pen
_NO_SECRET = re.compile(r"(?i)disabled|your|x{4}|none|null|false|dummy|example|change|todo|\.\.\.|…")
MOST_NAMES = 300  # unknown names that are compared with all known ones
MOST_SOCKETS = 64  # NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD


def _first(context: Context) -> List[Assignment]:
    """Each variable's first assignment with a given value."""
    seen = set()
    found = []
    for each in context.script.assignments:
        if (each.name, each.line) not in seen:
            seen.add((each.name, each.line))
            found.append(each)
    return found


def dead(context: Context) -> Iterator[Hit]:
    renamed = set()
    for each in _first(context):
        entry = DEAD.get(each.name)
        if entry is None or entry.when.get("vendor") == "nvidia":  # the script does not say whose GPUs
            continue
        version = entry.when.get("rocm", "")
        words = {
            "name": each.name,
            "why": entry.why + (f" (ROCm {version})" if version else ""),
            "fix": f"use {entry.use}" if entry.use else "remove it",
        }
        edits: Tuple[Edit, ...] = ()
        if each.name in context.settings["rename"] and each.name not in renamed:
            renamed.add(each.name)
            edits = _renamed(context, each.name, entry.use)
        yield Hit(each.line, words, edits, "info" if version else "")


def misspelt(context: Context) -> Iterator[Hit]:
    near: Dict[str, str] = {}
    edits: Tuple[Edit, ...] = ()  # with a name's first hit: they reach all of its places
    for each in _first(context):
        if not each.name.startswith(FAMILIES) or each.name in SPELT or each.name in DEAD or each.name in DEBUGGING:
            continue
        if each.name not in near and len(near) < MOST_NAMES:
            likely = difflib.get_close_matches(each.name[:60], SPELT, 1, _NEAR)
            near[each.name] = likely[0] if likely else ""
            edits = _renamed(context, each.name, near[each.name]) if likely else ()
        if near.get(each.name):
            yield Hit(each.line, {"name": each.name, "near": near[each.name]}, edits)
            edits = ()


def _renamed(context: Context, name: str, new: str) -> Tuple[Edit, ...]:
    """Wherever the name stands in the script, since what is set is often used again below."""
    return tuple(
        Edit(line, found.start(), name, new)
        for line, text in context.script.code_lines()
        for found in re.finditer(rf"(?<![A-Za-z0-9]){re.escape(name)}(?!\w)", text)
    )


def left_on(context: Context) -> Iterator[Hit]:
    for each in _first(context):
        entry = DEBUGGING.get(each.name)
        if entry and each.text not in entry.harmless and not each.value.active:
            severity = "warning" if each.text.upper() == "TRACE" else entry.severity
            yield Hit(each.line, {"name": each.name, "value": each.text, "cost": entry.cost}, (), severity)


def too_many_sockets(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments}
    threads, sockets = values.get("NCCL_SOCKET_NTHREADS"), values.get("NCCL_NSOCKS_PERTHREAD")
    if not threads or not sockets:
        return
    numbers = [_number(threads.text), _number(sockets.text)]
    product = numbers[0] * numbers[1] if numbers[0] and numbers[1] else None
    if product and product > MOST_SOCKETS:
        yield Hit(sockets.line, {"shown": f"{numbers[0]} x {numbers[1]} = {product}"})


def sockets_without_tcp(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments}
    if "NCCL_IB_HCA" in values or "NCCL_IB_GID_INDEX" in values:
        for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
            if name in values:
                yield Hit(values[name].line, {"name": name})
                return


def rdma_off(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        if each.name == "NCCL_IB_DISABLE" and each.text == "1" and (context.nodes or 1) > 1:
            yield Hit(each.line, {"nodes": str(context.nodes)})


def _number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def visibility_twice(context: Context) -> Iterator[Hit]:
    values = {each.name: each for each in context.script.assignments if each.how in ("export", "option")}
    for first, second, severity in (
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "warning"),
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "info"),
    ):
        if first in values and second in values:
            yield Hit(values[second].line, {"first": first, "second": second}, (), severity)


def secret(context: Context) -> Iterator[Hit]:
    for each in context.script.assignments:
        literal = re.fullmatch(r"[^\s$<>{}()*]{8,}", each.text) and not _NO_SECRET.search(each.text)
        if literal and is_secret(each.name, each.text) and not each.text.startswith("/"):
            yield Hit(each.line, {"name": each.name})
    for command in context.script.commands:
        found = None if command.assignments else in_text(command.text)
        if found and not _NO_SECRET.search(command.text):
            yield Hit(command.line, {"name": found})


CHECKS = {
    "dead": dead,
    "misspelt": misspelt,
    "left-on": left_on,
    "too-many-sockets": too_many_sockets,
    "rdma-off": rdma_off,
    "sockets-without-tcp": sockets_without_tcp,
    "visibility-twice": visibility_twice,
    "secret": secret,
}
