"""Learn what words of errors mean, from lines of which people said it: `python -m tools.meaning` writes weights.yaml.

Each line of the .tsv files here is a code and an error in somebody's words; `benign` are words of healthy runs and `aftermath`
what others say once one has failed. The model is multinomial logistic regression over what likely.py sees of a line. A tenth
of the lines is kept apart in tests/logs/data/held_out.tsv: more of them right is the only reason to change anything here.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Iterable, List, Sequence, Set, Tuple

import torch

from drumbeat.logs.meaning.model import CODES, features

HERE = Path(__file__).parent
TESTED = HERE.parent.parent / "tests" / "logs" / "data"
WEIGHTS = HERE.parent.parent / "src" / "drumbeat" / "logs" / "meaning" / "weights.yaml"
STEPS, RATE, DECAY, SMALLEST, FEWEST = 150, 0.2, 3e-6, 0.3, 2
ROW = 150  # features per line of weights.yaml

Example = Tuple[str, str]


def read(files: Iterable[Path]) -> List[Example]:
    pairs = (line.split("\t", 1) for file in files for line in file.read_text().splitlines())
    return [(code, text) for code, text in pairs]


def learn(examples: Sequence[Example]) -> str:
    """Return the text of weights.yaml."""
    codes = sorted({code for code, _ in examples})
    found = [features(text)[0] for _, text in examples]
    counts = Counter(each for of in found for each in of)
    names = sorted(each for each, count in counts.items() if count >= FEWEST or each[0] not in "#~")
    x, y = _matrix(found, names), torch.tensor([codes.index(code) for code, _ in examples])
    sizes = torch.bincount(y).float()
    rare = (sizes.mean() / sizes).sqrt()  # half the examples count 1.4 times
    weights = torch.zeros(len(names), len(codes), requires_grad=True)
    bias = torch.zeros(len(codes), requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.sparse.mm(x, weights) + bias, y, weight=rare)
        (loss + DECAY * weights.square().sum()).backward()
        optimizer.step()
    lines = [
        "# Written by `python -m tools.meaning`. codes and bias (in tenths) of each; weights: what is seen of a line, and the",
        "# letters of codes with how much it speaks for each, in tenths.",
        f"codes: [{', '.join(codes)}]",
        f"bias: [{', '.join(str(round(10 * each)) for each in bias.tolist())}]",
        "weights: |-",
    ]
    rows = []
    for name, row in zip(names, weights.tolist()):
        told = "".join(f"{letter}{round(10 * each)}" for letter, each in zip(CODES, row) if abs(each) >= SMALLEST)
        rows += [f"{name} {told}"] if told else []
    lines += ["  " + " ".join(rows[at : at + ROW]) for at in range(0, len(rows), ROW)]
    return "\n".join(lines) + "\n"


def _matrix(found: Sequence[Set[str]], names: Sequence[str]) -> torch.Tensor:
    """A row per line, whose length is one."""
    place = {name: number for number, name in enumerate(names)}
    rows_of = [[place[each] for each in sorted(of) if each in place] for of in found]
    entries = [(row, column, 1 / math.sqrt(len(of))) for row, of in enumerate(rows_of) for column in of]
    rows, columns, values = zip(*entries)
    return torch.sparse_coo_tensor(
        torch.tensor([rows, columns]), torch.tensor(values), (len(found), len(names))
    ).coalesce()
