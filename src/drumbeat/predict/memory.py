"""Bytes that a rank needs, part by part and pipeline stage by stage: pure functions over plain numbers or arrays.

States: weights, gradients and optimizer, divided by ZeRO's stages. Activations: what a layer keeps for the backward pass,
times its layers, times the micro-batches in flight on the stage. In addition: the logits, the working set (anything gathered
or computed at once), and the share of libraries and the allocator.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.predict import shapes
from drumbeat.predict.cost import Layout, Software, Work, plain
from drumbeat.predict.shapes import Model, Number

SLICE = 2 << 30
CONTEXT = 1.5 * 2**30  # for the driver and the libraries
COMMUNICATOR = 0.4 * 2**30  # buffers of one group of NCCL or RCCL: 0.3 to 0.5 GiB


@dataclass(frozen=True)
class States:
    """Bytes per parameter. `gathered`: full-precision shards are gathered as 16-bit copies, one unit at a time."""

    weights: Number = 2
    grads: Number = 4
    optimizer: Number = 12
    gathered: Number = 0
    copies: Number = 0  # 16-bit copies of full-precision weights, whole
    fused_loss: Number = 0  # 1: the full logits are never stored
    late_grads: Number = 0  # 1: gradients are freed after each step, so they grow while activations shrink
    bucket: Number = 0  # bytes of the buffer that gradients are reduced from, where states are sharded
    narrow: Number = (
        0  # 1: inputs of products are kept in 8 bits, as are a copy of the blocks' weights and the head's gradient
    )


def in_flight(a: Layout, stage: Number, count: Number, x: Any) -> Number:
    """Return the number of micro-batches whose activations a stage holds."""
    interleaved = a.pp * (1 + (a.pp - 1) / (a.pp * a.vp)) - stage
    usual = x.where(a.vp > 1, x.maximum(interleaved, 1), a.pp - stage)
    return x.minimum(count, x.where(a.flight * (a.pp > 1) > 0, a.flight * a.pp, usual))


def held_parameters(m: Model, a: Layout, stage: Number, last: Number, x: Any) -> Tuple[Number, Number]:
    """Return the parameters of a rank of this stage before sharding: without routed experts, and theirs."""
    layers = x.ceil(m.layers / a.pp - 1e-9)
    share = shapes.moe_layers(m) / m.layers
    mlp = (1 - share) * shapes.mlp_parameters(m) + share * shapes.shared_parameters(m)
    dense = layers * ((shapes.attention_parameters(m) + mlp) / a.tp + shapes.small_parameters(m))
    routed = layers * share * m.experts * shapes.expert_parameters(m) / (a.tp * a.ep)
    table = m.vocab * m.hidden / a.tp
    first = x.where(stage == 0, 1, 0)
    both = first * last  # one stage: a tied head is the same matrix
    dense = dense + table * (first + last - both * m.tied) + first * m.positions * m.hidden
    return dense, routed


def parts(
    m: Model, w: Work, a: Layout, s: Software, states: States, stage: Number, last: Number, x: Any = plain
) -> Dict[str, Number]:
    """Return the bytes of one rank of a stage. `last`: 1 if the stage has the head."""
    dense, routed = held_parameters(m, a, stage, last, x)
    replicas = a.dp * a.cp
    shard = x.where(a.shard > 0, x.minimum(a.shard, replicas), replicas)
    expert_shard = x.maximum(shard / a.ep, 1)

    def divided(bytes_each: Number, from_stage: int) -> Number:
        cut = a.zero >= from_stage
        return bytes_each * (dense / x.where(cut, shard, 1) + routed / x.where(cut, expert_shard, 1))

    tokens = a.micro * w.seq / a.cp
    count = x.maximum(1, x.ceil(w.batch / (a.dp * a.micro) - 1e-9))
    layers = x.ceil(m.layers / a.pp - 1e-9)
    per_layer = (shapes.activation_bytes(m, a.tp, a.sp, s.flash, w.seq, a.cp) + _extra(m, a, s, states)) * tokens
    whole = 2 * m.hidden * tokens * (a.sp / a.tp + 1 - a.sp)
    selective = _selective(m, a, s, w) * tokens
    kept = x.where(a.recompute == 2, whole, x.where(a.recompute == 1, selective, per_layer))
    again = x.where(a.recompute == 2, per_layer, x.where(a.recompute == 1, per_layer - selective, 0))
    under_way = in_flight(a, stage, count, x)
    logits = last * m.heads_out * tokens * m.vocab / a.tp * 6.0
    # A loss that processes the logits in slices holds one slice, and the gradient of the head. In 8 bits also that slice's
    # gradient both ways round, the weights without what they have in common, those both ways round, and a slice's share.
    one, matrix = x.minimum(SLICE, 2 * tokens * m.vocab), 2 * m.hidden * m.vocab
    slice_bytes = last * m.heads_out * (one + matrix + states.narrow * (one + 3 * matrix))
    logits = x.where(states.fused_loss > 0, slice_bytes, logits)
    unit = (dense + routed) / x.maximum(layers, 1)
    table = m.vocab * m.hidden / a.tp
    largest = x.maximum(unit, x.where(a.zero >= 3, table * last, 0))
    gathered = x.where(a.zero >= 3, 2 * (unit + largest) + 4 * 1 * unit, 0)
    # A weight's gradient before it is added; where gradients are kept in 32 bits also its share of the buffer being filled.
    product = (4 + 1.5 * x.where(states.grads >= 4, states.grads, 0)) * m.hidden * x.maximum(m.ffn, m.expert_ffn) / a.tp
    weights = divided(states.weights, 3) + states.copies * dense + states.narrow * (dense - table * (2 - m.tied))
    grads = divided(states.grads, 2)
    active = kept * layers * under_way + whole * under_way * (1 + s.stage_inputs * (a.pp > 1))
    # Gradients recreated in each step are complete when the activations are gone: the larger of the two counts.
    hidden_grads = states.late_grads * x.minimum(grads, active + again + logits)
    product = product * (1 - states.late_grads)
    return {
        "weights": weights,
        "gradients": grads - hidden_grads,
        "optimizer": divided(states.optimizer, 1),
        "activations": active,
        "logits": logits,
        "working set": again + gathered + product + states.bucket * (a.zero >= 1),
    }


def _extra(m: Model, a: Layout, s: Software, states: States) -> Number:
    """Return what a framework keeps beyond the usual (or below it, in 8 bits), in bytes per token and layer."""
    rotary = s.rotary_kept * 2 * (m.heads + m.kv_heads) * m.head_dim / a.tp
    return rotary - states.narrow * (m.heads * m.head_dim + m.ffn) / a.tp


def _selective(m: Model, a: Layout, s: Software, w: Work) -> Number:
    """Return the bytes per token and layer that selective recomputation keeps.

    Classic blocks keep everything except attention's scores; others keep the block's input and the outputs of attention and of
    matrix products."""
    q, kv = m.heads * m.head_dim / a.tp, m.kv_heads * m.head_dim / a.tp
    share = shapes.moe_layers(m) / m.layers
    inner = ((1 - share) * m.ffn + share * (m.topk * m.expert_ffn + m.shared_ffn)) / a.tp
    outputs = 2 * (2 * m.hidden * (a.sp / a.tp + 1 - a.sp) + 2 * q + 2 * kv + (1 + m.gated) * inner)
    return m.classic * shapes.activation_bytes(m, a.tp, a.sp, 1, w.seq, a.cp) + (1 - m.classic) * outputs


def libraries(m: Model, a: Layout, s: Software, x: Any = plain) -> Number:
    """Return what a GPU holds outside the framework's allocations: the context, communicators, and a block kept by the
    allocator.

    The gradient of the token table is one piece, made while other micro-batches' activations exist: it needs its own block.
    """
    kinds = 1.0 * (a.tp > 1) + (a.dp > 1) + (a.pp > 1) + (a.cp > 1) + (a.ep > 1)
    pipeline = 1.0 * (a.pp > 1)  # a pipeline also has groups of neighbours, and one of its two ends
    groups = (kinds > 0) + s.groups * kinds + (1 + 2 * (s.groups - 1)) * pipeline
    return CONTEXT + COMMUNICATOR * groups + pipeline * 2 * m.vocab * m.hidden / a.tp


def peak(m: Model, w: Work, a: Layout, s: Software, states: States, x: Any = plain) -> Number:
    """Return the bytes of the stage that needs most, without `libraries`."""
    first = parts(m, w, a, s, states, 0, x.where(a.pp == 1, 1, 0), x)
    last = parts(m, w, a, s, states, a.pp - 1, 1, x)
    return x.maximum(sum(first.values()), sum(last.values()))


def stages(m: Model, w: Work, a: Layout, s: Software, states: States) -> List[Dict[str, float]]:
    """Return the parts of every pipeline stage of one layout."""
    return [parts(m, w, a, s, states, stage, int(stage == a.pp - 1)) for stage in range(int(a.pp))]
