"""Sizes of models: parameters, FLOPs and activation bytes, for one model or for arrays of models.

Every function uses arithmetic that works on plain numbers and on numpy arrays alike, so one model needs no numpy.

FLOP convention (CONVENTION): 6 FLOPs per token and matmul parameter, plus attention's core, half of it for a causal model. The
input embedding is a lookup and counts nothing; recomputation is hardware work and never part of the model's FLOPs.
"""

from __future__ import annotations

from typing import Any, List, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem

CONVENTION = "6 N + 12 L h s (causal: half) FLOPs per token; N without the input embedding, nothing recomputed"

Number = Any  # a plain number, or a numpy array with one value per row


@dataclass(frozen=True)
class Model:
    """A transformer by its sizes. Switches are 0 or 1 so that they work in arrays."""

    name: str
    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn: Number
    vocab: Number
    gated: Number = 1
    tied: Number = 0
    causal: Number = 1
    classic: Number = 0  # LayerNorm with biases, GELU and dropout (GPT-2, GPT-3, BERT) instead of RMSNorm
    experts: Number = 0
    topk: Number = 0
    expert_ffn: Number = 0
    shared_ffn: Number = 0
    dense_layers: Number = 0  # for a mixture of experts: layers with a dense MLP of width `ffn`
    q_rank: Number = 0  # multi-head latent attention: ranks of the compressed queries and of keys and values
    kv_rank: Number = 0
    rope_dim: Number = 0
    value_dim: Number = 0
    positions: Number = 0  # learned position embeddings
    window: Number = 0  # keys that a query of a local layer sees; 0: all
    window_layers: Number = 0  # layers that have such a window
    heads_out: Number = 1  # 0: no language-model head (ViT has `vocab` classes and one output per sample)
    small: Number = -1  # norms and biases of a layer; -1: as usual
    once: Number = -1  # parameters outside of layers and tables; -1: one final norm


@dataclass(frozen=True)
class ConvNet:
    """A convolutional network, by the cost of one image."""

    name: str
    parameters: float
    forward_flops: float  # per image
    activations: float  # elements kept for the backward pass, per image
    layers: int
    size: int


def check(model: Model) -> Model:
    """Refuse impossible sizes."""
    needed = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
    for name, value in vars(model).items():
        if name in ("name", "small", "once"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not int(name in needed) <= value <= 10_000_000:
            what = f"{model.name}: {name} is {str(value)[:40]}"
            raise Problem(what, f"a whole number from {int(name in needed)} to 10,000,000 is needed")
    if model.heads % model.kv_heads:
        what = f"{model.name}: {model.heads} heads do not divide by {model.kv_heads} key-value heads"
        raise Problem(what, "check the config")
    if not model.ffn and not model.expert_ffn:
        raise Problem(f"{model.name}: the width of its MLP is missing", "check the config")
    if model.experts and not (0 < model.topk <= model.experts and model.dense_layers <= model.layers):
        raise Problem(
            f"{model.name}: {model.topk} of {model.experts} experts per token, {model.dense_layers} of {model.layers} layers "
            "without experts",
            "check the config",
        )
    return model


def attention_parameters(m: Model) -> Number:
    """Return the matmul parameters of one layer's attention."""
    plain = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    width = m.heads * (m.head_dim + m.rope_dim)
    queries = m.q_rank * (m.hidden + width) + (m.q_rank == 0) * m.hidden * width
    keys = m.hidden * (m.kv_rank + m.rope_dim) + m.kv_rank * m.heads * (m.head_dim + m.value_dim)
    latent = queries + keys + m.heads * m.value_dim * m.hidden
    return (m.kv_rank > 0) * latent + (m.kv_rank == 0) * plain


def mlp_parameters(m: Model) -> Number:
    """Return the parameters of one dense MLP."""
    return (2 + m.gated) * m.hidden * m.ffn


def expert_parameters(m: Model) -> Number:
    """Return the parameters of one routed expert."""
    return (2 + m.gated) * m.hidden * m.expert_ffn


def shared_parameters(m: Model) -> Number:
    """Return the parameters of the shared experts and the router of one layer."""
    return (m.experts > 0) * ((2 + m.gated) * m.hidden * m.shared_ffn + m.hidden * m.experts)


def moe_layers(m: Model) -> Number:
    return (m.experts > 0) * (m.layers - m.dense_layers)


def small_parameters(m: Model) -> Number:
    """Return the norms and biases of one layer."""
    biases = m.head_dim * (m.heads + 2 * m.kv_heads) + 2 * m.hidden + (1 + m.gated) * m.ffn
    usual = 2 * m.hidden * (1 + m.classic) + m.classic * biases
    return (m.small < 0) * usual + (m.small >= 0) * m.small


def parameters(m: Model) -> Number:
    """Return all parameters of the model."""
    moe = moe_layers(m)
    layers = m.layers * (attention_parameters(m) + small_parameters(m))
    layers = layers + (m.layers - moe) * mlp_parameters(m)
    layers = layers + moe * (m.experts * expert_parameters(m) + shared_parameters(m))
    once = (m.once < 0) * m.hidden * (1 + m.classic) + (m.once >= 0) * m.once
    return layers + (2 - m.tied) * m.vocab * m.hidden + m.positions * m.hidden + once


def matmul_parameters(m: Model) -> Number:
    """Return the parameters that one token is multiplied with: active experts only, no input embedding."""
    moe = moe_layers(m)
    layers = m.layers * attention_parameters(m) + (m.layers - moe) * mlp_parameters(m)
    layers = layers + moe * (m.topk * expert_parameters(m) + shared_parameters(m))
    return layers + m.heads_out * m.hidden * m.vocab


def core_width(m: Model) -> Number:
    """Return the width of QK^T and PV together, per token: twice heads x head size, except for latent attention."""
    latent = m.heads * (m.head_dim + m.rope_dim + m.value_dim)
    return (m.kv_rank > 0) * latent + (m.kv_rank == 0) * 2 * m.heads * m.head_dim


def visible_keys(m: Model, seq: Number) -> Number:
    """Return the number of keys that an average query attends to, by the FLOP convention (half of them if causal)."""
    full = seq * (1 - 0.5 * m.causal)
    local = full * (m.window == 0) + (m.window > 0) * _smaller(m.window, full)
    share = m.window_layers / m.layers
    return share * local + (1 - share) * full


def _smaller(a: Number, b: Number) -> Number:
    return a * (a < b) + b * (a >= b)


def flops_per_token(m: Model, seq: Number) -> Number:
    """Return the training FLOPs of one token by CONVENTION."""
    return 6 * matmul_parameters(m) + 6 * m.layers * core_width(m) * visible_keys(m, seq)


def transformer_flops(matmul_parameters: float, layers: int, width: int, length: int, causal: bool) -> float:
    """Return CONVENTION's training FLOPs per token for a model of which only these sizes are known."""
    return 6.0 * matmul_parameters + 12.0 * layers * width * length * (0.5 if causal else 1.0)


def layer_products(
    m: Model, tokens: Number, tp: Number, experts_here: Number, expert_tokens: Number
) -> List[Tuple[Number, Number, Number, Number]]:
    """Return (count, M, K, N) of the matrix products of one average layer on one of `tp` ranks, forward.

    A rank holds `experts_here` routed experts, each of which gets `expert_tokens`. The count of products that a model lacks is
    0.
    """
    q = m.heads * m.head_dim
    latent = m.kv_rank > 0
    share = moe_layers(m) / m.layers
    into = latent * (m.q_rank + m.kv_rank + m.rope_dim) + (1 - latent) * (q + 2 * m.kv_heads * m.head_dim) / tp
    out = latent * m.heads * m.value_dim + (1 - latent) * q
    return [
        (1, tokens, m.hidden, into),
        (
            latent * 1,
            tokens,
            m.q_rank + 1 * (m.q_rank == 0),
            m.heads * (m.head_dim + m.rope_dim) / tp + 1 * (1 - latent),
        ),
        (
            latent * 1,
            tokens,
            m.kv_rank + 1 * (1 - latent),
            m.heads * (m.head_dim + m.value_dim) / tp + 1 * (1 - latent),
        ),
        (1, tokens, out / tp, m.hidden),
        (1 - share, tokens, m.hidden, (1 + m.gated) * m.ffn / tp),
        (1 - share, tokens, m.ffn / tp, m.hidden),
        (share * (m.shared_ffn > 0), tokens, m.hidden, (1 + m.gated) * m.shared_ffn / tp + 1),
        (share * (m.shared_ffn > 0), tokens, m.shared_ffn / tp + 1, m.hidden),
        (share * experts_here, expert_tokens + 1e-9, m.hidden, (1 + m.gated) * m.expert_ffn / tp + 1),
        (share * experts_here, expert_tokens + 1e-9, m.expert_ffn / tp + 1, m.hidden),
    ]


def activation_bytes(m: Model, tp: Number, sp: Number, flash: Number, seq: Number, cp: Number) -> Number:
    """Return the bytes that one layer keeps per token of its rank for the backward pass, in 16-bit arithmetic.

    Classic blocks: Korthikanti et al. 2022, Table 2. Others: both norms' inputs and outputs, q, k, v, attention's output,
    gate and up, and their product. Without sequence parallelism the norms, residuals and dropout masks are whole on each rank.
    """
    h = m.hidden
    whole = sp / tp + (1 - sp)  # with sequence parallelism norms and residuals are divided too
    q = m.heads * m.head_dim
    kv = m.kv_heads * m.head_dim
    scores = (1 - flash) * m.heads * seq / tp * (2 + 2 * 1 + 1 * m.classic)
    share = moe_layers(m) / m.layers
    mlp_width = (1 - share) * m.ffn + share * (m.topk * m.expert_ffn + m.shared_ffn)
    dispatched = share * m.topk * h * 2
    latent = (m.kv_rank > 0) * 2 * (m.q_rank + m.kv_rank + m.rope_dim + 2 * m.heads * (m.head_dim + m.rope_dim) / tp)
    qkv = (m.kv_rank == 0) * 2 * (q + 2 * kv) / tp
    out = 2 * ((m.kv_rank > 0) * m.heads * m.value_dim + (m.kv_rank == 0) * q) / tp
    modern = 8 * h * whole + qkv + latent + out + 2 * (2 * m.gated + 1 + (1 - m.gated)) * mlp_width / tp + dispatched
    classic = 10 * h * whole + (2 * (q + 2 * kv) + 2 * q) / tp + 4 * m.ffn / tp
    return m.classic * classic + (1 - m.classic) * modern + scores


def resnet(depth: int, wide: int = 1) -> ConvNet:
    """Count a ResNet (v1.5: the stride is in the 3 x 3 convolution) for ImageNet, layer by layer."""
    width, size, classes = 64, 224, 1000
    plans = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
    blocks, expansion = plans[depth], 1 if depth < 50 else 4
    total = [0.0, 0.0, 0.0, 0]  # parameters, multiply-adds, activations, layers

    def conv(cin: int, cout: int, kernel: int, side: int) -> None:
        total[0] += cin * cout * kernel * kernel + 2 * cout
        total[1] += cin * cout * kernel * kernel * side * side
        total[2] += 2 * cout * side * side  # the convolution's output (input of the norm), and the norm's after ReLU
        total[3] += 1

    side = size // 2
    conv(3, width, 7, side)
    side //= 2
    cin = width
    for stage, count in enumerate(blocks):
        base = width << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            inner = base * wide
            if expansion == 4:
                conv(cin, inner, 1, side)
                conv(inner, inner, 3, side // stride)
                conv(inner, 4 * base, 1, side // stride)
            else:
                conv(cin, inner, 3, side // stride)
                conv(inner, base, 3, side // stride)
            if not block and (stride > 1 or cin != base * expansion):
                conv(cin, base * expansion, 1, side // stride)
            side //= stride
            cin = base * expansion
    total[0] += cin * classes + classes
    total[1] += cin * classes
    name = f"resnet-{depth}" if wide == 1 else f"wide-resnet-{depth}-{wide}"
    return ConvNet(name, total[0], 2 * total[1], total[2], int(total[3]), size)
