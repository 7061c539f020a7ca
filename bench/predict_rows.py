"""Published training rows as records that `drumbeat.predict` computes with; the rows are not part of this repository."""

from __future__ import annotations

import csv
import dataclasses
import os
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from drumbeat.base.problem import Problem
from drumbeat.predict import cost
from drumbeat.predict.cost import Constants, Layout, Machine, Software, States, Work, conv_step, plain
from drumbeat.predict.forecast import Case
from drumbeat.predict.job import recompute_named, sharding_named
from drumbeat.predict.machine import FRAMEWORKS, Framework, find_cluster, framework_named, machine_of, precision_named
from drumbeat.predict.models import named
from drumbeat.predict.shapes import Model, resnet


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


def read(path: Path, refused: Optional[List[str]] = None) -> List[Row]:
    """Return the rows that can be computed; why the others cannot goes to `refused`."""
    found = []
    with path.open(newline="", encoding="utf-8-sig") as stream:
        for raw in csv.DictReader(stream):
            try:
                found.append(convert(raw))
            except Problem as problem:
                if refused is not None:
                    refused.append(problem.what)
    return found


def number(raw: Dict[str, str], name: str, default: float = 0.0) -> float:
    try:
        return float(raw.get(name) or default)
    except ValueError:
        return default


def published_framework(words: str, date: str) -> Framework:
    """Return the framework of a published row: Megatron and DeepSpeed had no FlashAttention and overlap before 2023."""
    found = framework_named(words)
    if found.name in ("megatron", "megatron-classic") and date[:4].isdigit() and int(date[:4]) < 2023:
        return FRAMEWORKS["megatron-classic"]
    if found.name == "deepspeed" and date[:4].isdigit() and int(date[:4]) < 2023:
        return dataclasses.replace(found, software=FRAMEWORKS["megatron-classic"].software)
    if "Megatron-LM 0." in words:  # by itself: nothing is overlapped with tensor parallelism, gradients are in 32 bits
        return dataclasses.replace(found, software=dataclasses.replace(found.software, overlap_tp=0, grad_bytes=4))
    return found


def convert(raw: Dict[str, str]) -> Row:
    """Return a published row as records; a Problem says why it cannot be computed."""
    missing = [key for key in ("gpus", "seq", "hidden", "layers", "heads", "global_batch") if not number(raw, key)]
    if missing:
        raise Problem(f"no {missing[0]} in the row")
    gpus, seq, batch, heads = (number(raw, key) for key in ("gpus", "seq", "global_batch", "heads"))
    cluster = find_cluster(raw["hardware"].split("(")[0].split(" DGX")[0])
    precision = precision_named(raw["precision"] or "bf16")
    if cluster.gpu.startswith("V100"):
        precision = "fp16"
    machine = machine_of(cluster, precision)
    framework = published_framework(raw["framework"], raw.get("date", ""))
    software, states = framework.software, framework.states
    if "PURE" in raw["precision"]:  # everything in 16 bits
        states = States(2, 2, 4)
    if "DEFAULT" in raw["precision"]:  # gradients are reduced in 32 bits
        software = dataclasses.replace(software, grad_bytes=4)
    if "compile" in raw["framework"]:
        software = dataclasses.replace(software, compiled=1)
    experts, old = int(number(raw, "experts")), framework.name == "megatron-classic" or "ZeRO-3" in raw["framework"]
    name, dense = raw["model"], number(raw, "ffn_hidden")
    model = Model(
        name, number(raw, "layers"), number(raw, "hidden"), heads, number(raw, "kv_heads", heads), number(raw, "hidden") / heads,
        dense if not experts else 0, number(raw, "vocab") or 50257, gated=int(number(raw, "gated_mlp")),
        tied=int(old or "mpt" in name or name == "1b"), classic=int(old), experts=experts,
        topk=number(raw, "topk") or int(experts > 0),
        expert_ffn=dense if experts else 0,
    )  # fmt: skip
    model = known_model(model)
    tp, pp, cp, dp, ep, vp = (number(raw, key) or 1 for key in ("tp", "pp", "cp", "dp", "ep", "vp"))
    if dp * tp * pp * cp != gpus and gpus % (tp * pp * cp) == 0:
        dp = gpus / (tp * pp * cp)
    micro = max(1, min(number(raw, "micro_batch") or (1 if pp > 1 else min(4, batch / dp)), batch / dp))
    zero, shard = sharding_named(raw["zero"])
    recompute = recompute_named(raw["recompute"]) if raw["recompute"] else -1
    sp = int(tp > 1 and (not old or "sp" in raw["recompute"].split("+")))
    replaced: Dict[str, float] = {}
    if number(raw, "inter_bw_gbps_per_node"):
        replaced["nic"] = number(raw, "inter_bw_gbps_per_node") / 8 * 1e9
    # That source gives its simulator's figure, not the link's.
    if number(raw, "intra_bw_gbps_per_gpu_uni") and "vTrain" not in raw["source"]:
        replaced["link"] = number(raw, "intra_bw_gbps_per_gpu_uni") / 8 * 1e9
    if cluster.domain == cluster.gpus_per_node:
        replaced["gpus_per_node"] = number(raw, "gpus_per_node", cluster.gpus_per_node)
    machine = dataclasses.replace(machine, **replaced)
    layout = Layout(
        tp, pp, cp, ep, dp, 1 if vp * pp > model.layers or pp == 1 else vp, zero, shard, micro, recompute, sp
    )
    work = Work(seq, batch)
    if recompute < 0:  # not stated: the least recomputation that fits
        for level in (0, 1, 2):
            layout = dataclasses.replace(layout, recompute=level)
            if cost.peak(model, work, layout, software, states) < 0.95 * machine.memory:
                break
    seconds = number(raw, "step_time_s")
    if not seconds and number(raw, "tokens_s_gpu"):
        seconds = batch * seq / gpus / number(raw, "tokens_s_gpu")
    return Row(raw, model, work, layout, software, machine, states, seconds, batch * seq / gpus)


def known_model(model: Model) -> Model:
    """Return a mixture of experts by its name: rows say nothing of latent attention and shared experts."""
    if not model.experts:
        return model
    name = model.name.lower()
    try:
        found = named(name).model
    except Problem:
        return model
    return found if isinstance(found, Model) and (found.layers, found.hidden) == (model.layers, model.hidden) else model


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


def read_resnet(path: Path) -> Tuple[List[Tuple[Dict[str, str], float, float]], List[str]]:
    """Return published ResNet-50 rows with predicted and measured images per second, and why others were refused."""
    found, refused = [], []
    for raw in csv.DictReader(path.open(newline="", encoding="utf-8-sig")) if path.is_file() else ():
        try:
            gpus, rate = int(number(raw, "gpus")), number(raw, "images_s_total")
            batch = number(raw, "global_batch") or gpus * number(raw, "batch_per_gpu")
            if not (gpus and rate and batch):
                raise Problem("no GPUs, rate or batch in the row")
            per_node = int(number(raw, "gpus_per_node", 8))
            words = raw["inter_node_bw"].lower()
            fabric, nics = ("edr", 1) if "edr 100" in words else ("", 0)
            cluster = find_cluster(raw["hardware"].split()[0], min(gpus, per_node), fabric, nics)
            precision = "fp32" if raw["precision"].lower().startswith("fp32") else precision_named(raw["precision"])
            case = Case(
                resnet(50), Work(224, batch), Layout(dp=gpus, micro=batch / gpus), FRAMEWORKS["fsdp"], cluster,
                precision, Constants(),
            )  # fmt: skip
            seconds = conv_step(
                case.model, case.work, case.layout, case.framework.software, machine_of(cluster, precision), case.constants, plain
            )["total"]  # fmt: skip
            found.append((raw, batch / seconds, rate))
        except Problem as problem:
            refused.append(problem.what)
    return found, refused
