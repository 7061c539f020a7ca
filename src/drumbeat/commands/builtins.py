"""The shell's builtins. Each returns true if it succeeds, false if it fails, None if unknown."""

from __future__ import annotations

import copy
import fnmatch
import re
from typing import Callable, Dict, List, Optional, Tuple

from drumbeat.commands.control import arithmetic
from drumbeat.commands.events import Event, Exit, Next, Return, Trap, Unclear
from drumbeat.commands.expand import calculated
from drumbeat.commands.state import ARGUMENTS, LATE, ShellState
from drumbeat.commands.syntax import DECLARING, Node, assignment, into_file, names_read, parse
from drumbeat.commands.values import HEAD, JOB, MARK, SUBMIT, outside_quotes, whole_marks


def _declare(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    flags = "".join(word.raw for word in node.words[1:] if word.raw.startswith("-"))
    exports = words[0] == "export" or "x" in flags
    if words[0] == "export" and "n" in flags:
        exports = False
    if "A" in flags:  # a mapping
        for name in re.findall(r"^[A-Za-z_]\w*", "\n".join(word.raw for word in node.words[1:]), re.M):
            shell.leave_list(name, text, node.line)
        return True
    if "f" in flags:
        called = frozenset(f"{name}()" for name in words[1:])
        shell.events.append(Event("shell", node.line, text, called, soft=True))
        shell.exports = shell.exports | called
        return True
    names = {match[0] for match in (re.match(r"[A-Za-z_]\w*", word.text) for word in node.words[1:]) if match}
    if shell.locals is not None and words[0] in ("local", "declare", "typeset") and "g" not in flags:
        for name in names:
            shell.locals.setdefault(name, (shell.variables.get(name), name in shell.exports))
    for word in node.words[1:]:
        parts = assignment(word)
        if parts and "i" in flags and parts[3][:1] not in ("", "("):  # a number
            parts = (*parts[:3], f"$(({parts[3]}))")
        if parts:
            shell.assign_parts(parts, node.line, exports)
            if exports:
                shell.variables[parts[0]] = shell.variables[parts[0]]._replace(maybe=False)
            continue
        for name in shell.words.fields(word.raw) if not word.raw.startswith("-") else ():
            found = assignment(word._replace(raw=name)) if "=" in name else None
            if found:
                shell.assign(found[0], found[3], shell.marks.quoted(found[3]), node.line, exports)
            elif name in shell.variables and words[0] == "export" and not exports:
                shell.variables[name] = shell.variables[name]._replace(exported=False)
            elif re.fullmatch(r"[A-Za-z_]\w*", name) and exports:
                old = shell.variables.get(name)
                shell.exports = shell.exports | {name}
                if old:
                    shell.variables[name] = old._replace(exported=True, maybe=False)
                    shell.events.append(
                        Event("export", node.line, f"export {name}", frozenset((name,)), frozenset((name,)))
                    )
    return True


def _unset_builtin(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    for name in words[1:]:
        if name.startswith("-"):
            continue
        if "[" in name:
            shell.leave_list(name.partition("[")[0], text, node.line)
            continue
        shell.hidden |= {name}
        kind = "shell" if shell.variables.pop(name, None) is None else "assign"
        shell.events.append(Event(kind, node.line, f"unset {name}", frozenset(), frozenset((name,)), soft=True))
    return True


def _cd(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    place = words[1] if len(words) > 1 else shell.mark("${HOME}", SUBMIT)
    unsure = (
        shell.cwd and MARK.fullmatch(place) and shell.marks.resolved(place) not in ("${HOME}", "${PWD}")
    )  # empty, relative
    if place[:1] in ("-", "+") or words[0] == "popd" or words == ["pushd"] or unsure:
        shell.cwd = shell.mark("${PWD}", JOB, False)
    else:
        base = shell.cwd or shell.mark("${PWD}", SUBMIT)
        absolute = place.startswith("/") or MARK.match(place)
        if whole_marks(place) in (whole_marks(base), ".", "./"):  # it is there
            shell.events.append(Event("print", node.line, text))
            return True
        shell.cwd = place if absolute else f"{base}/{place}"
    shell.events.append(Event("cd", node.line, text, names_read(text), words=tuple(words)))
    return True


def _set_builtin(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    rest = shell.set_options(words[1:])
    if "--" in rest:
        shell.arguments = rest[rest.index("--") + 1 :]
        shell.moved_arguments(text, node.line)
        if any(map(outside_quotes, MARK.findall("".join(shell.arguments)))):  # how many, only the job knows
            shell.late_arguments(text, '"$@"', node.line)
    return True


def _shift(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    if shell.arguments is LATE:
        by = words[1] if len(words) > 1 else "1"
        shell.late_arguments(text, f'"${{{ARGUMENTS}[@]:{by}}}"', node.line)
        return True
    count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    if shell.arguments is None:
        shell.shifted += count
    else:
        del shell.arguments[:count]
    shell.moved_arguments(f"shift {count}", node.line)
    return True


def _source(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    soft = bool(shell.environments.match(text))
    shell.foreign = True
    shell.events.append(Event("shell", node.line, text, names_read(text), words=tuple(words), soft=soft))
    shell.sourced(shell.events[-1])
    return True if soft else None


def _eval(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    said = " ".join(words[1:])
    if MARK.match(said) and shell.marks.get(said[0]).text.startswith("$("):
        return _source(shell, words, node, text)
    if re.match(r"set\s+--", said) and MARK.search(said):
        shell.late_arguments(text, '"$@"', node.line)
        return True
    outer, shell.text = shell.text, said
    try:
        return shell.body(parse(shell.text, node.line))
    finally:
        shell.text = outer


def _exec(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    if len(node.words) > 1 and not node.words[1].raw.startswith("-"):
        rest = copy.copy(node)
        rest.words = node.words[1:]
        raise Exit(shell.simple(rest))
    return True


def _exit(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    if shell.certain:
        shell.events.append(Event("print", node.line, text))
        shell.ended_at = node.line
    code = "".join(words[1:2])
    if code.isdigit():
        shell.code = int(code) % 256
    result = shell.last if not code else shell.code == 0 if code.isdigit() else None
    raise (Return if words[0] == "return" else Exit)(result)


def _leave_loop(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    if len(words) > 1 and words[1] != "1":
        raise Unclear  # of an outer loop
    raise Next(words[0] == "continue")


def _let(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    inside = copy.copy(node)
    inside.words = (node.words[0]._replace(raw=",".join(words[1:])),)
    return arithmetic(shell, inside)


def _read(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    shell.keep(node)
    shell.events[-1].kind = "assign"
    shell.name_hosts(words, text, shell.events[-1].writes)
    return None


def _echo(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    if words[:2] == ["printf", "-v"]:
        shell.keep(node)
        return True
    shell.remember_file(words, node)
    acts = into_file(node) or shell.changes([node])
    shell.events.append(Event("once" if acts else "print", node.line, text, names_read(text)))
    return True


def _true(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    if into_file(node):
        shell.events.append(Event("once", node.line, text, names_read(text)))
    return words[0] != "false"


def _trap(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    shell.events.append(Event("print", node.line, text))
    rest = [word for word in words[1:] if word not in ("--", "-p", "-l")]
    if len(rest) > 1 and rest[0] != "-":
        signals = tuple(re.sub("^SIG", "", _NUMBERS.get(each, each.upper())) for each in rest[1:])
        shell.traps.append(Trap(node.line, text, shell.marks.shown(rest[0]), signals))
    return True


def _test(shell: ShellState, words: List[str], node: Node, text: str) -> Optional[bool]:
    double = words[0] == "[["
    raw = [word.raw for word in node.words]
    each = [[shell.words.text(word)] if double else shell.words.fields(word) for word in raw[1:]]
    fields = [field for some in each for field in some]
    quoted = [word[:1] in "'\"" for word, some in zip(raw[1:], each) for _ in some]
    if fields and fields[-1] in ("]", "]]"):
        fields.pop()
    if len(fields) <= 2 or fields[0] == "!":
        fields = [_without_outside(shell, each) for each in fields]
    else:
        fields = [
            _without_outside(shell, each) if each != "1" and shell.marks.kind(each) == SUBMIT else each
            for each in fields
        ]
    return _decide(list(zip(fields, quoted)), double)


def _without_outside(shell: ShellState, text: str) -> str:
    """Replace an outside variable that is assumed unset by '', and a mark that is never empty by '1'."""
    found = shell.marks.get(text) if MARK.fullmatch(text) else None
    if found and (found.kind == HEAD or found.text == "${SLURM_JOB_ID}"):
        return "1"  # not empty
    name = re.fullmatch(r"\$\{(?!ARG_\d)(\w+)\}", found.text) if found and found.kind == SUBMIT else None
    return "" if name and shell.unset(name[1], "") else text


def _decide(words: List[Tuple[str, bool]], double: bool) -> Optional[bool]:
    """Return the result of a test; None if the text does not decide it."""
    for joint, empty in (("||", False), ("-o", False), ("&&", True), ("-a", True)):
        places = [
            place
            for place, (word, quoted) in enumerate(words)
            if word == joint and not quoted and 0 < place < len(words) - 1
        ]
        if places and not any(word in "()" for word, quoted in words if word and not quoted):
            left, right = _decide(words[: places[0]], double), _decide(words[places[0] + 1 :], double)
            if left is (not empty) or right is (not empty):
                return not empty
            return None if left is None or right is None else empty
    if words and words[0] == ("!", False):
        result = _decide(words[1:], double)
        return None if result is None else not result
    text = [word for word, _ in words]
    if len(text) == 1:
        return bool(text[0]) if not MARK.search(text[0]) else True if MARK.sub("", text[0]) else None
    if len(text) == 2 and text[0] in ("-z", "-n"):
        sure = MARK.sub("", text[1])
        if not sure and MARK.search(text[1]):
            return None
        return bool(sure) == (text[0] == "-n")
    if len(text) != 3 or MARK.search(text[0] + text[2]):
        return None
    one, op, other = text
    if op in ("=", "==", "!="):
        same = fnmatch.fnmatchcase(one, other) if double and not words[2][1] else one == other
        return same == (op != "!=")
    numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
    if op in numbers and not double and not (one and other):
        return False  # `[ "" -gt 0 ]` is an error
    if op in numbers:
        number = calculated(f"({one or 0}){numbers[op]}({other or 0})")
        return None if number is None else bool(number)
    return None


_NUMBERS = {"0": "EXIT", "1": "HUP", "2": "INT", "3": "QUIT", "10": "USR1", "12": "USR2", "15": "TERM"}  # of signals


BUILTINS: Dict[str, Callable[[ShellState, List[str], Node, str], Optional[bool]]] = {
    **dict.fromkeys(DECLARING, _declare),
    **dict.fromkeys(("[", "[[", "test"), _test),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("read", "mapfile", "readarray"), _read),
    **dict.fromkeys(("exit", "return"), _exit),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("true", "false", ":"), _true),
    **dict.fromkeys(("echo", "printf"), _echo),
    **dict.fromkeys(("break", "continue"), _leave_loop),
    "let": _let,
    "unset": _unset_builtin,
    "set": _set_builtin,
    "shift": _shift,
    "eval": _eval,
    "exec": _exec,
    "trap": _trap,
}
