"""Data for the page: plain values from the session, in parts that stay small however large the run is."""

from __future__ import annotations

import statistics
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from drumbeat.base.record import to_plain
from drumbeat.watch.curve import Curve, Point
from drumbeat.watch.node_view import memory_percent
from drumbeat.watch.session import Session
from drumbeat.watch.text import COLUMNS, GPU_COLUMNS, RANK_COLUMNS, gpu_rows, matching, node_cells, rank_rows

_OVERLAP = 120.0  # seconds that are sent again: nodes of a large run are read in turns, so their values come late
_FEW_NODES = 6  # up to here every node has a line of its own in the charts; of more, those that stand out
_MOST_OUTLIERS = 3  # lines per chart
_FAR, _NEAR = 4.0, 0.05  # usual distances from the median that stand out; the least such distance, of the median
_NARROWEST = 0.1  # of the highest value: the least that a scale of the heat map spans
_MOST_ROWS = 200
_MOST_LINES = 60

# Cells of the heat map: label, unit, fixed range if there is one, value of a GPU (of a rank: its step time).
HEAT: Dict[str, Tuple[str, str, Optional[Tuple[float, float]], Callable[[Any], Optional[float]]]] = {
    "use": ("GPU use", "%", (0.0, 100.0), lambda gpu: gpu.busy),
    "memory": ("GPU memory", "%", (0.0, 100.0), memory_percent),
    "power": ("power", "W", None, lambda gpu: gpu.power),
    "temperature": ("temperature", "°C", None, lambda gpu: gpu.temperature),
    "clock": ("clock", "MHz", None, lambda gpu: gpu.clock),
    "step": ("step time", "ms", None, lambda rank: None if rank.step_seconds is None else rank.step_seconds * 1000),
}


def head_data(session: Session) -> Dict[str, Any]:
    head = session.head()
    plain: Dict[str, Any] = to_plain(head)
    if head.slowest:
        plain["slowest"]["spread"] = head.slowest.spread
    marks = sorted(session.view.marks, key=lambda mark: mark.t)
    return {"head": plain, "marks": [[mark.t, mark.kind, mark.text] for mark in marks]}


def lines(session: Session) -> Dict[str, List[int]]:
    """Return the nodes with a line of their own in each chart: all if there are few, else those that stand out now."""
    nodes = session.view.nodes
    if len(nodes) <= _FEW_NODES:
        return {name: sorted(nodes) for name in session.view.cluster}
    return {name: outliers({k: node.means[name] for k, node in nodes.items()}) for name in session.view.cluster}


def outliers(values: Mapping[int, Optional[float]]) -> List[int]:
    """Return the few whose value is furthest from the median, in units of the median distance from it."""
    known = {key: value for key, value in values.items() if value is not None}
    if not known:
        return []
    middle = statistics.median(known.values())
    away = {key: abs(value - middle) for key, value in known.items()}
    usual = max(statistics.median(away.values()), _NEAR * abs(middle))
    far = [key for key in sorted(away, key=lambda key: -away[key]) if usual > 0 and away[key] > _FAR * usual]
    return sorted(far[:_MOST_OUTLIERS])


def curves(session: Session, own: Mapping[str, List[int]], since: Optional[float] = None) -> Dict[str, Any]:
    """Return all curves, `own` of them for single nodes; with `since`, only what may have changed after that time."""
    view = session.view
    found = {"loss": _curve(view.loss, since), "validation": _curve(view.validation, since)}
    found["step_seconds"], found["steps"] = _curve(view.step_seconds, since), _curve(view.steps, since)
    found["rate"] = _points(view.throughput(), since)
    of_nodes = {f"{name}:{k}": view.nodes[k].curves[name] for name, nodes in own.items() for k in nodes}
    return {**found, **{name: _curve(curve, since) for name, curve in (*view.cluster.items(), *of_nodes.items())}}


def heat(session: Session, show: str) -> Dict[str, Any]:
    """Return one value per node and GPU, or per node and rank; None is unknown."""
    label, unit, limits, value_of = HEAT[show]
    hang, failure = session.view.course.hang, session.head().failure
    bad = hang.finding if hang else failure
    nodes = [session.view.nodes[number] for number in sorted(session.view.nodes)]
    ranks = show == "step"
    things = [[node.ranks[rank] for rank in sorted(node.ranks)] if ranks else node.gpus for node in nodes]
    values = [[value_of(thing) for thing in row] for row in things]
    rows = [[None if value is None else round(value, 1 if ranks else None) for value in row] for row in values]
    known = [value for row in rows for value in row if value is not None]
    low, high = limits or scale(known)
    return {
        "show": show,
        "label": label,
        "unit": unit,
        "low": low,
        "high": high,
        "columns": max(map(len, rows), default=0),
        "nodes": [node.node for node in nodes],
        "hosts": [node.host for node in nodes],
        "lost": [node.node for node in nodes if node.lost],
        "bad": bad.rank if bad else None,  # the rank that hangs, or failed first
        "ranks": [min(node.ranks, default=None) for node in nodes],
        "values": rows,
    }


def scale(values: List[float]) -> Tuple[float, float]:
    """Return a scale from the lowest to the highest value, never so narrow that nearly equal values get opposite colours."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    missing = max(0.0, (_NARROWEST * high or 1.0) - (high - low))
    return low - missing / 2, high + missing / 2


def node_table(session: Session, wanted: str) -> Dict[str, Any]:
    nodes = [session.view.nodes[number] for number in sorted(session.view.nodes)]
    shown = matching(nodes, wanted) if wanted else nodes
    rows = [node_cells(node) for node in shown[:_MOST_ROWS]]
    return {"columns": COLUMNS, "rows": rows, "matching": len(shown), "nodes": len(nodes)}


def node_data(session: Session, number: int) -> Optional[Dict[str, Any]]:
    node = session.view.nodes.get(number)
    if node is None:
        return None
    return {
        "node": number,
        "host": node.host,
        "lost": node.lost,
        "gpu_columns": GPU_COLUMNS,
        "gpus": gpu_rows(node),
        "rank_columns": RANK_COLUMNS,
        "ranks": rank_rows(node, session.view.now),
        "curves": {name: _curve(curve) for name, curve in node.curves.items()},
    }


def last_lines(session: Session, node: int, rank: Optional[int]) -> List[Dict[str, Any]]:
    lines = session.last_lines(node, rank, _MOST_LINES)
    return [{"rank": line.rank, "stream": line.stream, "text": line.text[:1000]} for line in lines]


def overlap_begin(session: Session) -> float:
    """Return the time from which curves may still change."""
    return session.view.now - max(_OVERLAP, 2.0 * float(max(widths(session, {})[1:])))


def widths(session: Session, own: Mapping[str, List[int]]) -> List[Any]:
    """Return the slot widths and the nodes of these curves: if one of them changes, whole curves must be sent."""
    view = session.view
    shown = [view.loss, view.validation, view.step_seconds, view.steps, view.work, view.reported_rate]
    shown += [*view.cluster.values(), *(view.nodes[k].curves[name] for name, nodes in own.items() for k in nodes)]
    return [own, *(curve.width for curve in shown)]


def _curve(curve: Curve, since: Optional[float] = None) -> Dict[str, Any]:
    if since is None or curve.begin is None or since <= curve.begin:
        return _points(curve.points())
    since = curve.begin + int((since - curve.begin) / curve.width) * curve.width
    return _points(curve.points(since), since)


def _points(points: List[Point], since: Optional[float] = None) -> Dict[str, Any]:
    """Return the points from `since` on: the client keeps the earlier ones."""
    kept = [point for point in points if since is None or point.t >= since]
    digits = [[float(f"{value:.6g}") for value in (p.mean, p.low, p.high)] for p in kept]
    return {"since": since, "p": [[round(p.t, 2), *values] for p, values in zip(kept, digits)]}
