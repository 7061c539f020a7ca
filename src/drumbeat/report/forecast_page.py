"""A prediction as one HTML page: scaling, a step's waterfall, memory per stage, time against cost."""

from __future__ import annotations

from html import escape
from typing import Any, Dict, List, Sequence

from drumbeat.predict.forecast import Forecast
from drumbeat.predict.show import NOT_MODELLED, layout_words, memory_words, model_words, seconds_words
from drumbeat.report.chart import line_chart
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


def page_of(found: Forecast, many: Sequence[Forecast], naive: Sequence[float], seen: Sequence[Any]) -> str:
    """Return the page of one prediction; `many`: of other node counts; `seen`: runs that were measured."""
    case = found.case
    facts = [
        ("model", model_words(case)),
        (
            "on",
            f"{case.gpus} x {case.cluster.gpu}; {layout_words(case.layout)}; {case.precision}, {case.framework.name}",
        ),
        (found.verdict, memory_words(found)),
        ("step", f"{seconds_words(found.seconds)} (90 %: {seconds_words(found.low)} to {seconds_words(found.high)})"),
        ("basis", f"{case.basis.name}: {case.basis.words}"),
        ("not in it", NOT_MODELLED),
    ]
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in facts)
    body = [f"<h1>{escape(case.model.name)} on {case.gpus} x {escape(case.cluster.gpu)}</h1>", f"<table>{rows}</table>"]
    body += ["<h2>Where a step's time goes</h2>", stacked([("", found.terms)], "s")]
    stages = [
        (f"stage {i}", {name: value / 2**30 for name, value in parts.items()}) for i, parts in enumerate(found.stages)
    ]
    body += [
        f"<h2>Memory per stage, of {case.cluster.memory_gib:.0f} GiB</h2>",
        stacked(stages, "GiB", case.cluster.memory_gib),
    ]
    body += ["<h2>Scaling</h2>", f'<div class="plots">{scaling(many, naive, seen)}{against_cost(many)}</div>']
    return document(f"drumbeat predict: {case.model.name}", body).replace(
        "Made by drumbeat report", "Made by drumbeat predict"
    )


def scaling(many: Sequence[Forecast], naive: Sequence[float], seen: Sequence[Any]) -> str:
    if not many:
        return ""
    unit = many[0].unit
    base = many[0].rate / many[0].case.gpus
    series: Dict[str, List[Any]] = {
        "predicted": [(each.case.gpus, each.rate) for each in many],
        "90 %, slow": [(each.case.gpus, each.per_step / each.high) for each in many],
        "90 %, fast": [(each.case.gpus, each.per_step / each.low) for each in many],
        "naive": [(each.case.gpus, each.per_step / simple) for each, simple in zip(many, naive)],
        "ideal": [(each.case.gpus, base * each.case.gpus) for each in many],
    }
    name = many[0].case.model.name
    points = [
        (each.case.gpus, each.case.work.batch * each.case.work.seq / each.measured)
        for each in seen
        if each.case.model.name == name
    ]
    if points:
        series["measured"] = sorted(points)
    return line_chart(f"{unit}/s", series, "GPUs", dots=True)


def against_cost(many: Sequence[Forecast]) -> str:
    if not many:
        return ""
    unit = many[0].unit
    billion = 1e9 if unit == "tokens" else 1e6
    points = [(billion / each.rate / 3600, billion / each.rate / 3600 * each.case.gpus) for each in many]
    size = "a billion tokens" if unit == "tokens" else "a million images"
    return line_chart(f"GPU-hours of {size}, against hours", {"time and cost": sorted(points)}, "hours", dots=True)


def stacked(rows: Sequence[Any], unit: str, full: float = 0.0) -> str:
    """Return bars, one per row, with a table of their parts."""
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts.items() if value > 0))
    most = max([full, *(sum(max(0.0, value) for value in parts.values()) for _, parts in rows)]) or 1.0
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    bars = ""
    for label, parts in rows[:64]:
        spans = "".join(
            f'<span style="width:{100 * value / most:.3f}%;background:{colour[name]}" '
            f'title="{escape(name)}: {value:.3g} {unit}"></span>'
            for name, value in parts.items()
            if value > 0
        )
        bars += f'<p class="soft">{escape(label)}</p><div class="bar">{spans}</div>'
    first = rows[0][1]
    cells = "".join(
        f'<tr><th><span style="color:{colour[name]}">&#9632;</span> {escape(name)}</th>'
        f'<td class="n">{first.get(name, 0.0):.4g} {unit}</td></tr>'
        for name in names
    )
    return f"{bars}<table>{cells}</table>"
