"""accelerate: `Accelerator(log_with=DrumbeatTracker())`, then `accelerator.log({"train_loss": …}, step=…)`."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from accelerate.tracking import GeneralTracker, on_main_process

from drumbeat import metrics
from drumbeat.metrics import integrations


class DrumbeatTracker(GeneralTracker):
    """Reports values passed to `accelerator.log` as loss, train_loss, lr, grad_norm, eval_loss and the like."""

    name = "drumbeat"
    requires_logging_directory = False

    @on_main_process
    def __init__(self) -> None:
        super().__init__()

    @property
    def tracker(self) -> Any:
        return metrics

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Do nothing: the run folder already has the configuration (command, environment, commit)."""

    @on_main_process
    def log(self, values: Mapping[str, Any], step: Optional[int] = None, **more: Any) -> None:
        trained, evaluated = integrations.training(values), integrations.validation(values)
        if "loss" in trained:
            metrics.report(step, loss_per="rank", **trained)
        if evaluated:
            metrics.report(step, kind="validation", loss_per="rank", **evaluated)
