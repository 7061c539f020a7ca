"""Losses that are not numbers, and losses that jump: said, stopped at, or gone back from, leaving out the samples that led there.

Looked at are the steps that are reported, and every step is before it is saved: the newest checkpoint and the newest snapshot
are always good. Every rank has the same figures, so every rank decides the same.
"""

from __future__ import annotations

import json
import os
from typing import Callable

from drumbeat.train.data.stream import Stream
from drumbeat.train.judge import Judge
from drumbeat.train.refusal import Refusal, Stopped
from drumbeat.train.settings import Settings
from drumbeat.train.trainer import Trainer

_SO_OFTEN = 5  # times to go back to the same step
SKIPPED = "skipped.jsonl"


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
