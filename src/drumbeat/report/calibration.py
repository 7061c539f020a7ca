"""Evidence from run folders for predictions: step times, rates that verify measured, and how often nodes fail."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Collection, Dict, List, Mapping, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.desk.nodes import BAD, LOST, read_store
from drumbeat.desk.runs import all_runs, find_run
from drumbeat.desk.start.verify import RESULTS
from drumbeat.machine.peaks import peak_of
from drumbeat.predict.goodput import FAILURE_SOURCE, GPU_HOURS_PER_FAILURE
from drumbeat.predict.past import Seen
from drumbeat.report.gather import figures_of
from drumbeat.report.predicted import case_of_run, seen_of

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
