"""drumbeat inside other libraries: each module needs the library it is named after, and reports like drumbeat.metrics.report."""

from __future__ import annotations

from typing import Any, Dict, Mapping

# Metric names of these libraries -> names in a metrics record.


_NAMES = {
    **dict.fromkeys(("loss", "train_loss", "train/loss"), "loss"),
    **dict.fromkeys(("learning_rate", "lr"), "lr"),
    "grad_norm": "grad_norm",
    "epoch": "epoch",
    "tokens_per_second": "tokens_per_s",
    "samples_per_second": "samples_per_s",
}
_VALIDATION = {
    prefix + name: known
    for prefix in ("eval_", "val_", "valid_", "validation_", "eval/", "val/")
    for name, known in (("loss", "loss"), ("accuracy", "accuracy"), ("acc", "accuracy"))
}


def training(values: Mapping[str, Any]) -> Dict[str, Any]:
    return _named(values, _NAMES)


def validation(values: Mapping[str, Any]) -> Dict[str, Any]:
    return _named(values, _VALIDATION)


def _named(values: Mapping[str, Any], names: Mapping[str, str]) -> Dict[str, Any]:
    """Return known values that are plain numbers or scalar tensors."""
    found = {names[name]: value for name, value in values.items() if name in names}
    numbers = {name for name, value in found.items() if isinstance(value, (int, float))}
    scalars = {name for name, value in found.items() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0}
    return {name: value for name, value in found.items() if name in numbers | scalars}
