"""Line numbers of many files as ranges: what a verdict names as seen. Memory is bounded; what is dropped is counted."""

from __future__ import annotations

from typing import Dict, Iterable, List, Tuple

MAX_RANGES = 4_000
MAX_TEXTS = 64  # files that are named
MAX_RANGES_IN_TEXT = 400


class Places:
    def __init__(self) -> None:
        self._files: Dict[str, List[Tuple[int, int]]] = {}
        self._ranges = 0
        self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._files)

    def add(self, file: str, last: int, lines: int = 1) -> None:
        """`lines` lines, the last of which is number `last`. Lines of a file come in their order, or nearly so."""
        first = max(last - lines + 1, 1)
        ranges = self._files.setdefault(file, [])
        if ranges and first <= ranges[-1][1] + 1 and first >= ranges[-1][0]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        elif self._ranges >= MAX_RANGES:
            self.dropped += 1
        else:
            ranges.append((first, last))
            self._ranges += 1

    def drop(self, file: str, below: int) -> None:
        """Forget the lines of that file before number `below`."""
        kept = [(max(first, below), last) for first, last in self._files.pop(file, ()) if last >= below]
        if kept:
            self._files[file] = kept

    def texts(self) -> Tuple[str, ...]:
        """`slurm-7.out:12,40-44`, one for each file."""
        return tuple(f"{file}:{_numbers(ranges)}" for file, ranges in list(self._files.items())[:MAX_TEXTS])


def merged(places: Iterable[Places]) -> Tuple[str, ...]:
    """All of them together, sorted within each file."""
    files: Dict[str, List[Tuple[int, int]]] = {}
    for each in places:
        for file, ranges in each._files.items():
            files.setdefault(file, []).extend(ranges)
    return tuple(f"{file}:{_numbers(_union(ranges))}" for file, ranges in list(files.items())[:MAX_TEXTS])


def _union(ranges: List[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Sorted, each line once."""
    union: List[Tuple[int, int]] = []
    for first, last in sorted(ranges):
        if union and first <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, last))
    return union


def _numbers(ranges: List[Tuple[int, int]]) -> str:
    shown = ranges[:MAX_RANGES_IN_TEXT]
    words = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in shown)
    return words + (f" and {len(ranges) - len(shown)} more" if len(ranges) > len(shown) else "")
