"""Losses that are not numbers, and losses that jump: said, stopped at, or gone back from, leaving out the samples that led there.

Looked at are the steps that are reported. Every rank has the same figures, so every rank decides the same.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import deque
from typing import Callable, Deque, Dict

from drumbeat.train.data.stream import Stream
from drumbeat.train.refusal import NotFinite, Refusal, Stopped
from drumbeat.train.settings import Settings
from drumbeat.train.trainer import Trainer

_FEWEST, _MOST = 8, 50  # reports that say what is usual
_TIMES = 8.0  # a spike is this many usual deviations above the median, and at least a tenth of it
_SO_OFTEN = 5  # times in a row to go back without a report that is fine
SKIPPED = "skipped.jsonl"


class Trouble:
    def __init__(self, settings: Settings, trainer: Trainer, stream: Stream) -> None:
        self.settings, self.trainer, self.stream = settings, trainer, stream
        self.good = trainer.steps  # the last step whose report was fine
        self._usual: Deque[float] = deque(maxlen=_MOST)
        self._again = 0
        for name, words in (("on_nan", ("stop", "skip", "back")), ("on_spike", ("warn", "stop", "back"))):
            if getattr(settings, name) not in words:
                raise Refusal(f"{name} '{getattr(settings, name)}' is unknown", f"known: {', '.join(words)}")
            if getattr(settings, name) == "back" and not (settings.checkpoint and settings.save_every):
                raise Refusal(f"{name}=back without checkpoints", "give checkpoint=FOLDER and save_every=STEPS")

    def judge(self, figures: Dict[str, float], say: Callable[[str], None]) -> bool:
        """Return true if training went back: its state is then that of an earlier step. Raises where it is to stop."""
        loss, skipped, done = figures["loss"], int(figures.get("skipped_steps", 0)), self.trainer.steps
        if (skipped and self.settings.on_nan != "skip") or not math.isfinite(loss):
            left_out = f"; {skipped} step{'s' * (skipped != 1)} left out, so no weight holds one" if skipped else ""
            what = f"loss or gradients are not finite at or before step {done}{left_out}"
            if self.settings.on_nan == "back":
                return self._back(what, say)
            if self.settings.on_nan == "stop":
                fix = "look at the data and the learning rate; on_nan=skip leaves such steps out and goes on"
                raise NotFinite(what, fix)
            return False
        if self._is_spike(loss):
            what = f"the loss of step {done} is {loss:.4f}, and was {statistics.median(self._usual):.4f}"
            if self.settings.on_spike == "stop":
                raise Stopped(what, "look at the data and the learning rate; on_spike=back leaves such batches out")
            if self.settings.on_spike == "back":
                return self._back(what, say)
            say(f"a spike: {what}")
            return False
        self._usual.append(loss)
        self.good, self._again = done, 0
        return False

    def _is_spike(self, loss: float) -> bool:
        if len(self._usual) < _FEWEST:
            return False
        usual = statistics.median(self._usual)
        deviation = statistics.median(abs(value - usual) for value in self._usual)
        return loss - usual > max(_TIMES * deviation, 0.1 * abs(usual))

    def _back(self, what: str, say: Callable[[str], None]) -> bool:
        self._again += 1
        done, sample = self.trainer.steps, self.stream.sample
        self.trainer.checkpoints(self.settings.checkpoint).finish()
        step = self.trainer.load(self.settings.checkpoint, at_most=self.good) if self._again <= _SO_OFTEN else 0
        if not step:
            why = "no checkpoint is older" if self._again <= _SO_OFTEN else f"{_SO_OFTEN} times in a row"
            raise NotFinite(f"{what}; going back does not help: {why}", "look at the data and the learning rate")
        first = self.stream.sample
        self.stream.load_state_dict({"sample": sample})
        say(f"{what}: back to the checkpoint of step {step}; samples {first} to {sample - 1} are left out")
        if self.trainer.world.lead:
            note = {"why": what, "step": done, "back_to": step, "samples": [first, sample - 1]}
            with open(os.path.join(self.settings.checkpoint, SKIPPED), "a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
        return True
