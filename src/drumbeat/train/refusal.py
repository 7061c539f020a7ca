"""Refusal: what the training runtime will not do, why, and what to do instead. A command shows it as one message."""

from __future__ import annotations


class Refusal(ValueError):
    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}; {fix}" if fix else what)
        self.what = what
        self.fix = fix


class Stopped(Refusal):
    """Training ended itself, on all ranks together: going on would have trained wrongly."""


class NotFinite(Stopped, FloatingPointError):
    """A NaN or inf in loss or gradients; none has reached the weights."""
