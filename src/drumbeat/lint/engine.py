"""Text and rules in, Findings and edits out. Pure."""

from __future__ import annotations

import difflib
import re
import sys
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.redact import redact
from drumbeat.base.regex import regex
from drumbeat.base.text import count
from drumbeat.commands.script import MAX_TEXT, Command, Script, read
from drumbeat.findings.model import Evidence, Finding
from drumbeat.lint import checks_launch, checks_ranks, checks_shell, pages, python_program
from drumbeat.lint.context import LONGEST_FIXED, Context, Edit, Hit, Rule, rules
from drumbeat.lint.pages import COMMANDS, SCRIPTS, SHELL, Block, blocks, is_document

# Words for what was checked in a text; none if lint can read nothing in it.


_RESERVED = frozenset(["if", "then", "else", "fi", "for", "while", "do", "done", "case", "esac", "time"])
_BUILTINS = frozenset(
    ["[", "[[", ":", "true", "false", "test", "eval", "local", "declare", "readonly", "exit", "shift", "return"]
)
_KNOWN = (frozenset(COMMANDS.split()) | _BUILTINS) - _RESERVED
_OPTION = regex(r"--?[A-Za-z]")
_LEAST = 4  # one command in so many must be known, or a text that nothing calls a script is none


def in_page(pieces: int) -> str:
    return f"{count(pieces, 'piece')} of code in a page" if pieces else "a page without shell or Python code"


def in_python(text: str) -> str:
    lines = sum(1 for line in text.split("\n") if line.strip())
    if not lines:
        return ""
    words = f"{count(lines, 'line')} of Python"
    if python_program.parse(text, 1, True) is None:
        version = ".".join(map(str, sys.version_info[:2]))
        words += f", each by itself, because Python {version} cannot parse the file"
    return words


def in_shell(script: Script, name: str) -> str:
    """Return a description of the script if the text is shell, else ''. A name or a first line decides; otherwise enough of its
    commands must be known."""
    outer = [command for command in script.commands if not command.within]
    directives = len({directive.line for directive in script.directives} | set(script.late))
    if not outer and not directives:
        return ""
    called = name.endswith(SCRIPTS) or script.text.startswith("#!") or directives
    known = sum(map(_known, outer))
    if not called and not (known and known * _LEAST >= len(outer)):
        return ""
    words = [count(len(outer), "command")] if outer else []
    words += [count(directives, "#SBATCH line")] if directives else []
    return " and ".join(words)


def _known(command: Command) -> bool:
    if command.assignments or not command.words:
        return True
    first = command.words[0].text
    options = any(_OPTION.match(word.text) for word in command.words[1:])
    return command.name in _KNOWN or "/" in first or first.startswith("$") or options


CHECKS = {**checks_shell.CHECKS, **checks_launch.CHECKS, **checks_ranks.CHECKS}
MAX_SHOWN = 160
Words = Dict[str, str]
Read = Callable[[str], str]


class Review(NamedTuple):
    text: str  # as it was judged: lines end in \n
    document: bool
    findings: Tuple[Finding, ...]
    edits: Tuple[Edit, ...]
    looked_at: str  # in words; empty when there is nothing here that lint reads


def lint(text: str, name: str = "-", read_file: Read = lambda path: "") -> Review:
    """Check a script, a page with code in it, or a pasted command. `read_file` gives the text of a program that it starts."""
    document = is_document(text, name)
    returns = "\r\n" in text and not document
    text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    found: Dict[Tuple[str, int], Tuple[Rule, Hit]] = {}  # one finding per rule and line
    edits: List[Edit] = []
    pieces = [(block, read(block.text, block.line) if block.kind == SHELL else None) for block in blocks(text, name)]
    seen = _looked_at(pieces, document, name)
    for block, script in pieces if seen else []:
        for rule, hit in _judge(block, script, text, not document, returns, read_file):
            found.setdefault((rule.id, hit.line), (rule, hit))
            if rule.fixes:
                edits += [_moved(edit, block) for edit in hit.edits]
    ordered = sorted(found.values(), key=lambda pair: pair[1].line)
    findings = tuple(_finding(rule, hit, lines, name) for rule, hit in ordered)
    return Review(text, document, findings, tuple(edits), seen)


def _looked_at(pieces: Sequence[Tuple[Block, Optional[Script]]], document: bool, name: str) -> str:
    if document:
        return in_page(len(pieces))
    block, script = pieces[0]
    return in_shell(script, name) if script else in_python(block.text)


def _judge(
    block: Block, script: Optional[Script], around: str, whole: bool, returns: bool, read_file: Read
) -> Iterator[Tuple[Rule, Hit]]:
    if script is None:
        yield from _python(block.text, block.line, whole, read_file)
        return
    context = Context(script, whole, returns, around, {}, read_file)
    for rule in rules():
        if rule.python or (rule.whole and not whole) or not _wanted(rule, block.text):
            continue
        if rule.check in CHECKS:
            for hit in CHECKS[rule.check](context._replace(settings=rule.settings)):
                yield rule, hit
        elif not rule.check:
            for line, words in _matches(rule, script):
                yield rule, Hit(line, words)
    for piece in script.python:
        yield from _python(piece.text, piece.line, False, read_file)


def _wanted(rule: Rule, text: str) -> bool:
    if rule.where and not re.search(rule.where, text):
        return False
    return not (rule.without and re.search(rule.without, text))


def _python(text: str, first: int, whole: bool, read_file: Read) -> Iterator[Tuple[Rule, Hit]]:
    code = pages.lines(text, first)
    program = python_program.parse(text, first, whole, read_file)
    joined = "\n".join(line for _, line in code)
    for rule in rules():
        if rule.check in python_program.CHECKS:
            for hit in python_program.CHECKS[rule.check](program) if program else ():
                yield rule, hit
        elif rule.python and _wanted(rule, joined):
            for line, source in code:
                words = _match(rule, rule.python, source)
                if words is not None:
                    yield rule, Hit(line, words)


def _matches(rule: Rule, script: Script) -> Iterator[Tuple[int, Words]]:
    if rule.command or rule.pipeline:
        groups = (
            [((each,), each.text) for each in script.commands]
            if rule.command
            else [(each.commands, each.text) for each in script.pipelines]
        )
        for commands, text in groups:
            found = re.search(rule.command or rule.pipeline, text)
            if found and not (rule.unless and re.search(rule.unless, text)):
                yield _line_at(commands, found.end()), _named(found)
        return
    subjects: Iterator[Tuple[int, str, Optional[str]]]
    if rule.assign:
        subjects = ((each.line, each.name, each.text[:MAX_TEXT]) for each in script.assignments)
    elif rule.sbatch:
        subjects = ((each.line, each.name, each.value) for each in script.directives)
    else:
        printed = re.compile(r"\s*(?:echo|printf)\s")
        subjects = ((line, text, None) for line, text in script.code_lines() if not printed.match(text))
    for line, text, value in subjects:
        words = _match(rule, rule.assign or rule.sbatch or rule.line, text, value)
        if words is not None:
            yield line, words


def _line_at(commands: Sequence[Command], end: int) -> int:
    """Return the line of the word where a match ends: a command often goes over many lines."""
    at, line = 0, commands[0].line
    for command in commands:
        for word in command.shown():
            if at >= end:
                return line
            at, line = at + len(word.nested) + 1, word.line
        at += 2  # the bar between two commands
    return line


def _named(found: re.Match[str]) -> Words:
    return {name: word or "" for name, word in found.groupdict().items()}


def _match(rule: Rule, pattern: str, text: str, value: Optional[str] = None) -> Optional[Words]:
    found = re.search(pattern, text[:MAX_TEXT])
    if not found:
        return None
    words = {"name": text[:80], "value": (value or "")[:80], **_named(found)}
    if rule.value:
        inner = re.search(rule.value, value or "")
        if not inner:
            return None
        words.update(_named(inner))
    if rule.unless and re.search(rule.unless, f"{text}={value}" if value is not None else text):
        return None
    return words


def _moved(edit: Edit, block: Block) -> Edit:
    """Move columns: a page's code is indented, and columns count from the page's own edge."""
    place = edit.line - block.line
    indent = block.indents[place] if 0 <= place < len(block.indents) else 0
    return edit._replace(column=edit.column + indent)


def _finding(rule: Rule, hit: Hit, lines: Sequence[str], name: str) -> Finding:
    shown = lines[hit.line - 1].strip() if 0 < hit.line <= len(lines) else ""
    return Finding(
        code=rule.id,
        severity=hit.severity or rule.severity,
        title=_filled(rule.title, hit),
        cause=_filled(rule.reason, hit),
        fix=_filled(rule.fix, hit),
        evidence=(Evidence(redact(shown)[:MAX_SHOWN], name, hit.line),),
    )


def _filled(text: str, hit: Hit) -> str:
    for name, word in hit.words.items():
        text = text.replace("{" + name + "}", word)
    return text


__all__ = ["CHECKS", "SHELL", "Review", "lint"]


# Edits into a new text: only what is safe, and only where the old text still stands as it was judged.


def apply_edits(review: Review) -> str:
    """Return the text with its edits made; line ends are \\n."""
    lines = review.text.split("\n")
    for edit in sorted(set(review.edits), key=lambda edit: (edit.line, edit.column), reverse=True):
        place = edit.line - 1
        if 0 <= place < len(lines) and (edit.old or edit.new):
            lines[place] = _changed(lines[place], edit)
    above = _insertions(review.edits)
    fixed: List[str] = []
    for place, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        fixed += [indent + text for text in above.get(place, ())]
        fixed.append(line)
    return "\n".join(fixed)


def _changed(line: str, edit: Edit) -> str:
    if len(line) > LONGEST_FIXED:
        return line
    end = edit.column + len(edit.old)
    if line[edit.column : end] == edit.old:
        return line[: edit.column] + edit.new + line[end:]
    if (
        edit.old and line.count(edit.old) == 1
    ):  # inside quotes with escapes columns shift; the text itself is proof enough
        return line.replace(edit.old, edit.new)
    return line


def _insertions(edits: Sequence[Edit]) -> Dict[int, List[str]]:
    wanted: Dict[int, List[str]] = {}
    for line, text in dict.fromkeys(edit.above for edit in edits if edit.above):
        wanted.setdefault(line - 1, []).append(text)
    return wanted


def difference(before: str, after: str, name: str) -> Tuple[str, ...]:
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), name, name + " (fixed)", lineterm="", n=1)
    return tuple(lines)
