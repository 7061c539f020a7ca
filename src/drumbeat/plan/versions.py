"""Version numbers as they come out of files and tools: '6.2.4-66', '2.21.5+hip6.3', '5.14.21-150500-default'."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.base.regex import regex

_LEADING = regex(r"\D{0,8}(\d{1,9}(?:\.\d{1,9}){0,3})")
_CONDITION = regex(r"(<|<=|>|>=)(\d[\d.]*)( or unknown)?")


def parse(text: Optional[str]) -> Optional[Tuple[int, ...]]:
    """The leading number, as a tuple; None when there is none."""
    found = _LEADING.match(text or "")
    return tuple(int(part) for part in found.group(1).split(".")) if found else None


def fits(condition: str, version: Optional[str]) -> bool:
    """`<6.2`, `>=7.1`, `<6.2 or unknown`: an unknown version fits only where the condition says so."""
    found = _CONDITION.fullmatch(condition)
    assert found, condition
    sign, bound_text, or_unknown = found.groups()
    mine, bound = parse(version), parse(bound_text)
    if mine is None or bound is None:
        return bool(or_unknown)
    length = max(len(mine), len(bound))
    left = mine + (0,) * (length - len(mine))
    right = bound + (0,) * (length - len(bound))
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign]
