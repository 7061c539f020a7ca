"""What a shell script runs in the place of a launcher that failed: `torchrun train.py || python train.py`, or
`if ! torchrun train.py; then python train.py; fi`.

A script's exit code 0 says little in general: it may be that of a pipe into tee, or of a last echo. It proves that the
fallback ended well where one of these is the last thing that the script does, nothing ends the script before, and the
fallback is a program that trains; and only then.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from typing import List, Optional, Sequence

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.find import Found, find_launcher, python_module

_LAST_EXIT = regex(r"exit(?:[ \t]+\"?\$\?\"?)?")
_ENDS_EARLY = regex(r"\b(?:exit|return|exec)\b")
_COMMENT = regex(r"(?:^|\s)#")
_OPERATORS = frozenset(("&&", "||", "|", "|&", "&", ";", ";;", "(", ")", "{", "}", "!"))
_COMPOUND = frozenset(
    ("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "time", "exec")
)
_PYTHON = regex(r"python(?:\d+(?:\.\d+)*)?")
_PYTHON_FLAGS = regex(r"-[uOBEsSIqvb]+")
_NO_TRAINING = frozenset(("pip", "ensurepip", "venv", "virtualenv"))  # modules
_CALLS_TO_TRAIN = regex(r"train|pretrain|finetune|fit|backward|run_path|run_module")
_LONGEST_TEXT = 4000
_ASKS = frozenset(("-h", "--help", "--version"))


def fallback(text: str, launcher: str) -> str:
    """What the last statement of this script runs where `launcher` (its first word) has failed; '' where the script's exit
    code 0 does not prove that it ended well."""
    if "<<" in text or re.search(r"\btrap\b", text):
        return ""  # lines of a here-document are no commands; a trap may end the script in another way
    lines = [line for line in _logical_lines(text) if line and not line.startswith("#")]
    if lines and _LAST_EXIT.fullmatch(lines[-1]):
        lines.pop()
    if not lines or any(_ENDS_EARLY.search(line) for line in lines):
        return ""  # the last statement may not have been reached
    if lines[-1] == "}":
        return _of_group(lines[:-1], launcher)
    if re.search(r"(?:^|[\s;])fi$", lines[-1]):
        return _of_if(lines, launcher)
    left, _, right = lines[-1].partition("||")
    return right.strip() if _decides([*lines[:-1], left], launcher) and _trains(right) else ""


def _of_group(lines: Sequence[str], launcher: str) -> str:
    """`LAUNCHER || {`, commands in lines of their own, and `}`: the last command's exit code is the group's."""
    heads = [number for number, line in enumerate(lines) if re.search(r"\|\|\s*\{$", line)]
    if not heads:
        return ""
    body = lines[heads[-1] + 1 :]
    before = [*lines[: heads[-1]], lines[heads[-1]].partition("||")[0]]
    return body[-1] if _are_simple(body) and _decides(before, launcher) and _trains(body[-1]) else ""


def _of_if(lines: Sequence[str], launcher: str) -> str:
    """`if ! LAUNCHER; then`, commands, `fi`; or `if LAUNCHER; then`, commands, `else`, commands, `fi`."""
    heads = [number for number, line in enumerate(lines) if re.match(r"if\s", line)]
    if not heads:
        return ""
    text = re.sub(r"\s*(?:;|\n)\s*(then|else|fi)\b", r"\n\1", "\n".join(lines[heads[-1] :]))
    text = re.sub(r"^(then|else)[ \t]+", r"\1\n", text, flags=re.M)
    parts = [part.strip() for part in re.split(r"^(?:then|else|fi)$", text, flags=re.M)]  # condition, branches, nothing
    negated = re.match(r"if\s+!\s", parts[0]) is not None
    if len(parts) != (3 if negated else 4) or "\n" in parts[0] or (negated and "&&" in parts[0]):
        return ""
    before = [*lines[: heads[-1]], re.sub(r"^if\s+(?:!\s+)?", "", parts[0])]
    branches = [[line.strip() for line in part.split("\n")] for part in parts[1:-1]]
    last = branches[-1][-1]
    return last if all(map(_are_simple, branches)) and _decides(before, launcher) and _trains(last) else ""


def _are_simple(commands: Sequence[str]) -> bool:
    """Whether each of these lines is a whole statement, and none is a compound one."""
    words = [_words(line) for line in commands]
    return bool(words) and all(
        each and not _COMPOUND & set(each) and not {"{", "}", "(", ")"} & set(each) for each in words
    )


def _logical_lines(text: str) -> List[str]:
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"(\|\||&&)[ \t]*\n", r"\1 ", text)
    return [line.strip() for line in text.split("\n")]


def _words(command: str) -> List[str]:
    """Words and operators; nothing where a quote is open: then the line is not a whole statement."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []


def _decides(lines: Sequence[str], launcher: str) -> bool:
    """Whether the launcher is the last command of the last of these lines, so that its exit code decides about the other side
    of `||`, and is named nowhere before: otherwise another one may be the one that failed."""
    words = _words(lines[-1])
    if not words or _COMMENT.search(lines[-1]) or _COMPOUND & set(words) or set(words) & (_OPERATORS - {"&&"}):
        return False
    if len(re.findall(rf"(?<![\w-]){re.escape(launcher)}(?![\w-])", "\n".join(lines))) != 1:
        return False
    last = words[len(words) - words[::-1].index("&&") :] if "&&" in words else words
    found = _launcher(_without_assignments(last))
    return found is not None and os.path.basename(found.program) == launcher


def _trains(right: str) -> bool:
    """Whether this is a single command that is known to train: a Python program, or a launcher. Any other program behind
    `||` may only tell of the failure, or clean up after it."""
    words = _words(right)
    if not words or _COMMENT.search(right) or set(words) & (_OPERATORS - {"&&"}) or _COMPOUND & set(words):
        return False
    words = _without_assignments(words[: words.index("&&")] if "&&" in words else words)
    if not words or _ASKS & set(words):
        return False
    found = _launcher(words)
    if found is not None:
        return not found.prefix and bool(found.script)
    return _PYTHON.fullmatch(os.path.basename(words[0])) is not None and _names_program(words)


def _names_program(words: Sequence[str]) -> bool:
    """Whether this call of an interpreter names a script or a module, or gives it a text that trains."""
    module = python_module(words)[1]
    if module:
        return module.partition(".")[0] not in _NO_TRAINING
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        if rest[0] == "-c":
            return len(rest) > 1 and _text_trains(rest[1])
        if rest[0] in ("-W", "-X"):
            del rest[0]
        elif not _PYTHON_FLAGS.fullmatch(rest[0]):
            return False
        del rest[:1]
    return bool(rest) and (rest[0].endswith(".py") or "$" in rest[0])


def _text_trains(text: str) -> bool:
    """Whether a Python text calls what trains, by its name: `app.train()`, `model.fit(x)`, `loss.backward()`. Any other text
    may only tell of the failure, or clean up after it."""
    try:
        tree = ast.parse(text) if len(text) <= _LONGEST_TEXT else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # the shell fills something in, say
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
    return any(_CALLS_TO_TRAIN.fullmatch(name) for name in names)


def _without_assignments(words: Sequence[str]) -> List[str]:
    words = list(words)
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        del words[0]
    return words


def _launcher(words: Sequence[str]) -> Optional[Found]:
    try:
        return find_launcher(words)
    except Problem:
        return None
