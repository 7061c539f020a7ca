"""The machine of a prediction: rates from the data sheets in `drumbeat.machine.peaks`, or measured ones instead."""

from __future__ import annotations

import re
from typing import Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.machine.peaks import fabrics, known_gpus, peak_of, typical_node
from drumbeat.predict.cost import Machine


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
    node = typical_node(peak.name)
    known = fabrics()
    chosen = fabric or node.fabric
    if chosen not in known:
        raise Problem(f"unknown fabric {fabric!r}", f"known: {', '.join(known)}")
    count = gpus_per_node or node.gpus
    adapters = nics or max(1, node.nics * count // node.gpus if not fabric else node.nics)
    rate = known[chosen].rate * adapters
    source = f"data sheets ({peak.source}; {node.source}; {adapters} x {known[chosen].source})"
    domain = max(count, node.domain if not gpus_per_node else count)
    told = int(size[1]) if size and not peak.name.startswith("G") else 0  # behind Grace's GPUs stands the CPU's
    gb = told if told and abs(told / peak.memory_gb - 1) > 0.05 else peak.memory_gb
    memory = memory_gib or 0.99 * gb  # data sheets say GB and mean GiB, of which the driver keeps some
    return Cluster(
        peak.name, count, domain, node.link, node.per_peer, rate, known[chosen].hop, memory, peak.watts, source
    )


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
