"""Losses that are not finite, and losses that jump: the decision about each report."""

from __future__ import annotations

import math
import statistics
from typing import Callable, List, Optional, Tuple

from drumbeat.train.refusal import NotFinite, Refusal, Stopped

_FEWEST, _MOST = 8, 50  # reports that say what is usual
_TIMES = 8.0  # a spike is this many usual deviations above the median, and at least a tenth of it


class Judge:
    """Decide about the figures of a report: `on_nan` for losses and gradients that are not finite, `on_spike` for jumps."""

    def __init__(self, on_nan: str, on_spike: str, back: bool = False) -> None:
        self.on_nan, self.on_spike, self._skipped = on_nan, on_spike, 0
        for name, word, words in (("on_nan", on_nan, ("stop", "skip")), ("on_spike", on_spike, ("warn", "stop"))):
            known = (*words, *(["back"] if back else []))
            if word not in known:
                raise Refusal(f"{name} '{word}' is unknown", f"known: {', '.join(known)}")

    def start(self, skipped: int) -> None:
        """Set the number of steps left out so far, after a state was loaded."""
        self._skipped = skipped

    def judge(
        self, step: int, loss: float, skipped: int, usual: List[float], say: Callable[[str], None]
    ) -> Optional[Stopped]:
        """Return what to go back for, if anything. Raises it where training is to stop. `usual`: losses of the reports before,
        to which this one is added."""
        new, self._skipped = skipped - self._skipped, skipped
        found: List[Tuple[Stopped, str]] = []
        if new or not math.isfinite(loss):
            left_out = f"; {new} step{'s' * (new != 1)} left out of the weights" if new else ""
            what = f"loss or gradients are not finite at or before step {step}{left_out}"
            fix = "look at the data and the learning rate; on_nan=skip leaves such steps out and goes on"
            found.append((NotFinite(what, fix), self.on_nan))
        if _is_spike(loss, usual):
            what = f"the loss of step {step} is {loss:.4f}, and was {statistics.median(usual):.4f}"
            fix = "look at the data and the learning rate; on_spike=back leaves such batches out"
            found.append((Stopped(what, fix), self.on_spike))
        for problem, action in found:
            if action == "stop":
                raise problem
            if action == "back":
                return problem
            say(f"a spike: {problem.what}" if action == "warn" else problem.what)
        if math.isfinite(loss):  # a spike that is only said, too: a loss that stays high becomes usual
            usual.append(loss)
            del usual[:-_MOST]
        return None


def _is_spike(loss: float, losses: List[float]) -> bool:
    if len(losses) < _FEWEST or not math.isfinite(loss):
        return False
    usual = statistics.median(losses)
    deviation = statistics.median(abs(value - usual) for value in losses)
    return loss - usual > max(_TIMES * deviation, 0.1 * abs(usual))
