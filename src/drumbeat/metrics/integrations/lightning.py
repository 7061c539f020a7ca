"""Lightning and Fabric: `Trainer(logger=[DrumbeatLogger(), …])`, `Fabric(loggers=[DrumbeatLogger()])`."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from drumbeat import metrics as drumbeat_metrics
from drumbeat.metrics import integrations


class DrumbeatLogger(Logger):
    """Reports what the module logs as loss, train_loss, lr, grad_norm, val_loss and the like, with rank 0's values."""

    @property
    def name(self) -> str:
        return "drumbeat"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return drumbeat_metrics

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **more: Any) -> None:
        """Do nothing: the run folder already has the hyperparameters (command, environment, commit)."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: Optional[int] = None) -> None:
        if step is not None and "epoch" in metrics:  # a Trainer's, which counts from 0; Fabric passes the caller's own
            step += 1
        plain = {name.removesuffix("_step"): value for name, value in metrics.items()}
        values, evaluated = integrations.training(plain), integrations.validation(plain)
        if "loss" in values:
            drumbeat_metrics.report(step, loss_per="rank", **values)
        if evaluated:
            drumbeat_metrics.report(step, kind="validation", loss_per="rank", **evaluated)
