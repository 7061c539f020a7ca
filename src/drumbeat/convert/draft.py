"""A job file being built: its keys with their lines in the script, and notes on all that was left out."""

from __future__ import annotations

import os
import re
from dataclasses import field
from typing import Any, Dict, List, NamedTuple, Optional, Set

import yaml

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.redact import printable, redact
from drumbeat.commands.values import MARK, Marks
from drumbeat.findings.model import shown


class LeftOut(NamedTuple):
    line: int
    text: str
    why: str


class Notice(NamedTuple):
    """The signal before the time limit that `--signal` asks for."""

    line: int
    signal: str
    seconds: int
    batch: bool  # only the batch script gets it


class Difference(NamedTuple):
    """A difference between what reaches a rank from the script and from the job file."""

    what: str  # env NAME, argument N, working directory, ranks
    script: str
    job: str
    why: str = ""


@dataclass
class Draft:
    marks: Marks = field(default_factory=Marks)
    arguments: Optional[List[str]] = None  # of the script; None: nobody gave any
    keys: Dict[str, Any] = field(default_factory=dict)
    lines: Dict[str, int] = field(default_factory=dict)  # key -> line of the script that it comes from
    env: Dict[str, str] = field(default_factory=dict)
    on_start: List[str] = field(default_factory=list)
    setup: List[str] = field(default_factory=list)
    modules: List[str] = field(default_factory=list)
    options: List[str] = field(default_factory=list)  # of sbatch, that no key has
    notice: Optional[Notice] = None
    ended_at: int = 0  # the line of an exit that is reached before anything is started
    left_out: List[LeftOut] = field(default_factory=list)
    to_check: List[LeftOut] = field(default_factory=list)  # carried over, but a person should look
    to_export: List[LeftOut] = field(default_factory=list)  # `submit` refuses without them, and names them
    advice: List[LeftOut] = field(default_factory=list)  # true of the script as well: nothing changes
    differences: List[Difference] = field(default_factory=list)
    # lines whose statements are in `on-start`, `setup`, `modules` or `env`
    carried: Set[int] = field(default_factory=set)
    replaced: Set[str] = field(default_factory=set)  # flags of the launcher that drumbeat fills in
    read: Dict[str, List[int]] = field(default_factory=dict)  # why they are not copied -> lines
    defaults: Dict[str, str] = field(default_factory=dict)  # variables from outside, taken to be unset

    def set(self, key: str, value: Any, line: int) -> None:
        self.keys[key] = value
        self.lines[key] = line

    def drop(self, line: int, text: str, why: str) -> None:
        text = " ".join(shown(self._as_written(text)).split())
        note = LeftOut(line, redact(text if len(text) <= 160 else text[:157] + "..."), why)
        if note not in self.left_out:
            self.left_out.append(note)

    def question(self, line: int, text: str, why: str, advice: bool = False) -> None:
        notes = self.advice if advice else self.to_check
        text = " ".join(shown(self._as_written(text)).split())[:100]
        note = LeftOut(line, redact(text), " ".join(shown(self.marks.shown(why)).split()))
        if note not in notes:
            notes.append(note)

    def differs(self, what: str, script: object, job: object, why: str = "") -> None:
        """List a difference, once."""
        found = Difference(what, self.marks.shown(str(script)), self.marks.shown(str(job)), why)
        if found not in self.differences:
            self.differences.append(found)

    def _as_written(self, text: str) -> str:
        """Return the text with what the script has where the job has a variable of its own."""
        return self.marks.shown(text, lambda each: each.made if each.text.startswith("${VALUE_") else each.text)

    def in_job_file(self, value: Any) -> Any:
        """Write a value for a job file, which expands `$NAME` and reads `$$` as a plain `$`."""
        if isinstance(value, list):
            return [self.in_job_file(each) for each in value]
        if not isinstance(value, str):
            return value
        return re.sub(
            f"({MARK.pattern})(?=\\w)|({MARK.pattern})|\\$",
            lambda found: "$$" if found[0] == "$" else _reference(self.marks.get(found[0]).text, bool(found[1])),
            value,
        )


def _reference(text: str, braces: bool) -> str:
    name = re.fullmatch(r"\$\{(\w+)\}", text)
    return f"${name[1]}" if name and not braces else text


# The draft as a job file with comments.


_ORDER = (
    "name", "nodes", "ranks-per-node", "gpus", "command", "modules", "on-start", "setup", "container", "container-runtime",
    "binds", "env", "workdir", "time", "account", "partition", "qos", "memory", "cpus",
)  # fmt: skip


def job_file(draft: Draft, source: str) -> str:
    keys = {key: draft.in_job_file(value) for key, value in draft.keys.items()}
    for key, lines in (("on-start", draft.on_start), ("setup", draft.setup)):
        if lines:
            keys[key] = "\n".join(map(redact, lines))
    if draft.modules:
        keys["modules"] = draft.in_job_file(draft.modules)
    if draft.env:
        keys["env"] = {name: draft.in_job_file(value) for name, value in draft.env.items()}
    if draft.options:
        keys["submit-options"] = draft.options
    lines = [
        f"# From {printable(source)} by drumbeat convert. drumbeat plan --render shows the batch script that this becomes."
    ]
    for key in [*(key for key in _ORDER if key in keys), *(key for key in keys if key not in _ORDER)]:
        lines += _entry(key, keys[key], f"  # line {draft.lines[key]}" if key in draft.lines else "")
    for title, notes in (
        ("Please check", draft.to_check),
        ("Export before you submit", draft.to_export),
        ("Left out", draft.left_out),
        ("Advice", draft.advice),
    ):
        if notes:
            lines += ["", f"# {title}:"]
            for why in dict.fromkeys(note.why for note in notes):
                lines.append(f"#   {why}:")
                lines += [f"#     line {note.line}: {note.text}" for note in sorted(notes) if note.why == why]
    if draft.read:
        lines += ["", "# Read, and not copied:"]
        lines += [f"#   {why}: {_lines(numbers)}" for why, numbers in draft.read.items()]
    if draft.differences:
        lines += ["", "# What reaches a rank otherwise than from the script:"]
        for each in draft.differences:
            why = f" ({each.why})" if each.why else ""
            alike = max(0, len(os.path.commonprefix(each[1:3])) - _LONGEST // 2)  # long texts from where they differ
            there, here = (("... " if alike else "") + _one_line(text[alike:]) for text in each[1:3])
            lines.append(f"#   {each.what}: {there} there, {here} here{why}")
    if draft.defaults:
        taken = ", ".join(f"{name}={_one_line(value)}" if value else name for name, value in draft.defaults.items())
        lines += ["", f"# Taken to be unset where the script is submitted, so that its defaults hold: {taken}"]
    return "\n".join(lines) + "\n"


def _lines(numbers: List[int]) -> str:
    """Return `lines 3, 5-8`."""
    found: List[List[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return f"line{'s' if len(set(numbers)) > 1 else ''} " + ", ".join("-".join(map(str, each)) for each in found)


_LONGEST = 120  # of a text in a comment


def _one_line(text: str) -> str:
    text = " ".join(shown(redact(text)).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _entry(key: str, value: Any, comment: str) -> List[str]:
    if isinstance(value, str) and "\n" in value:
        if re.search(r"[^\S\n]\n|\n\Z|[^\n\t\x20-\x7e\xa0-\ud7ff]|\A\s", value):  # a block would not keep it
            return [f"{key}: {_scalar(value)}{comment}"]
        return [f"{key}: |-{comment}", *(f"  {line}" for line in value.split("\n"))]
    if isinstance(value, dict):
        return [f"{key}:{comment}", *(f"  {name}: {_scalar(text)}" for name, text in value.items())]
    if key == "command" and value[:2] == ["bash", "-c"] and "\n" in value[2]:
        block = _entry("-", value[2], "")
        return [
            f"{key}:{comment}",
            "- bash",
            "- -c",
            "- " + block[0][3:],
            *block[1:],
            *(f"- {_scalar(each)}" for each in value[3:]),
        ]
    if key == "command" and all(re.fullmatch(r"[\w@%+=:,./$-]+", word) for word in value):
        return [f"{key}: {_scalar(' '.join(value))}{comment}"]
    return [f"{key}: {_scalar(value)}{comment}"]


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.replace("\n...", "").rstrip("\n")
