"""The time of one training step, term by term, and the bytes of a rank, from sizes alone: pure functions over plain numbers or
arrays.

`x` has `maximum`, `minimum`, `where`, `ceil` and `log2`: numpy, or `plain` for plain numbers.

Compute    each matrix product takes its FLOPs at the achievable rate plus its bytes at the memory's rate; element-wise work
           moves every stored activation a few times; attention's core has a rate of its own; a layer takes no less time than
           its kernels need to be launched.
Network    bytes over bandwidth plus hops times latency. A group's bandwidth is that of its slowest part: the links inside a
           node by how many members are in it, or the share of the node's adapters that belongs to those members.
Pipeline   m micro-batches at the slowest stage, plus the fill and drain, divided by the number of chunks per stage.
Overlap    what a framework hides is subtracted, and what it hides behind becomes slower.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict import shapes
from drumbeat.predict.shapes import ConvNet, Model, Number

plain = SimpleNamespace(
    maximum=lambda a, b: a if a > b else b,
    minimum=lambda a, b: a if a < b else b,
    where=lambda condition, a, b: a if condition else b,
    ceil=math.ceil,
    log2=math.log2,
)


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and the work of a rank. `shard`: ranks that share the states; 0: all replicas."""

    tp: Number = 1
    pp: Number = 1
    cp: Number = 1
    ep: Number = 1
    dp: Number = 1
    vp: Number = 1  # virtual stages: chunks of layers per stage
    zero: Number = 0
    shard: Number = 0
    micro: Number = 1
    recompute: Number = 0  # 0 none, 1 selective, 2 full
    sp: Number = 0  # sequence parallelism beside tensor parallelism
    bubble: Number = 1.0  # share of the 1F1B bubble left by the schedule
    flight: Number = 0  # micro-batches in flight on every stage, in units of `pp`; 0: as in 1F1B


# Pipeline schedules: minimum chunks per stage, share of the 1F1B bubble left, micro-batches in flight (Layout.flight).
# Zero-bubble schedules: arXiv:2401.10241; DualPipeV: the DeepSeek-V3 report's bubble, with one copy of the weights.
SCHEDULES: Dict[str, Tuple[int, float, float]] = {
    "1f1b": (1, 1.0, 0),
    "interleaved": (2, 1.0, 0),
    "gpipe": (1, 1.0, 1e9),
    "zb-h1": (1, 1 / 3, 0),
    "zb-2p": (1, 0.0, 2),
    "zero-bubble": (2, 1 / 3, 0),
    "zbv": (2, 0.0, 1),
    "dualpipe-v": (2, 1 / 3, 1),
}


def schedule_name(a: Layout) -> str:
    """Return the schedule of a layout."""
    same = (name for name, row in SCHEDULES.items() if row[1:] == (a.bubble, a.flight) and (row[0] > 1) == (a.vp > 1))
    return next(same, "1f1b")


@dataclass(frozen=True)
class Work:
    """Work of one step: sequences (or images) of one length."""

    seq: Number
    batch: Number


@dataclass(frozen=True)
class Software:
    """Properties of a framework that change time or memory. Numbers between 0 and 1, so that they work in arrays."""

    flash: Number = 1  # attention scores are never stored
    overlap_grads: Number = 1  # gradients are communicated during the backward pass
    overlap_tp: Number = 0
    grad_bytes: Number = 4
    compiled: Number = 0  # element-wise work is fused by a compiler
    rotary_kept: Number = 0  # queries and keys are kept both before and after rotation
    groups: Number = 1  # communicators per kind of parallelism
    head_too: Number = 0  # where products are in 8 bits, the head's are too
    stage_inputs: Number = 0  # copies of its input that a pipeline stage keeps beside its layers' inputs


@dataclass(frozen=True)
class Machine:
    """Rates of the hardware: FLOP/s that a large product reaches, bytes per second, seconds."""

    flops: Number  # in the products' precision, as reached by large ones
    core_flops: Number  # of 16-bit products: attention's core
    memory_rate: Number
    memory: Number
    gpus_per_node: Number
    link: Number  # one GPU to the others of its node, each way
    per_peer: Number  # pairs are joined by their own links; 0: by a switch
    nic: Number  # for a whole node, each way
    hop: Number = 3e-6
    net_hop: Number = 12e-6


@dataclass(frozen=True)
class Constants:
    """Physical shares and delays; the only values that are ever fitted."""

    product: Number = 0.88  # share of the rate that large products reach
    bytes: Number = 1.0  # multiplies a product's bytes at the memory's rate
    memory: Number = 0.8  # share of the memory's rate for element-wise work
    core: Number = 0.45  # share of the products' rate in attention's core
    link: Number = 0.78
    nic: Number = 0.62
    partial: Number = 0.7  # share of that, for a group with some but not all GPUs of a node
    delay: Number = 1.0  # multiplies the latency of a hop
    launch: Number = 5e-4  # seconds per layer, forward
    hidden: Number = 0.8  # share of one micro-batch's time that can hide gradients
    slowed: Number = 0.1  # fraction by which computing slows during communication
    step: Number = 0.03  # seconds per step: optimizer launch, norm of the gradients, data


# Terms of a step that are communication between GPUs.
NETWORK = (
    "tensor parallel", "context parallel", "expert parallel", "sharded weights", "pipeline transfers", "gradients",
)  # fmt: skip
# Bytes that the optimizer moves per parameter updated by a rank (weights, moments and gradients read and written).
_OPTIMIZER_BYTES = 36


def members_per_node(size: Number, stride: Number, per_node: Number, x: Any) -> Number:
    """Return how many members of a group of `size` ranks, `stride` apart, are on one node."""
    return x.minimum(size, x.maximum(1, per_node / stride))


def link_rate(members: Number, h: Machine, c: Constants, x: Any) -> Number:
    """Return the rate at which one of `members` GPUs of a node can send to the others: all its links, or those to its peers."""
    peers = x.maximum(members - 1, 1)
    return c.link * x.where(h.per_peer > 0, x.minimum(h.link, h.per_peer * peers), h.link)


def gather_seconds(size: Number, stride: Number, total: Number, h: Machine, c: Constants, x: Any) -> Number:
    """Return the time of an all-gather or reduce-scatter of `total` bytes; an all-reduce takes two of them.

    Transfers inside nodes and between them run at once: the slower part decides. Between nodes a group gets its members' share
    of the adapters. A ring enters a node at one member and leaves it at another: if neighbours on an adapter belong to other
    groups, its data cross the node to reach that adapter. With one member per node, or all of them, they do not.
    """
    inside = members_per_node(size, stride, h.gpus_per_node, x)
    nodes = size / inside
    local = (inside - 1) / inside * total / link_rate(inside, h, c, x)
    crossing = x.where((inside > 1) * (inside < h.gpus_per_node) > 0, c.partial, 1.0)
    remote = x.maximum(nodes - 1, 0) / nodes * total / (c.nic * crossing * h.nic * inside / h.gpus_per_node)
    hops = x.minimum(inside - 1, 7) * h.hop + x.minimum(nodes - 1, 4 * x.log2(x.maximum(nodes, 1)) + 4) * h.net_hop
    return x.where(size > 1, x.maximum(local, remote) + c.delay * hops, 0)


def exchange_seconds(size: Number, stride: Number, each: Number, h: Machine, c: Constants, x: Any) -> Number:
    """Return the time of an all-to-all in which every rank sends `each` bytes; a node's outgoing bytes are those of all its
    members."""
    inside = members_per_node(size, stride, h.gpus_per_node, x)
    local = (inside - 1) / size * each / link_rate(inside, h, c, x)
    remote = (size - inside) / size * each * h.gpus_per_node / (c.nic * h.nic)
    hops = x.minimum(inside - 1, 7) * h.hop + x.minimum(size / inside - 1, 16) * h.net_hop
    return x.where(size > 1, x.maximum(local, remote) + c.delay * hops, 0)


def step(m: Model, w: Work, a: Layout, s: Software, h: Machine, c: Constants, x: Any) -> Dict[str, Number]:
    """Return the seconds of one step by term; "total" is their sum."""
    rate = h.flops * c.product
    t, p = a.tp, a.pp
    tokens = a.micro * w.seq / a.cp
    count = x.maximum(1, x.ceil(w.batch / (a.dp * a.micro) - 1e-9))  # micro-batches
    layers = x.ceil(m.layers / p - 1e-9)
    experts_here = x.maximum(m.experts / a.ep, 1)
    # Tokens per local expert: those of all ranks of its group, divided by all experts.
    expert_tokens = tokens * m.topk / x.maximum(m.experts, 1) * a.ep
    gemm: Number = 0.0
    for number, rows, inner, columns in shapes.layer_products(m, tokens, t, experts_here, expert_tokens):
        if not hasattr(number, "shape") and not number:
            continue
        moved = 2 * (rows * inner + inner * columns + rows * columns)
        gemm = gemm + number * (2 * rows * inner * columns / rate + c.bytes * moved / h.memory_rate)
    keys = x.where(s.flash > 0, shapes.visible_keys(m, w.seq), w.seq)
    aligned = x.where(m.head_dim % 8 == 0, 1.0, 0.3)
    small = m.head_dim / (m.head_dim + 32) * 1.25  # short heads fill the tensor cores less
    core = 2 * tokens * keys * shapes.core_width(m) / t / (h.core_flops * c.product * c.core * aligned * small)
    act = shapes.activation_bytes(m, t, a.sp, s.flash, w.seq, a.cp) * tokens
    moved = 2 * act * (1 - 0.35 * s.compiled) / (h.memory_rate * c.memory)
    launch = c.launch * (1 - 0.3 * s.compiled)
    full, some = (a.recompute == 2) * 1.0, (a.recompute == 1) * 1.0
    back_core = 2 + 0.5 * s.flash
    busy = gemm * (3 + full) + core * (1 + back_core + full + some * (1 - s.flash)) + moved * (2 + full + 0.3 * some)
    floor = launch * (3 + full)
    # Tensor parallelism: two all-reduces of a layer's output forward, two backward, two more where it is recomputed.
    tp_one = 2 * gather_seconds(t, 1, 2 * tokens * m.hidden, h, c, x)
    tp_layer = (4 + 2 * full) * tp_one * (1 - 0.5 * s.overlap_tp)
    cp_bytes = 4 * tokens * m.kv_heads * m.head_dim / t * a.cp
    cp_layer = x.maximum(0.0, (3 + full) * gather_seconds(a.cp, t, cp_bytes, h, c, x) - 0.7 * core * (1 + back_core))
    ep_bytes = 2 * tokens * m.topk * m.hidden / x.where(a.sp > 0, t, 1)
    moe_share = shapes.moe_layers(m) / m.layers
    ep_layer = moe_share * (4 + 2 * full) * exchange_seconds(a.ep, t * a.cp, ep_bytes, h, c, x)

    # Weights of a layer that a rank holds before they are sharded.
    held = (shapes.attention_parameters(m) + (1 - moe_share) * shapes.mlp_parameters(m)) / t + moe_share * (
        shapes.shared_parameters(m) / t + m.experts / a.ep * shapes.expert_parameters(m) / t
    )
    replicas = a.dp * a.cp
    shard = x.where(a.shard > 0, x.minimum(a.shard, replicas), replicas)
    sharded = x.where(a.zero >= 3, 1.0, 0.0)
    twice = x.where(a.zero == 2, 1.0, 0.0)
    gathers = 2 * sharded + twice
    gather = gather_seconds(shard, t, 2 * held, h, c, x)
    scatter = gather_seconds(shard, t, s.grad_bytes * held, h, c, x)
    fsdp_layer = gathers * gather + (sharded + twice) * scatter
    # A layer, forward and backward including recomputation, is never faster than its kernel launches.
    work = busy + tp_layer + cp_layer + ep_layer
    hidden_layer = (work * work + floor * floor) ** 0.5
    slowed = busy * c.slowed * x.minimum(1.0, fsdp_layer / (busy + 1e-12))
    computing, gathering = hidden_layer * hidden_layer, fsdp_layer * fsdp_layer
    waits = ((computing * computing + gathering * gathering) ** 0.5) ** 0.5 - hidden_layer
    # The head: its product and the loss over the logits, on the last stage only.
    head_columns = m.vocab * m.heads_out / t
    head_flops = s.head_too * h.flops + (1 - s.head_too) * h.core_flops
    head = 3 * (
        2 * tokens * m.hidden * head_columns / (head_flops * c.product)
        + c.bytes * 2 * (m.hidden * head_columns + tokens * head_columns) / h.memory_rate
    ) + 16 * (1 - 0.6 * s.compiled) * tokens * head_columns / (h.memory_rate * c.memory)
    stage = layers * (hidden_layer + slowed + waits)
    mean = m.layers / p * (hidden_layer + slowed + waits) + head / p
    send = x.where(p > 1, 2 * a.vp * (2 * tokens * m.hidden / t / p2p_rate(a, h, c, x) + c.delay * h.net_hop), 0)
    slowest = stage + head + send
    fill = (p - 1) / a.vp * a.bubble * mean
    # Gradients (and, with sharding, the weights gathered after an update).
    plain = 1 - x.where(a.zero >= 2, 1.0, 0.0)
    own = layers * held + m.vocab * m.hidden / t * (1 + (p > 1) * 0.0)
    travel = plain * (
        gather_seconds(replicas, t, s.grad_bytes * own, h, c, x)
        + gather_seconds(replicas, t, x.where(a.zero == 1, 2, s.grad_bytes) * own, h, c, x)
    )
    groups = replicas / shard  # hybrid sharding: the shards are summed over the replicas of the sharding group
    travel = travel + (1 - plain) * 2 * gather_seconds(groups, t * shard, s.grad_bytes * own / shard, h, c, x)
    travel = travel + (1 - plain) * gather_seconds(shard, t, 2 * m.vocab * m.hidden * 2, h, c, x)
    room = c.hidden * s.overlap_grads * slowest
    exposed = x.maximum(travel - room, 0.05 * travel)
    updated = own / x.where(a.zero >= 1, shard, 1)
    optimizer = updated * _OPTIMIZER_BYTES / (h.memory_rate * c.memory) + c.step
    terms = {
        "products": count * layers * gemm * (3 + full) + count * head,
        "attention": count * layers * core * (1 + back_core + full + some * (1 - s.flash)),
        "element-wise": count * layers * moved * (2 + full + 0.3 * some),
        "launches": count * layers * (hidden_layer - work),
        "tensor parallel": count * layers * tp_layer,
        "context parallel": count * layers * cp_layer,
        "expert parallel": count * layers * ep_layer,
        "sharded weights": count * layers * (waits + slowed),
        "pipeline transfers": count * send,
        "bubble": fill,
        "gradients": exposed,
        "optimizer": optimizer,
    }
    total = count * slowest + fill + exposed + optimizer
    return {**terms, "stage imbalance": total - sum(terms.values()), "total": total}


def p2p_rate(a: Layout, h: Machine, c: Constants, x: Any) -> Number:
    """Return the rate at which one rank sends to the next stage: over GPU links if the pipeline is inside a node."""
    # One connection, and each stage both sends and receives: half of what a collective reaches.
    outside = a.tp * a.cp * a.dp * a.pp > h.gpus_per_node
    return 0.5 * x.where(outside, c.nic * h.nic / h.gpus_per_node, c.link * x.where(h.per_peer > 0, h.per_peer, h.link))


def conv_step(m: ConvNet, w: Work, a: Layout, s: Software, h: Machine, c: Constants, x: Any) -> Dict[str, Number]:
    """Return the seconds of one step of a convolutional network under data parallelism, by term."""
    count = x.maximum(1, x.ceil(w.batch / (a.dp * a.micro) - 1e-9))
    products = 3 * a.micro * m.forward_flops / (h.flops * c.product * 0.6)
    moved = 5 * 2 * a.micro * m.activations / (h.memory_rate * c.memory)
    floor = m.layers * c.launch
    busy = products + moved
    one = (busy**4 + floor**4) ** 0.25
    travel = 2 * gather_seconds(a.dp, 1, s.grad_bytes * m.parameters, h, c, x)
    exposed = x.maximum(travel - c.hidden * s.overlap_grads * one, 0.05 * travel)
    optimizer = m.parameters * _OPTIMIZER_BYTES / (h.memory_rate * c.memory) + c.step
    total = count * one + exposed + optimizer
    return {
        "products": count * products,
        "element-wise": count * moved,
        "launches": count * (one - busy),
        "gradients": exposed,
        "optimizer": optimizer,
        "total": total,
    }


# Bytes that a rank needs, part by part and pipeline stage by stage: pure functions over plain numbers or arrays.
#
# States: weights, gradients and optimizer, divided by ZeRO's stages. Activations: what a layer keeps for the backward pass,
# times its layers, times the micro-batches in flight on the stage. In addition: the logits, the working set (anything gathered
# or computed at once), and the share of libraries and the allocator.

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
    # What a framework keeps beyond the usual, or below it, in 8 bits.
    rotary = s.rotary_kept * 2 * (m.heads + m.kv_heads) * m.head_dim / a.tp
    extra = rotary - states.narrow * (m.heads * m.head_dim + m.ffn) / a.tp
    per_layer = (shapes.activation_bytes(m, a.tp, a.sp, s.flash, w.seq, a.cp) + extra) * tokens
    whole = 2 * m.hidden * tokens * (a.sp / a.tp + 1 - a.sp)
    selective = _selective(m, a, s, w) * tokens
    kept = x.where(a.recompute == 2, whole, x.where(a.recompute == 1, selective, per_layer))
    again = x.where(a.recompute == 2, per_layer, x.where(a.recompute == 1, per_layer - selective, 0))
    under_way = in_flight(a, stage, count, x)
    logits = last * m.heads_out * tokens * m.vocab / a.tp * 6.0
    # A loss that processes the logits in slices holds one slice, and the gradient of the head.
    # In 8 bits also that slice's gradient both ways round, the weights without what they have in common, those both ways
    # round, and a slice's share of the gradient.
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


# Fit the few physical constants of a step's time to measured steps, with a prior on each.


# Prior standard deviations, in log units, before anything is measured on a cluster.
SPREAD: Dict[str, float] = {
    "product": 0.12, "bytes": 0.4, "memory": 0.2, "core": 0.5, "link": 0.25, "nic": 0.4, "partial": 0.5, "delay": 0.7,
    "launch": 0.7, "hidden": 0.3, "slowed": 0.7, "step": 0.7,
}  # fmt: skip


def stack(items: Sequence[Any]) -> Any:
    """Turn records of numbers into one record of arrays."""
    numpy = need_numpy()
    columns = {field.name: [getattr(item, field.name) for item in items] for field in dataclasses.fields(items[0])}
    names = [name for name, values in columns.items() if isinstance(values[0], str)]
    arrays = {name: numpy.array(values, dtype=float) for name, values in columns.items() if name not in names}
    return type(items[0])(**arrays, **{name: columns[name][0] for name in names})


def take(record: Any, rows: Any) -> Any:
    """Return the rows of a record of arrays."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return type(record)(**{name: each[rows] if hasattr(each, "shape") else each for name, each in values.items()})


def need_numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise Problem("this needs numpy", "pip install numpy, or leave out --search and --calibrate") from None
    return numpy


def fit(
    seconds: Callable[[Constants], Any],
    measured: Any,
    prior: Constants,
    spread: Dict[str, float] = SPREAD,
    noise: float = 0.06,
    rounds: int = 25,
) -> Constants:
    """Return the constants whose predicted step times fit `measured`.

    Regularised least squares in log time: a Gauss-Newton step per round, halved until it helps; large residuals count less.
    """
    numpy = need_numpy()
    names = list(spread)
    start = numpy.log([getattr(prior, name) for name in names])
    width = numpy.array([spread[name] for name in names])
    truth = numpy.log(measured)

    def constants(point: Any) -> Constants:
        return dataclasses.replace(prior, **{name: float(value) for name, value in zip(names, numpy.exp(point))})

    def residuals(point: Any) -> Any:
        return (numpy.log(seconds(constants(point))) - truth) / noise

    def cost(found: Any, point: Any) -> float:
        return float(2 * numpy.log1p(found**2 / 4).sum() + (((point - start) / width) ** 2).sum() / 2)

    point = start.copy()
    found = residuals(point)
    now = cost(found, point)
    for _ in range(rounds):
        columns = []
        for i in range(len(names)):
            moved = point.copy()
            moved[i] += 1e-4
            columns.append((residuals(moved) - found) / 1e-4)
        jacobian = numpy.stack(columns, axis=1)
        weights = 1 / (1 + found**2 / 4)  # one disturbed run must not distort the constants
        information = jacobian.T @ (jacobian * weights[:, None]) + numpy.diag(width**-2)
        gradient = jacobian.T @ (weights * found) + (point - start) / width**2
        direction = -numpy.linalg.solve(information, gradient)
        length = 1.0
        while length > 1e-3:
            tried = point + length * direction
            again = residuals(tried)
            then = cost(again, tried)
            if then < now:
                break
            length /= 2
        else:
            break
        better = now - then
        point, found, now = tried, again, then
        if better < 1e-6 * (1 + now):
            break
    return constants(point)
