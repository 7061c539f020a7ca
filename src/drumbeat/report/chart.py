"""Line charts as small SVG texts, written by hand: they need no library, no script and no network."""

from __future__ import annotations

import math
from html import escape
from typing import Dict, List, Mapping, Sequence, Tuple

Points = Sequence[Tuple[float, float]]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 30, 40
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by the colour-blind too


def line_chart(title: str, series: Mapping[str, Points], x_label: str, dots: bool = False, zero: bool = True) -> str:
    """Draw a line chart. `zero`: the y axis begins at 0; `dots`: each point is marked."""
    points = [point for each in series.values() for point in each if all(map(math.isfinite, point))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{_LEFT}" y="18" font-size="14" class="t">{escape(title)}</text>',
    ]
    if points:
        parts += _drawn(series, points, x_label, dots, zero)
    else:
        parts.append(f'<text x="{_LEFT}" y="80" class="t">not measured</text>')
    return "\n".join([*parts, "</svg>"])


def _drawn(series: Mapping[str, Points], points: Points, x_label: str, dots: bool, zero: bool) -> List[str]:
    xs = ticks(min(x for x, _ in points), max(x for x, _ in points))
    ys = ticks(min([0.0] if zero else [], default=min(y for _, y in points)), max(y for _, y in points))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at_x(x: float) -> float:
        return _LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (right - _LEFT)

    def at_y(y: float) -> float:
        return bottom - (y - ys[0]) / (ys[-1] - ys[0]) * (bottom - _TOP)

    parts: List[str] = []
    for y in ys:
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" class="g"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end" class="t">{number(y)}</text>')
    for x in xs:
        parts.append(f'<text x="{at_x(x):.1f}" y="{bottom + 16}" text-anchor="middle" class="t">{number(x)}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 33}" text-anchor="end" class="t">{escape(x_label)}</text>')
    for place, (name, each) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        dashes = ' stroke-dasharray="5 4"' if name == "ideal" else ""
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in each if math.isfinite(x) and math.isfinite(y))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        if dots:
            marked = [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in each]
            parts += marked if name != "ideal" else []
        if len(series) > 1:
            parts.append(f'<text x="{_LEFT + 10}" y="{_TOP + 14 + 16 * place}" fill="{colour}">{escape(name)}</text>')
    return parts


def ticks(low: float, high: float) -> List[float]:
    """Return about five round numbers that cover a range."""
    if not high > low:
        low, high = (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1))
    raw = high / 4 - low / 4
    if not 1e-300 < raw < 1e300:  # no round number lies between them, or none that can be written
        return [low, high]
    power = 10.0 ** math.floor(math.log10(raw))
    size = next((step * power for step in (1, 2, 2.5, 5) if step * power >= raw), 10 * power)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [place * size for place in range(first, last + 1)]


def number(value: float) -> str:
    units: Dict[str, float] = {"G": 1e9, "M": 1e6, "k": 1e3}
    for letter, size in units.items():
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
