"""The job file in the making: keys with where they come from, and what was left out."""

from __future__ import annotations

import re
import shlex
from dataclasses import field
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import yaml

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.redact import printable
from drumbeat.base.regex import regex
from drumbeat.commands.shell import Word
from drumbeat.findings.model import shown

# Text that stood in single quotes: no shell expands it, and no job file may. Marks keep it apart until it is
# written.


BLANK = "\x01"  # a blank inside $(...), where no word ends
_MARKS = {"$": "\x02", "`": "\x03", "\\": "\x04"}
_SPECIAL = regex(r"[$`]|\\(?!\n)")
_MARKED = regex(r"[\x02-\x04]")


def literal(word: Word) -> str:
    """Return the word's text, with marks for what its single quotes protect."""
    if "'" not in word.raw:
        return word.text
    done, at = [], 0
    for piece in _pieces(word):
        if piece[1] is not None:
            found = max(word.text.find(piece[1], at), at)
            done += [word.text[at:found], marked(word.text[found : found + len(piece[1])])]
            at = found + len(piece[1])
        else:
            shown = next((each for each in _shown(piece[0]) if word.text.startswith(each, at)), "")
            done.append(shown)
            at += len(shown)
    return "".join(done) + word.text[at:]


def _pieces(word: Word) -> Iterator[re.Match[str]]:
    """Yield each stretch of the word as written; the first group is what is in single quotes."""
    inner = "".join(f"{re.escape(raw)}|" for raw in sorted({part.raw for part in word.parts}, key=len, reverse=True))
    pattern = rf"""{inner}\\.|"(?:{inner}\\.|[^"\\])*"|\$?'([^']*)'|."""
    return re.finditer(pattern, word.raw, re.DOTALL)


def _shown(raw: str) -> Tuple[str, ...]:
    """Return what the word's text may hold for a stretch outside single quotes."""
    if len(raw) > 1 and raw[0] == '"':
        return (raw[1:-1].replace('\\"', '"').replace("\\\n", ""), raw[1:-1])
    return (raw, raw[1:]) if raw[0] == "\\" else (raw,)


def marked(text: str) -> str:
    return _SPECIAL.sub(lambda found: _MARKS[found[0]], text)


def has_marks(text: str) -> bool:
    return bool(_MARKED.search(text))


def plain(text: str) -> str:
    """Return the text as the script's author reads it."""
    for char, mark in _MARKS.items():
        text = text.replace(mark, char)
    return text.replace(BLANK, " ")


def in_job_file(value: Any) -> Any:
    """Escape for a job file, which expands `$NAME` and reads `$$` as a plain `$`."""
    if isinstance(value, list):
        return [in_job_file(each) for each in value]
    return plain(value.replace(_MARKS["$"], "$$")) if isinstance(value, str) else value


def for_shell(word: str) -> str:
    """Return one word of a shell's line: variables in it are filled in, except those that are marked."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    if has_marks(word) and not re.search(r"[$`]", word):
        return shlex.quote(plain(word))
    word = word.replace('"', '\\"')
    return '"' + _MARKED.sub(lambda found: "\\" + plain(found[0]), word) + '"'


class LeftOut(NamedTuple):
    line: int
    text: str
    why: str


@dataclass
class Draft:
    keys: Dict[str, Any] = field(default_factory=dict)
    lines: Dict[str, int] = field(default_factory=dict)  # key -> line of the script that it comes from
    env: Dict[str, str] = field(default_factory=dict)
    setup: List[str] = field(default_factory=list)
    modules: List[str] = field(default_factory=list)
    own_modules: bool = False  # from here on modules come from a folder of the user's own
    options: List[str] = field(default_factory=list)  # of sbatch, that no key has
    computed: Dict[str, Tuple[int, str]] = field(default_factory=dict)  # variables that the script works out itself
    unknown: Optional[Tuple[int, str]] = None  # a line that starts something, where none is known to start a training
    left_out: List[LeftOut] = field(default_factory=list)
    to_check: List[LeftOut] = field(default_factory=list)  # carried over, but a person should look

    def set(self, key: str, value: Any, line: int) -> None:
        self.keys[key] = value
        self.lines[key] = line

    def drop(self, line: int, text: str, why: str) -> None:
        text = " ".join(shown(plain(text)).split())
        self.left_out.append(LeftOut(line, text if len(text) <= 160 else text[:157] + "...", why))

    def question(self, line: int, text: str, why: str) -> None:
        self.to_check.append(LeftOut(line, " ".join(shown(plain(text)).split())[:100], " ".join(shown(why).split())))


# The draft as a job file with comments.


_ORDER = (
    "name", "nodes", "ranks-per-node", "gpus", "command", "setup", "modules", "container", "container-runtime", "binds", "env",
    "workdir", "time", "account", "partition", "qos", "memory", "cpus",
)  # fmt: skip


def job_file(draft: Draft, source: str) -> str:
    keys = {**draft.keys}
    if draft.setup:
        keys["setup"] = "\n".join(draft.setup)
    if draft.modules:
        keys["modules"] = draft.modules
    if draft.env:
        keys["env"] = draft.env
    if draft.options:
        keys["submit-options"] = draft.options
    lines = [
        f"# From {printable(source)} by drumbeat convert. drumbeat plan --render shows the batch script that this becomes."
    ]
    for key in [*(key for key in _ORDER if key in keys), *(key for key in keys if key not in _ORDER)]:
        lines += _entry(key, keys[key], f"  # line {draft.lines[key]}" if key in draft.lines else "")
    for title, notes in (("Please check", draft.to_check), ("Left out", draft.left_out)):
        if notes:
            lines += ["", f"# {title}:"]
            for why in dict.fromkeys(note.why for note in notes):
                lines.append(f"#   {why}:")
                lines += [f"#     line {note.line}: {note.text}" for note in sorted(notes) if note.why == why]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, comment: str) -> List[str]:
    if isinstance(value, str) and "\n" in value:
        return [f"{key}: |-{comment}", *(f"  {line}" for line in value.split("\n"))]
    if isinstance(value, dict):
        return [f"{key}:{comment}", *(f"  {name}: {_scalar(text)}" for name, text in value.items())]
    if key == "command" and all(re.fullmatch(r"[\w@%+=:,./$-]+", word) for word in value):
        return [f"{key}: {_scalar(' '.join(value))}{comment}"]
    return [f"{key}: {_scalar(value)}{comment}"]


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.replace("\n...", "").rstrip("\n")
