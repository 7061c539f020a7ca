"""Charts as small SVG texts, written by hand: they need no library, no script and no network."""

from __future__ import annotations

import math
from dataclasses import field
from html import escape
from typing import Callable, List, Mapping, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass

Points = Sequence[Tuple[float, float]]
Errors = Mapping[Tuple[float, float], float]  # point -> half of its interval

_WIDTH, _HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 30, 46
_HALF = 31  # letters that fit into half of the width
_ALONE = "<style>.t{fill:#222}.g{stroke:#ddd}.e{stroke:#222}</style>"  # for a standalone file; a page has its own
_DASHED = ("ideal", "naive", "90 %: from", "90 %: to", "ceiling")  # suffixes of the names of such series
_UNNAMED = "ceiling"  # a series missing from the legend: it has the colour of the series it bounds
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # distinguishable for the colour-blind


def standalone(svg: str) -> str:
    """Return a chart as a standalone file, with its own colours, for use in a paper."""
    head, _, rest = svg.partition(">")
    return f"{head}>{_ALONE}{rest}\n"


def _opened(title: str, height: int) -> List[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="{_LEFT}" y="18" font-size="14" class="t">{escape(title)}</text>',
    ]


def share_bar(title: str, parts: Mapping[str, float], unit: str, colours: Mapping[str, str]) -> str:
    """Draw one stacked bar, with a legend of each part's name and share."""
    whole, left = sum(parts.values()) or 1.0, 8.0
    named = {name: f"{name} {value:,.1f} {unit}, {value / whole:.1%}" for name, value in parts.items()}
    legend = _legend([(words, colours.get(name, "#666666"), 'stroke-width="10"') for name, words in named.items()], 71)
    drawn = _opened(f"{title}: {', '.join(parts)}", 70 + 18 * _rows(list(named.values())))
    drawn[1] = f'<text x="8" y="18" font-size="14" class="t">{escape(title)}</text>'
    for name, value in parts.items():
        wide, colour = value / whole * (_WIDTH - 16), colours.get(name, "#666666")
        drawn.append(f'<rect x="{left:.2f}" y="30" width="{wide:.2f}" height="26" fill="{colour}"/>')
        left += wide
    return "\n".join([*drawn, *legend, "</svg>"])


def _rows(texts: Sequence[str]) -> int:
    """Return the lines of a legend: two texts each, or one if they are long."""
    return len(texts) if max(map(len, texts), default=0) > _HALF else (len(texts) + 1) // 2


def _legend(entries: Sequence[Tuple[str, str, str]], top: float) -> List[str]:
    """Draw texts, each beside a piece of its line: text, colour, and how the line is drawn."""
    found: List[str] = []
    columns = 1 if _rows([text for text, _, _ in entries]) == len(entries) > 1 else 2
    for place, (text, colour, drawn) in enumerate(entries):
        x, y = 8 + place % columns * 236, top + 18 * (place // columns)
        found.append(f'<line x1="{x}" x2="{x + 16}" y1="{y}" y2="{y}" stroke="{colour}" {drawn}/>')
        found.append(f'<text x="{x + 22}" y="{y + 5}" class="t">{escape(text)}</text>')
    return found


@dataclass(frozen=True)
class Look:
    dots: bool = False  # each point is marked
    zero: bool = True  # the y axis starts at 0
    log: bool = False  # both axes are logarithmic
    errors: Mapping[str, Errors] = field(default_factory=dict)  # intervals of a series
    labels: Mapping[Tuple[float, float], str] = field(default_factory=dict)  # labels at points
    ticks: Mapping[float, str] = field(default_factory=dict)  # labels along the x axis, instead of its numbers

    def halves(self, name: str, point: Tuple[float, float]) -> List[float]:
        """Return the offsets of a point's interval, below and above, if it has one."""
        half = self.errors.get(name, {}).get(point)
        return [half, -half] if half else []


def line_chart(title: str, series: Mapping[str, Points], x_label: str, y_label: str, look: Look = Look()) -> str:  # noqa: B008
    points = [point for each in series.values() for point in each if all(map(math.isfinite, point))]
    ends = [(x, y + half) for name, each in series.items() for x, y in each for half in look.halves(name, (x, y))]
    shown = [name for name in series if len(series) > 1 and not name.endswith(_UNNAMED)]
    parts = _opened(title, _HEIGHT + 18 * _rows(shown))
    if points:
        parts += _drawn(series, [*points, *ends], x_label, look)
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        turned = f'transform="rotate(-90 14 {middle:.0f})" text-anchor="middle"'
        parts.append(f'<text x="14" y="{middle:.0f}" {turned} class="t">{escape(y_label)}</text>')
    else:
        parts.append(f'<text x="{_LEFT}" y="80" class="t">not measured</text>')
    return "\n".join([*parts, "</svg>"])


def _drawn(series: Mapping[str, Points], points: Points, x_label: str, look: Look) -> List[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    across, up = [x for x, _ in points], [y for _, y in points]
    xs, at_x = _axis(across, _LEFT, right, look.log, whole=all(x == round(x) for x in across))
    ys, at_y = _axis([*up, 0.0] if look.zero and not look.log else up, bottom, _TOP, look.log)
    parts, legend = [], []
    for y in ys:
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" class="g"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end" class="t">{number(y)}</text>')
    for x, words in (look.ticks or {x: number(x) for x in xs}).items():
        parts.append(f'<text x="{at_x(x):.1f}" y="{bottom + 16}" text-anchor="middle" class="t">{escape(words)}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{bottom + 36}" text-anchor="middle" class="t">{escape(x_label)}</text>')
    for place, (name, each) in enumerate(series.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        dashed = name.endswith(_DASHED)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in each if math.isfinite(x) and math.isfinite(y))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        for x, y in each:
            for half in look.halves(name, (x, y))[:1]:
                at, top, low = at_x(x), at_y(y + half), at_y(y - half)
                lines = f"M{at:.1f} {top:.1f}V{low:.1f}M{at - 5:.1f} {top:.1f}h10M{at - 5:.1f} {low:.1f}h10"
                parts.append(f'<path d="{lines}" class="e" stroke-width="1.2"/>')
        if look.dots:
            marked = [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in each]
            parts += [] if dashed else marked
        for x, y in each:
            where = f'x="{at_x(x):.1f}" y="{at_y(y) - 8:.1f}" text-anchor="middle" font-size="11"'
            parts += [f'<text {where} class="t">{escape(look.labels[x, y])}</text>'] if (x, y) in look.labels else []
        if len(series) > 1 and not name.endswith(_UNNAMED):
            legend.append((name, colour, f'stroke-width="2"{dashes}'))
    return [*parts, *_legend(legend, _HEIGHT + 5)]


def _axis(
    values: Sequence[float], begin: float, end: float, log: bool, whole: bool = False
) -> Tuple[List[float], Callable[[float], float]]:
    """Return the numbers of an axis, and the place of a value between `begin` and `end`."""
    if not log:
        found = ticks(min(values), max(values), whole)
        return found, lambda value: begin + (value - found[0]) / (found[-1] - found[0]) * (end - begin)
    first, last = math.log10(min(values)), math.log10(max(values))
    room = 0.06 * (last - first) or 0.2
    first, last = first - room, last + room
    powers = range(math.floor(first), math.ceil(last) + 1)
    steps = (1, 2, 5) if last - first < 3 else (1,)
    marks = [step * 10.0**power for power in powers for step in steps if first <= math.log10(step) + power <= last]
    if len(marks) < 2:  # a narrow range
        marks = [value for value in ticks(min(values), max(values)) if 10**first <= value <= 10**last]
    return marks, lambda value: begin + (math.log10(value) - first) / (last - first) * (end - begin)


def ticks(low: float, high: float, whole: bool = False) -> List[float]:
    """Return about five round numbers that cover a range; `whole`: integers only, for steps and nodes."""
    if not high > low:
        low, high = (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1))
    raw = high / 4 - low / 4
    if not 1e-300 < raw < 1e300:  # no round number lies between them, or none that can be written
        return [low, high]
    power = 10.0 ** math.floor(math.log10(raw))
    sizes = [step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw]
    size = next((each for each in sizes if each == round(each)), 1.0) if whole else sizes[0]
    first, last = math.floor(low / size), math.ceil(high / size)
    return [place * size for place in range(first, last + 1)]


def number(value: float) -> str:
    units = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
    letter, size = next(((letter, size) for letter, size in units.items() if abs(value) >= size), ("", 1.0))
    return f"{value / size:.4g}{letter}"
