"""A report as one HTML file: tables and inline SVG. It opens from disk and asks for nothing else."""

from __future__ import annotations

import time
from html import escape
from typing import List, Mapping, Sequence, Tuple

from drumbeat.report.chart import line_chart
from drumbeat.report.figures import Figures
from drumbeat.report.text import rows

_STYLE = """
:root { color-scheme: light dark; --text: #222; --back: #fff; --line: #ddd; --soft: #666; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --back: #16181c; --line: #3a3d44; --soft: #9a9da4; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; } th { white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg .t { fill: var(--text); } svg .g { stroke: var(--line); }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; } .bar span { height: 100%; }
.soft { color: var(--soft); }
"""
_PARTS = {
    "queue": "#bbbbbb", "start": "#88aacc", "first step": "#56b4e9", "training": "#009e73", "validation": "#e69f00",
    "checkpoint": "#cc79a7", "between stages": "#bbbbbb",
    "hang": "#f0e442", "lost": "#d55e00", "restart": "#a04000", "idle": "#999999", "unknown": "#666666",
}  # fmt: skip


def page_of(figures: Figures) -> str:
    body = [f"<h1>{escape(figures.name)}</h1>", _table(rows(figures)[1:])]
    if figures.ledger:
        body += ["<h2>Where the time went</h2>", ledger_bar(figures.ledger)]
    charts = [
        line_chart(name, {name: points}, "seconds since the command", zero=name != "loss")
        for name, points in figures.curves.items()
    ]
    if charts:
        body += ["<h2>Over time</h2>", f'<div class="plots">{"".join(charts)}</div>']
    return document(f"drumbeat report: {figures.name}", body)


def document(title: str, body: Sequence[str]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            f'<p class="soft">Made by drumbeat report, {made}.</p></body></html>\n',
        ]
    )


def ledger_bar(ledger: Mapping[str, float]) -> str:
    total = sum(ledger.values()) or 1.0
    spent = [(name, seconds) for name, seconds in ledger.items() if seconds >= 0.001]
    bar = "".join(
        f'<span style="width:{100 * seconds / total:.3f}%;background:{_PARTS.get(name, "#666")}" '
        f'title="{escape(name)}: {seconds:.1f} s"></span>'
        for name, seconds in spent
    )
    cells = "".join(
        f'<tr><th><span style="color:{_PARTS.get(name, "#666")}">&#9632;</span> {escape(name)}</th>'
        f'<td class="n">{seconds:,.1f} s</td><td class="n">{seconds / total:.1%}</td></tr>'
        for name, seconds in spent
    )
    return f'<div class="bar">{bar}</div><table>{cells}</table>'


def _table(found: Sequence[Tuple[str, str]]) -> str:
    lines: List[str] = [f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in found]
    return f"<table>{''.join(lines)}</table>"
