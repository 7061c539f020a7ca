"""A script as lists of commands, pipelines, assignments and #SBATCH options, including those in `$(...)` and `bash -c`."""

from __future__ import annotations

import functools
import re
from dataclasses import field
from typing import Collection, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.interpret import Shell, look_everywhere
from drumbeat.commands.launch import SHELLS, STARTERS, read_by_shell
from drumbeat.commands.shell import MAX_DEPTH, Fault, Heredoc, Lexer, Token, Word
from drumbeat.commands.starts import LONG, Start, starts
from drumbeat.commands.syntax import DECLARING, Node, parse_loosely
from drumbeat.commands.values import MARK, without_marks

# Where a command stands, outermost first.
SUBSTITUTION, TASK, CONTAINER, FILE = "substitution", "task", "container", "file"

MAX_COMMANDS = MAX_LINES = 10_000  # more is no script that a person wrote; what is left out is said
MAX_TEXT = 8000  # of one command that patterns see
MAX_WORDS = 400  # of one command that are looked at for what it starts
_ASSIGNMENT = regex(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=")
_CONTAINER_ENV = regex(r"(?:APPTAINER|SINGULARITY)ENV_(?=\w)")
_RUNTIMES = {
    "apptainer": ("exec", "run", "shell"),
    "singularity": ("exec", "run", "shell"),
    "docker": ("run", "exec"),
    "podman": ("run", "exec"),
    "runai": ("submit", "submit-dist", "training", "workload", "exec", "bash"),
}


@dataclass(frozen=True)
class Assignment:
    name: str  # as the rank sees it, APPTAINERENV_ taken off
    value: Word
    line: int
    how: str  # plain, export, prefix (before a command), option (--env, -e, -x)
    spelt: str  # the name as written

    @property
    def text(self) -> str:
        return self.value.text


@dataclass
class Command(Node):
    """A simple command, and where it stands."""

    within: Tuple[str, ...] = ()
    follows: str = ""  # && or || before it

    @functools.cached_property
    def assignments(self) -> Tuple[Assignment, ...]:
        rest = self.words
        found = [_assignment(word, "prefix" if rest else "plain") for word in self.assigned]
        if rest and rest[0].text in DECLARING:
            flag = rest[1].text if len(rest) > 1 else ""
            exported = rest[0].text == "export" or (flag.startswith("-") and "x" in flag)
            how = "export" if exported else "plain"
            found += [_assignment(word, how) for word in rest[1:] if _ASSIGNMENT.match(word.raw)]
        for before, word in zip(rest, rest[1:]):
            if before.text in ("--env", "-e", "-x") and _ASSIGNMENT.match(word.text):
                found.append(_assignment(word, "option"))
            elif word.text.startswith("--env=") and _ASSIGNMENT.match(word.text[6:]):
                found.append(_assignment(word._replace(text=word.text[6:]), "option"))
        return tuple(found)

    @functools.cached_property
    def text(self) -> str:
        return " ".join(word.nested for word in self.shown())[:MAX_TEXT]

    def shown(self) -> Tuple[Word, ...]:
        """Return its words, with `...` for a script inside it, whose commands are listed separately."""
        inner = shell_text(self)
        if not inner:
            return self.words
        return tuple(word._replace(nested="...") if word is inner[0] else word for word in self.words)

    @property
    def name(self) -> str:
        return self.words[0].text.rsplit("/", 1)[-1] if self.words else ""

    @functools.cached_property
    def names(self) -> List[str]:
        """Return its first words without folders."""
        return [word.text.rsplit("/", 1)[-1] for word in self.words[:MAX_WORDS]]


@dataclass(frozen=True)
class Pipeline:
    commands: Tuple[Command, ...]

    @property
    def line(self) -> int:
        return self.commands[0].line

    @functools.cached_property
    def text(self) -> str:
        return " | ".join(command.text for command in self.commands)[:MAX_TEXT]


@dataclass(frozen=True)
class Directive:
    """One option of a #SBATCH line."""

    name: str  # long form: nodes, cpus-per-task
    value: str
    line: int
    text: str


class Extent(NamedTuple):
    nodes: Optional[int]  # None: unknown
    tasks: Optional[int]  # on all of them

    @property
    def tasks_per_node(self) -> Optional[int]:
        return -(-self.tasks // self.nodes) if self.tasks and self.nodes else None


class _Reader(Shell):
    def unset(self, name: str, default: str) -> Optional[bool]:
        """Treat every outside variable as possibly set, so that both branches of a test on it are read."""
        return None

    def parsed(self, text: str, line: int) -> List[Node]:
        """Parse what may be an excerpt."""
        return parse_loosely(Lexer(text, line).run())


def _followed(text: str, line: int) -> Shell:
    """Interpret a text, functions that it never calls included."""
    try:
        return look_everywhere(_Reader({}, bool, None).run(without_marks(text), line))
    except Problem:
        return _Reader({}, bool, None)  # too long to follow: nothing is known


def _decided(each: Assignment, values: Collection[str]) -> Assignment:
    if len(values) != 1 or not each.value.active:
        return each
    (value,) = values
    word = each.value if MARK.search(value) else each.value._replace(text=value, active=())
    return Assignment(each.name, word, each.line, each.how, each.spelt)


@dataclass
class Script:
    text: str
    line: int
    pipelines: List[Pipeline] = field(default_factory=list)
    directives: List[Directive] = field(default_factory=list)
    late: List[int] = field(default_factory=list)  # lines of #SBATCH that come too late to count
    faults: List[Fault] = field(default_factory=list)
    comments: List[Token] = field(default_factory=list)
    cut: int = 0  # the line from which on commands were left out
    python: List[Heredoc] = field(default_factory=list)  # Python inside: heredocs and -c
    files: List[Tuple[str, int]] = field(default_factory=list)  # scripts that it writes with heredocs: text, line

    @functools.cached_property
    def commands(self) -> Tuple[Command, ...]:
        return tuple(command for pipeline in self.pipelines for command in pipeline.commands)

    @functools.cached_property
    def shell(self) -> Shell:
        """The interpreter's state after the script: what each command is started with, as far as the text decides it."""
        return _followed(self.text, self.line)

    @functools.cached_property
    def assignments(self) -> Tuple[Assignment, ...]:
        """All assignments, each with the value that the interpreter found, else as written."""
        known: Dict[Tuple[int, str], Set[str]] = {}
        for event in self.shell.events:
            if isinstance(event.value, str):
                for name in event.writes:
                    known.setdefault((event.line, name), set()).add(event.value)
        found = (each for command in self.commands for each in command.assignments)
        return tuple(_decided(each, known.get((each.line, each.spelt), ())) for each in found)

    def code_lines(self) -> Iterator[Tuple[int, str]]:
        """Return lines without their comments."""
        comments = {token.line: token.text for token in self.comments}
        for number, text in enumerate(self.text.split("\n"), self.line):
            comment = comments.get(number)
            yield number, text[: -len(comment)] if comment and text.endswith(comment) else text

    def option(self, *names: str) -> Optional[Directive]:
        """Return the last #SBATCH option of one of these names."""
        found = [directive for directive in self.directives if directive.name in names]
        return found[-1] if found else None

    @functools.cached_property
    def starts(self) -> List[Start]:
        """Return the programs that the script starts, with what reaches each of them."""
        return starts(self.shell)

    @functools.cached_property
    def started_anywhere(self) -> List[Start]:
        """Return also what the scripts start that it writes."""
        return [*self.starts, *(each for text, line in self.files for each in starts(_followed(text, line)))]

    @property
    def job_nodes(self) -> Optional[int]:
        """Return the number of nodes in the #SBATCH lines; None where they do not say one number."""
        option = self.option("nodes")
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", option.value) if option else None
        return int(found[1]) if found and found[2] in (None, found[1]) else None

    @functools.cached_property
    def nodes(self) -> Optional[int]:
        """Return the number of nodes that it asks for, or that its commands count on; None when nothing says it."""
        option = self.option("nodes")
        if option and re.fullmatch(r"\d{1,6}(-\d{1,6})?", option.value):
            return int(option.value.split("-")[-1])
        said = [each.flags.get("nodes", "") for each in self.started_anywhere]
        said += [
            value
            for each in self.started_anywhere
            for name, value in options(each.words)
            if name == "nnodes" or name == "nodes" and each.words[0] in ("sbatch", "salloc")
        ]
        said += [each.text for each in self.assignments if each.name == "NNODES"]
        return max(filter(None, map(number, said)), default=None)

    @property
    def gpus(self) -> int:
        """Return how many GPUs the job has on each node; 0 where its #SBATCH lines do not say."""
        asked = self.option("gpus-per-node", "gres") or self.option("gpus")
        count = last_number(asked.value) if asked else None
        return (count or 0) // ((self.nodes or 1) if asked and asked.name == "gpus" else 1)

    def extent(self, start: Start) -> Extent:
        """Return on how many nodes a program starts, and as how many tasks."""
        if not start.step:
            return Extent(1, 1)
        found, by_gpus = self.extent_of(start.flags, self.job_nodes), {"ntasks-per-gpu", "gpus-per-task"}
        counted = start.flags.get("ntasks") or not self.option("ntasks-per-node") and self.option("ntasks")
        by_gpus &= {*start.flags, *(each.name for each in self.directives)}
        return Extent(found.nodes, None) if by_gpus and not counted else found

    def likely(self, start: Start) -> Extent:
        """Return the same for a script that does not say its nodes: one node, or as many as its launchers are told."""
        return self.extent_of(start.flags, self.nodes or 1)

    def extent_of(self, flags: Mapping[str, str], has: Optional[int]) -> Extent:
        """Return the nodes and tasks of a step with these options in a job of so many nodes."""
        nodes = _counted(flags["nodes"], has) if "nodes" in flags else has
        per_node, total = flags.get("ntasks-per-node", ""), flags.get("ntasks", "")
        if not per_node and re.sub(r"[${}]", "", total) in ("", "SLURM_NTASKS", "SLURM_NPROCS"):
            said, all_tasks = self.option("ntasks-per-node"), self.option("ntasks")
            per_node, total = said.value if said else "", all_tasks.value if all_tasks and not said else ""
        if total:
            tasks = _counted(total, has)
        else:
            each_node = number(per_node) if per_node else 1
            tasks = nodes * each_node if nodes and each_node else None
        return Extent(min(nodes, tasks) if nodes and tasks else nodes, tasks)


def number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else None


def last_number(text: str) -> Optional[int]:
    """Return the number of gpu:a100:4."""
    return number(text.rpartition(":")[2])


def _counted(text: str, nodes: Optional[int]) -> Optional[int]:
    return nodes if re.sub(r"[${}]", "", text) in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES") else number(text)


_OF_SBATCH = {
    "B": "extra-node-info", "F": "nodefile", "H": "hold", "L": "licenses", "M": "clusters", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "W": "wait", "b": "begin", "i": "input", "k": "no-kill", "m": "distribution", "s": "oversubscribe",
    "v": "verbose",
}  # fmt: skip


def options(words: Sequence[str]) -> Iterator[Tuple[str, str]]:
    """Parse `--name=value`, `--name value`, `-N 2`, `-N2` into (long name, value); underscores as dashes."""
    for place, word in enumerate(words):
        after = words[place + 1] if place + 1 < len(words) else ""
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            yield LONG.get(name, name), value if equals else ("" if after.startswith("-") else after)
        elif len(word) >= 2 and word[0] == "-" and word[1] in LONG:
            yield LONG[word[1]], word[2:].lstrip("=") or after


def read(text: str, line: int = 1) -> Script:
    lines = text.split("\n", MAX_LINES)
    script = Script("\n".join(lines[:MAX_LINES]), line, cut=line + MAX_LINES if lines[MAX_LINES:] else 0)
    _read(script, script.text, line, 0, (), 0)
    script.faults.sort(key=lambda fault: (fault.line, fault.column))
    return script


def _read(script: Script, text: str, line: int, column: int, within: Tuple[str, ...], depth: int) -> None:
    lexer = Lexer(text, line, column).run()
    script.faults += lexer.faults
    if not within:
        script.comments = [token for token in lexer.tokens if token.kind == "comment"]
        _directives(script, lexer.tokens)
    for pipeline in _pipelines(parse_loosely(lexer), within):
        if len(script.pipelines) >= MAX_COMMANDS:
            script.cut = script.cut or pipeline.line
            return
        script.pipelines.append(pipeline)
        if depth < MAX_DEPTH:
            for command in pipeline.commands:
                _descend(script, command, depth + 1)


def _descend(script: Script, command: Command, depth: int) -> None:
    words = [*(each.value for each in command.assignments if each.how in ("plain", "prefix")), *command.words]
    for word in words:
        for part in word.parts:
            _read(script, part.text, part.line, part.column, (*command.within, SUBSTITUTION), depth)
    found = shell_text(command)
    if found:
        word, where = found
        quoted = word.raw[:1] in "'\""
        _read(script, word.nested, word.line, word.column + quoted, (*command.within, *where), depth)
    names = command.names
    for place, name in enumerate(names[:-2]):
        if re.fullmatch(r"python[\d.]*", name) and names[place + 1] == "-c":
            word = command.words[place + 2]
            script.python.append(Heredoc(word.nested, word.line, True, command.line))
    for heredoc in command.heredocs:
        target = " ".join(token.word.text for token in command.redirects if token.word and token.text[0] == ">")
        text = heredoc.text if heredoc.literal else heredoc.text.replace("\\$", "$").replace("\\`", "`")
        if any(re.fullmatch(r"python[\d.]*", name) for name in names) or target.endswith(".py"):
            script.python.append(Heredoc(text, heredoc.line, True, heredoc.owner))
        elif set(SHELLS) & set(names) or re.search(r"\.(sh|bash|sbatch|slurm)$", target) or "sbatch" in names:
            script.files.append((text, heredoc.line))
            _read(script, text, heredoc.line, 0, (*command.within, FILE), depth)


def runtime_at(command: Command) -> int:
    """Return where in its words a container begins; -1 when there is none."""
    names = command.names
    for place, name in enumerate(names):
        if name == "csub.py" or (name in _RUNTIMES and set(names[place + 1 :]) & set(_RUNTIMES[name])):
            return place
        if name.startswith("--container-image"):
            return place
    return -1


def shell_text(command: Command) -> Optional[Tuple[Word, Tuple[str, ...]]]:
    """Return the script in `bash -c '...'` (or what csub.py is told to run), and where that will run."""
    names = command.names
    container = runtime_at(command)
    for place, name in enumerate(names[:-1]):
        at, is_text = read_by_shell(names[place:]) if name in SHELLS else (0, False)
        flag = next((flag for flag in ("-c", "--command") if name == "csub.py" and flag in names[place:]), "")
        if flag:
            at, is_text = names[place:].index(flag) + 1, True
        if is_text and names[place + at :]:
            where = [TASK] if set(STARTERS) & set(names[:place]) or container >= 0 and "run" in names[container] else []
            where += [CONTAINER] if 0 <= container <= place else []
            return command.words[place + at], tuple(where) or (FILE,)
    return None


def _in_full(found: re.Match[str]) -> str:
    name = _OF_SBATCH.get(found[1])
    return f"--{name}{'=' * bool(found[2])}" if name else found[0]


def _directives(script: Script, tokens: Sequence[Token]) -> None:
    begun = False
    for token in tokens:
        if token.kind == "comment":
            if not token.text.startswith("#SBATCH"):
                continue
            if begun:
                script.late.append(token.line)
                continue
            words = re.sub(r"\s#.*", "", token.text[len("#SBATCH") :]).split()
            for name, value in options([re.sub(r"\A-([A-Za-z])(?!-)=?(?=(.?))", _in_full, word) for word in words]):
                value = re.sub(r"\\(.)", r"\1", value.strip("\"'"))  # sbatch takes a backslash as the shell does
                script.directives.append(Directive(name, value, token.line, token.text))
        elif token.text != "\n":
            begun = True


def _pipelines(nodes: Sequence[Node], within: Tuple[str, ...], follows: str = "") -> Iterator[Pipeline]:
    for node in nodes:
        if node.kind == "simple":
            yield Pipeline((_command(node, within, follows),))
        elif node.kind == "list":
            node.bodies[-1][0].background |= node.background
            for joint, body in zip((follows, *node.joints), node.bodies):
                yield from _pipelines(body, within, joint)
        elif node.kind == "pipeline":
            parts = [part for body in node.bodies for part in body]
            parts[-1].background |= node.background
            yield from _pipelines([part for part in parts if part.kind != "simple"], within)
            commands = tuple(_command(part, within, follows) for part in parts if part.kind == "simple")
            if commands:
                yield Pipeline(commands)
        else:
            if node.kind == "for" and node.words:
                name, *items = node.words
                head = (name._replace(text="for", raw="for"), name, name._replace(text="in", raw="in"), *items)
                yield Pipeline((Command("simple", node.line, node.start, node.end, head, within=within),))
            for body in node.bodies:
                yield from _pipelines(body, within)
            if node.redirects:
                first = node.redirects[0]
                command = Command("simple", first.line, first.start, node.end, redirects=node.redirects, within=within)
                yield Pipeline((command,))


def _command(node: Node, within: Tuple[str, ...], follows: str = "") -> Command:
    line = (node.words[0] if node.words else node).line
    return Command(**{**vars(node), "line": line, "within": within, "follows": follows})


def _assignment(word: Word, how: str) -> Assignment:
    found = _ASSIGNMENT.match(word.text)
    name = found.group(1) if found else ""
    value = word.text[found.end() :] if found else ""
    cut = len(found.group()) if found and word.raw.startswith(found.group()) else 0
    return Assignment(
        _CONTAINER_ENV.sub("", name, 1), word._replace(text=value, raw=word.raw[cut:]), word.line, how, name
    )


_FOREIGN = regex(r"#(?:PBS|BSUB|COBALT|PJM|\$) +-?\S.*")  # PBS, LSF, Cobalt, Fujitsu, Grid Engine


def foreign_directives(text: str) -> List[Tuple[int, str]]:
    """Return lines for another scheduler, with their numbers."""
    return [(i, line) for i, line in enumerate(text.splitlines(), 1) if _FOREIGN.fullmatch(line.rstrip())]
