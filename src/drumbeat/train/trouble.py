"""Losses that are not numbers, and losses that jump: said, stopped at, or gone back from, leaving out the samples that led there.

Looked at are the steps that are reported, and every step is before it is saved: the newest checkpoint and the newest snapshot
are always good. Every rank has the same figures, so every rank decides the same.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from typing import TYPE_CHECKING, Callable, List, Optional, Tuple

from drumbeat.train.data.stream import Stream
from drumbeat.train.refusal import NotFinite, Refusal, Stopped
from drumbeat.train.settings import Settings

if TYPE_CHECKING:
    from drumbeat.train.trainer import Trainer

_FEWEST, _MOST = 8, 50  # reports that say what is usual
_TIMES = 8.0  # a spike is this many usual deviations above the median, and at least a tenth of it
_SO_OFTEN = 5  # times to go back to the same step
SKIPPED = "skipped.jsonl"


class Judge:
    """Decide about the figures of a report: `on_nan` for losses and gradients that are not finite, `on_spike` for jumps."""

    def __init__(self, on_nan: str, on_spike: str, back: bool = False) -> None:
        self.on_nan, self.on_spike, self._skipped = on_nan, on_spike, 0
        for name, word, words in (("on_nan", on_nan, ("stop", "skip")), ("on_spike", on_spike, ("warn", "stop"))):
            known = (*words, *(["back"] if back else []))
            if word not in known:
                raise Refusal(f"{name} '{word}' is unknown", f"known: {', '.join(known)}")

    def start(self, skipped: int) -> None:
        """Take steps left out so far as known: of a state that was loaded."""
        self._skipped = skipped

    def judge(
        self, step: int, loss: float, skipped: int, usual: List[float], say: Callable[[str], None]
    ) -> Optional[Stopped]:
        """Return what to go back for, if anything. Raises it where training is to stop. `usual`: losses of the reports before,
        to which this one is added."""
        new, self._skipped = skipped - self._skipped, skipped
        found: List[Tuple[Stopped, str]] = []
        if new or not math.isfinite(loss):
            left_out = f"; {new} step{'s' * (new != 1)} left out, so no weight holds one" if new else ""
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


class Trouble(Judge):
    """The judge of a recipe, which can go back: it has the stream of samples and a folder of checkpoints."""

    def __init__(self, settings: Settings, trainer: Trainer, stream: Stream) -> None:
        super().__init__(settings.on_nan, settings.on_spike, back=True)
        self.settings, self.trainer, self.stream = settings, trainer, stream
        self.start(trainer.skipped)
        self._back_to = self._times = 0
        for name in ("on_nan", "on_spike"):
            if getattr(settings, name) == "back" and not (settings.checkpoint and settings.save_every):
                raise Refusal(f"{name}=back without checkpoints", "give checkpoint=FOLDER and save_every=STEPS")

    def go_back(self, problem: Stopped, say: Callable[[str], None]) -> None:
        """Load the newest state that was saved, and leave out the samples since then."""
        done, sample = self.trainer.steps, self.stream.sample
        step = self.trainer.restore(self.settings.checkpoint)
        self._times = self._times + 1 if step == self._back_to else 1
        if not step or self._times > _SO_OFTEN:
            why = f"tried {_SO_OFTEN} times from step {step}" if step else "nothing is saved yet"
            raise type(problem)(f"{problem.what}; going back does not help: {why}", problem.fix)
        first, self._back_to = self.stream.sample, step
        self.start(self.trainer.skipped)
        self.stream.load_state_dict({"sample": sample})
        say(
            f"{problem.what}: back to step {step}{self.trainer.loaded_from}; samples {first} to {sample - 1} are left out"
        )
        if self.trainer.world.lead:
            note = {"why": problem.what, "step": done, "back_to": step, "samples": [first, sample - 1]}
            with open(os.path.join(self.settings.checkpoint, SKIPPED), "a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
