"""Interpreting compound commands: lists, conditions, loops, functions, subshells. Undecided ones are kept as they stand."""

from __future__ import annotations

import fnmatch
import re
from typing import Callable, Dict, List, Optional, Sequence

from drumbeat.commands.events import MAX_DEPTH, MAX_ROUNDS, Event, Exit, Leaves, Next, Return, Unclear, options_at
from drumbeat.commands.state import ShellState
from drumbeat.commands.syntax import Node, bodies_of, files_of, names_read, program_of
from drumbeat.commands.values import HEAD, HOSTS, MARK, Unknown

_ARGUMENTS = r"\$[#@*\d]|\$\{(?:[@*\d]|#[@*}])|\bgetopts\b"


def _unknown(shell: ShellState, node: Node) -> Optional[bool]:
    shell.keep(node)
    return None


def arithmetic(shell: ShellState, node: Node) -> Optional[bool]:
    number = shell.words.arithmetic(node.words[0].raw, shell.text[node.start : node.end])
    if re.fullmatch(r"-?\d+", number):
        return number != "0"
    if node.end > node.start:
        shell.keep(node)
    return None


def _group(shell: ShellState, node: Node) -> Optional[bool]:
    started = len(shell.started)
    result = shell.body(node.bodies[0])
    for each in shell.started[started:]:
        each.redirected = f"{each.redirected} {files_of(node)}".strip()
    return result


def _subshell(shell: ShellState, node: Node) -> Optional[bool]:
    before, events, started = shell.apart(), len(shell.events), len(shell.started)
    result: Optional[bool] = None
    try:
        for body in bodies_of(node):
            result = shell.body(body)
    except (Exit, Return) as left:
        result = left.result
    found = len(shell.started) > started
    kept = shell.events if found else shell.events[:events]
    shell.__dict__.update({**before.__dict__, "events": kept, "started": shell.started, "words": shell.words})
    if found:
        _part_of(shell, node, events)
    else:
        shell.keep(node)
    return False if result is False and found else None


def _pipeline(shell: ShellState, node: Node) -> Optional[bool]:
    started = len(shell.started)
    results: List[Optional[bool]] = []
    for place, body in enumerate(node.bodies):
        inner = shell.apart()
        rest = shell.text[node.bodies[place + 1][0].start : node.end] if place + 1 < len(node.bodies) else ""
        results.append(inner.command(body[0], rest))
    if len(shell.started) == started:
        shell.keep(node)
    else:
        text = shell.written(node)
        shell.events.append(Event("started", node.line, text, names_read(text)))
        counted = results if "pipefail" in options_at(shell.options, len(shell.events)) else results[-1:]
        return False if False in counted else None
    return None


def _list(shell: ShellState, node: Node) -> Optional[bool]:
    names = [program_of(body[0]) for body in node.bodies]
    before, events = shell.apart(), len(shell.events)
    started = len(shell.started)
    result = shell.asked(node.bodies[0])
    for place, joint in enumerate(node.joints):
        if joint == "||" and names[place] == "mkdir":
            result = None  # it may well be there
        if result is None and len(shell.started) > started:  # it has run: `&&` goes on, `||` is for when it fails
            following = node.bodies[place + 1][0]
            if joint == "&&":
                if len(shell.events) > events and shell.events[-1].kind == "started":
                    shell.events[-1].text += " || exit"
                result = _part(shell, node, place)
            elif shell.acts.search(shell.text[following.start : following.end]) or not {
                program_of(each) for each in following.walk() if each.kind == "simple"
            } <= shell.prints | {"exit"}:
                shell.keep(following)
                shell.look_inside([following])
            continue
        sourced = len(shell.events) > events and shell.events[-1].words[:1] in (("source",), (".",))
        if result is None or result and sourced:  # what follows depends on it
            ahead = shell.apart()
            ahead.started = []
            ahead.look_inside(*node.bodies[place + 1 :])
            certain = names[place] not in shell.asks and node.bodies[place][0].kind == "simple" and joint == "&&"
            if certain and ahead.started:
                if len(shell.events) > events and shell.events[-1].kind == "once" or sourced:
                    shell.events[-1].text += " || exit"
                result = _part(shell, node, place)
                continue
        if result is None:
            fresh = shell.events[events:]
            soft = bool(fresh) and all(each.soft for each in fresh)
            shell.__dict__.update({**before.__dict__, "started": shell.started, "words": shell.words})
            shell.undecided(node)
            shell.events[-1].soft = soft
            return None
        taken = result is not False
        if (joint == "&&") == taken:
            result = _part(shell, node, place)
    if len(shell.started) > started:
        _part_of(shell, node, events)
    return result


def _part(shell: ShellState, node: Node, place: int) -> Optional[bool]:
    """Interpret the command after an operator of a list. Under `set -e` only a failure of the last one ends the script."""
    body = node.bodies[place + 1]
    return shell.body(body) if place + 1 == len(node.joints) else shell.asked(body)


def _part_of(shell: ShellState, node: Node, events: int) -> None:
    """Note the whole statement on each of its events, since it decides which of them run."""
    for event in shell.events[events:]:
        event.around = shell.written(node)


def _if(shell: ShellState, node: Node) -> Optional[bool]:
    before, events = shell.apart(), len(shell.events)
    pairs = list(zip(node.bodies[0::2], node.bodies[1::2]))
    for condition, body in pairs:
        started, defaults = len(shell.started), set(shell.defaults)
        result = shell.asked(condition)
        if len(shell.started) > started and result is None:
            for rest in node.bodies[1:]:
                shell.events += shell.effects(shell.text[rest[0].start : rest[-1].end], rest[0].line) if rest else []
            shell.look_inside(*node.bodies[1:])
            _part_of(shell, node, events)
            return None
        fresh = set(shell.defaults) - defaults
        if (
            result and fresh and _ends(body)
        ):  # it does not go on without them, nor without others that are asked for there
            asked = names_read(shell.text[condition[0].start : condition[-1].end]) & shell.own
            shell.required = shell.required | fresh | asked - shell.variables.keys()
            for name in fresh:
                del shell.defaults[name]
            continue
        if result is None:
            asks = re.search(_ARGUMENTS, shell.text[node.start : body[0].start if body else node.end])
            if shell.arguments is None and asks and _ends(body):
                continue  # it asks for arguments, which whoever submits the job gives
            del shell.events[events:]
            shell.variables = before.variables
            return shell.undecided(node)
        if result:
            return shell.body(body)
    return shell.body(node.bodies[-1]) if len(node.bodies) % 2 else True


def _case(shell: ShellState, node: Node) -> Optional[bool]:
    value = shell.words.text(node.words[0].raw) if node.words else ""
    patterns = [[shell.words.text(each) for each in joint.split("\n")] for joint in node.joints]
    if MARK.search(value) or any(MARK.search(each) for some in patterns for each in some):
        return shell.undecided(node)
    for some, body in zip(patterns, node.bodies):
        if any(fnmatch.fnmatchcase(value, each) for each in some):
            return shell.body(body)
    return True


def _while(shell: ShellState, node: Node) -> Optional[bool]:
    head = shell.text[node.start : node.bodies[1][0].start if node.bodies[1] else node.end]
    if shell.arguments is None and re.search(_ARGUMENTS, head):
        shell.defaults.setdefault("$@", "")  # it goes through arguments, and nobody gave any
        return True

    def rounds(shell: ShellState) -> Optional[bool]:
        result: Optional[bool] = True
        for first in node.bodies[2:3]:
            shell.asked(first)  # zero is no failure there
        for _ in range(MAX_ROUNDS):
            asked = shell.asked(node.bodies[0])
            if asked is None:
                raise Unclear
            if asked is (node.joints == ("until",)):
                return result
            result = _round(shell, node.bodies[1])
            for step in node.bodies[3:]:
                shell.asked(step)
        raise Unclear

    return _inline(shell, node, rounds)


def _for(shell: ShellState, node: Node) -> Optional[bool]:
    items = [each for word in node.words[1:] for each in shell.words.fields(word.raw)]
    items = _by_node(shell, items) if len(items) == 1 else items
    marked = any(MARK.search(each) and shell.marks.kind(each) not in (HEAD, HOSTS) for each in items)
    if marked or len(items) == 1 and MARK.search(items[0]) or len(items) > MAX_ROUNDS or (len(node.words) == 1):
        return shell.undecided(node)

    def rounds(shell: ShellState) -> Optional[bool]:
        result: Optional[bool] = True
        for item in items:
            shell.assign(node.words[0].text, item, shell.marks.quoted(item), node.line, False)
            result = _round(shell, node.bodies[0])
        return result

    return _inline(shell, node, rounds)


def _by_node(shell: ShellState, items: List[str]) -> List[str]:
    """Return a mark for each node in place of one for all of them, where their number is known."""
    found = shell.marks.get(items[0]) if MARK.fullmatch(items[0]) else None
    nodes = shell.known.get("SLURM_NNODES", "")
    if found is None or found.kind != HOSTS or not nodes.isdigit() or not 1 < int(nodes) <= MAX_ROUNDS:
        return items
    listed = "[@]" in found.text
    texts = [
        found.text.replace("[@]", f"[{place}]") if listed else f"$(echo {found.text} | cut -d' ' -f{place + 1})"
        for place in range(int(nodes))
    ]
    return [shell.marks.mark(Unknown(text, HOSTS if at else HEAD, found.reads, False)) for at, text in enumerate(texts)]


def _round(shell: ShellState, nodes: Sequence[Node]) -> Optional[bool]:
    try:
        return shell.body(nodes)
    except Next as left:
        if left.result is False:
            raise
        return True


def _inline(shell: ShellState, node: Node, body: Callable[[ShellState], Optional[bool]]) -> Optional[bool]:
    """Interpret a loop or function in place if its text decides all that it does, else keep it as it stands."""
    left: Optional[Leaves] = None
    trial = shell if shell.inlines else shell.apart()
    if not shell.inlines:
        trial.started = []
    try:
        result = body(trial)
    except (Return, Next) as ended:
        result = ended.result if isinstance(ended, Return) else True
    except Exit as ended:
        left, result = ended, ended.result
    except Unclear:
        return None if shell.inlines else shell.undecided(node)
    if shell.inlines:
        return None
    fresh = trial.events[len(shell.events) :]
    held = {each for variable in shell.variables.values() for each in shell.marks.of("".join(variable.value))}
    changed = frozenset(name for event in fresh for name in event.writes)
    decided = all(
        event.kind in ("print", "cd", "export", "arguments")
        or (
            event.kind == "assign"
            and all(
                each in held and each.reads.isdisjoint(changed) for each in shell.marks.of("".join(event.value or ""))
            )
        )
        for event in fresh
    )
    if trial.started and len(trial.started) > 1 and node.kind == "for":
        for each in trial.started:
            each.certain = False
    if decided or trial.started:
        shell.started += trial.started
        kept = {name: shell.__dict__[name] for name in ("started", "certain", "words", "guarded", "locals")}
        shell.__dict__.update({**trial.__dict__, **kept})
        if left:
            raise left
        return result
    shell.keep(node, trial)
    return None


def _function(shell: ShellState, node: Node) -> Optional[bool]:
    name = node.words[0].text
    text = shell.text[node.start : node.end]
    reads = shell.reads(text) - {f"{name}()"}
    shell.functions[name] = (node.bodies[0][0], shell.text)
    shell.events.append(Event("assign", node.line, text, reads, frozenset((f"{name}()",))))
    return True


def call(shell: ShellState, name: str, words: List[str], node: Node) -> Optional[bool]:
    body, text = shell.functions[name]

    def call(shell: ShellState) -> Optional[bool]:
        outer, shell.arguments = shell.arguments, words[1:]
        source, shell.text = shell.text, text
        before, shell.locals = shell.locals, {}
        shell.depth += 1
        try:
            return shell.command(body) if shell.depth < MAX_DEPTH else None
        finally:
            shell.arguments, shell.text = outer, source
            shell.depth -= 1
            for name, was in shell.locals.items():
                shell.restore(name, *was, node.line)
            shell.locals = before

    return _inline(shell, node, call)


def _ends(body: Sequence[Node]) -> bool:
    return any(program_of(each) == "exit" for each in body)


COMPOUND: Dict[str, Callable[[ShellState, Node], Optional[bool]]] = {
    "arithmetic": arithmetic,
    "case": _case,
    "for": _for,
    "function": _function,
    "group": _group,
    "if": _if,
    "list": _list,
    "pipeline": _pipeline,
    "subshell": _subshell,
    "unknown": _unknown,
    "while": _while,
}
