"""A reason for each line of a script: carried over, named in a note, or read and not copied."""

from __future__ import annotations

from typing import Dict, List, Sequence, Set

from drumbeat.commands.events import Event, Started
from drumbeat.commands.interpret import Shell
from drumbeat.commands.syntax import Node, names_read, parse
from drumbeat.commands.values import HEAD, HOSTS
from drumbeat.convert.draft import Draft
from drumbeat.convert.launch import OURS, WORKED_OUT, Launch

_PRINTS = "only prints or waits"
_USED = "its value stands where the rest uses it"
_UNUSED = "nothing that is carried over reads it"
_NODES = "drumbeat knows the nodes of the job"
_DECIDED = "decided here: options of the shell, and conditions"
_UNREACHED = "not reached"


def account(draft: Draft, batch: Shell, chosen: Started, launch: Launch) -> None:
    """Give a reason for every line that no key, statement or note of the draft comes from."""
    lines = {note.line for notes in (draft.left_out, draft.to_check, draft.to_export) for note in notes}
    lines |= draft.carried | set(draft.lines.values()) | _span(chosen.line, chosen.text)
    for event in batch.events:
        if event.line in lines and not (event.kind in ("print", "assign") and "\n" in event.text):
            lines |= _span(event.line, event.text)
    events: Dict[int, List[Event]] = {}
    for event in [each for each in batch.events if each.kind != "arguments"]:
        for line in sorted(_span(event.line, event.text)) if event.kind == "shell" and event.writes else (event.line,):
            events.setdefault(line, []).append(event)
    lines |= set(range(chosen.line, batch.text.count("\n") + 2)) if chosen.whole else set()
    for node in (each for top in parse(batch.text) for each in top.walk()):
        if node.kind in ("simple", "arithmetic", "unknown") and node.end > node.start and node.line not in lines:
            _one(draft, batch, launch, node, events.get(node.line, ()))


def _span(line: int, text: str) -> Set[int]:
    return set(range(line, line + 1 + text.count("\n")))


def _one(draft: Draft, batch: Shell, launch: Launch, node: Node, events: Sequence[Event]) -> None:
    text = batch.text[node.start : node.end]
    acts = [each for each in events if each.kind in ("once", "shell", "started") and not each.writes]
    if acts:
        draft.question(node.line, text, "not carried over: do it before you submit, or in the program")
        return
    named = [each for each in events if each.kind not in ("print", "cd")]
    writes = frozenset(name for each in named for name in each.writes)
    if writes and writes <= OURS:
        why = WORKED_OUT
    elif any(launch.shell.marks.kind("".join(each.value or "")) in (HEAD, HOSTS) for each in named):
        why = _NODES
    elif writes:
        why = _USED if writes & names_read(batch.text) or any(name.endswith("()") for name in writes) else _UNUSED
    elif events:
        why = "in workdir" if events[0].kind == "cd" else _PRINTS
    else:
        why = _DECIDED if node.words and node.words[0].text in _SILENT else _UNREACHED
    draft.read.setdefault(why, []).append(node.line)


_SILENT = frozenset(("[", "[[", "test", "set", "shopt", "true", "false", ":", "shift", "exit", "return", "((", "local"))
