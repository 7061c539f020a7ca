"""Output of `drumbeat verify`."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Tuple
from xml.sax.saxutils import escape

from drumbeat.findings.model import ERROR, OK, worst
from drumbeat.verify.judge import Judgement

_MARKS = {OK: "ok", "info": "ok"}


def table(results: Mapping[str, Any], judgement: Judgement) -> str:
    ranks, nodes = results["world_size"], len({each["node"] for each in results["ranks"]})
    device = results["ranks"][0]["gpu"] if results["ranks"] else None
    size = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {nodes} {'node' if nodes == 1 else 'nodes'}"
    lines = [
        f"{size}, {results['library']} on {device or 'the CPU'}, torch {results['torch']}, {results['seconds']:.1f} s"
        f"{', quick' if results['quick'] else ''}"
    ]
    head = f"{'':16}{'size':>9} {'time':>10} {'algbw':>9} {'busbw':>9} {'ceiling':>9} {'':>6} {'latency':>10}"
    lines += ["", head] if judgement.rows else []
    for row in judgement.rows:
        bound = f"{row.ceiling.bound:.4g}" if row.ceiling.bound else "unknown"
        part = f"{row.ratio:.0%}" if row.ratio is not None else ""
        lines.append(
            f"{row.op:16}{bytes_text(row.bytes):>9} {duration(row.seconds):>10} {row.algbw:>9.3f} {row.busbw:>9.3f} {bound:>9} "
            f"{part:>6} {duration(row.latency):>10}"
        )
    if judgement.rows:
        lines.append(f"{'':16}{'':>9} {'':>10} {'GB/s':>9} {'GB/s':>9} {'GB/s':>9}")
    lines.append("")
    for verdict in judgement.verdicts:
        severity = worst(verdict.findings)
        mark = "unknown" if verdict.answer == "unknown" and severity == OK else _MARKS.get(severity, severity)
        summary = verdict.summary[:1].upper() + verdict.summary[1:]
        lines.append(f"{mark:<8} {verdict.check}: {verdict.answer}. {summary}")
        for finding in verdict.findings:
            lines += [f"         {finding.title}"] if finding.title != verdict.summary else []
            lines += [f"         {words}" for words in (finding.cause, finding.fix and f"fix: {finding.fix}") if words]
            if finding.severity == ERROR:
                lines += [f"           {evidence.text}" for evidence in finding.evidence]
    return "\n".join(lines)


def bytes_text(count: int) -> str:
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
    return next((f"{count / unit:.4g} {name}" for unit, name in units if count >= unit), "0 B")


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


# The MPI test's figures in words. Pure.


NOT_MEASURED = (
    "not measured: GPU memory, NCCL or RCCL, other collectives, single pairs (drumbeat verify measures NCCL's)"
)


def mpi_failed(results: Mapping[str, Any]) -> bool:
    return any(row["right"] != results["ranks"] for row in results["rows"])


def mpi_lines(results: Mapping[str, Any]) -> List[str]:
    ranks, hosts = results["ranks"], len(set(results["hosts"]))
    lines = [
        f"MPI_Allreduce of doubles in host memory, {ranks} ranks on {hosts} {'node' if hosts == 1 else 'nodes'}, "
        f"by {results['library']}",
        f"{'size':>10}  {'time':>10}  {'bus bandwidth':>14}  sums",
    ]
    for row in results["rows"]:
        wrong = ranks - row["right"]
        sums = f"right on all {ranks} ranks" if not wrong else f"WRONG on {wrong} of {ranks} ranks"
        rate = "-"  # of a few bytes it is latency alone
        if row["bytes"] >= 4096 and row["seconds"] > 0:
            rate = f"{2 * (ranks - 1) / ranks * row['bytes'] / row['seconds'] / 1e9:.3f} GB/s"
        lines.append(f"{bytes_text(row['bytes']):>10}  {row['seconds'] * 1e6:>7.1f} us  {rate:>14}  {sums}")
    lines.append(NOT_MEASURED)
    if hosts == 1:
        lines.append("all ranks were on one node: nothing of this went over the network")
    return lines


# A small SVG, written by hand: busbw over message size, one line per operation, both axes logarithmic.

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 36, 44
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by the colour-blind too


def plot(results: Mapping[str, Any], judgement: Judgement) -> str:
    series: Dict[str, List[Tuple[int, float]]] = {}
    for one in results["collectives"]:
        if one["dtype"] == "float32" and one["busbw"] > 0:
            series.setdefault(one["op"], []).append((one["bytes"], one["busbw"]))
    title = f"{results['world_size']} ranks, {results['library']}: bus bandwidth, GB/s"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    if series:
        parts += _drawn(series, judgement)
    else:
        parts.append(f'<text x="{_LEFT}" y="80">nothing was measured</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(series: Mapping[str, List[Tuple[int, float]]], judgement: Judgement) -> List[str]:
    bounds = {row.op: row.ceiling.bound for row in judgement.rows if row.ceiling.bound and row.op in series}
    sizes = sorted({count for points in series.values() for count, _ in points})
    rates = [rate for points in series.values() for _, rate in points] + [bound for bound in bounds.values() if bound]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)) + 1e-9)
    high = max(high, low + 1)

    def x(count: int) -> float:
        first, last = math.log2(sizes[0]), math.log2(sizes[-1])
        return _LEFT + (math.log2(count) - first) / max(1e-9, last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(rate) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for count in sizes[:: 1 if len(sizes) <= 8 else 2]:
        where = f'x="{x(count):.1f}" y="{_HEIGHT - _BOTTOM + 18}"'
        parts.append(f'<text {where} text-anchor="middle">{bytes_text(count)}</text>')
    for number, (op, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(count):.1f},{y(rate):.1f}" for count, rate in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(count):.1f}" cy="{y(rate):.1f}" r="3" fill="{colour}"/>' for count, rate in points]
        at, words = _TOP + 16 + 18 * number, op
        bound = bounds.get(op)
        if bound:
            level = f'y1="{y(bound):.1f}" y2="{y(bound):.1f}"'
            dashes = f'stroke="{colour}" stroke-dasharray="4 4"'
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {level} {dashes}/>')
            words += f" ({bound:.3g})"
        parts.append(f'<text x="{_WIDTH - _RIGHT + 12}" y="{at}" fill="{colour}">{escape(words)}</text>')
    if bounds:
        parts.append(f'<text x="{_WIDTH - _RIGHT + 12}" y="{_HEIGHT - _BOTTOM}" fill="#666">dashed: ceiling</text>')
    return parts
