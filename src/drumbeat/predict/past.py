"""Evidence from earlier runs: rates measured by `verify`, and a ledger of predictions and their results."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.folders import make_private, state_folder
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.predict import shapes
from drumbeat.predict.cost import Constants, Layout, Work, fit, need_numpy, stack, step
from drumbeat.predict.forecast import Case
from drumbeat.predict.machine import CALIBRATED, FRAMEWORKS, MEASURED, UNCALIBRATED, Basis, Cluster, machine_of
from drumbeat.predict.shapes import ConvNet, Model
from drumbeat.runfolder.files import Files, decode, replace

_MOST = 500  # maximum number of records


@dataclass(frozen=True)
class Seen:
    """One run whose step time is known."""

    run: str
    case: Case
    predicted: float
    measured: float


def ledger_path(environ: Mapping[str, str]) -> str:
    return state_folder(environ, "predictions.jsonl")


def remember(seen: Seen, environ: Mapping[str, str]) -> None:
    """Add a run to the ledger or replace its entry. A ledger that cannot be written is left unchanged."""
    path = ledger_path(environ)
    try:
        make_private(os.path.dirname(path))
        lines = [line for line in _lines(path) if line.get("run") != seen.run][-_MOST:] + [_to_plain(seen)]
        replace(path, "".join(json.dumps(line) + "\n" for line in lines))
    except OSError:
        return


def recall(gpu: str, environ: Mapping[str, str]) -> List[Seen]:
    """Return the runs of the ledger on this kind of GPU."""
    found = [_from_plain(line) for line in _lines(ledger_path(environ))]
    return [seen for seen in found if seen is not None and seen.case.cluster.gpu == gpu]


def _lines(path: str) -> List[Dict[str, Any]]:
    texts = (Files().read(path) or b"").decode("utf-8", "replace").splitlines()
    return [line for line in map(decode, texts) if line is not None]


def _to_plain(seen: Seen) -> Dict[str, Any]:
    case = seen.case
    return {
        "run": seen.run,
        "predicted": seen.predicted,
        "measured": seen.measured,
        "kind": type(case.model).__name__,
        "model": to_plain(case.model),
        "work": to_plain(case.work),
        "layout": to_plain(case.layout),
        "cluster": to_plain(case.cluster),
        "framework": case.framework.name,
        "precision": case.precision,
    }


def _from_plain(line: Dict[str, Any]) -> Optional[Seen]:
    try:
        model: Any = (ConvNet if line["kind"] == "ConvNet" else Model)(**line["model"])
        framework = FRAMEWORKS[line["framework"]]
        work, layout, cluster = Work(**line["work"]), Layout(**line["layout"]), Cluster(**line["cluster"])
        case = Case(model, work, layout, framework, cluster, str(line["precision"]), framework.constants)
        predicted, measured = float(line["predicted"]), float(line["measured"])
        machine_of(case.cluster, case.precision)
    except Exception:  # skip a line of another version, or a damaged one
        return None
    return Seen(str(line["run"]), case, predicted, measured) if predicted > 0 and measured > 0 else None


def error_words(seen: Sequence[Seen]) -> str:
    """Describe the errors of earlier predictions."""
    if not seen:
        return "no run on such GPUs was compared with its prediction yet (drumbeat report RUN does that)"
    errors = [each.predicted / each.measured - 1 for each in seen]
    mean = sum(abs(error) for error in errors) / len(errors)
    worst = max(errors, key=abs)
    many = f"{len(errors)} earlier prediction{'s' if len(errors) > 1 else ''} on such GPUs"
    return f"{many}: off by {mean:.0%} on average, at most {worst:+.0%}"


def calibrated(prior: Constants, seen: Sequence[Seen], framework: str) -> Tuple[Constants, Basis]:
    """Return constants fitted to earlier runs of the same framework, and their basis; convolutional networks are left out."""
    rows = [each for each in seen if isinstance(each.case.model, Model) and each.case.framework.name == framework]
    if not rows:
        return prior, UNCALIBRATED
    try:
        numpy = need_numpy()
    except Exception:
        return prior, UNCALIBRATED
    cases = [each.case for each in rows]
    parts = zip(*((c.model, c.work, c.layout, c.framework.software, machine_of(c.cluster, c.precision)) for c in cases))
    model, work, layout, software, machine = map(stack, parts)
    measured = numpy.array([each.measured for each in rows])
    constants = fit(
        lambda c: step(model, work, layout, software, machine, c, numpy)["total"], measured, prior, noise=0.03
    )
    words = f"{len(rows)} earlier run{'s' if len(rows) > 1 else ''} with this framework on such GPUs"
    wider = 1 + 1 / math.sqrt(len(rows))
    low, high = CALIBRATED.low * wider, CALIBRATED.high * wider
    return constants, dataclasses.replace(CALIBRATED, words=words, low=low, high=high)


def with_verify(
    cluster: Cluster, constants: Constants, results: Mapping[str, Any], nodes: int
) -> Tuple[Constants, Basis, List[str]]:
    """Replace default rates by `drumbeat verify`'s measurements: the all-reduce's bus bandwidth, and a matrix product."""
    told: List[str] = []
    machine = machine_of(cluster, "bf16" if cluster.gpu != "V100" else "fp16")
    rows = [row for row in results.get("collectives") or () if row.get("op") in ("all_reduce", "all-reduce")]
    if rows and int(results.get("world_size") or 0) > 1:
        best = max(float(row["busbw"]) for row in rows) * 1e9
        if nodes > 1:
            constants = dataclasses.replace(constants, nic=min(1.2, best / machine.nic))
        else:
            constants = dataclasses.replace(constants, link=min(1.2, best / machine.link))
        told.append(f"network {best / 1e9:.0f} GB/s per node" if nodes > 1 else f"links {best / 1e9:.0f} GB/s per GPU")
    products = [float(row["tflops"]) for row in (results.get("gemm") or {}).get("ranks") or ()]
    if products and (results.get("gemm") or {}).get("dtype") == "bfloat16":
        median = sorted(products)[len(products) // 2] * 1e12
        share = min(1.1, max(0.5, median / machine.flops))
        constants = dataclasses.replace(constants, product=constants.product * share)
        told.append(f"matrix product {median / 1e12:.0f} TFLOP/s")
    return constants, MEASURED if told else UNCALIBRATED, told


# Measure the matrix products of a model's own shapes on a device of this machine. Needs torch.


def products_of(case: Case) -> List[Tuple[float, int, int, int]]:
    """Return (count, M, K, N) of the products of one layer and micro-batch, as `cost.step` counts them."""
    m, a = case.model, case.layout
    if isinstance(m, ConvNet):
        raise Problem(f"{m.name} has no matrix products of its own", "calibrate with a run")
    tokens = a.micro * case.work.seq / a.cp
    here = max(m.experts / a.ep, 1)
    each = tokens * m.topk / max(m.experts, 1) * a.ep
    found = shapes.layer_products(m, tokens, a.tp, here, each)
    return [(count, max(1, int(r)), max(1, int(k)), max(1, int(n))) for count, r, k, n in found if count]


def measured_rate(case: Case, device: str = "", each: float = 2.0) -> float:
    """Return the FLOP/s that the products of a case reach together, on this machine's GPU unless a device is named. Each kind
    of product runs for `each` seconds: a GPU is faster until it reaches its power limit."""
    try:
        import torch
    except ImportError:
        raise Problem("--calibrate here measures matrix products with torch, which is not installed") from None
    place = device or ("cuda" if torch.cuda.is_available() else "")
    if not place:
        raise Problem("--calibrate here: no GPU here that torch can use", "leave it out, or give a run")
    seconds = flops = 0.0
    for count, rows, inner, columns in products_of(case):
        seconds += count * _seconds(torch, rows, inner, columns, place, each)
        flops += count * 2 * rows * inner * columns
    return flops / seconds


def _seconds(torch: Any, rows: int, inner: int, columns: int, place: str, each: float) -> float:
    """Return the time of one product in 16 bits (on processors in 32): the mean of the second half. The numbers are random,
    because products of equal ones take less power."""
    kind = torch.float32 if place == "cpu" else torch.bfloat16
    a, b = torch.randn(rows, inner, device=place, dtype=kind), torch.randn(inner, columns, device=place, dtype=kind)
    wait = torch.cuda.synchronize if place != "cpu" else (lambda: None)
    ends: List[float] = []
    while len(ends) < 3 or ends[-1] - ends[0] < each:
        for _ in range(5):
            torch.mm(a, b)
        wait()
        ends.append(time.perf_counter())
    half = len(ends) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half) / 5


def share_of(case: Case, rate: float) -> float:
    """Return the value of Constants.product that makes the prediction match a measured rate."""
    machine = machine_of(case.cluster, "bf16" if case.cluster.gpu != "V100" else "fp16")
    flops = moved = 0.0
    for count, rows, inner, columns in products_of(case):
        flops += count * 2 * rows * inner * columns
        moved += count * 2 * (rows * inner + inner * columns + rows * columns)
    left = flops / rate - case.constants.bytes * moved / machine.memory_rate
    return float(min(1.2, max(0.3, flops / machine.flops / left))) if left > 0 else 1.2
