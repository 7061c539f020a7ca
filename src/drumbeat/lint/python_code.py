"""Python in a page, a heredoc or `python -c`: its lines without comments and docstrings, and two checks."""

from __future__ import annotations

import re
from typing import List, Sequence, Tuple

from drumbeat.lint.context import Hit

Code = Sequence[Tuple[int, str]]
_ACCUMULATES = re.compile(r"(?i)grad\w*_accum|accum\w*_(?:grad|step|iter|every|batch|freq)|accumulation")
_NEAR = 8  # lines of code between a backward pass and its optimizer's step
_TRIPLE = re.compile(r"\"\"\"|'''")
_STRING_OR_COMMENT = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|#.*")


def lines(text: str, first: int) -> List[Tuple[int, str]]:
    """Strings stay, since a device is often named in one; excerpts need not parse, so this does not ask Python."""
    kept: List[Tuple[int, str]] = []
    inside = ""
    for number, line in enumerate(text.split("\n"), first):
        if inside:
            if inside in line:
                inside = ""
            continue
        quote = _TRIPLE.search(line)
        if quote:
            if line.count(quote.group()) % 2:
                inside = quote.group()
            line = line[: quote.start()]
        line = _STRING_OR_COMMENT.sub(lambda found: "" if found.group()[0] == "#" else found.group(), line[:2000])
        if line.strip():
            kept.append((number, line))
    return kept


def hooks_twice(code: Code) -> List[Hit]:
    hooked = set()
    hits = []
    for number, line in code:
        made = re.match(r"\s*(\w+)\s*=\s*(?:\w+\.)*(?:DDP|DistributedDataParallel)\(", line)
        if made:
            hooked.discard(made.group(1))
        called = re.search(r"\b(\w+)\.register_comm_hook\(", line)
        if called:
            if called.group(1) in hooked:
                hits.append(Hit(number, {"name": called.group(1)}))
            hooked.add(called.group(1))
    return hits


def accumulation(code: Code) -> List[Hit]:
    """Gradients are gathered over several backward passes, and every one of them is reduced over the network."""
    text = "\n".join(line for _, line in code)
    if not _ACCUMULATES.search(text) or re.search(r"no_sync|set_requires_gradient_sync|require_backward", text):
        return []
    passes = (place for place, (_, line) in enumerate(code) if re.search(r"\.backward\(", line))
    return [Hit(code[place][0]) for place in passes if not _steps_after(code, place)][:1]


def _steps_after(code: Code, place: int) -> bool:
    """Does the optimizer step after each such backward pass? Then nothing is accumulated there."""
    indent = _indent(code[place][1])
    for _, line in code[place + 1 : place + 1 + _NEAR]:
        if _indent(line) < indent:
            return False
        if _indent(line) == indent and re.search(r"\.step\(", line):
            return True
    return False


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


CHECKS = {"hooks-twice": hooks_twice, "accumulation": accumulation}
