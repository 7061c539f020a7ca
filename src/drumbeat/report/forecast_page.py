"""A prediction as one HTML page: scaling, a step's waterfall, memory per stage, time against cost."""

from __future__ import annotations

import math
from html import escape
from typing import Any, Callable, List, Sequence, Tuple

from drumbeat.predict.forecast import Forecast
from drumbeat.predict.show import NOT_MODELLED, layout_words, memory_words, model_words, seconds_words
from drumbeat.report.chart import number, ticks
from drumbeat.report.tables import document

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#f0e442",
    "#999999",
    "#88aacc",
    "#a04000",
)


def page_of(
    found: Forecast,
    many: Sequence[Forecast],
    naive: Sequence[float],
    seen: Sequence[Any],
    whole: Sequence[Tuple[str, str]] = (),
) -> str:
    """Return the page of one prediction; `many`: of other node counts; `seen`: measured runs; `whole`: lines on the whole run."""
    case = found.case
    facts = [
        ("model", model_words(case)),
        (
            "on",
            f"{case.gpus} x {case.cluster.gpu}; {layout_words(case.layout)}; {case.precision}, {case.framework.name}",
        ),
        (found.verdict, memory_words(found)),
        ("step", f"{seconds_words(found.seconds)} (90 %: {seconds_words(found.low)} to {seconds_words(found.high)})"),
        *whole,
        ("basis", f"{case.basis.name}: {case.basis.words}"),
        ("not in it", NOT_MODELLED),
    ]
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in facts)
    body = [f"<h1>{escape(case.model.name)} on {case.gpus} x {escape(case.cluster.gpu)}</h1>", f"<table>{rows}</table>"]
    body += [f"<h2>A step of {seconds_words(found.seconds)}</h2>", waterfall(found)]
    stages = [
        (f"stage {i}", {name: value / 2**30 for name, value in parts.items()}) for i, parts in enumerate(found.stages)
    ]
    body += [
        f"<h2>Memory per stage, of {case.cluster.memory_gib:.0f} GiB</h2>",
        stacked(stages, "GiB", case.cluster.memory_gib),
    ]
    body += [
        "<h2>Scaling, and time against cost</h2>",
        f'<div class="plots">{scaling(many, naive, seen)}{against_cost(many)}</div>',
    ]
    return document(f"drumbeat predict: {case.model.name}", body).replace(
        "Made by drumbeat report", "Made by drumbeat predict"
    )


def waterfall(found: Forecast) -> str:
    """Return a step's terms, each bar beginning where the one before ended."""
    total = sum(value for value in found.terms.values() if value > 0) or 1.0
    rows, at = "", 0.0
    for i, (name, value) in enumerate((name, value) for name, value in found.terms.items() if value > 0):
        bar = (
            f'<div style="margin-left:{100 * at / total:.2f}%;width:{max(0.3, 100 * value / total):.2f}%;height:1em;'
            f'background:{_COLOURS[i % len(_COLOURS)]}"></div>'
        )
        rows += (
            f'<tr><th>{escape(name)}</th><td style="width:60%">{bar}</td><td class="n">{seconds_words(value)}</td>'
            f'<td class="n">{value / total:.1%}</td></tr>'
        )
        at += value
    return f"<table>{rows}</table>"


def scaling(many: Sequence[Forecast], naive: Sequence[float], seen: Sequence[Any]) -> str:
    """Return speed against GPUs: ideal, naive, predicted with its band, and runs of this model that were measured."""
    if not many:
        return ""
    base = many[0].rate / many[0].case.gpus
    gpus = [each.case.gpus for each in many]
    slow = [(each.case.gpus, each.per_step / each.high) for each in many]
    fast = [(each.case.gpus, each.per_step / each.low) for each in many]
    guess = [(each.case.gpus, each.rate) for each in many]
    simple = [(each.case.gpus, each.per_step / value) for each, value in zip(many, naive)]
    points = [
        (each.case.gpus, each.case.work.batch * each.case.work.seq / each.measured)
        for each in seen
        if each.case.model.name == many[0].case.model.name
    ]
    plot = Plot(
        f"{many[0].unit}/s", "GPUs", [*slow, *fast, *points, (gpus[0], base * gpus[0]), (gpus[-1], base * gpus[-1])]
    )
    plot.area("90 % interval", [*slow, *reversed(fast)], "#0072b2")
    plot.line("ideal: as fast per GPU as the smallest", [(n, base * n) for n in gpus], "#999999", "6 4")
    plot.line("naive: as fast per GPU as this step on one node", simple, "#d55e00", "2 3")
    plot.line("predicted", guess, "#0072b2")
    if points:
        plot.dots("measured", points, "#009e73")
    return plot.text(gpus)


def against_cost(many: Sequence[Forecast]) -> str:
    """Return hours against GPU-hours, one point per size."""
    if not many:
        return ""
    tokens = many[0].unit == "tokens"
    units = 1e9 if tokens else 1e6
    points = [(units / each.rate / 3600, units / each.rate / 3600 * each.case.gpus) for each in many]
    plot = Plot(f"GPU-hours of {'a billion tokens' if tokens else 'a million images'}", "hours", points)
    plot.line("", sorted(points), "#0072b2")
    plot.dots("", points, "#0072b2", [f"{each.case.gpus} GPUs" for each in many])
    return plot.text([])


class Plot:
    """A small plot with logarithmic axes, as SVG."""

    def __init__(self, title: str, x_label: str, points: Sequence[Tuple[float, float]]) -> None:
        self.title, self.x_label = title, x_label
        self.x, self.x_range = _log_scale([x for x, _ in points], 70, 620)
        self.y, self.y_range = _log_scale([y for _, y in points], 270, 36)
        self.parts: List[str] = []
        self.names: List[Tuple[str, str]] = []

    def _at(self, points: Sequence[Tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def area(self, name: str, points: Sequence[Tuple[float, float]], colour: str) -> None:
        self.parts.append(f'<polygon points="{self._at(points)}" fill="{colour}" opacity="0.18"/>')
        self.names.append((name, colour))

    def line(self, name: str, points: Sequence[Tuple[float, float]], colour: str, dashes: str = "") -> None:
        self.parts.append(
            f'<polyline points="{self._at(points)}" fill="none" stroke="{colour}" stroke-width="1.8" '
            f'stroke-dasharray="{dashes}"/>'
        )
        self.names += [(name, colour)] if name else []

    def dots(self, name: str, points: Sequence[Tuple[float, float]], colour: str, labels: Sequence[str] = ()) -> None:
        self.parts += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4" fill="{colour}"/>' for x, y in points]
        self.parts += [
            f'<text x="{self.x(x):.1f}" y="{self.y(y) - 9:.1f}" text-anchor="middle" font-size="10" class="t">'
            f"{escape(label)}</text>"
            for (x, y), label in zip(points, labels)
        ]
        self.names += [(name, colour)] if name else []

    def text(self, marks: Sequence[float]) -> str:
        """Return the whole plot. `marks`: numbers on the x axis; none: round ones."""
        found = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 310" role="img" aria-label="{escape(self.title)}" '
            f'font-family="sans-serif" font-size="12"><text x="70" y="18" font-size="14" class="t">{escape(self.title)}</text>'
        ]
        for y in _round_between(*self.y_range):
            at = self.y(y)
            found.append(f'<line x1="70" x2="620" y1="{at:.1f}" y2="{at:.1f}" class="g"/>')
            found.append(f'<text x="62" y="{at + 4:.1f}" text-anchor="end" class="t">{number(y)}</text>')
        for x in marks or _round_between(*self.x_range):
            found.append(f'<text x="{self.x(x):.1f}" y="288" text-anchor="middle" class="t">{number(x)}</text>')
        found.append(f'<text x="620" y="304" text-anchor="end" class="t">{escape(self.x_label)}</text>')
        for i, (name, colour) in enumerate(self.names):
            found.append(f'<text x="80" y="{50 + 16 * i}" fill="{colour}">{escape(name)}</text>')
        return "".join([*found, *self.parts, "</svg>"])


def _log_scale(
    values: Sequence[float], low: float, high: float
) -> Tuple[Callable[[float], float], Tuple[float, float]]:
    """Return a function from values to places between `low` and `high`, and the range of the values with a little room."""
    first, last = math.log(min(values)), math.log(max(values))
    room = 0.06 * (last - first) or 0.5
    first, last = first - room, last + room
    return lambda value: low + (math.log(value) - first) / (last - first) * (high - low), (
        math.exp(first),
        math.exp(last),
    )


def _round_between(low: float, high: float) -> List[float]:
    """Return round numbers of a range: 1, 2 and 5 of each decade, or powers of ten where there are many."""
    found: List[float] = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [step * 10.0**power for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    if len(found) < 2:  # a narrow range
        return [value for value in ticks(low, high) if low <= value <= high]
    return found if len(found) <= 9 else [value for value in found if str(value)[0] == "1"]


def stacked(rows: Sequence[Any], unit: str, full: float = 0.0) -> str:
    """Return one bar per row, and a table of their parts."""
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts.items() if value > 0))
    most = max([full, *(sum(max(0.0, value) for value in parts.values()) for _, parts in rows)]) or 1.0
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    bars = cells = ""
    for label, parts in rows[:64]:
        spans = "".join(
            f'<span style="width:{100 * value / most:.3f}%;background:{colour[name]}" '
            f'title="{escape(name)}: {value:.3g} {unit}"></span>'
            for name, value in parts.items()
            if value > 0
        )
        bars += (
            f'<tr><th>{escape(label)}</th><td style="width:80%"><div class="bar" style="margin:0">{spans}</div></td>'
        )
        bars += f'<td class="n">{sum(parts.values()):.1f} {unit}</td></tr>'
    shown = [rows[0], rows[-1]] if len(rows) > 1 else rows[:1]
    for name in names:
        values = "".join(f'<td class="n">{parts.get(name, 0.0):.2f} {unit}</td>' for _, parts in shown)
        cells += f'<tr><th><span style="color:{colour[name]}">&#9632;</span> {escape(name)}</th>{values}</tr>'
    titles = "".join(f'<td class="n"><b>{escape(label)}</b></td>' for label, _ in shown)
    return f"<table>{bars}</table><table><tr><th></th>{titles}</tr>{cells}</table>"
