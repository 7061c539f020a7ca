"""A small SVG, written by hand: busbw over message size, one line per operation, both axes logarithmic."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Tuple
from xml.sax.saxutils import escape

from drumbeat.verify.judge import Judgement
from drumbeat.verify.show import bytes_text

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
