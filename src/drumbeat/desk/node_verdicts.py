"""What each node says of itself, held until all have: nodes that say the same are one line."""

from __future__ import annotations

from typing import Dict, List

from drumbeat.base.ranges import ranges

_MOST = 4  # lines


class NodeVerdicts:
    """Of one attempt."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._said: Dict[int, str] = {}

    def add(self, node: int, words: str) -> List[str]:
        """Lines to show, once every node has said something; `words` may be empty. What comes later is shown at once."""
        late = len(self._said) >= self.nodes
        self._said[node] = words
        if late:
            return _lines({node: words})
        return _lines(self._said) if len(self._said) == self.nodes else []

    def take(self) -> List[str]:
        """The attempt is over, and some nodes may have said nothing."""
        held = {} if len(self._said) >= self.nodes else self._said
        self._said = {}
        return _lines(held)


def _lines(said: Dict[int, str]) -> List[str]:
    groups: Dict[str, List[int]] = {}
    for node, words in sorted(said.items()):
        if words:
            groups.setdefault(words, []).append(node)
    lines = [
        f"nodes {ranges(nodes, 8)}, each: {words}" if len(nodes) > 1 else f"node {nodes[0]}: {words}"
        for words, nodes in groups.items()
    ]
    more = [f"{len(lines) - _MOST} more differ: drumbeat status --placement"] if len(lines) > _MOST else []
    return lines[:_MOST] + more
