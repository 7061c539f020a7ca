"""Evidence from run folders for predictions: step times, rates that verify measured, and how often nodes fail."""

from __future__ import annotations

from dataclasses import field
from html import escape
from typing import Any, Collection, Dict, List, Mapping, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.text import step_time
from drumbeat.desk.nodes import BAD, LOST, read_store
from drumbeat.desk.runs import all_runs, find_run
from drumbeat.desk.start.verify import RESULTS
from drumbeat.machine.peaks import peak_of
from drumbeat.predict.forecast import FAILURE_SOURCE, GPU_HOURS_PER_FAILURE, Forecast
from drumbeat.predict.past import Seen
from drumbeat.predict.show import NOT_MODELLED, head_rows
from drumbeat.report.gather import figures_of
from drumbeat.report.setting import case_of_run, seen_of
from drumbeat.report.tables import document, rows_table
from drumbeat.verify.chart import Look, line_chart

_NEWEST = 40  # runs that are looked at, the newest first
_MOST = 8  # runs that are used


@dataclass
class Evidence:
    seen: List[Seen] = field(default_factory=list)
    verified: List[Tuple[Dict[str, Any], int]] = field(default_factory=list)  # results of verify, and its nodes


def evidence(wanted: Sequence[str], environ: Mapping[str, str]) -> Evidence:
    """Return the evidence in the named runs; a Problem if one of them has none."""
    found = Evidence()
    for name in wanted:
        run = find_run(name, environ)
        results = run.results(RESULTS)
        if results is not None:
            if not (results.get("collectives") or results.get("gemm")):
                raise Problem(f"{name}: this verify run measured no bandwidth and no product", "give a run on GPUs")
            found.verified.append((results, len(run.nodes())))
            continue
        one = seen_of(run, figures_of(run))
        if one is None:
            words = f"{name}: no model, layout or step time is known of this run"
            raise Problem(words, "give runs of a framework that predict reads")
        found.seen.append(one)
    return found


def own_runs(gpu: str, known: Collection[str], environ: Mapping[str, str]) -> Evidence:
    """Return the evidence in this user's newest runs on such GPUs, except known ones; damaged folders are skipped."""
    found = Evidence()
    for run in all_runs(environ).runs[:_NEWEST]:
        if run.run_id in known or len(found.seen) >= _MOST:
            continue
        try:
            facts, results = run.facts(0), run.results(RESULTS)
            names = {each.name for each in facts.gpus if not each.integrated and each.name} if facts else set()
            if {peak.name for peak in map(peak_of, names) if peak} != {gpu}:
                continue
            order = None if results is not None else run.order()
            if results is not None:
                found.verified = found.verified or [(results, len(run.nodes()))]  # the newest
            elif order is not None and case_of_run(order, facts, order.nodes, order.world_size) is not None:
                one = seen_of(run, figures_of(run))
                found.seen += [one] if one else []
        except (Problem, RecordError, OSError):
            continue
    return found


def failure_rate(environ: Mapping[str, str]) -> Tuple[float, str]:
    """Return the GPU-hours per failure and their source: the published rate, adjusted by the failures that `drumbeat nodes` has
    recorded here."""
    try:
        failures = sum(each.what in (LOST, BAD) for each in read_store(environ).sightings)
    except Problem:
        failures = 0
    hours = 0.0
    for run in all_runs(environ).runs:
        try:
            order, events = run.order(), run.run_events()
        except RecordError:
            continue
        if order is not None and not order.emulated and events and order.world_size:
            hours += order.world_size * max(0.0, events[-1].t - events[0].t) / 3600
    if hours < 100:
        return GPU_HOURS_PER_FAILURE, FAILURE_SOURCE
    source = f"{failures} failures of nodes in {hours:,.0f} GPU-hours of earlier runs here, beside the published rate"
    return (hours + GPU_HOURS_PER_FAILURE) / (failures + 1), source


# A prediction as one HTML page: scaling, a step's waterfall, memory per stage, time against cost.


_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#f0e442", "#999999", "#88aacc", "#a04000",
)  # fmt: skip


def page_of(
    found: Forecast, many: Sequence[Forecast], naive: Sequence[float], seen: Sequence[Any], whole: Sequence[Tuple[str, str]]
) -> str:  # fmt: skip
    """Return the page of one prediction. `many`: predictions for other node counts; `seen`: measured runs; `whole`: lines about
    the whole run."""
    case = found.case
    gpus = f"{case.gpus} x {case.cluster.gpu}"
    facts = [
        *head_rows(found, gpus),
        *whole,
        ("basis", f"{case.basis.name}: {case.basis.words}"),
        ("not in it", NOT_MODELLED),
    ]
    stages = [{name: value / 2**30 for name, value in parts.items()} for parts in found.stages]
    body = [
        f"<h1>{escape(case.model.name)} on {escape(gpus)}</h1>",
        rows_table(facts),
        f"<h2>A step of {step_time(found.seconds)}</h2>",
        waterfall(found),
        f"<h2>Memory per stage, of {case.cluster.memory_gib:.0f} GiB</h2>",
        stacked([(f"stage {i}", parts) for i, parts in enumerate(stages)], "GiB", case.cluster.memory_gib),
        "<h2>Scaling, and time against cost</h2>",
        f'<div class="plots">{scaling(many, naive, seen)}{against_cost(many)}</div>',
    ]
    return document(f"drumbeat predict: {case.model.name}", body, "drumbeat predict")


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
            f'<tr><th>{escape(name)}</th><td style="width:60%">{bar}</td><td class="n">{step_time(value)}</td>'
            f'<td class="n">{value / total:.1%}</td></tr>'
        )
        at += value
    return f"<table>{rows}</table>"


def scaling(many: Sequence[Forecast], naive: Sequence[float], seen: Sequence[Any]) -> str:
    """Return speed against GPUs: ideal (as fast per GPU as the smallest), naive (as this step on one node), predicted with
    its interval, and runs of this model that were measured."""
    if not many:
        return ""
    base = many[0].rate / many[0].case.gpus
    name = many[0].case.model.name
    measured = [each for each in seen if each.case.model.name == name]
    series = {
        "predicted": [(each.case.gpus, each.rate) for each in many],
        "90 %: from": [(each.case.gpus, each.per_step / each.high) for each in many],
        "90 %: to": [(each.case.gpus, each.per_step / each.low) for each in many],
        "ideal": [(each.case.gpus, base * each.case.gpus) for each in many],
        "naive": [(each.case.gpus, each.per_step / value) for each, value in zip(many, naive)],
        "measured": [(each.case.gpus, each.case.work.batch * each.case.work.seq / each.measured) for each in measured],
    }
    drawn = {name: points for name, points in series.items() if points}
    return line_chart("Speed", drawn, "GPUs", f"{many[0].unit}/s", Look(dots=True, log=True))


def against_cost(many: Sequence[Forecast]) -> str:
    """Return hours against GPU-hours, one point per size."""
    if not many:
        return ""
    units, words = (1e9, "a billion tokens") if many[0].unit == "tokens" else (1e6, "a million images")
    hours = {each.case.gpus: units / each.rate / 3600 for each in many}
    labels = {(each, each * gpus): f"{gpus} GPUs" for gpus, each in hours.items()}
    look = Look(dots=True, log=True, labels=labels)
    return line_chart(f"Cost of {words}", {"": sorted(labels)}, "hours", "GPU-hours", look)


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
