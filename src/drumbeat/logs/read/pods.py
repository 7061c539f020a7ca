"""States of Kubernetes containers, as `kubectl describe` and `get -o yaml|json` print them: a container whose last attempt
ended well, or that runs, has not failed, whatever its state before was."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass

WORDS = ("Last State:", "lastState", "State:      ", "    state:", '"state": {')  # a line of a state has one of these
_STATE = re.compile(r'\s+(?:- )?"?(?P<last>last ?)?state"?: *(?P<value>.*)', re.IGNORECASE)
_WELL = re.compile(r'(?i)\bCompleted\b|\bRunning\b|exit ?Code"?: *0\b')
_NAMED = re.compile(r'(?i)\b(reason|exit ?code)"?: *"?([\w-]+)')
LONGEST = 16  # lines of a state
NEAR = 24  # lines between the two states of a container
MAX_FILES = 1_000
MAX_STATES = 20_000


@dataclass(frozen=True)
class State:
    file: str
    first: int
    last: int
    indent: int
    past: bool
    text: str

    @property
    def well(self) -> bool:
        return bool(_WELL.search(self.text))

    @property
    def words(self) -> str:
        """`reason OOMKilled, exit code 137`."""
        return ", ".join(
            f"{'reason' if name[0] in 'rR' else 'exit code'} {value}" for name, value in _NAMED.findall(self.text)
        )


class Pods:
    def __init__(self) -> None:
        self._open: Dict[str, Tuple[int, int, bool, List[str]]] = {}  # file -> the state that is being read
        self._states: List[State] = []

    def waits(self, file: str) -> bool:
        return file in self._open

    def feed(self, file: str, number: int, text: str) -> None:
        indent = len(text) - len(text.lstrip(" \t-"))
        if file in self._open:
            first, own, past, words = self._open[file]
            if indent > own and number - first < LONGEST:
                words.append(text.strip())
                return
            self._close(file, number - 1)
        found = _STATE.fullmatch(text) if "tate" in text and len(self._open) < MAX_FILES else None
        if found:
            self._open[file] = number, indent, bool(found["last"]), [found["value"]]

    def _close(self, file: str, last: int) -> None:
        first, indent, past, words = self._open.pop(file)
        if len(self._states) < MAX_STATES:
            self._states.append(State(file, first, last, indent, past, "\n".join(words)))

    def past(self, ends: Dict[str, int]) -> List[State]:
        """Return the states of earlier attempts whose container did well afterwards."""
        for file in list(self._open):
            self._close(file, ends.get(file, 0))
        now = [state for state in self._states if not state.past]
        return [state for state in self._states if state.past and (here := _beside(state, now)) and here.well]


def _beside(past: State, states: List[State]) -> Optional[State]:
    near = (
        (max(state.first - past.last, past.first - state.last), state)
        for state in states
        if state.file == past.file and state.indent == past.indent
    )
    return min(((far, state) for far, state in near if far <= NEAR), key=lambda each: each[0], default=(0, None))[1]
