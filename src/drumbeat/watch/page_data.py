"""Data for the page: plain values from the session, in pieces that stay small however large the run is."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from drumbeat.base.record import to_plain
from drumbeat.watch.curve import Curve, Point
from drumbeat.watch.node_view import NodeView, memory_percent
from drumbeat.watch.session import Session
from drumbeat.watch.text import COLUMNS, GPU_COLUMNS, RANK_COLUMNS, gpu_rows, matching, node_cells, rank_rows

_OVERLAP = 120.0  # seconds that are sent again: nodes of a large run are read in turns, so their values come late
_FEW_NODES = 8  # up to here every node has a line of its own in the charts
_NARROWEST = 0.1  # of the highest value: the least that a scale of the heat map spans
_MOST_ROWS = 200
_MOST_LINES = 60

# Cells of the heat map: label, unit, fixed range if there is one.
HEAT = {
    "use": ("GPU use", "%", (0.0, 100.0)),
    "memory": ("GPU memory", "%", (0.0, 100.0)),
    "power": ("power", "W", None),
    "temperature": ("temperature", "°C", None),
    "clock": ("clock", "MHz", None),
    "step": ("step time", "ms", None),
}
_OF_GPU: Dict[str, Callable[[Any], Optional[float]]] = {
    "use": lambda gpu: gpu.busy,
    "memory": memory_percent,
    "power": lambda gpu: gpu.power,
    "temperature": lambda gpu: gpu.temperature,
    "clock": lambda gpu: gpu.clock,
}


def head_data(session: Session) -> Dict[str, Any]:
    head = session.head()
    plain: Dict[str, Any] = to_plain(head)
    if head.slowest:
        plain["slowest"]["spread"] = head.slowest.spread
    marks = sorted(session.view.marks, key=lambda mark: mark.t)
    return {"head": plain, "marks": [[mark.t, mark.kind, mark.text] for mark in marks]}


def curves(session: Session, since: Optional[float] = None) -> Dict[str, Any]:
    """Return all curves; with `since`, only what may have changed after that time."""
    view = session.view
    found = {"loss": _curve(view.loss, since), "validation": _curve(view.validation, since)}
    found["step_seconds"] = _curve(view.step_seconds, since)
    found["rate"] = _points(view.throughput(), since)
    for name, curve in view.cluster.items():
        found[name] = _curve(curve, since)
    if len(view.nodes) <= _FEW_NODES:
        for number, node in view.nodes.items():
            for name, curve in node.curves.items():
                found[f"{name}:{number}"] = _curve(curve, since)
    return found


def heat(session: Session, show: str) -> Dict[str, Any]:
    """Return one value per node and GPU, or per node and rank; None is unknown."""
    label, unit, limits = HEAT[show]
    hang = session.view.course.hang
    nodes = [session.view.nodes[number] for number in sorted(session.view.nodes)]
    rows = [_heat_row(node, show) for node in nodes]
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
        "hanging": hang.finding.rank if hang else None,
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


def _heat_row(node: NodeView, show: str) -> List[Optional[float]]:
    if show == "step":
        ranks = [node.ranks[rank].step_seconds for rank in sorted(node.ranks)]
        return [None if seconds is None else round(seconds * 1000, 1) for seconds in ranks]
    values = [_OF_GPU[show](gpu) for gpu in node.gpus]
    return [None if value is None else round(value) for value in values]


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
    return session.view.now - max(_OVERLAP, 2 * max(widths(session)))


def widths(session: Session) -> List[float]:
    """Return the slot widths: when one of them changes, whole curves must be sent."""
    view = session.view
    shown = [view.loss, view.validation, view.step_seconds, view.work, view.reported_rate, *view.cluster.values()]
    if len(view.nodes) <= _FEW_NODES:
        shown += [curve for node in view.nodes.values() for curve in node.curves.values()]
    return [curve.width for curve in shown]


def _curve(curve: Curve, since: Optional[float] = None) -> Dict[str, Any]:
    if since is None or curve.begin is None or since <= curve.begin:
        return _points(curve.points())
    since = curve.begin + int((since - curve.begin) / curve.width) * curve.width
    return _points(curve.points(since), since)


def _points(points: List[Point], since: Optional[float] = None) -> Dict[str, Any]:
    """Return points. `since`: the client keeps what it has from before that time."""
    kept = [point for point in points if since is None or point.t >= since]
    return {"since": since, "p": [[round(p.t, 2), _short(p.mean), _short(p.low), _short(p.high)] for p in kept]}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
