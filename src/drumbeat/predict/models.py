"""Models as people have them: by name or by config.json. What cannot be read is said with its name; nothing is guessed."""

from __future__ import annotations

import difflib
import functools
import os
from typing import Any, Dict, Optional, Union

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict.cost import Layout
from drumbeat.predict.huggingface import from_config
from drumbeat.predict.shapes import ConvNet, Model, check, resnet


@dataclass(frozen=True)
class Described:
    """A model and what else its description said. None: not said."""

    model: Union[Model, ConvNet]
    seq: int
    framework: Optional[str] = None
    layout: Optional[Layout] = None
    batch: Optional[int] = None
    steps: Optional[int] = None
    precision: Optional[str] = None
    assumed: str = ""  # said in the output
    per_replica: Optional[int] = None  # samples of a replica and step, where the batch follows from it


@functools.cache
def _shapes() -> Any:
    return load("drumbeat.predict", "shapes")


def named(name: str) -> Described:
    """Find a model by its name in shapes.yaml, or a ResNet."""
    spelled = name.lower().replace("_", "-")
    rows = _shapes()
    for row in rows:
        if spelled in (row["name"], *row.get("alias", [])):
            return Described(_model(row), int(row["seq"]))
    nets = {"resnet-18": 18, "resnet-34": 34, "resnet-50": 50, "resnet-101": 101, "resnet-152": 152}
    plain = spelled if "-" in spelled else spelled.replace("resnet", "resnet-")
    if plain in nets:
        return Described(resnet(nets[plain]), 224)
    if spelled in ("wide-resnet", "wide-resnet-50", "wide-resnet-50-2"):
        return Described(resnet(50, wide=2), 224)
    known = [row["name"] for row in rows] + list(nets) + ["wide-resnet-50-2"]
    near = difflib.get_close_matches(spelled, known, 3)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise Problem(
        f"unknown model {name!r}",
        f"{hint} Or give a config.json" if hint.endswith("?") else f"{hint}; or give a config.json",
    )


def _model(row: Dict[str, Any]) -> Model:
    values = {key: value for key, value in row.items() if key not in ("alias", "seq")}
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["hidden"] // values["heads"])
    return check(Model(**values))


def describe(text: str) -> Described:
    """Return the model of --model: a file (config.json, or a folder with one), or a name."""
    if os.path.isdir(text):
        text = os.path.join(text, "config.json")
    if text.endswith(".json") or os.path.sep in text:
        return Described(*from_config(text))
    return named(text)
