"""What a check is given, and what it answers."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from drumbeat.commands.script import Script, options

LONGEST_FIXED = 4000  # a longer line is no person's line


class Edit(NamedTuple):
    """In `line`, from `column`, `old` becomes `new`; an insertion has no `old`. `above` is a line to put in before."""

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


class Context(NamedTuple):
    script: Script
    whole: bool  # a whole script, not an excerpt in a page
    returns: bool  # its lines ended in \r\n
    around: str  # the whole text that the script stands in
    settings: Mapping[str, Any]

    @property
    def lines(self) -> Dict[int, str]:
        return dict(enumerate(self.script.text.split("\n"), self.script.line))

    @property
    def slurm(self) -> bool:
        """Does it run under Slurm?"""
        return bool(re.search(r"\bSLURM_|\bsrun\b|\bsbatch\b|^#SBATCH", self.around, re.MULTILINE))

    @property
    def batch(self) -> bool:
        """Is it what sbatch runs, once a job, rather than what srun starts in every task?"""
        script = self.script
        return bool(script.directives or script.late) or any(
            command.name == "srun" and "substitution" not in command.within for command in script.commands
        )

    @property
    def nodes(self) -> Optional[int]:
        """How many nodes it asks for; None when it does not say."""
        option = self.script.option("nodes")
        if option and re.fullmatch(r"\d{1,6}(-\d{1,6})?", option.value):
            return int(option.value.split("-")[-1])
        counts = [
            int(value)
            for command in self.script.commands
            for name, value in options(command.names)
            if (name == "nnodes" or (name == "nodes" and command.name in ("srun", "sbatch", "salloc")))
            and re.fullmatch(r"\d{1,6}", value)
        ]
        counts += [
            int(each.text)
            for each in self.script.assignments
            if each.name == "NNODES" and re.fullmatch(r"\d{1,6}", each.text)
        ]
        return max(counts, default=None)
