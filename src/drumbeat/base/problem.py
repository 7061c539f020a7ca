"""Problem: something the user can fix. It ends a command with one clear message, never a traceback."""

from __future__ import annotations

from drumbeat.base.redact import indented


class Problem(Exception):
    """An error with `what` is wrong and where, and its `fix`: what to do next."""

    def __init__(self, what: str, fix: str = "", exit_code: int = 2) -> None:
        self.what = indented(what)  # names of files stand in it
        self.fix = indented(fix)
        super().__init__(self.what)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.what}\n  {self.fix}" if self.fix else self.what
