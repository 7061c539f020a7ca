"""Input and output of a check: Context, Hit and Edit."""

from __future__ import annotations

import functools
import re
from dataclasses import field
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from drumbeat.base.data import load, names
from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.script import Script

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


def in_batch(text: str, job: Mapping[str, str]) -> str:
    """Return a shell text as a batch script that asks for the nodes and GPUs of a job file."""
    options = {"nodes": "nodes", "gpus": "gpus-per-node"}
    return "\n".join(["#!/bin/bash", *(f"#SBATCH --{options[key]}={job[key]}" for key in options if key in job), text])


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


# Rules are data: the YAML files of this folder, whose every key is a test's to check. contributing/lint-rules.md says what
# each key means.


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
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the check needs to know
    fixes: bool = False  # --fix writes it
    whole: bool = False  # says something only about a whole script, never about a page's excerpt
    converted: bool = False  # the job file that `drumbeat convert` makes no longer has it


@functools.lru_cache(maxsize=1)
def rules() -> Tuple[Rule, ...]:
    """Return the rules that come with drumbeat."""
    package = "drumbeat.lint"
    return tuple(Rule(**rule) for name in names(package) for rule in load(package, name))
