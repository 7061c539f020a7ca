"""Learn what an error is about: logistic regression over its words, between lines about machines and lines about programs.

machines.txt and objects.txt use the same words in either sense (`node`, `port`, `connection`); every cause in the .tsv files is
about machines as well, and an `exception` there about the program.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import List, Sequence, Set

import torch
from tools.meaning import HERE, WEIGHTS, Example

from drumbeat.logs.meaning.model import NO_CAUSES
from drumbeat.logs.meaning.senses import PROGRAM
from drumbeat.logs.meaning.subject import UNSEEN, stems

SUBJECT = WEIGHTS.with_name("subject.yaml")
STEPS, RATE, DECAY, FEWEST, TIMES = 200, 0.1, 5e-5, 3, 2
ROW = 200  # words per line of subject.yaml


def learn(examples: Sequence[Example]) -> str:
    """Return the text of subject.yaml."""
    machines = [text for code, text in examples if code not in (*NO_CAUSES, PROGRAM)]
    machines += TIMES * (HERE / "machines.txt").read_text().splitlines()
    objects = [text for code, text in examples if code == PROGRAM]
    objects += (HERE / "objects.txt").read_text().splitlines()
    found = [stems(text) for text in (*machines, *objects)]
    counts = Counter(each for of in found for each in of)
    names = [UNSEEN, *sorted(each for each, count in counts.items() if count >= FEWEST)]
    x = _matrix(found, names)
    y = torch.tensor([1.0] * len(machines) + [0.0] * len(objects))
    as_many = torch.where(y > 0, 1.0, len(machines) / len(objects))
    weights, bias = torch.zeros(len(names), 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        points = torch.sparse.mm(x, weights)[:, 0] + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(points, y, weight=as_many)
        (loss + DECAY * weights.square().sum()).backward()
        optimizer.step()
    told = [f"{name} {round(10 * weight)}" for name, weight in zip(names, weights[:, 0].tolist())]
    lines = [
        "# Written by `python -m tools.meaning`, in tenths: how much each word (its first letters) speaks for machines.",
        f"bias: {round(10 * bias.item())}",
        "weights: |-",
    ]
    lines += ["  " + " ".join(told[at : at + ROW]) for at in range(0, len(told), ROW)]
    return "\n".join(lines) + "\n"


def _matrix(found: Sequence[Set[str]], names: Sequence[str]) -> torch.Tensor:
    place = {name: number for number, name in enumerate(names)}
    entries: List[List[float]] = [
        [row, place.get(each, 0), 1 / math.sqrt(len(of))] for row, of in enumerate(found) for each in sorted(of)
    ]
    rows, columns, values = zip(*entries)
    size = (len(found), len(names))
    return torch.sparse_coo_tensor(torch.tensor([rows, columns]), torch.tensor(values), size).coalesce()
