"""Learn what words of errors mean, from lines of which people said it: `python -m tools.meaning` writes weights.yaml.

Each line of the .tsv files here is a code and an error in somebody's words; `benign` are words of healthy runs and `aftermath`
what others say once one has failed. The model is multinomial logistic regression over the stems of a line. A tenth of the lines
is kept apart in tests/logs/data/held_out.tsv: more of them right is the only reason to change anything here.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Dict, Iterable, List, Sequence, Set, Tuple

import torch

from drumbeat.logs.meaning.likely import stems_of

HERE = Path(__file__).parent
TESTED = HERE.parent.parent / "tests" / "logs" / "data"
WEIGHTS = HERE.parent.parent / "src" / "drumbeat" / "logs" / "meaning" / "weights.yaml"
STEPS, RATE, DECAY, SMALLEST = 150, 0.2, 3e-6, 0.5

Example = Tuple[str, str]


def read(files: Iterable[Path]) -> List[Example]:
    pairs = (line.split("\t", 1) for file in files for line in file.read_text().splitlines())
    return [(code, text) for code, text in pairs]


def learn(examples: Sequence[Example]) -> Dict[str, Dict[str, float]]:
    """Return the weights: code -> stem -> weight, with the code's bias under the empty stem."""
    codes = sorted({code for code, _ in examples})
    found = [stems_of(text) for _, text in examples]
    stems = sorted(Counter(stem for each in found for stem in each))
    x, y = _matrix(found, stems), torch.tensor([codes.index(code) for code, _ in examples])
    counts = torch.bincount(y).float()
    rare = (counts.mean() / counts).sqrt()  # half the examples count 1.4 times
    weights = torch.zeros(len(stems), len(codes), requires_grad=True)
    bias = torch.zeros(len(codes), requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.sparse.mm(x, weights) + bias, y, weight=rare)
        (loss + DECAY * weights.square().sum()).backward()
        optimizer.step()
    kept = weights.detach().where(weights.detach().abs() >= SMALLEST, 0.0)
    columns = {code: kept[:, place].tolist() for place, code in enumerate(codes)}
    return {
        code: {"": bias[place].item(), **{stem: each for stem, each in zip(stems, columns[code]) if each}}
        for place, code in enumerate(codes)
    }


def _matrix(found: Sequence[Set[str]], stems: Sequence[str]) -> torch.Tensor:
    """A row per line, whose length is one."""
    place = {stem: number for number, stem in enumerate(stems)}
    entries = [(row, place[stem], 1 / math.sqrt(len(each))) for row, each in enumerate(found) for stem in sorted(each)]
    rows, columns, values = zip(*entries)
    return torch.sparse_coo_tensor(
        torch.tensor([rows, columns]), torch.tensor(values), (len(found), len(stems))
    ).coalesce()


def text_of(weights: Dict[str, Dict[str, float]]) -> str:
    """One line per code: its bias, then each stem and its weight, in tenths."""
    lines = [
        "# Written by `python -m tools.meaning`: code -> its bias, then stems and how much each speaks for it, in tenths."
    ]
    for code, of in weights.items():
        lines.append(f'{code}: "{" ".join(f"{stem}:{round(10 * each)}" for stem, each in of.items())}"')
    return "\n".join(lines) + "\n"
