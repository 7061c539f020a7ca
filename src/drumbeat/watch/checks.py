"""What the nodes' verdicts of one check add up to. Pure."""

from __future__ import annotations

from typing import Dict, List, Mapping

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import UNKNOWN, Verdict


@dataclass(frozen=True)
class Check:
    """What one check says of all nodes."""

    check: str
    answer: str  # the answer that needs attention first, else the one of most nodes
    summary: str
    words: str  # answer and summary in one sentence
    nodes: int  # that gave this answer
    judged: int  # nodes that gave any answer
    confidence: str


def check_of(name: str, by_node: Mapping[int, Verdict]) -> Check:
    answers: Dict[str, List[Verdict]] = {}
    for verdict in by_node.values():
        answers.setdefault(verdict.answer, []).append(verdict)
    worst = max(answers, key=lambda answer: (answer == "mismatch", answer != UNKNOWN, len(answers[answer])))
    first = answers[worst][0]
    return Check(name, worst, first.summary, first.words, len(answers[worst]), len(by_node), first.confidence)
