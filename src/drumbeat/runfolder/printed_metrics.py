"""Training lines that scripts print themselves, read as metrics: epochs, validation, images a second, a closing summary."""

from __future__ import annotations

import re
from typing import Any, Dict, Optional

_N = r"([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|nan|inf)"
_EPOCH = re.compile(rf"Epoch (\d+)/(\d+) completed in {_N} seconds")
_EPOCH_LINE = re.compile(rf"Epoch (\d+)/(\d+): time={_N}s, (.{{0,200}})")
_VALIDATION = re.compile(rf"Validation Loss: {_N}, Validation Accuracy: {_N}")
_THROUGHPUT = re.compile(rf"(?:Epoch )?Throughput: {_N} (images|samples|tokens)/second")
_KEY = re.compile(rf"(train_loss|val_loss|val_acc|throughput)={_N}")
_LOSS = re.compile(rf"Local rank (\d+), Loss: {_N}")
_TARGET = re.compile(r"[Tt]arget accuracy .{0,40}reached")


def read_line(text: str) -> Optional[Dict[str, Any]]:
    """The metrics record a printed line stands for, without its time and rank; None for any other line."""
    if len(text) > 500:
        return None
    found = _EPOCH.search(text)
    if found:
        return {"kind": "step", "step": int(found[1]), "steps": int(found[2]), "epoch_seconds": float(found[3])}
    found = _VALIDATION.search(text)
    if found:
        return {"kind": "validation", "loss": float(found[1]), "accuracy": float(found[2])}
    found = _THROUGHPUT.search(text)
    if found:
        return {"kind": "throughput", "rate": float(found[1]), "unit": f"{found[2]}/s"}
    found = _EPOCH_LINE.search(text)
    if found:
        record: Dict[str, Any] = {"kind": "step", "step": int(found[1]), "steps": int(found[2])}
        values = {key: float(value) for key, value in _KEY.findall(found[4])}
        names = {"train_loss": "loss", "val_loss": "validation_loss", "val_acc": "accuracy", "throughput": "rate"}
        record.update((names[key], value) for key, value in values.items())
        if "rate" in record:
            record["unit"] = "img/s"
        return record
    found = _LOSS.search(text)
    if found:
        return {"kind": "step", "loss": float(found[2])}
    if _TARGET.search(text):
        return {"kind": "target", "target_reached": True}
    return None
