"""Predictions as text and as plain data: every figure with its interval and its basis."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.base.record import to_plain
from drumbeat.base.text import columns, duration, labelled, step_time
from drumbeat.predict import shapes
from drumbeat.predict.arguments import RECOMPUTE, arguments_of
from drumbeat.predict.cost import NETWORK, Layout, schedule_name
from drumbeat.predict.forecast import Case, Forecast, Reliability, Whole, limit_words
from drumbeat.predict.search import Ranking
from drumbeat.predict.shapes import ConvNet

NOT_MODELLED = (
    "data loading and checkpoints inside a step, other jobs on the network, uneven experts, memory fragmentation, "
    "compile time, offloading"
)


def layout_words(a: Layout) -> str:
    degrees = [(name, int(getattr(a, name))) for name in ("tp", "pp", "cp", "ep", "dp")]
    parts = [f"{name} {value}" for name, value in degrees if value > 1 or name == "dp"]
    parts += [f"vp {int(a.vp)}"] if a.vp > 1 else []
    parts += [schedule_name(a)] if a.pp > 1 and (a.bubble, a.flight) != (1.0, 0) else []
    parts += [f"ZeRO-{int(a.zero)}"] if a.zero else []
    parts += [f"shards of {int(a.shard)}"] if a.shard and a.zero >= 3 else []
    return f"{', '.join(parts)}, micro-batch {int(a.micro)}, recompute {RECOMPUTE[int(a.recompute)]}"


def model_words(case: Case) -> str:
    m = case.model
    if isinstance(m, ConvNet):
        return f"{m.name}: {m.parameters / 1e6:.1f} M parameters, {3 * m.forward_flops / 1e9:.1f} GFLOP per image (3 x forward)"
    active = shapes.matmul_parameters(m)
    total = shapes.parameters(m)
    some = f", {amount(active)} of them per token" if m.experts else ""
    flops = shapes.flops_per_token(m, case.work.seq) / 1e9
    work = f"{flops:,.0f}" if flops >= 1000 else f"{flops:.3g}"
    return f"{m.name}: {amount(total)} parameters{some}, {work} GFLOP per token ({shapes.CONVENTION})"


def amount(number: float) -> str:
    """Format an amount: 335 M, 8.03 B, 15 T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {letter}" if number < 999.5 * size else f"{number / size:,.0f} {letter}"
    return f"{number:,.0f}"


def memory_words(found: Forecast) -> str:
    size = found.case.cluster.memory_gib
    stage = max(range(len(found.stages)), key=lambda i: sum(found.stages[i].values()))
    shares = {name: value / 2**30 for name, value in found.stages[stage].items()}
    parts = ", ".join(f"{name} {share:.1f}" for name, share in shares.items() if share > 0.05)
    where = f" on stage {stage} of {len(found.stages)}" if len(found.stages) > 1 else ""
    fix = f"; to make it fit: {found.fix}" if found.fix else ""
    return f"{found.memory / 2**30:.1f} of {size:.0f} GiB{where} ({parts}){fix}"


def head_rows(found: Forecast, place: str) -> List[Tuple[str, str]]:
    """Return model, machine and layout, memory, and time of a step, as label and text."""
    case = found.case
    return [
        ("model", model_words(case)),
        ("on", f"{place}; {layout_words(case.layout)}; {case.precision}, {case.framework.name}"),
        (found.verdict, memory_words(found)),
        ("step", f"{step_time(found.seconds)} (90 %: {step_time(found.low)} to {step_time(found.high)})"),
    ]


def lines_of(
    found: Forecast, naive: Optional[float], whole: Optional[Whole], r: Reliability, past: str, assumed: str = ""
) -> List[str]:
    """Format the prediction of one case. `naive`: seconds by the naive rule."""
    case, cluster = found.case, found.case.cluster
    total = sum(value for value in found.terms.values() if value > 0)
    parts = [(value / total, name) for name, value in found.terms.items() if value > 0.005 * total]
    nodes = case.gpus // cluster.gpus_per_node or 1
    place = f"{nodes} x {min(case.gpus, cluster.gpus_per_node)} {cluster.gpu}"
    length = "images" if found.unit == "images" else f"x {int(case.work.seq)} tokens"
    slow, fast = found.per_step / found.high, found.per_step / found.low
    rows = [
        *head_rows(found, place),
        (
            "speed",
            f"{found.rate:,.0f} {found.unit}/s (90 %: {slow:,.0f} to {fast:,.0f}); {found.rate / case.gpus:,.0f} per GPU; "
            f"MFU {found.mfu:.0%}",
        ),
        ("where", ", ".join(f"{name} {share:.0%}" for share, name in sorted(parts, reverse=True))),
    ]
    rows.insert(2, ("batch", f"{int(case.work.batch)} {length} per step"))
    if naive is not None:
        rule = "if every GPU kept its speed on the fewest nodes that this layout needs"
        rows.append(("naive", f"{step_time(naive)} {rule}"))
    hint = ("whole run", f"--tokens N: time and cost of so many {found.unit}")
    rows += whole_lines(whole, found.unit, r) if whole else [hint]
    rows += [("assumed", assumed)] if assumed else []
    rows += [("basis", f"{case.basis.name}: {case.basis.words}; {past}"), ("not in it", NOT_MODELLED)]
    return list(labelled(rows, indent=13))


def whole_lines(whole: Whole, unit: str, r: Reliability) -> List[Any]:
    """Return time, cost and goodput of a whole run, as label and text."""
    cost = f"{_count(whole.gpu_hours)} GPU-hours"
    cost += f", about {_count(whole.kwh)} kWh" if whole.kwh is not None else ""
    cost += f", {_count(whole.money)} at the price given" if whole.money is not None else ""
    span = f"90 %: {duration(whole.low)} to {duration(whole.high)}"
    costs = f"checkpoints of {r.checkpoint:.0f} s, restarts of {r.restart:.0f} s"
    return [
        ("whole run", f"{amount(whole.units)} {unit} in {duration(whole.seconds)} ({span}); {cost}"),
        ("goodput", f"{whole.goodput:.1%}: a failure every {duration(r.between_failures)} ({r.source}), {costs}"),
        ("time limit", f"--time={limit_words(whole.limit)} covers the upper end of the interval"),
    ]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def scaling_lines(found: Sequence[Forecast], naive: Sequence[float]) -> List[str]:
    """Return a table over node counts."""
    unit, base = found[0].unit, found[0].rate / found[0].case.gpus
    titles = ["nodes", "GPUs", "step", f"{unit}/s", "90 % interval", "per GPU", "efficiency", "naive", "GiB", "memory"]
    grows = len({int(each.case.work.batch) for each in found}) > 1
    titles[2:2] = ["batch"] if grows else []
    rows: List[Sequence[str]] = []
    for each, simple in zip(found, naive):
        gpus, per_gpu = each.case.gpus, each.rate / each.case.gpus
        slow, fast = each.per_step / each.high, each.per_step / each.low
        rows.append(
            (
                str(gpus // each.case.cluster.gpus_per_node or 1), str(gpus),
                *([f"{int(each.case.work.batch):,}"] if grows else []), step_time(each.seconds), f"{each.rate:,.0f}",
                f"{slow:,.0f} to {fast:,.0f}", f"{per_gpu:,.0f}", f"{per_gpu / base:.0%}",
                f"{each.per_step / simple:,.0f}", f"{each.memory / 2**30:.1f}", each.verdict,
            )
        )  # fmt: skip
    chosen: Dict[str, List[str]] = {}
    for each, row in zip(found, rows):
        a = each.case.layout
        chosen.setdefault(f"micro-batch {int(a.micro)}, recompute {RECOMPUTE[int(a.recompute)]}", []).append(row[0])
    differ = "; ".join(f"{words} on {', '.join(nodes)}" for words, nodes in chosen.items())
    return columns([titles, *rows], right=True) + (
        ["", f"rows differ by what fits: {differ} nodes"] if len(chosen) > 1 else []
    )


_DEGREES = ("tp", "pp", "vp", "cp", "ep", "dp", "zero", "micro")


def search_lines(found: Sequence[Forecast], ranking: Ranking, usual: Sequence[str]) -> List[str]:
    """Return the table of the best layouts."""
    titles = (*_DEGREES, "recompute", "step", "90 %", "per GPU", "MFU", "bubble", "network", "GiB")
    rows = []
    for each in found:
        a, total = each.case.layout, each.seconds
        exposed = sum(each.terms.get(name, 0.0) for name in NETWORK)
        degrees = [str(int(getattr(a, name))) for name in _DEGREES]
        rows.append(
            (
                *degrees, RECOMPUTE[int(a.recompute)], step_time(total),
                f"{step_time(each.low)} to {step_time(each.high)}",
                f"{each.rate / each.case.gpus:,.0f}", f"{each.mfu:.0%}", f"{each.terms.get('bubble', 0.0) / total:.0%}",
                f"{exposed / total:.0%}", f"{each.memory / 2**30:.1f}",
            )
        )  # fmt: skip
    lines = [f"{ranking.tried:,} layouts divide, {ranking.fitting:,} of them fit; the best by predicted time:", ""]
    return lines + columns([titles, *rows], right=True) + ([""] + list(usual) if usual else [])


def pareto_lines(found: Sequence[Forecast], good: Sequence[bool]) -> List[str]:
    """Format the best layout of each size: time and GPU-hours of a billion tokens, and the sizes whose speed is worth the
    cost."""
    titles = ("GPUs", "layout", "hours per 1e9", "GPU-hours per 1e9", "")
    rows = []
    for each, pays in sorted(zip(found, good), key=lambda pair: pair[0].case.gpus):
        hours = 1e9 / each.rate / 3600
        gpus, words = each.case.gpus, layout_words(each.case.layout)
        rows.append((str(gpus), words, f"{hours:.3g}", f"{hours * gpus:.3g}", "" if pays else "beaten"))
    return [
        f"time against GPU-hours, at the same batch (per 1e9 {found[0].unit}):",
        "",
        *columns([titles, *rows], right=True),
    ]


def arguments_words(case: Case) -> str:
    """Return the arguments of a layout, or say that the framework has none."""
    none = f"{case.framework.name} has no arguments for this layout; set it in the program: {layout_words(case.layout)}"
    return arguments_of(case) or none


def plain_of(found: Forecast, naive: Optional[float], whole: Optional[Whole]) -> Dict[str, Any]:
    """Return a prediction as plain data for --json."""
    case = found.case
    return {
        "model": case.model.name,
        "framework": case.framework.name,
        "gpu": case.cluster.gpu,
        "gpus": case.gpus,
        "gpus_per_node": case.cluster.gpus_per_node,
        "precision": case.precision,
        "flop_convention": shapes.CONVENTION,
        "batch": case.work.batch,
        "seq": case.work.seq,
        "layout": to_plain(case.layout),
        "arguments": arguments_of(case),
        "step_s": found.seconds,
        "step_s_90": [found.low, found.high],
        f"{found.unit}_per_s": found.rate,
        f"{found.unit}_per_s_90": [found.per_step / found.high, found.per_step / found.low],
        "mfu": found.mfu,
        "terms_s": found.terms,
        "memory_gib": found.memory / 2**30,
        "memory_of_gib": case.cluster.memory_gib,
        "stages_gib": [{name: value / 2**30 for name, value in parts.items()} for parts in found.stages],
        "verdict": found.verdict,
        "fix": found.fix,
        "naive_step_s": naive,
        "basis": case.basis.name,
        "basis_words": case.basis.words,
        "sources": [case.cluster.source, case.framework.source],
        "not_modelled": NOT_MODELLED,
        "whole_run": to_plain(whole),
    }


def one_line(found: Forecast) -> str:
    """Return the prediction in one line, as shown by `drumbeat plan` and `watch`."""
    span = f"90 %: {step_time(found.low)} to {step_time(found.high)}"
    memory = f"memory {found.verdict}: {found.memory / 2**30:.0f} of {found.case.cluster.memory_gib:.0f} GiB"
    speed = f"{found.rate:,.0f} {found.unit}/s, MFU {found.mfu:.0%}"
    return f"{step_time(found.seconds)} per step ({span}), {speed}; {memory}; by {found.case.basis.name}"
