"""Losses that are not numbers, and losses that jump: said, stopped at, or gone back from, leaving out the samples that led there.

Looked at are the steps that are reported, and every step is before it is saved: the newest checkpoint and the newest snapshot
are always good. Every rank has the same figures, so every rank decides the same.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from typing import Callable, Dict, List, Optional, Tuple

from drumbeat.train.data.stream import Stream
from drumbeat.train.refusal import NotFinite, Refusal, Stopped
from drumbeat.train.settings import Settings
from drumbeat.train.trainer import Trainer

_FEWEST, _MOST = 8, 50  # reports that say what is usual
_TIMES = 8.0  # a spike is this many usual deviations above the median, and at least a tenth of it
_SO_OFTEN = 5  # times to go back to the same step
SKIPPED = "skipped.jsonl"


class Trouble:
    def __init__(self, settings: Settings, trainer: Trainer, stream: Stream) -> None:
        self.settings, self.trainer, self.stream = settings, trainer, stream
        self._skipped = trainer.skipped  # steps left out until the last report
        self._back_to = self._times = 0
        for name, words in (("on_nan", ("stop", "skip", "back")), ("on_spike", ("warn", "stop", "back"))):
            if getattr(settings, name) not in words:
                raise Refusal(f"{name} '{getattr(settings, name)}' is unknown", f"known: {', '.join(words)}")
            if getattr(settings, name) == "back" and not (settings.checkpoint and settings.save_every):
                raise Refusal(f"{name}=back without checkpoints", "give checkpoint=FOLDER and save_every=STEPS")

    def judge(self, figures: Dict[str, float], say: Callable[[str], None]) -> Optional[Stopped]:
        """Return what to go back for, if anything. Raises it where training is to stop."""
        loss, skipped, usual = figures["loss"], int(figures.get("skipped_steps", 0)), self.trainer.usual
        new, self._skipped = skipped - self._skipped, skipped
        found: List[Tuple[Stopped, str]] = []
        if new or not math.isfinite(loss):
            left_out = f"; {new} step{'s' * (new != 1)} left out, so no weight holds one" if new else ""
            what = f"loss or gradients are not finite at or before step {self.trainer.steps}{left_out}"
            fix = "look at the data and the learning rate; on_nan=skip leaves such steps out and goes on"
            found.append((NotFinite(what, fix), self.settings.on_nan))
        if self._is_spike(loss):
            what = f"the loss of step {self.trainer.steps} is {loss:.4f}, and was {statistics.median(usual):.4f}"
            fix = "look at the data and the learning rate; on_spike=back leaves such batches out"
            found.append((Stopped(what, fix), self.settings.on_spike))
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

    def _is_spike(self, loss: float) -> bool:
        if len(self.trainer.usual) < _FEWEST or not math.isfinite(loss):
            return False
        usual = statistics.median(self.trainer.usual)
        deviation = statistics.median(abs(value - usual) for value in self.trainer.usual)
        return loss - usual > max(_TIMES * deviation, 0.1 * abs(usual))

    def go_back(self, problem: Stopped, say: Callable[[str], None]) -> None:
        """Load the newest state that was saved, and leave out the samples since then."""
        done, sample = self.trainer.steps, self.stream.sample
        step = self.trainer.load(self.settings.checkpoint)
        self._times = self._times + 1 if step == self._back_to else 1
        if not step or self._times > _SO_OFTEN:
            why = f"tried {_SO_OFTEN} times from step {step}" if step else "nothing is saved yet"
            raise type(problem)(f"{problem.what}; going back does not help: {why}", problem.fix)
        first, self._back_to, self._skipped = self.stream.sample, step, self.trainer.skipped
        self.stream.load_state_dict({"sample": sample})
        say(
            f"{problem.what}: back to step {step}{self.trainer.loaded_from}; samples {first} to {sample - 1} are left out"
        )
        if self.trainer.world.lead:
            note = {"why": problem.what, "step": done, "back_to": step, "samples": [first, sample - 1]}
            with open(os.path.join(self.settings.checkpoint, SKIPPED), "a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
