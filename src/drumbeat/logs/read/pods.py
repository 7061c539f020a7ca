"""States of Kubernetes containers, as `kubectl describe` and `get -o yaml|json` print them: a container whose last attempt
ended well, or that runs, has not failed, whatever its state before was."""

from __future__ import annotations

import re
from typing import Dict, List

from drumbeat.base.light_dataclass import dataclass

WORDS = ("Last State:", "lastState", "State:      ", "    state:", '"state": {')  # a line of a state has one of these
_STATE = re.compile(r'\s+(?:- )?"?(?P<last>last ?)?state"?: *(?P<value>.*)', re.IGNORECASE)
_NAMED = re.compile(r'(?i)\b(reason|exit ?code)"?: *"?([\w-]+)')
LONGEST = 200  # lines of a container
MAX_FILES = 1_000
MAX_STATES = 20_000


@dataclass
class State:
    file: str
    first: int
    last: int
    past: bool
    text: str

    @property
    def well(self) -> bool:
        return "running" in self.text.lower() or any(
            value in ("Completed", "0") for _, value in _NAMED.findall(self.text)
        )

    @property
    def words(self) -> str:
        """Return `reason OOMKilled, exit code 137`."""
        return ", ".join(
            f"{'reason' if name[0] in 'rR' else 'exit code'} {value}" for name, value in _NAMED.findall(self.text)
        )


@dataclass
class _Container:
    """A container that is being read, from its first state to the next line that is not its own."""

    indent: int
    states: List[State]


class Pods:
    def __init__(self) -> None:
        self._open: Dict[str, _Container] = {}
        self._over: List[State] = []

    def waits(self, file: str) -> bool:
        """Return True while the next line of this file may belong to a container."""
        return file in self._open

    def feed(self, file: str, number: int, text: str) -> None:
        indent = len(text) - len(text.lstrip(" \t-"))
        container = self._open.get(file)
        if container is not None and text.strip():
            state = container.states[-1]
            next_one = indent == container.indent and text.lstrip().startswith("- ")
            if indent < container.indent or next_one or number - container.states[0].first > LONGEST:
                self._close(file)
                container = None
            elif indent > container.indent and number == state.last + 1:
                state.last, state.text = number, f"{state.text}\n{text.strip()}"
        found = _STATE.fullmatch(text) if "tate" in text and len(self._open) < MAX_FILES else None
        if found and (container is None or indent == container.indent):
            state = State(file, number, number, bool(found["last"]), found["value"])
            self._open.setdefault(file, _Container(indent, [])).states.append(state)

    def _close(self, file: str) -> None:
        states = self._open.pop(file).states
        well = any(state.well for state in states if not state.past)
        if well and len(self._over) < MAX_STATES:
            self._over += [state for state in states if state.past]

    def past(self) -> List[State]:
        """Return the states of earlier attempts whose container did well afterwards."""
        for file in list(self._open):
            self._close(file)
        return self._over
