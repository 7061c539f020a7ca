"""Published training rows as records that `drumbeat.predict` computes with; the rows are not part of this repository."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from drumbeat.base.problem import Problem
from drumbeat.predict import memory
from drumbeat.predict.cost import Layout, Machine, Software, Work
from drumbeat.predict.machine import find_cluster, machine_of
from drumbeat.predict.memory import States
from drumbeat.predict.shapes import Model


class Row(NamedTuple):
    raw: Dict[str, str]
    model: Model
    work: Work
    layout: Layout
    software: Software
    machine: Machine
    states: States
    seconds: float
    tokens: float  # of one step and GPU


def folder() -> Path:
    named = os.environ.get("DRUMBEAT_SCALE", "")
    if not named or not (Path(named) / "scale.csv").is_file():
        print("no published rows: set DRUMBEAT_SCALE to the folder with scale.csv")
        sys.exit(0)
    return Path(named)


_GPUS = {
    "A100-40GB": "a100 40gb", "A100": "a100", "H100": "h100", "GB200": "gb200",
    "GB300": "gb300", "B200": "b200", "B300": "b300", "V100": "v100",
    "MI300X": "mi300x", "MI355X": "mi355x", "MI250X": "mi250x", "MI325X": "mi325x", "H200": "h200",
}  # fmt: skip


def read(path: Path) -> List[Row]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        rows = [convert(raw) for raw in csv.DictReader(stream)]
    return [row for row in rows if row]


def number(raw: Dict[str, str], name: str, default: float = 0.0) -> float:
    try:
        return float(raw.get(name) or default)
    except ValueError:
        return default


def convert(raw: Dict[str, str]) -> Optional[Row]:
    gpu = next((ours for theirs, ours in _GPUS.items() if raw["hardware"].startswith(theirs)), None)
    gpus, seq = number(raw, "gpus"), number(raw, "seq")
    if not (gpu and gpus and seq and number(raw, "hidden") and number(raw, "layers") and number(raw, "global_batch")):
        return None
    source, framework = raw["source"], raw["framework"]
    # Before FlashAttention and overlapped gradients: Megatron-DeepSpeed, and Megatron-LM and DeepSpeed up to 2022.
    year = number({"year": raw.get("date", "")[:4]}, "year")
    early = ("Megatron-LM", "DeepSpeed")
    old = "Megatron-DeepSpeed" in framework or (framework.startswith(early) and 0 < year < 2023)
    gated = int(number(raw, "gated_mlp"))
    experts = int(number(raw, "experts"))
    heads = number(raw, "heads")
    name = raw["model"]
    model = Model(
        name, number(raw, "layers"), number(raw, "hidden"), heads, number(raw, "kv_heads", heads),
        number(raw, "hidden") / heads, number(raw, "ffn_hidden") if not experts else 0, number(raw, "vocab"), gated=gated,
        tied=int(old or "mpt" in name or name == "1b"), classic=int(old), experts=experts, topk=number(raw, "topk"),
        expert_ffn=number(raw, "ffn_hidden") if experts else 0,
    )  # fmt: skip
    tp, pp, cp, dp = (number(raw, key, 1) or 1 for key in ("tp", "pp", "cp", "dp"))
    batch = number(raw, "global_batch")
    dp = min(dp, max(1, gpus / (tp * pp * cp))) if dp * tp * pp * cp > gpus else dp
    micro = number(raw, "micro_batch") or (1 if pp > 1 else min(4, max(1, batch / dp)))
    micro = max(1, min(micro, batch / dp))
    zero_word = raw["zero"]
    digit = next((int(letter) for letter in zero_word if letter in "123"), 0)
    zero = 3 if "hsdp" in zero_word or "fsdp" in zero_word else digit
    zero = 2 if "zero2" in zero_word else (1 if "dist-opt" in zero_word else zero)
    shard = 8 if zero_word == "hsdp" else (128 if "fsdp-128" in zero_word else 0)
    core = any(
        word in framework for word in ("NeMo", "Megatron-Core", "Bridge", "Megatron-LM 0.", "Primus", "MegaScale")
    )
    composer = "Composer" in framework
    deepspeed3 = "ZeRO-3" in framework
    compiled = int(any(word in framework for word in ("compile", "MaxText", "torchtitan")))
    sp = int((core and tp > 1) or "sp" in raw["recompute"])
    grad_bytes = 4.0 if "Megatron-LM 0." in framework or ("DEFAULT" in raw["precision"]) or "BLOOM" in source else 2.0
    software = Software(
        flash=int(not old), overlap_grads=int(not old), overlap_tp=int(core and "Megatron-LM 0." not in framework),
        grad_bytes=grad_bytes, compiled=compiled,
    )  # fmt: skip
    if composer or compiled:
        states = States(4, 4, 8, 1, fused_loss=0)
    elif deepspeed3:
        states = States(2, 2, 12)
    else:
        states = States(2, 4 if not old or "BLOOM" in source else 2, 12)
    if "PURE" in raw["precision"]:
        states = States(2, 2, 4, 0)
    word = raw["precision"].lower()
    precision = "fp8" if "fp8" in word or "float8" in word else ("fp16" if word == "fp16" else "bf16")
    if "fp4" in word:
        return None
    if gpu == "v100":
        precision = "fp16"
    cluster = find_cluster(gpu, memory_gib=0)
    try:
        machine = machine_of(cluster, precision)
    except Problem:  # a precision that this GPU does not have
        return None
    per_node = number(raw, "gpus_per_node", cluster.gpus_per_node)
    replaced: Dict[str, float] = {}
    if number(raw, "inter_bw_gbps_per_node"):
        replaced["nic"] = number(raw, "inter_bw_gbps_per_node") / 8 * 1e9
    if (
        number(raw, "intra_bw_gbps_per_gpu_uni") and "vTrain" not in source
    ):  # that source gives its simulator's figure, not the link's
        replaced["link"] = number(raw, "intra_bw_gbps_per_gpu_uni") / 8 * 1e9
    if cluster.domain == cluster.gpus_per_node:
        replaced["gpus_per_node"] = per_node
    import dataclasses

    machine = dataclasses.replace(machine, **replaced)
    word = raw["recompute"]
    recompute = 2 if "full" in word else (1 if "selective" in word else 0)
    layout = Layout(
        tp, pp, cp, number(raw, "ep", 1) or 1, dp, number(raw, "vp", 1) or 1, zero, shard, micro, recompute, sp
    )
    if layout.vp * layout.pp > model.layers or pp == 1:
        layout = dataclasses.replace(layout, vp=1)
    work = Work(seq, batch)
    if not word:  # not stated: the least recomputation that fits
        for level in (0, 1, 2):
            layout = dataclasses.replace(layout, recompute=level)
            if memory.peak(model, work, layout, software, states) < 0.95 * machine.memory:
                break
    seconds = number(raw, "step_time_s")
    return Row(raw, model, work, layout, software, machine, states, seconds, batch * seq / gpus)


def read_single(path: Path) -> List[Row]:
    """Read vTrain's measurements on one node of eight A100."""
    if not path.is_file():
        return []
    machine = machine_of(find_cluster("a100"), "fp16")
    rows = []
    with path.open(newline="", encoding="utf-8-sig") as stream:
        for raw in csv.DictReader(stream):
            hidden, heads, layers, seq = (
                float(raw[k]) for k in ("hidden size", "attention heads", "# layers", "sequence length")
            )
            model = Model(
                "gpt", layers, hidden, heads, heads, hidden / heads, 4 * hidden, 50257, gated=0, tied=1, classic=1
            )
            work = Work(seq, float(raw["global batch"]))
            tp, dp, pp = (float(raw[k]) for k in ("tensor parallelism", "data parallelism", "pipeline parallelism"))
            layout = Layout(tp, pp, 1, 1, dp, 1, 0, 0, float(raw["micro batch"]), 2)
            software = Software(flash=0, overlap_grads=0, grad_bytes=2)
            seconds = float(raw["iteration time (ms)"]) / 1e3
            tokens = work.batch * seq / (tp * dp * pp)
            rows.append(Row(raw, model, work, layout, software, machine, States(2, 2, 12), seconds, tokens))
    return rows
