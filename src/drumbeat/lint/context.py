"""Input and output of a check: Context, Hit and Edit."""

from __future__ import annotations

import functools
import re
from dataclasses import fields
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from drumbeat.base.data import load, names
from drumbeat.base.light_dataclass import dataclass
from drumbeat.commands.events import Started
from drumbeat.commands.script import Command, Script, options
from drumbeat.findings.model import SEVERITIES
from drumbeat.lint.starts import Start, starts

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

    def started(self, wanted: Callable[[List[str]], bool]) -> List[Started]:
        """Return the commands of this kind that the script starts, with their variables."""
        return [each for each in self.script.shell.started if wanted(each.words)]

    @property
    def starts(self) -> List[Start]:
        """Return the programs that the script starts, with what reaches each of them."""
        return starts(self.script.shell)

    def extent(self, start: Start) -> Extent:
        """Return on how many nodes a program starts, and as how many tasks."""
        if not start.step:
            return Extent(1, 1)
        found, by_gpus = self._extent(start.flags, self.job_nodes), {"ntasks-per-gpu", "gpus-per-task"}
        per_node = self.script.option("ntasks-per-node", "tasks-per-node")
        counted = start.flags.get("ntasks") or not per_node and self.script.option("ntasks")
        by_gpus &= {*start.flags, *(each.name for each in self.script.directives)}
        return Extent(found.nodes, None) if by_gpus and not counted else found

    def _extent(self, flags: Mapping[str, str], has: Optional[int]) -> Extent:
        """Return the nodes and tasks of a step with these options in a job of so many nodes."""
        script = self.script
        nodes = _count(flags["nodes"], has) if "nodes" in flags else has
        per_node = flags.get("ntasks-per-node") or flags.get("tasks-per-node") or ""
        total = flags.get("ntasks", "")
        if not per_node and (not total or re.sub(r"[${}]", "", total) in ("SLURM_NTASKS", "SLURM_NPROCS")):
            said, all_tasks = script.option("ntasks-per-node", "tasks-per-node"), script.option("ntasks")
            per_node, total = said.value if said else "", all_tasks.value if all_tasks and not said else ""
        if total:
            tasks = _count(total, has)
        else:
            each_node = _count(per_node, None) if per_node else 1
            tasks = nodes * each_node if nodes and each_node else None
        return Extent(min(nodes, tasks) if nodes and tasks else nodes, tasks)

    @property
    def job_nodes(self) -> Optional[int]:
        """Return the number of nodes in the #SBATCH lines; None where they do not say one number."""
        option = self.script.option("nodes")
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", option.value) if option else None
        return int(found[1]) if found and found[2] in (None, found[1]) else None

    def flags(self, command: Command) -> Dict[str, str]:
        """Return the options of a command, with the values of the variables in them."""
        return dict(options(self.script.values(command)))

    @property
    def gpus(self) -> int:
        """Return how many GPUs the job has on each node; 0 where its #SBATCH lines do not say."""
        asked = self.script.option("gpus-per-node", "gres") or self.script.option("gpus")
        count = re.search(r"(?:^|:)(\d{1,4})$", asked.value) if asked else None
        return int(count[1]) // ((self.nodes or 1) if asked and asked.name == "gpus" else 1) if count else 0

    @property
    def slurm(self) -> bool:
        """Return true if the script runs under Slurm."""
        return bool(re.search(r"\bSLURM_|\bsrun\b|\bsbatch\b|^#SBATCH", self.around, re.MULTILINE))

    @property
    def batch(self) -> bool:
        """Return true if sbatch runs the script, once per job, rather than srun in every task."""
        script = self.script
        return bool(script.directives or script.late) or any(
            command.name == "srun" and "substitution" not in command.within for command in script.commands
        )

    def tasks_on_a_node(self, command: Command) -> int:
        """Return how many tasks a step has on each node: its own options, then the script's; 2 where a variable says it."""
        flags = {
            name: value
            for name, value in self.flags(command).items()
            if name not in ("ntasks-per-gpu", "gpus-per-task")
        }
        if command.name != "srun" and flags.get("np"):
            flags["ntasks"] = flags["np"]
        return self._extent(flags, self.nodes or 1).tasks_per_node or 2

    @property
    def nodes(self) -> Optional[int]:
        """Return the number of nodes it requests; None when it does not say."""
        option = self.script.option("nodes")
        if option and re.fullmatch(r"\d{1,6}(-\d{1,6})?", option.value):
            return int(option.value.split("-")[-1])
        counts = [
            int(value)
            for command in self.script.commands
            for name, value in options(self.script.values(command))
            if (name == "nnodes" or (name == "nodes" and command.name in ("srun", "sbatch", "salloc")))
            and re.fullmatch(r"\d{1,6}", value)
        ]
        counts += [
            int(each.text)
            for each in self.script.assignments
            if each.name == "NNODES" and re.fullmatch(r"\d{1,6}", each.text)
        ]
        return max(counts, default=None)


class Extent(NamedTuple):
    nodes: Optional[int]  # None: unknown
    tasks: Optional[int]  # on all of them

    @property
    def tasks_per_node(self) -> Optional[int]:
        return -(-self.tasks // self.nodes) if self.tasks and self.nodes else None


def _count(text: str, nodes: Optional[int]) -> Optional[int]:
    if re.sub(r"[${}]", "", text) in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        return nodes
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


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
