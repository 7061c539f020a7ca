"""Input and output of a check: Context, Hit and Edit."""

from __future__ import annotations

import functools
import re
from dataclasses import fields
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from drumbeat.base.data import load, names
from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.script import Script
from drumbeat.findings.model import SEVERITIES

LONGEST_FIXED = 4000  # a longer line is no person's line


class Edit(NamedTuple):
    """An edit: in `line`, from `column`, `old` becomes `new`; an insertion has no `old`. `above` is a line to put in
    before."""

    line: int
    column: int
    old: str
    new: str
    above: Optional[Tuple[int, str]] = None


class Hit(NamedTuple):
    line: int
    words: Mapping[str, str] = {}  # for the {names} of the rule's title and fix
    edits: Tuple[Edit, ...] = ()
    severity: str = ""  # where it differs from the rule's own


def by_name(*checks: Any) -> Dict[str, Any]:
    """Map each check to the name that rules have for it: `sbatch-late` is sbatch_late."""
    return {check.__name__.replace("_", "-"): check for check in checks}


class Context(NamedTuple):
    script: Script
    whole: bool  # a whole script, not an excerpt in a page
    returns: bool  # its lines ended in \r\n
    around: str  # the whole text around the script
    settings: Mapping[str, Any]
    read: Callable[[str], str] = lambda path: ""  # the text of a file that the script names; '' if it is not there

    @property
    def lines(self) -> Dict[int, str]:
        return dict(enumerate(self.script.text.split("\n"), self.script.line))

    @property
    def slurm(self) -> bool:
        """Return true if the script runs under Slurm."""
        return bool(re.search(r"\bSLURM_|\bsrun\b|\bsbatch\b|^#SBATCH", self.around, re.MULTILINE))

    @property
    def batch(self) -> bool:
        """Return true if sbatch runs the script, once per job, rather than srun in every task."""
        script = self.script
        return bool(script.directives or script.late) or any(each.step == "srun" for each in script.started_anywhere)


# Rules are data: the YAML files of this folder, every key checked. contributing/lint-rules.md says what each key means.


# Texts that a rule's pattern is matched against; `check` names a function for what one text cannot show.
SUBJECTS = ("command", "pipeline", "assign", "sbatch", "line", "python")


class RuleError(ValueError):
    """A rule file is wrong; the message names file, rule and key."""


@dataclass(frozen=True)
class Rule:
    id: str  # stable, kebab-case: the finding's code
    title: str  # may hold {names} of the pattern's groups or of what a check found
    reason: str
    fix: str
    bad: str
    good: str
    source: str = ""  # where it is documented
    severity: str = "warning"
    command: str = ""  # pattern: one command's words, quotes taken off
    pipeline: str = ""  # pattern: commands joined by ' | '
    assign: str = ""  # pattern: a variable's whole name
    sbatch: str = ""  # pattern: the long name of a #SBATCH option
    line: str = ""  # pattern: a line of shell outside comments
    python: str = ""  # pattern: a line of Python outside comments and docstrings
    value: str = ""  # pattern: with assign and sbatch, the value
    unless: str = ""  # pattern: not if the same text has this
    where: str = ""  # pattern: only when the whole script has this
    without: str = ""  # pattern: not when the whole script has this
    check: str = ""
    settings: Mapping[str, Any] = None  # type: ignore[assignment]  # what the check needs to know
    fixes: bool = False  # --fix writes it
    whole: bool = False  # says something only about a whole script, never about a page's excerpt
    converted: bool = False  # the job file that `drumbeat convert` makes no longer has it
    file: str = ""


_SWITCHES = ("fixes", "whole", "converted")
_KEYS = {field.name for field in fields(Rule)} - {"file"}
_PATTERNS = ("command", "pipeline", "assign", "sbatch", "line", "python", "value", "unless", "where", "without")


@functools.lru_cache(maxsize=1)
def rules() -> Tuple[Rule, ...]:
    """Return the rules that come with drumbeat."""
    package = "drumbeat.lint"
    found = [rule for name in names(package) for rule in checked(load(package, name), name)]
    twice = {rule.id for rule in found if [each.id for each in found].count(rule.id) > 1}
    if twice:
        raise RuleError(f"two rules are called {', '.join(sorted(twice))}")
    return tuple(found)


def checked(entries: Any, file: str) -> List[Rule]:
    """Return the rules of one file, with every key checked."""
    if not isinstance(entries, list):
        raise RuleError(f"{file}: expected a list of rules")
    return [_rule(entry, file, number) for number, entry in enumerate(entries, 1)]


def _rule(entry: Any, file: str, number: int) -> Rule:
    if not isinstance(entry, dict):
        raise RuleError(f"{file}: rule {number} is not a mapping")
    where = f"{file}: rule {entry.get('id', number)}"
    unknown = {str(key) for key in entry} - _KEYS
    if unknown:
        raise RuleError(f"{where}: unknown key {', '.join(sorted(unknown))}; known: {', '.join(sorted(_KEYS))}")
    for key, value in entry.items():
        kind = dict if key == "settings" else bool if key in _SWITCHES else str
        if not isinstance(value, kind) or (value == "" and key not in ("bad", "good")):  # drumbeat.pyz has no examples
            raise RuleError(f"{where}: '{key}' must be {kind.__name__}")
    missing = [name for name in ("id", "title", "reason", "fix", "bad", "good") if name not in entry]
    if missing:
        raise RuleError(f"{where}: lacks {', '.join(missing)}")
    values: Dict[str, Any] = {"settings": {}, **entry, "file": file}
    rule = Rule(**values)
    if rule.severity not in SEVERITIES:
        raise RuleError(f"{where}: severity is one of {', '.join(SEVERITIES)}")
    subjects = [name for name in (*SUBJECTS, "check") if getattr(rule, name)]
    if len(subjects) != 1:
        raise RuleError(f"{where}: needs one of {', '.join(SUBJECTS)}, check")
    for name in _PATTERNS:
        try:
            compiled(getattr(rule, name))
        except re.error as error:
            raise RuleError(f"{where}: '{name}' is not a regular expression: {error}") from None
    return rule


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
