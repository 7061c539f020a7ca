"""What an error means, whatever program words it: by errno, by result words, by an object and what is wrong with it.

It classifies exceptions and error lines that no rule knows; a rule refines it with a better title and fix. Each sense is the
code of a rule, whose cause and fix are used.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Optional, Tuple

from drumbeat.base.regex import regex
from drumbeat.causes.table import OF_ERRNO

# Names, numbers and texts of errno all mean the same.
_TEXTS = {os.strerror(number).lower(): code for number, code in OF_ERRNO.items()}
_NAMES = {errno.errorcode[number]: code for number, code in OF_ERRNO.items()}
# Exceptions of Python that stand for an errno.
_CLASSES = {"FileNotFoundError": "file-missing", "PermissionError": "permission", "MemoryError": "host-out-of-memory"}
_ERRNO = regex(
    r"(?i)\b(?:errno|os error|error code)[\s:=#(]{0,3}(?P<number>\d{1,3})\b|\b(?P<name>(?-i:"
    + "|".join(_NAMES)
    + r"))\b"
)
_TEXT = regex("(?i)(?:" + "|".join(map(re.escape, _TEXTS)) + ")")

_GPU = r"(?:gpu|cuda|hip|rocm|device|hbm|vram|video)"
_GONE = (
    r"(?:(?:was |were |is |are |be |could |can )?(?:not|n't|never) (?:be )?(?:found|exist|present|available|located|readable)"
    r"|(?:does|do|did) ?n(?:o|')t exist|missing|is absent|not there)"
)
_FILE = (
    r"(?:\b(?:file|path|directory|folder|checkpoint|data ?set|shard|tokeni[sz]er|config(?:uration)?|weights|manifest)\b"
    r"|[\w./~-]+\.(?:jsonl?|ya?ml|txt|csv|pt|pth|bin|npy|npz|h5|idx|parquet|arrow|safetensors|tar|model|cfg|toml))"
)
_DEGREE = (
    r"(?:parallel\w*|world[ _]?size|\b[tpdcse]p\b|degree|batch(?:[ _]?size)?|heads?|head[ _]count"
    r"|(?:ranks|gpus|processes|devices|nodes|layers|experts|stages)\b)"
)
# The first that fits. What stands further up is narrower.
_PHRASES: Tuple[Tuple[str, Tuple[str, ...]], ...] = (
    ("import-error", (
        r"\bno module named|cannot import|undefined symbol|\b(?:pip3?|conda|mamba) install\b",
        r"lib[\w+-]+\.so[\w.]*\W.{0,40}(?:cannot open|not found|no such file|missing)",
        r"(?:package|library|module|dependency)\b.{0,40}(?:not installed|missing|is required)",
    )),
    ("gpu-out-of-memory", (
        rf"{_GPU}.{{0,60}}(?:out of memory|memory (?:is |was )?exhausted|ran out)",
        rf"(?:out of|insufficient|not enough|exhausted|ran out of) (?:\w+ )?{_GPU} memory",
        r"RESOURCE_EXHAUSTED.{0,80}(?:alloc|memory)",
        rf"(?:failed|unable|could not|cannot) (?:to )?alloc\w*.{{0,80}}{_GPU}",
    )),
    ("gpu-ecc", (r"\becc\b.{0,40}(?:error|uncorrect\w*|double)|uncorrectable.{0,20}\becc\b",)),
    ("file-descriptors", (r"too many (?:open )?(?:files|file descriptors)",)),
    ("peer-lost", (
        r"\b(?:peer|worker|(?:remote|other|another) (?:rank|process)|rank \d+)\b"
        r".{0,30}(?:went away|died|is gone|vanished|closed)",
    )),
    ("shm-full", (r"(?:/dev/shm|shared memory).{0,80}(?:full|no space|insufficient|exhausted|too small|not enough)",)),
    ("host-out-of-memory", (
        r"\b(?:out of memory|memory exhausted|not enough (?:host |system )?memory|insufficient memory|std::bad_alloc)",
        r"(?:cannot|could not|unable to|failed to) allocate (?:host )?memory",
    )),
    ("disk-full", (
        r"(?:disk|quota|volume|file ?system|storage)\b.{0,40}(?:full|exceeded|exhausted|no (?:more )?space)",
        r"no (?:free )?space (?:left|remaining)",
    )),
    ("invalid-device-ordinal", (
        r"(?:invalid|no such|non-?existent|unknown) (?:cuda ?place|(?:gpu|cuda|device) ?(?:ordinal|index|id))",
        r"(?:gpu|device|cuda)s? ?(?:index|ordinal|id|\d)?"
        r".{0,40}(?:out of range|only \d+ (?:gpu|device)s?|number on your machine)",
    )),
    ("host-not-found", (
        r"\bgai error|getaddrinfo|name (?:or service )?(?:not known|resolution)|(?:resolve|look ?up).{0,40}\bhost",
        r"host ?(?:name)?\b.{0,60}(?:could not|cannot|can't|not) (?:be )?(?:resolv|found|look)",
    )),
    ("port-in-use", (
        r"address (?:is )?already in use|\bport\b.{0,40}(?:in use|taken|occupied|busy|already bound)",
    )),
    ("layout-mismatch", (
        rf"{_DEGREE}.{{0,120}}(?:not |in|cannot be )(?:evenly )?(?:divi(?:sible|ded)|split)|(?:not |in)divisible"
        rf".{{0,120}}{_DEGREE}",
        rf"(?:must|should|has to|needs? to) (?:be )?(?:a multiple of|divi\w+).{{0,80}}{_DEGREE}",
        rf"{_DEGREE}.{{0,80}}(?:is (?:less|smaller|greater|larger) than|does not match|!=|not equal).{{0,60}}{_DEGREE}",
    )),
    ("permission", (
        r"(?:permission|access) (?:was |is )?(?:denied|refused)",
        r"(?:not|un)(?: |-)?(?:permitted|authori[sz]ed|allowed) to (?:read|write|open|access)",
    )),
    ("file-missing", (rf"{_FILE}.{{0,120}}{_GONE}|{_GONE}.{{0,20}}{_FILE}|no such file",)),
    ("connect-failed", (
        r"(?:connect\w*|\brecv\b|\bsend\b|reach\w*)\b.{0,100}"
        r"(?:timed out|time-?out|unreachable|no route)",
        r"(?:timed out|time-?out|unable|failed|could not|cannot).{0,40}\b(?:connect|reach)\b",
    )),
    ("nccl-error", (
        r"unhandled (?:system|cuda|hip) error",
        r"nccl(?:\w*Error|.{0,40}(?:invalid (?:usage|argument)|internal error|unhandled))",
    )),
)  # fmt: skip
_SENSES = tuple((code, regex(f"(?i){'|'.join(phrases)}")) for code, phrases in _PHRASES)
_REMEDY = regex(
    r"(?i)\b(?P<how>(?:(?:python3? -m )?pip3?|conda|mamba|apt(?:-get)?|module) (?:install|load)"
    r"(?: -[\w-]+)* [\w.\[\]=~<>,-]*\w\]?)"
)


def sense(text: str) -> str:
    """The code of what this error means; empty where its words do not tell."""
    found = _ERRNO.search(text)
    narrow = next((code for code, pattern in _SENSES if pattern.search(text)), "")
    if narrow in ("import-error", "shm-full"):
        return narrow  # they name the object, and errno only what befell it
    if found:
        code = OF_ERRNO.get(int(found["number"])) if found["number"] else _NAMES[found["name"]]
        return code or narrow
    words = _TEXT.search(text)
    return narrow or _CLASSES.get(text.split(":", 1)[0], "") or (_TEXTS[words[0].lower()] if words else "")


def remedy(text: str) -> Optional[str]:
    """The remedy that the error itself names."""
    found = _REMEDY.search(text)
    return found["how"] if found else None
