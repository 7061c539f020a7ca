"""Sets of rank numbers as text: 0, 1, 2 and 9 are written `0-2,9`."""

from __future__ import annotations

from typing import Iterable, List

MOST = 400  # ranges written out; beyond that the text ends in `...`


def ranges(numbers: Iterable[int], most: int = MOST) -> str:
    """The numbers in order, without repetition, runs of them joined; at most `most` runs are written out."""
    runs: List[List[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:most]]
    return ",".join(parts + ["..."] if len(runs) > most else parts)


def numbers(text: str) -> List[int]:
    """What `ranges` has written; what it left out is not known."""
    found: List[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(int(low), int(high or low) + 1)
    return found


def named_ranks(numbers: Iterable[int], most: int = MOST) -> str:
    """With the noun before it: `rank 3`, `ranks 0-7,9`."""
    text = ranges(numbers, most)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def named_commands(nodes: Iterable[int], most: int = 8) -> str:
    """What was started once per node, where it starts the ranks itself: `the command on node 1`."""
    text = ranges(nodes, most)
    return f"the command on node {text}" if text.isdigit() else f"the commands on nodes {text}"
