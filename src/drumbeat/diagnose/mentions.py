"""Is a line an error, or does it only talk about one? `so that CUDA out of memory is avoided` failed at nothing."""

from __future__ import annotations

import re

_AFTER = 40  # characters behind an error's words that may take them back
_TALK = re.compile(
    r"(?i)\b(?:avoid(?:s|ed|ing)?|prevent(?:s|ed|ing)?|so that|in case of|instead of|guards? against|protects? (?:from|against)"
    r"|(?:to|will|we|and) (?:handle|catch|detect|simulate|retry)|handles|handled|handling|recovers? from|would|might|may|could"
    r"|should|unlikely|not an error)\b"
)
# An exception's name, or what programs put before their errors.
_ERROR = re.compile(r"(?:^|[\s.])[A-Z]\w*(?:Error|Exception)\b|(?i:\b(?:error|fatal|failed|failure)\b)|NCCL WARN")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")


def is_exception(text: str) -> bool:
    """Does the line begin as an exception's own last line does?"""
    return bool(_EXCEPTION.match(text))


def is_talk(text: str, start: int, end: int) -> bool:
    """Do the words around `text[start:end]` say that the error is guarded against, expected or possible, not that it came?"""
    around = text[:start], text[end : end + _AFTER]
    return any(map(_TALK.search, around)) and not _ERROR.search(text[:end])
