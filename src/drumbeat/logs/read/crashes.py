"""Where a process stood when it crashed: the stack that Python's faulthandler writes below `Fatal Python error`."""

from __future__ import annotations

import re
from typing import Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.logs.read.tracebacks import is_library

FATAL, STACK = "Fatal Python error: ", "(most recent call first):"  # words of its lines
_FRAME = re.compile(r'\s*File "([^"]{1,300})", line (\d+) in ')
_CURRENT = re.compile(r"\s*Current thread 0x")
MAX_OPEN = 256
MAX_LINES = 200


@dataclass
class _Stack:
    number: int  # of the line that names the error
    lines: int = 0
    current: bool = False  # inside the stack of the thread that crashed
    frame: str = ""  # innermost
    own_frame: str = ""  # innermost outside of installed packages

    @property
    def where(self) -> str:
        if not self.own_frame or self.own_frame == self.frame:
            return f"crashed at {self.frame}" if self.frame else ""
        return f"crashed at {self.own_frame} (in {self.frame})"


class Crashes:
    """The crashes of all files, one at a time for each rank of a file."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, Optional[int]], _Stack] = {}

    def feed(self, text: str, rank: Optional[int], file: str, number: int) -> Tuple[int, str]:
        """The number of the line that names the error, and where the process stood, as far as that is known; or 0 and nothing."""
        if FATAL in text:
            if len(self._open) < MAX_OPEN or (file, rank) in self._open:
                self._open[(file, rank)] = _Stack(number)
            return 0, ""
        stack = self._open.get((file, rank)) if self._open else None
        if stack is None:
            return 0, ""
        stack.lines += 1
        if stack.lines > MAX_LINES:
            del self._open[(file, rank)]
            return 0, ""
        if STACK in text:
            stack.current = bool(_CURRENT.match(text))
        frame = _FRAME.match(text) if stack.current else None
        if not frame:
            return 0, ""
        place = f"{frame[1]}:{frame[2]}"
        stack.frame = stack.frame or place
        if not stack.own_frame and not is_library(frame[1]):
            stack.own_frame = place
        return stack.number, stack.where
