"""The Python examples of docs/train/own-loop.md run as they are printed, given a model, an optimizer and a loader."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
from gloo_world import GlooWorld

PAGE = Path(__file__).parents[2] / "docs" / "train" / "own-loop.md"
EXAMPLES: List[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
OURS = [text for text in EXAMPLES if "train.setup" in text]


def test_there_are_examples_and_a_plain_loop_needs_at_most_eight_lines_more() -> None:
    assert len(EXAMPLES) >= 4 and len(OURS) == 2
    assert max(len([line for line in text.splitlines() if line.strip()]) for text in OURS) <= 10
    plain = next(text for text in EXAMPLES if "optimizer.step()" in text and "import" not in text)
    added = [line for line in OURS[1].splitlines() if line.strip() and line not in plain.splitlines()]
    assert len(added) <= 8


def run_examples(examples: List[str], folder: str) -> List[float]:
    """The loss that each example's last step left behind."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader

    from drumbeat import train

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: Any, labels: Any = None) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x if labels is None else {"loss": F.cross_entropy(x, labels)}

    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    ended = []
    for text in examples:
        torch.manual_seed(0)
        model = Model()
        rows = [{"x": torch.randn(4), "labels": torch.tensor(i % 4)} for i in range(32)]
        names: Dict[str, Any] = {"model": model, "loader": DataLoader(rows, batch_size=8), "F": F}  # type: ignore[arg-type]
        names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if "def loss" in text:  # it continues a script: after setup, inside the loop
            pairs = [(row["x"], row["labels"]) for row in rows]
            names["kept"] = DataLoader(pairs, batch_size=8)  # type: ignore[arg-type]
            names["trainer"] = train.setup(model, names["optimizer"], layout="fsdp")
            names["batch"] = next(iter(names["trainer"].batches(DataLoader(pairs, batch_size=8))))  # type: ignore[arg-type]
        exec(compile(text, str(PAGE), "exec"), names)
        result = names["result"]
        if "def loss" in text:
            assert set(result.metrics) == {"accuracy"} and set(names["figures"]) == {"loss", "accuracy"}
        else:
            assert result.step == 12
        ended.append(float(result.loss))
    return ended


def test_the_examples_run_and_compute_the_same_on_any_number_of_ranks(world: GlooWorld, tmp_path: Path) -> None:
    examples = [*OURS, next(text for text in EXAMPLES if "def loss" in text)]
    (one,) = world.run(run_examples, examples, str(tmp_path / "one"), size=1)
    for four in world.run(run_examples, examples, str(tmp_path / "four"), size=4):
        assert four[1:] == pytest.approx(one[1:], rel=1e-5)  # the first one computes in bf16
        assert four[0] == pytest.approx(one[0], rel=5e-2)
