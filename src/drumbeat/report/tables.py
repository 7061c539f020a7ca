"""A comparison as text, Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import os
import textwrap
import time
from html import escape
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.text import columns, duration
from drumbeat.findings.model import ERROR, WARNING
from drumbeat.metrics.trackers import MODULES, open_tracker
from drumbeat.report.figures import LOSS, NOT_RECORDED, VALIDATION, Figures
from drumbeat.report.printed_log import metrics_of_log
from drumbeat.report.scaling import FINISHED, NOT, NOT_KNOWN, STRONG, WEAK, Comparison, Repeats, Row, cut_alike
from drumbeat.report.text import end_words, rows, size_words, speed_words
from drumbeat.runfolder.lines import near, part_words
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import HANGING
from drumbeat.runfolder.tracker import SCALARS, figures, identity, send
from drumbeat.verify.chart import Look, line_chart, share_bar

# A report as one HTML file: tables and inline SVG. It opens from disk and loads nothing else.


_STYLE = """
:root { color-scheme: light dark; --text: #222; --back: #fff; --line: #ddd; --soft: #666; --good: #0b7a4b; --bad: #c02038; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --back: #16181c; --line: #3a3d44; --soft: #9a9da4;
  --good: #3fc68a; --bad: #ff7a8a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; } th { white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.plots { columns: 26rem; column-gap: 1rem; } .plots > * { display: block; break-inside: avoid; margin-bottom: 1rem; }
svg { width: 100%; height: auto; } svg .t { fill: var(--text); } svg .g { stroke: var(--line); } svg .e { stroke: var(--text); }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; } .bar span { height: 100%; }
.soft { color: var(--soft); } .scroll { overflow-x: auto; } .scroll td { white-space: nowrap; }
.verdict { border-left: 6px solid var(--soft); padding: .2rem 1rem; margin: 1rem 0; overflow-wrap: anywhere; }
.verdict p { margin: .3rem 0; } .verdict .end { font-size: 1.15rem; font-weight: 600; } .scroll th + th { text-align: right; }
.verdict.ok { border-color: var(--good); } .verdict.ok .end { color: var(--good); }
.verdict.error { border-color: var(--bad); } .verdict.error .end { color: var(--bad); }
"""
_PARTS = {
    "queue": "#bbbbbb", "start": "#88aacc", "first step": "#56b4e9", "training": "#009e73", "validation": "#e69f00",
    "checkpoint": "#cc79a7", "between stages": "#bbbbbb", "paused": "#c8b900",
    "hang": "#f0e442", "lost": "#d55e00", "restart": "#a04000", "idle": "#999999", "unknown": "#666666",
}  # fmt: skip


_SECONDS = "seconds since the command"


def page_of(figures: Figures) -> str:
    charts = charts_of(figures)
    body = [_verdict(figures)]
    body += ['<div class="plots">', *charts.values(), "</div>"] if charts else []
    return document(f"drumbeat report: {figures.name}", [*body, "<h2>Details</h2>", rows_table(rows(figures)[1:])])


def _verdict(figures: Figures) -> str:
    """Return how the run ended, what was wrong and its fix, and the most requested figures."""
    wrong = [note for note in figures.notes if note.severity == ERROR or note.severity == WARNING and note.fix]
    bad = figures.outcome in ("failed", HANGING) or any(note.severity == ERROR for note in wrong)
    state = "error" if bad else "ok" if figures.outcome == FINISHED and not figures.world else ""
    lines = [f'<p class="end">{escape(end_words(figures))}</p>']
    for note in wrong[:3]:
        lines.append(f"<p>{escape(note.text)}</p>")
        lines += [f"<p><b>Fix:</b> {escape(note.fix)}</p>"] if note.fix else []
    told = dict(rows(figures))
    words = [size_words(figures)]
    words += [speed_words(figures)] if figures.speed else []
    words += [f"loss {told['loss']}"] if figures.loss else []
    lines.append(f"<p>{escape('; '.join(words))}</p>")
    return f'<section class="verdict {state}"><h1>{escape(figures.name)}</h1>{"".join(lines)}</section>'


def charts_of(figures: Figures) -> Dict[str, str]:
    """Return every figure of a run as SVG, by a name that a file can have."""
    found: Dict[str, str] = {}
    spent = {name: seconds for name, seconds in figures.ledger.items() if seconds >= 0.001}
    if spent:
        colours = {part_words(name, spent, figures.step_is): colour for name, colour in _PARTS.items()}
        named = {part_words(name, spent, figures.step_is): seconds for name, seconds in spent.items()}
        found["time"] = share_bar("Where the time went", named, "s", colours)
    if losses := figures.losses_by_step():
        both = {"training": losses[LOSS], "validation": losses[VALIDATION]} if len(losses) > 1 else losses
        over = (figures.step_is or "step") if len(figures.steps_at) > 1 else _SECONDS
        name = LOSS if LOSS in losses else VALIDATION
        found[name.replace(" ", "-")] = line_chart(name.capitalize(), both, over, "loss", Look(zero=False))
    for title, points in figures.curves.items():
        if title not in (LOSS, VALIDATION):
            name, _, unit = title.rpartition(", ")
            file = "-".join(name.lower().replace(",", "").split())
            found[file] = line_chart(name[0].upper() + name[1:], {name: points}, _SECONDS, unit)
    return found


def document(title: str, body: Sequence[str], command: str = "drumbeat report") -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
{chr(10).join(body)}
<p class="soft">Made by {command}, {made}.</p></body></html>
"""


def rows_table(found: Sequence[Tuple[str, str]]) -> str:
    lines = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in found)
    return f"<table>{''.join(lines)}</table>"


_WORDS = {True: "yes", False: "no", None: "not known"}


def cells(comparison: Comparison) -> Tuple[List[str], List[List[str]]]:
    """Return the table for a paper: header, one row per run, and one per group of repeated runs with their means. Columns without
    any known value are left out."""
    told = [(row.name, _cells(row, comparison)) for row in comparison.rows]
    told += [(each.runs[0], _means(each, comparison)) for each in comparison.repeats]
    varied = _varied(comparison)
    rows = [{"run": "", **{what: values[run] for what, values in varied.items()}, **row} for run, row in told]
    empty = {_WORDS[None], NOT, ""}
    empty |= {FINISHED} if {row.outcome for row in comparison.rows} <= {FINISHED, NOT_RECORDED} else set()
    header = [name for name in rows[0] if not {row.get(name, "") for row in rows} <= empty]
    return header, [[row.get(name, "") for name in header] for row in rows]


def _varied(comparison: Comparison) -> Dict[str, Dict[str, str]]:
    """Return the settings in which variants differ: name of a setting -> run -> value, of a command only its own words."""
    found = [each for each in comparison.differences if each.breaks and each.values and comparison.variants]
    varied = {each.what: cut_alike(each.values) if each.what == "command" else each.values for each in found}
    return {
        what: {run: value.replace("...", "").strip() for run, value in values.items()}
        for what, values in varied.items()
    }


def _cells(row: Row, comparison: Comparison) -> Dict[str, str]:
    return {
        "run": row.name, "nodes": str(row.nodes or _WORDS[None]), comparison.size_is: str(row.size),
        f"throughput ({comparison.unit})": _rate(row.throughput), "speed-up": _known(row.speedup, ".2f"),
        "efficiency": _known(row.efficiency and 100 * row.efficiency, ".1f", 100 * (row.error or 0), " %"),
        "time": duration(row.seconds) if row.seconds is not None else NOT, "loss": _known(row.loss, ".4g"),
        "accuracy": _known(row.accuracy, ".4g"), "target reached": _WORDS[row.target_reached],
        "end": _WORDS[None] if row.outcome == NOT_RECORDED else row.outcome,
    }  # fmt: skip


def _means(repeats: Repeats, comparison: Comparison) -> Dict[str, str]:
    error = "" if repeats.throughput_error is None else f" ± {_rate(repeats.throughput_error)}"
    return {
        "run": f"mean of {repeats.runs[0]} and {len(repeats.runs) - 1} more",
        "nodes": str(repeats.nodes or _WORDS[None]), comparison.size_is: str(repeats.size),
        f"throughput ({comparison.unit})": _rate(repeats.throughput) + error,
        "loss": "" if repeats.loss is None else _known(repeats.loss, ".4g", repeats.loss_error),
    }  # fmt: skip


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _known(value: Optional[float], form: str, error: Optional[float] = None, unit: str = "") -> str:
    if value is None:
        return _WORDS[None]
    spread = f" ± {error:{form if 'f' in form else '.2g'}}" if error else ""
    return f"{value:{form}}{spread}{unit}"


def markdown(comparison: Comparison) -> str:
    header, rows = cells(comparison)
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def csv_text(comparison: Comparison) -> str:
    """Return plain numbers, one row per run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = {  # column -> field of a row
        "run": "name", "nodes": "nodes", comparison.size_is.lower(): "size", "throughput": "throughput", "unit": "",
        "speedup": "speedup", "efficiency": "efficiency", "efficiency_error": "error", "ideal_throughput": "ideal",
        "seconds": "seconds", "loss": "loss", "accuracy": "accuracy", "target_reached": "target_reached", "step_ms": "step_ms",
        "lost_ms": "lost_ms", "end": "outcome", "source": "source",
    }  # fmt: skip
    varied = _varied(comparison)
    writer.writerow([*fields, *varied])
    for row in comparison.rows:
        values = (getattr(row, name) if name else comparison.unit for name in fields.values())
        writer.writerow([*map(_plain, values), *(values[row.name] for values in varied.values())])
    return out.getvalue()


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def latex(comparison: Comparison) -> str:
    header, rows = cells(comparison)
    head, *lines = (" & ".join(map(_tex, row)) + r" \\" for row in (header, *rows))
    begin = r"\begin{tabular}{l" + "r" * (len(header) - 1) + "}"
    return "\n".join([begin, r"\hline", head, r"\hline", *lines, r"\hline", r"\end{tabular}"]) + "\n"


def _tex(text: str) -> str:
    for plain in "&%$#_{}":
        text = text.replace(plain, "\\" + plain)
    return text.replace("±", r"$\pm$")


def text(comparison: Comparison, width: int = 80) -> List[str]:
    header, rows = cells(comparison)
    throughput = f"throughput ({comparison.unit})"
    short = [{throughput: comparison.unit, "target reached": "target"}.get(name, name).upper() for name in header]
    lines = columns([short, *rows])
    for paragraph in ("", *said(comparison)):
        lines += textwrap.wrap(paragraph, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
    return lines


def said(comparison: Comparison) -> List[str]:
    """Return the text below the table: the kind of scaling, the losses, and anything that makes it unfair."""
    found = [f"baseline: {comparison.baseline}", f"scaling: {comparison.kind} ({comparison.kind_why})"]
    found = [] if comparison.variants else found
    if any(row.error for row in comparison.rows):
        found.append("efficiency ± 95 % interval, from the spread within the runs; days and nodes differ by more")
    if comparison.repeats:
        found.append("means of repeated runs ± 95 % interval of the mean (Student's t)")
    found += [
        f"efficiency of {row.name}: {row.no_error}"
        for row in comparison.rows if row.no_error and row.efficiency is not None
    ]  # fmt: skip
    found += [] if comparison.variants else [loss_words(row, comparison) for row in comparison.rows[1:]]
    lost = [each for row in comparison.rows if (row.lost_ms or 0) > 0 for each in row.losses]
    sources = {each.kind: each.source for each in lost if each.ms is not None}
    found += [f"{kind}: measured as {source}" for kind, source in sources.items()]
    broken = [each.text() for each in comparison.differences if each.breaks]
    if broken:
        found.append(_unfair(comparison).replace("Not a fair comparison", "NOT A FAIR COMPARISON"))
    found += [f"differs: {each.text()}" for each in comparison.differences]
    found += [f"question: {each}" for each in comparison.questions]
    found += [f"left out: {name}: {why}" for name, why in comparison.left_out.items()]
    return found


def _unfair(comparison: Comparison) -> str:
    if comparison.variants:
        return "Variants, not scaling: compare losses; speeds only where the work of a step is the same"
    return "Not a fair comparison: the runs differ in more than their size"


def loss_words(row: Row, comparison: Comparison) -> str:
    on = f"{row.size} {comparison.size_is[: -1 if row.size == 1 else None]}"
    begin, each = f"lost on {on}: ", comparison.unit.partition("s/s")[0]
    each = each if each == "epoch" else "step"
    if row.lost_ms is None or row.step_ms is None:
        why = f": scaling is {comparison.kind}" if comparison.kind == NOT_KNOWN else ""
        return f"{begin}{NOT} per {each}{why}"
    if row.lost_ms < 0:
        return f"no time lost on {on}: {-row.lost_ms:.1f} ms less per {each} than ideal"
    named = [f"{loss.kind} {loss.ms:+.1f} ms" for loss in row.losses if loss.ms is not None]
    if unknown := [loss.kind for loss in row.losses if loss.ms is None]:
        named.append(f"{' and '.join(', '.join(unknown).rsplit(', ', 1))} {NOT}")
    return f"{begin}{row.lost_ms:+.1f} of {row.step_ms:.1f} ms per {each}: {', '.join(named)}"


def page(comparison: Comparison) -> str:
    header, rows = cells(comparison)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f'<td class="n">{escape(cell)}</td>' for cell in each) + "</tr>"
        for name, *each in rows
    )
    last = comparison.rows[-1]
    cell = _cells(last, comparison)
    doubts = "".join(f"<p>{escape(each.text())}</p>" for each in comparison.differences if each.breaks)
    kind = f"{comparison.kind} scaling".capitalize() if comparison.kind in (STRONG, WEAK) else comparison.kind_why
    end = _unfair(comparison) if doubts else kind
    words = f"{cell['speed-up']} times as fast on {last.size} {comparison.size_is} as on {comparison.rows[0].size}"
    words = (
        f"{words}: {cell['efficiency']} of ideal"
        if last.efficiency is not None
        else "speed-up and efficiency: not known"
    )
    state = "error" if doubts else "" if comparison.questions else "ok"
    doubts += "".join(f"<p>question: {escape(each)}</p>" for each in comparison.questions)
    if comparison.variants:
        losses = [(row.loss, row.name) for row in comparison.rows if row.loss is not None]
        words = "lowest last loss: {:.4g} ({})".format(*min(losses)) if losses else "no loss is known"
        state = ""
    verdict = f'<p class="end">{escape(end)}</p><p>{escape(words)}</p>{doubts}'
    notes = "".join(f"<li>{escape(each)}</li>" for each in said(comparison))
    parts = [
        f'<section class="verdict {state}"><h1>{len(comparison.rows)} runs</h1>{verdict}</section>',
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>',
        '<div class="plots">',
        *charts_of_comparison(comparison).values(),
        f"</div>\n<ul>{notes}</ul>",
    ]
    return document("drumbeat report: scaling", parts)


def charts_of_comparison(comparison: Comparison) -> Dict[str, str]:
    """Return throughput and efficiency over the size, with the 95 % intervals of what was measured, as SVG; of variants, the
    losses of all over the steps."""
    if comparison.variants:
        return {
            name.replace(" ", "-"): line_chart(name.capitalize(), series, comparison.counts, "loss", Look(zero=False))
            for name, series in comparison.losses.items()
        }
    points = [(float(row.size), row) for row in comparison.rows]
    measured, ideal = [(x, row.throughput) for x, row in points], [(x, row.ideal) for x, row in points if row.ideal]
    shown = [(x, row, row.efficiency) for x, row in points if row.efficiency is not None]
    efficiency, full = [(x, 100 * share) for x, _, share in shown], [(x, 100.0) for x, _, _ in shown]
    spread = {(x, row.throughput): row.throughput * row.error / share for x, row, share in shown if row.error}
    shares = {(x, 100 * share): 100 * row.error for x, row, share in shown if row.error}
    charts = {
        "throughput": (measured, ideal, spread, comparison.unit),
        "efficiency": (efficiency, full, shares, "% of ideal"),
    }
    return {
        name: line_chart(
            name.capitalize() + (", with its 95 % interval" if errors else ""), {"measured": points, "ideal": expected},
            comparison.size_is, unit, Look(dots=True, errors={"measured": errors}),
        ) for name, (points, expected, errors, unit) in charts.items()
    }  # fmt: skip


def rendered(comparison: Comparison, name: Optional[str], width: int) -> str:
    render: Dict[str, Callable[[Comparison], str]] = {"markdown": markdown, "csv": csv_text, "latex": latex}
    return render[name](comparison) if name else "\n".join(text(comparison, width)) + "\n"


# A run's metrics for other tools, afterwards: as a CSV file, or in a tracker.


_COLUMNS = ("t", "node", "rank", "kind", "step", "steps", *SCALARS[:-1], "unit")
_PLACES = "csv=FILE, tensorboard=FOLDER, wandb=PROJECT or mlflow=EXPERIMENT"


def export_log(path: str, where: str) -> List[str]:
    """Export what a program printed into a file. It has no times, so a tracker, which needs them, is refused."""
    kind, _, place = where.partition("=")
    if kind != "csv" or not place:
        raise Problem(f"--export {where}: a file that a program printed is exported as csv", "--export csv=FILE")
    metrics = [metric._replace(t=None) for metric in metrics_of_log(path)]  # type: ignore[arg-type]
    return _written(_csv(metrics, place), os.path.basename(path), kind, place)


def export(run: Run, where: str) -> List[str]:
    """Export metrics; return lines about what was written."""
    kind, _, place = where.partition("=")
    if kind not in ("csv", *MODULES) or not place:
        raise Problem(f"--export {where}: unknown", _PLACES)
    if kind == "csv":
        return _written(_csv(_metrics_in_order(run), place), run.run_id, kind, place)
    count, kept = _export(run, kind, place)
    words = _written(count, run.run_id, kind, place)
    if kept:
        sends = f"not sent: kept in {near(kept)}; after `wandb login`, or with WANDB_API_KEY: wandb sync {near(kept)}"
        words = [words[0].replace("written to", "written for"), sends]
    return words


def _written(count: int, name: str, kind: str, place: str) -> List[str]:
    if not count:
        raise Problem(
            f"{name} has no metrics: nothing was written", "docs page metrics says how a program reports some"
        )
    return [f"{count:,} records of {name} written to {kind} {place}"]


def _metrics_in_order(run: Run) -> List[Metric]:
    """Return the metrics of all nodes, by the lead's clock."""
    offsets = run.clock_offsets()
    both = ((offsets.get(node, 0.0), metric) for node in run.nodes() for metric in run.metrics(node))
    return sorted((metric._replace(t=metric.t + offset) for offset, metric in both), key=lambda metric: metric.t)


def _csv(metrics: List[Metric], path: str) -> int:
    if not metrics:
        return 0
    more = sorted({name for metric in metrics for name in metric.more})
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*_COLUMNS, *more])
            for metric in metrics:
                row = [getattr(metric, name) for name in _COLUMNS] + [metric.more.get(name) for name in more]
                writer.writerow(["" if value is None else value for value in row])
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror}") from None
    return len(metrics)


def _export(run: Run, kind: str, place: str) -> Tuple[int, str]:
    """Export the lowest rank's metrics: it reports everything that all ranks share. Return their number, and the folder in which
    the tracker keeps them if it could not send them."""
    metrics = _metrics_in_order(run)
    lowest = min((metric.rank for metric in metrics), default=0)
    metrics = [metric for metric in metrics if metric.rank == lowest and metric.step is not None and figures(metric)]
    if metrics:
        tracker = open_tracker(kind, place, identity(run))
        for metric in metrics:
            send(tracker, metric)
        tracker.close()
    return len(metrics), tracker.kept if metrics else ""
