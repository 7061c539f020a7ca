"""DeepSpeed: `engine = deepspeed.initialize(…)[0]; watch(engine)`."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

from deepspeed.monitor.monitor import Monitor

from drumbeat import metrics

_NAMES = {"Train/Samples/train_loss": "loss", "Train/Samples/lr": "lr"}


class DrumbeatMonitor(Monitor):
    """Reports what the engine writes to its monitors (loss if any, learning rate, samples of all ranks), and forwards it to
    the monitors in the configuration."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.others, self.enabled = engine, engine.monitor, True
        self._samples = int(engine.global_samples)

    def write_events(self, event_list: Sequence[Tuple[str, Any, int]]) -> None:
        values = {_NAMES[name]: value for name, value, _ in event_list if name in _NAMES}
        if values:
            samples = int(self.engine.global_samples)
            new, self._samples = samples - self._samples, samples
            metrics.report(int(self.engine.global_steps), samples=new, loss_per="rank", **values)
        if self.others is not None and self.others.enabled:
            self.others.write_events(event_list)


def watch(engine: Any) -> None:
    """Make this engine report to drumbeat from now on; does nothing outside drumbeat."""
    if metrics.active():
        engine.monitor = DrumbeatMonitor(engine)
