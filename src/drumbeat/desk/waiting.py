"""Until a run has ended."""

from __future__ import annotations

import time
from typing import Callable, Optional

from drumbeat.backends.contract import UNKNOWN
from drumbeat.desk.state import State

_PATIENCE = 60.0  # seconds for which nobody may be able to say how a run stands: a busy scheduler answers again
_SHORTEST, _LONGEST = 0.2, 5.0  # seconds between two looks; the scheduler itself is asked less often


def wait_for_end(state: Callable[[], State], timeout: Optional[float] = None) -> State:
    """The last state. TimeoutError after `timeout` seconds."""
    begin, pause, unknown = time.monotonic(), _SHORTEST, 0.0
    while True:
        now, found = time.monotonic(), state()
        unknown = (unknown or now) if found.status.state == UNKNOWN else 0.0
        if not found.goes_on and not (unknown and now - unknown < _PATIENCE):
            return found
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
