"""A small interpreter of shell scripts. It works out what a script does, as far as the text decides it, and runs nothing."""

from __future__ import annotations

import re
from typing import List, Optional, TypeVar

from drumbeat.base.regex import regex
from drumbeat.commands.builtins import BUILTINS
from drumbeat.commands.control import COMPOUND, call
from drumbeat.commands.events import MAX_DEPTH
from drumbeat.commands.expand import calculated
from drumbeat.commands.state import ShellState
from drumbeat.commands.syntax import Node, names_read, parse
from drumbeat.commands.values import HEAD, HOSTS, JOB, MARK, ONCE, SUBMIT, TASK, Unknown

_ENVIRONMENTS = regex(
    r"(?:source|\.)\s+(?:\$\([^()]*\)|\S)*?(?:bin/activate|conda\.sh|/etc/profile\S*|modules?(?:/\S*)?/init/\S+|\.bashrc)[\"']?(?:\s|$)"
    r"|(?:conda|mamba|micromamba|pyenv|spack|module|ml|source\s+activate)\b|eval\s.*(?:conda|mamba|spack|pyenv)"
)
_PRINTED = r"(?:[^%\\]|%0?\d*[sd])+"  # formats of printf that are followed


class Shell(ShellState):
    """A shell with the commands and substitutions of bash."""

    builtins, compound, environments = BUILTINS, COMPOUND, _ENVIRONMENTS

    def substitute(self, text: str) -> str:
        return _substitute(self, text)

    def call(self, name: str, words: List[str], node: Node) -> Optional[bool]:
        return call(self, name, words, node)


S = TypeVar("S", bound=Shell)


def look_everywhere(shell: S) -> S:
    """Collect also what the functions start that a script never calls."""
    shell.arguments = None
    for body, source in list(shell.functions.values()):
        shell.text = source
        if not any(each.line >= body.line and each.text in source[body.start : body.end] for each in shell.started):
            shell.look_inside([body])
    return shell


def _substitute(shell: ShellState, text: str) -> str:
    """Return the text that `$(...)` prints if it can be worked out, else a mark."""
    written = f"$({text})"
    if shell.depth > MAX_DEPTH:
        return shell.marks.mark(Unknown(written, JOB, names_read(text), False))
    nodes = parse(text)
    inner = shell.apart(certain=False)
    inner.text, inner.depth = text, shell.depth + 1
    if len(nodes) == 1 and nodes[0].kind == "simple" and not nodes[0].assigned:
        words = [each for word in nodes[0].words for each in inner.words.fields(word.raw)]
        known = _simple_output(shell, words, nodes[0], inner)
        if known is not None:
            return known.rstrip("\n")
    if not shell.task:
        found = shell.host_of(text, nodes, inner)
        if found:
            return found
    names = {word.text.rsplit("/", 1)[-1] for node in nodes for each in node.walk() for word in each.words[:1]}
    each_time = names & {"date", "mktemp", "uuidgen", "shuf", "openssl"} or "/urandom" in text
    reads = names_read(text)
    values = "".join("".join(value) for value in (shell.lookup(name) or "" for name in reads))
    own = {"hostname", "nproc", "nvidia-smi", "rocm-smi", "taskset"} & names
    kind = ONCE if each_time else TASK if own else shell.marks.kind(values) or JOB
    kind = JOB if kind in (SUBMIT, HEAD, HOSTS) else kind
    return shell.marks.mark(Unknown(written, kind, reads, False))


def _simple_output(shell: ShellState, words: List[str], node: Node, inner: ShellState) -> Optional[str]:
    name = words[0].rsplit("/", 1)[-1] if words else ""
    decided = not any(shell.marks.kind(word) for word in words)
    if name == "echo" and not node.redirects:
        if "-e" in words[:3] and "\\" in "".join(words):
            return None
        return " ".join(word for word in words[1:] if word not in ("-n", "-e"))
    if name == "printf" and decided and not node.redirects and re.fullmatch(_PRINTED, "".join(words[1:2])):
        places = [each[-1] for each in re.findall(r"%0?\d*[sd]", words[1])]
        given = [int(each) if kind == "d" and each.isdigit() else each for kind, each in zip(places, words[2:])]
        sure = places == ["s" if isinstance(each, str) else "d" for each in given] and len(words) == 2 + len(places)
        return words[1] % tuple(given) if sure else None
    if name == "cat" and node.heredocs and len(words) == 1:
        return node.heredocs[0].text if node.heredocs[0].literal else inner.words.heredoc(node.heredocs[0].text)
    if name == "pwd":
        return shell.cwd or shell.mark("${PWD}", SUBMIT)
    if name in ("whoami",) or words[:2] == ["id", "-un"]:
        return shell.mark("${USER}", SUBMIT)
    if name == "expr" and decided:
        number = calculated(" ".join(words[1:]))
        return None if number is None else str(number)
    if name == "seq" and decided and all(word.isdigit() for word in words[1:]) and len(words) in (2, 3):
        first, last = (1, int(words[1])) if len(words) == 2 else (int(words[1]), int(words[2]))
        return "\n".join(map(str, range(first, min(last, first + 1000) + 1)))
    if name in ("dirname", "basename") and len(words) == 2 and words[1]:
        place = words[1].rstrip("/")
        if not decided and "/" not in MARK.sub("", place):
            return None
        return (place.rpartition("/")[0] or ".") if name == "dirname" else place.rpartition("/")[2]
    return None
