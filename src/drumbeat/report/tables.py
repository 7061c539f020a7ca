"""A comparison as text, Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import textwrap
from html import escape
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from drumbeat.report.chart import line_chart
from drumbeat.report.figures import NOT_RECORDED
from drumbeat.report.page import document
from drumbeat.report.scaling import FINISHED, NOT, STRONG, WEAK, Comparison, Row
from drumbeat.runfolder.closing import count, duration

FORMATS = ("markdown", "csv", "latex")
_WORDS = {True: "yes", False: "no", None: "not known"}


def cells(comparison: Comparison) -> Tuple[List[str], List[List[str]]]:
    """The table that people put into a paper: header and one row per run."""
    size = comparison.size_is
    header = ["nodes", size, f"throughput ({comparison.unit})", "speed-up", "efficiency", "time", "target reached"]
    rows = [_cells(row) for row in comparison.rows]
    if not _all_finished(comparison):
        return [*header, "end"], [
            [*cells, "not known" if row.outcome == NOT_RECORDED else row.outcome]
            for cells, row in zip(rows, comparison.rows)
        ]
    return header, rows


def _all_finished(comparison: Comparison) -> bool:
    """Or their ends are not recorded, as in logs."""
    return all(row.outcome in (FINISHED, NOT_RECORDED) for row in comparison.rows)


def _cells(row: Row) -> List[str]:
    interval = f" ± {100 * row.error:.1f}" if row.error is not None and row.error > 0 else ""
    return [
        str(row.nodes) if row.nodes else "not known", str(row.size), f"{row.throughput:,.0f}" if row.throughput >= 100 else
        f"{row.throughput:.3g}", f"{row.speedup:.2f}", f"{100 * row.efficiency:.1f}{interval} %",
        duration(row.seconds) if row.seconds is not None else NOT, _target(row),
    ]  # fmt: skip


def _target(row: Row) -> str:
    accuracy = f" ({row.accuracy:.4g})" if row.accuracy is not None else ""
    return _WORDS[row.target_reached] + accuracy


def markdown(comparison: Comparison) -> str:
    header, rows = cells(comparison)
    lines = ["| " + " | ".join(header) + " |", "|" + "---:|" * (len(header) - 1) + "---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def csv_text(comparison: Comparison) -> str:
    """Plain numbers, one row per run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = (
        "run",
        "nodes",
        comparison.size_is.lower(),
        "throughput",
        "unit",
        "speedup",
        "efficiency",
        "efficiency_error",
    )
    writer.writerow([*names, "ideal_throughput", "seconds", "accuracy", "target_reached", "step_ms", "lost_ms", "end"])
    for row in comparison.rows:
        reached = "" if row.target_reached is None else str(row.target_reached).lower()
        values = [
            row.name,
            row.nodes,
            row.size,
            row.throughput,
            comparison.unit,
            row.speedup,
            row.efficiency,
            row.error,
        ]
        values += [row.ideal, row.seconds, row.accuracy, reached, row.step_ms, row.lost_ms, row.outcome]
        writer.writerow(
            ["" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in values]
        )
    return out.getvalue()


def latex(comparison: Comparison) -> str:
    header, rows = cells(comparison)
    lines = [
        r"\begin{tabular}{" + "r" * (len(header) - 1) + "l}",
        r"\hline",
        " & ".join(map(_tex, header)) + r" \\",
        r"\hline",
    ]
    lines += [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


def _tex(text: str) -> str:
    for plain in "&%$#_{}":
        text = text.replace(plain, "\\" + plain)
    return text.replace("±", r"$\pm$")


def text(comparison: Comparison, width: int = 80) -> List[str]:
    header, rows = cells(comparison)
    short = ["NODES", comparison.size_is.upper(), comparison.unit.upper(), "SPEED-UP", "EFFICIENCY", "TIME", "TARGET"]
    short += ["END"] if len(header) > len(short) else []
    widths = [max(len(each[place]) for each in [short, *rows]) for place in range(len(header))]
    lines = ["  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths)).rstrip() for row in [short, *rows]]
    lines += [""] + [
        line
        for paragraph in said(comparison)
        for line in textwrap.wrap(paragraph, width, subsequent_indent="  ", break_on_hyphens=False)
    ]
    return lines


def said(comparison: Comparison) -> List[str]:
    """All that stands below the table: what kind of scaling it is, the losses, what makes it unfair."""
    found = [f"run: {row.name} ({count(row.size, comparison.size_is[:-1])})" for row in comparison.rows]
    found.append(f"baseline: {comparison.baseline}")
    found.append(f"scaling: {comparison.kind} ({comparison.kind_why})")
    if any(row.error for row in comparison.rows):
        found.append("efficiency ± 95 % interval, from the spread within the runs; days and nodes differ by more")
    found += [f"efficiency of {row.name}: {row.no_error}" for row in comparison.rows if row.no_error]
    for row in comparison.rows[1:]:
        found.append(loss_words(row, comparison))
    sources = {
        each.kind: each.source
        for row in comparison.rows
        if (row.lost_ms or 0) > 0
        for each in row.losses
        if each.ms is not None
    }
    found += [f"{kind}: measured as {source}" for kind, source in sources.items()]
    broken = [each.text() for each in comparison.differences if each.breaks]
    if broken:
        found.append("NOT A FAIR COMPARISON: the runs differ in more than their size")
    found += [f"differs: {each.text()}" for each in comparison.differences]
    found += [f"question: {each}" for each in comparison.questions]
    found += [f"left out: {name}: {why}" for name, why in comparison.left_out.items()]
    return found


def loss_words(row: Row, comparison: Comparison) -> str:
    begin = f"lost on {row.size} {comparison.size_is}: "
    if row.lost_ms is None or row.step_ms is None:
        why = "" if comparison.kind in (STRONG, WEAK) else f": scaling is {comparison.kind}"
        return f"{begin}{NOT} per step{why}"
    if row.lost_ms < 0:
        return f"nothing lost on {row.size} {comparison.size_is}: {-row.lost_ms:.1f} ms per step faster than ideal"
    named = [f"{each.kind} {NOT}" if each.ms is None else f"{each.kind} {each.ms:+.1f} ms" for each in row.losses]
    return f"{begin}{row.lost_ms:+.1f} of {row.step_ms:.1f} ms per step: {', '.join(named)}"


def page(comparison: Comparison) -> str:
    header, rows = cells(comparison)
    head = "".join(f"<th>{escape(name)}</th>" for name in ["run", *header])
    body = "".join(
        f"<tr><td>{escape(row.name)}</td>" + "".join(f'<td class="n">{escape(cell)}</td>' for cell in each) + "</tr>"
        for row, each in zip(comparison.rows, rows)
    )
    measured = [(float(row.size), row.throughput) for row in comparison.rows]
    ideal = [(float(row.size), row.ideal) for row in comparison.rows]
    efficiency = [(float(row.size), 100 * row.efficiency) for row in comparison.rows]
    charts = [
        line_chart(
            f"throughput, {comparison.unit}", {"measured": measured, "ideal": ideal}, comparison.size_is, dots=True
        ),
        line_chart(
            "efficiency, %",
            {"measured": efficiency, "ideal": [(x, 100.0) for x, _ in efficiency]},
            comparison.size_is,
            dots=True,
        ),
    ]
    notes = "".join(f"<li>{escape(each)}</li>" for each in said(comparison))
    parts = ["<h1>Scaling</h1>", f"<table><tr>{head}</tr>{body}</table>", f"<ul>{notes}</ul>"]
    return document("drumbeat report: scaling", [*parts, f'<div class="plots">{"".join(charts)}</div>'])


RENDER: Dict[str, Callable[[Comparison], str]] = {"markdown": markdown, "csv": csv_text, "latex": latex}


def rendered(comparison: Comparison, name: Optional[str], width: int) -> str:
    return RENDER[name](comparison) if name else "\n".join(text(comparison, width)) + "\n"


__all__: Sequence[str] = ("FORMATS", "RENDER", "cells", "page", "rendered", "said", "text")
