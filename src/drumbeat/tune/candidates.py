"""Which hooks and which layouts are tried, and in which order. Pure."""

from __future__ import annotations

from typing import Iterator, List, Tuple

from drumbeat.train.layout import Layout
from drumbeat.tune.search import divisors

# As the recipes name them; the first one is what the others are compared with.
HOOKS = ("all-reduce", "fp16", "bf16", "powersgd:1", "powersgd:4")


def layouts(world: int) -> Iterator[Layout]:
    """Every way to write the number of ranks as a product of the five degrees."""
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // tp // cp):
                for shard in divisors(world // tp // cp // pp):
                    yield Layout(world // tp // cp // pp // shard, shard, tp, pp, cp)


def ranked(world: int, ranks_per_node: int) -> List[Layout]:
    """All layouts, the likeliest to be fast first; docs/tune.md says the order in words."""
    return sorted(layouts(world), key=lambda layout: _order(layout, ranks_per_node))


def _order(layout: Layout, ranks_per_node: int) -> Tuple[object, ...]:
    """What talks in every layer must stay inside a node; then the less a model is cut, the less it talks."""
    crosses = layout.tp > ranks_per_node or ranks_per_node % layout.tp != 0
    crosses = crosses or layout.tp * layout.cp > max(ranks_per_node, layout.tp)
    inside = ranks_per_node // (layout.tp * layout.cp) or 1  # data ranks of one node
    both = layout.dp_replicate > 1 and layout.dp_shard > 1
    odd = both and layout.dp_shard != inside  # shards that fill a node are the usual cut between the two
    cut = layout.tp * layout.cp * layout.pp
    kinds = sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp))
    # Within the same cut: replicas talk once a step, shards in every layer; then tp, pp, cp.
    return (crosses, odd, kinds, cut, layout.cp, layout.pp, layout.tp, layout.dp_shard)
