"""Ring attention is attention: results and gradients, in 64 bits, whatever the ranks and the groups of heads."""

from __future__ import annotations

import pytest
import torch
from gloo_world import GlooWorld

from drumbeat.train.parallel.context import zigzag


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(4, 3, 1), (2, 4, 2)])
def test_ring_attention_equals_attention(world: GlooWorld, ranks: int, heads: int, kv_heads: int) -> None:
    for error in world.run(errors, ranks, heads, kv_heads):
        assert error < 1e-12


def errors(ranks: int, heads: int, kv_heads: int) -> float:
    """The largest difference from plain attention over the whole sequence, of the result and the three gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    from drumbeat.train.layers.attention import causal_attention
    from drumbeat.train.parallel.context import Ring, zigzag

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("others", "ring"))["ring"]
    shapes = [(2, 32, n, 8) for n in (heads, kv_heads, kv_heads)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    up = torch.randn(shapes[0], dtype=torch.float64)
    want = causal_attention(*whole)
    wanted = [want, *torch.autograd.grad((want * up).sum(), whole)]
    places = zigzag(32, mesh.get_local_rank(), ranks)
    own = [x.detach()[:, places].requires_grad_() for x in whole]
    got = Ring(mesh.get_group())(*own)
    ours = [got, *torch.autograd.grad((got * up[:, places]).sum(), own)]
    return max(float((a - b[:, places]).abs().max()) for a, b in zip(ours, wanted))


def test_zigzag_gives_every_place_once_and_every_rank_the_same_work() -> None:
    held = [zigzag(48, rank, 4) for rank in range(4)]
    assert sorted(torch.cat(held).tolist()) == list(range(48))
    assert len({int((places + 1).sum()) for places in held}) == 1, "a query at place p meets p + 1 keys"
