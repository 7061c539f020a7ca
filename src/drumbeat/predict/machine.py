"""The machine and the framework of a prediction: rates from the data sheets in `drumbeat.machine.peaks`, or measured ones
instead; and each framework's traits, with their source."""

from __future__ import annotations

import re
from typing import Any, Dict, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.machine.peaks import fabrics, known_gpus, node_of, peak_of
from drumbeat.predict.cost import Constants, Machine, Software, States


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind, with the source of each figure."""

    gpu: str
    gpus_per_node: int
    domain: int
    link: float  # GB/s each way
    per_peer: float
    nic: float  # GB/s of a node each way
    hop: float  # microseconds between nodes
    memory_gib: float
    watts: float
    source: str


def find_cluster(gpu: str, gpus_per_node: int = 0, fabric: str = "", nics: int = 0, memory_gib: float = 0.0) -> Cluster:
    """Return the cluster that a GPU's name usually stands for, overridden by the caller's values."""
    spelled = re.sub(r"[-_ ]+", " ", re.sub(r"-gcd|gcd|[-_ ]sxm\d?", "", gpu.lower()))
    size = re.search(r"(?<=\s)(\d{2,3}) ?(?:gi?b?)?(?=\s|$)", spelled)  # a100-40, V100-SXM2-16GB
    if size:
        spelled = f"{spelled[: size.start()]}{size[1]}gb{spelled[size.end() :]}"
    peak = peak_of(spelled)
    if peak is None:
        raise Problem(f"unknown GPU {gpu!r}", f"known: {', '.join(sorted(set(known_gpus())))}")
    node = node_of(peak.name)
    known = fabrics()
    chosen = fabric or node["fabric"]
    if chosen not in known:
        raise Problem(f"unknown fabric {fabric!r}", f"known: {', '.join(known)}")
    count = gpus_per_node or node["gpus"]
    adapters = nics or max(1, node["nics"] * count // node["gpus"] if not fabric else node["nics"])
    rate = float(known[chosen]["rate"]) * adapters
    source = f"data sheets ({peak.source}; {node['source']}; {adapters} x {known[chosen]['source']})"
    domain = max(count, count if gpus_per_node else node.get("domain", node["gpus"]))
    told = int(size[1]) if size and not peak.name.startswith("G") else 0  # behind Grace's GPUs stands the CPU's
    gb = told if told and abs(told / peak.memory_gb - 1) > 0.05 else peak.memory_gb
    memory = memory_gib or 0.99 * gb  # data sheets say GB and mean GiB, of which the driver keeps some
    link, per_peer = float(node["link"]), float(node.get("per_peer", 0))
    hop = float(known[chosen]["hop"])
    return Cluster(peak.name, count, domain, link, per_peer, rate, hop, memory, peak.watts, source)


# Precision of training -> that of its matrix products, the key of the data sheet's peak.
PRODUCTS = {"bf16-master": "bf16", "fp16-master": "fp16", "mxfp8": "fp8"}


def precision_named(words: str) -> str:
    """Return the precision for a user's or paper's name: amp_bf16, BF16-mixed, FP8-CS, MXFP8, float8, ..."""
    spelled = words.lower().replace("float", "fp").replace("bfp16", "bf16").replace("bfloat16", "bf16")
    spelled = spelled.replace("half", "fp16").replace("single", "fp32")
    if spelled in ("bf16-master", "fp16-master"):
        return spelled
    if "fp4" in spelled:
        raise Problem(f"precision {words}: 4-bit products are not modelled", "bf16, fp16, fp8, tf32 or fp32")
    known = next((name for name in ("fp8", "bf16", "fp16", "tf32", "fp32") if name in spelled), None)
    if known or spelled in ("amp", "mixed", "auto"):
        return known or "fp16"
    raise Problem(f"precision {words[:40]!r} is unknown", "bf16, fp16, fp8, tf32 or fp32")


def machine_of(cluster: Cluster, precision: str) -> Machine:
    """Return the rates for the step model. `precision`: that of the matrix products."""
    peak = peak_of(cluster.gpu)
    assert peak is not None
    products = PRODUCTS.get(precision, precision)
    if products not in peak.tflops:
        raise Problem(f"{cluster.gpu} has no {precision}", f"it computes in {', '.join(peak.tflops)}")
    share = peak.matmul
    in_32_bits = products in ("fp32", "tf32")
    half = peak.tflops[products] if in_32_bits else peak.tflops.get("bf16", peak.tflops.get("fp16", 0.0))
    # 8-bit products also quantise their inputs: they gain less than the data sheet says.
    less = 0.85 if products == "fp8" else 1.0
    return Machine(
        flops=peak.tflops[products] * 1e12 * share * less,
        core_flops=half * 1e12 * share,
        memory_rate=peak.bandwidth_tb_s * 1e12,
        memory=cluster.memory_gib * 2**30,
        gpus_per_node=cluster.domain,
        link=cluster.link * 1e9,
        per_peer=cluster.per_peer * 1e9,
        nic=cluster.nic * 1e9 * cluster.domain / cluster.gpus_per_node,
        net_hop=cluster.hop * 1e-6,
    )


# Uncertainty of a prediction: 90 % intervals in log time, by its basis. The widths are from predictions for sources that the
# fit had not seen (bench/predict.py): disturbances make real runs slower than predicted more often than faster.


@dataclass(frozen=True)
class Basis:
    """Basis of a prediction, and the logarithms of measured over predicted time at 5 and 95 %."""

    name: str
    words: str
    low: float
    high: float


UNCALIBRATED = Basis("defaults", "data sheets and usual shares of them; nothing was measured here", -0.22, 0.34)
MEASURED = Basis("measured rates", "rates that were measured here, and usual shares", -0.17, 0.25)
OWN = Basis("own runs", "drumbeat's runtime as it was measured on one H200", -0.08, 0.10)
CALIBRATED = Basis("past runs", "runs of this cluster", -0.10, 0.14)


def interval(value: float, basis: Basis) -> Tuple[float, float]:
    """Return the 90 % interval of a predicted time."""
    return value * 2.718281828459045**basis.low, value * 2.718281828459045**basis.high


# Traits of training frameworks that change time and memory: one row per framework, with its source.


@dataclass(frozen=True)
class Framework:
    name: str
    software: Software
    states: States
    constants: Constants
    fits: float  # share of the memory up to which a run fits
    fails: float  # share from which it does not fit
    source: str
    stages: Tuple[int, ...] = (0, 1)  # ZeRO stages that can be selected
    degrees: Tuple[str, ...] = ("tp", "pp", "cp", "ep", "vp")
    words: Tuple[str, ...] = ()  # other names; one of them occurs in what a user or a paper writes


_ALL = ("tp", "pp", "cp", "ep", "vp")
_FP32_SHARDS = States(4, 4, 8, gathered=1)


def _row(name: str, software: Software, states: States, source: str, *more: Any) -> Framework:
    return Framework(name, software, states, Constants(), 0.8, 0.97, source, *more)


_ROWS = (
    Framework(
        "drumbeat", Software(grad_bytes=2, compiled=1, rotary_kept=1, head_too=1), States(2, 2, 12, fused_loss=1, late_grads=1),
        Constants(product=0.965, core=0.585, memory=0.8, launch=2.5e-4, step=0.003), 0.95, 1.05,
        "drumbeat's own runtime on one H200 (measured/gpu.md)", (0, 3), ("tp", "pp", "cp"),
    ),
    _row(
        "megatron", Software(overlap_tp=1, grad_bytes=2), States(2, 4, 12),
        "Megatron-Core with its distributed optimizer: 6 + 12/D bytes per parameter", (0, 1), _ALL,
        ("megatron", "nemo", "primus", "megascale", "bridge", "mcore"),
    ),
    _row(
        "megatron-classic", Software(flash=0, overlap_grads=0, grad_bytes=2, groups=2, stage_inputs=1),
        States(2, 2, 16, bucket=1e9),
        "Megatron-LM and Megatron-DeepSpeed before FlashAttention: 4 + 16/D bytes per parameter (the fp32 gradients are sharded "
        "too), reduced in buckets of 5e8; both halves have groups of their own; stages clone their input",
        (0, 1), ("tp", "pp", "vp"), ("megatron-deepspeed", "megatron-lm v1", "megatron-lm ptd", "gpt-neox", "metaseq"),
    ),
    _row(
        "torchtitan", Software(compiled=1), _FP32_SHARDS, "FSDP2 with bf16 compute over fp32 shards: 16/D bytes per parameter",
        (0, 3), _ALL, ("titan",),
    ),
    _row(
        "fsdp", Software(), _FP32_SHARDS, "PyTorch FSDP, bf16 compute over fp32 shards", (0, 3), ("tp", "pp", "cp"),
        ("composer", "llm-foundry", "lightning", "accelerate", "ddp", "pytorch", "olmo", "lingua"),
    ),
    _row(
        "deepspeed", Software(grad_bytes=2), States(2, 2, 16, bucket=1e9),
        "DeepSpeed ZeRO with bf16 or fp16 weights and fp32 masters", (0, 1, 2, 3), (),
    ),
    _row(
        "maxtext", Software(compiled=1), _FP32_SHARDS, "MaxText: fp32 weights sharded by XLA", (3,), ("tp", "cp", "ep"),
        ("jax", "t5x", "pathways"),
    ),
)  # fmt: skip
FRAMEWORKS: Dict[str, Framework] = {row.name: row for row in _ROWS}


def framework_named(name: str) -> Framework:
    """Find a framework by its name, or by the longest of its aliases that the text contains."""
    spelled = name.lower().strip()
    if spelled in FRAMEWORKS:
        return FRAMEWORKS[spelled]
    found = [(len(word), row) for row in FRAMEWORKS.values() for word in (row.name, *row.words) if word in spelled]
    if not found:
        raise Problem(f"unknown framework {name[:60]!r}", f"known: {', '.join(FRAMEWORKS)}")
    return max(found, key=lambda each: each[0])[1]


def states_of(framework: Framework, precision: str, sharded: bool) -> States:
    """Return the bytes per parameter for a precision. Only drumbeat's own runtime has more than one 16-bit mode."""
    own = framework.name == "drumbeat"
    if precision in ("fp32", "tf32"):
        return States(4, 4, 8, fused_loss=int(own), late_grads=int(own))
    if not own:
        return framework.states
    if sharded:
        return States(4, 4, 8, 1, fused_loss=1)
    if precision in ("bf16", "fp16"):  # autocast: copies of fp32 weights
        return States(4, 4, 8, copies=2, fused_loss=1, late_grads=1)
    return States(2, 2, 12, fused_loss=1, late_grads=1, narrow=int(precision == "fp8"))
