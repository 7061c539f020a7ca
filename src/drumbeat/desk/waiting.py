"""Until a run has ended."""

from __future__ import annotations

import time
from typing import Callable, Optional

from drumbeat.backends.contract import ALIVE, UNKNOWN
from drumbeat.desk.state import State, state_of
from drumbeat.runfolder.run import Run

_PATIENCE = 60.0  # seconds for which nobody may be able to say how a run stands: a busy scheduler answers again
_SHORTEST, _LONGEST = 0.2, 5.0  # seconds between two looks; the scheduler itself is asked less often


class Patience:
    """Whether a run has ended, from one look to the next."""

    def __init__(self) -> None:
        self.unknown = 0.0  # since when nobody can say

    def over(self, state: str) -> bool:
        now = time.monotonic()
        self.unknown = (self.unknown or now) if state == UNKNOWN else 0.0
        return state not in ALIVE and not (self.unknown and now - self.unknown < _PATIENCE)


def wait_for_end(run: Run, timeout: Optional[float] = None, state: Optional[Callable[[], State]] = None) -> State:
    """The last state, once all of the run's files are here, so that nothing of it stays where it ran. `state` says how it
    stands, where that is not the whole run. TimeoutError after `timeout` seconds."""
    state = state or (lambda: state_of(run))
    begin, pause, patience = time.monotonic(), _SHORTEST, Patience()
    while True:
        now, found = time.monotonic(), state()
        if patience.over(found.status.state):
            run.files.settle()
            return state()
        if timeout is not None and now - begin > timeout:
            raise TimeoutError(f"{found.run_id} is {found.status.state} after {timeout:g} s")
        time.sleep(min(pause, timeout if timeout is not None else pause))
        pause = min(pause * 1.3, _LONGEST)


def exit_code(state: State) -> int:
    """Of a command that waited: the run's own, else 1 unless it finished."""
    if state.summary:
        return state.summary.exit_code
    if state.status.exit_code is not None:
        return state.status.exit_code
    return 0 if state.status.state == "finished" else 1
