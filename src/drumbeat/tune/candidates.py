"""Which hooks and which layouts are tried, and in which order. Pure."""

from __future__ import annotations

from typing import Iterator, List, Optional, Tuple

from drumbeat.train.parallel.layout import Layout
from drumbeat.tune.search import divisors

# Of one parameter, whatever the precision: weights and gradients of 4 bytes (or 2 + 2 and a master copy of 4) and Adam's
# two moments of 4. Activations come on top.
STATE_BYTES = 16

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
    # Within the same cut: replicas talk once per step, shards in every layer; then tp, pp, cp.
    return (crosses, odd, kinds, cut, layout.cp, layout.pp, layout.tp, layout.dp_shard)


def too_large(layout: Layout, parameters: Optional[float], gpu_gib: Optional[float]) -> str:
    """Why this layout cannot fit, by its parameters alone; '' where it may, or where nobody says how many they are."""
    if parameters is None or gpu_gib is None:
        return ""
    pieces = layout.dp_shard * layout.tp * layout.pp
    need = STATE_BYTES * parameters / pieces / 2**30
    if need <= gpu_gib:
        return ""
    return f"{STATE_BYTES} bytes x {parameters:.3g} parameters / {pieces} = {need:.0f} GiB, and a GPU has {gpu_gib:.0f}"
