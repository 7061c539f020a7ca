"""transformers: `Trainer(…, callbacks=[DrumbeatCallback()])`."""

from __future__ import annotations

from typing import Any, Dict, Optional

from transformers import TrainerCallback

from drumbeat import metrics
from drumbeat.metrics import integrations


class DrumbeatCallback(TrainerCallback):
    """Reports what the Trainer logs: step, loss (the mean of all ranks), learning rate, gradient norm, evaluation.

    With `include_num_input_tokens_seen` in the arguments it also reports the tokens of all ranks. Outside drumbeat it does
    nothing.
    """

    def __init__(self) -> None:
        self._tokens = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Optional[Dict[str, Any]] = None, **more: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        values, evaluated = integrations.training(logs), integrations.validation(logs)
        if "loss" in values and "train_runtime" not in logs:
            seen = int(getattr(state, "num_input_tokens_seen", 0) or 0)
            tokens = seen - self._tokens if seen > self._tokens else None
            self._tokens = max(seen, self._tokens)
            metrics.report(state.global_step, steps=state.max_steps, tokens=tokens, loss_per="all", **values)
        if evaluated:
            metrics.report(state.global_step, kind="validation", loss_per="all", **evaluated)
