"""`drumbeat watch --web`: one page and its data, served by Starlette on uvicorn. Needs the extra `web`."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import gzip
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, MutableMapping
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Set, Tuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.desk.start.create import users_token
from drumbeat.watch.node_view import Curve, Point, memory_percent
from drumbeat.watch.prometheus import families, text
from drumbeat.watch.session import Session
from drumbeat.watch.text import COLUMNS, GPU_COLUMNS, RANK_COLUMNS, gpu_rows, matching, node_cells, rank_rows

# Data for the page: plain values from the session, in parts that stay small however large the run is.


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


def heat_map(session: Session, show: str) -> Dict[str, Any]:
    """Return one value per node and GPU, or per node and rank; None is unknown."""
    label, unit, limits, value_of = HEAT[show]
    hang, head = session.view.course.hang, session.head()
    bad = hang.finding if hang else head.failure
    nodes = [session.view.nodes[number] for number in sorted(session.view.nodes)]
    ranks = show == "step"
    things = [[node.ranks[rank] for rank in sorted(node.ranks)] if ranks else node.gpus for node in nodes]
    values = [[value_of(thing) for thing in row] for row in things]
    rows = [[None if value is None else round(value, 1 if ranks else None) for value in row] for row in values]
    known = [value for row in rows for value in row if value is not None]
    low, high = limits or scale(known)
    return {
        "show": show,
        "label": label.replace("step", head.step_is or "step"),
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


# Access to the page's data: an ASGI wrapper that checks Host, Origin and token, and sets the headers of every
# answer. A page of another site in the same browser can send requests to this address, under a name that it has made
# to point here (DNS rebinding). So the Host must be an address or a name of this machine, the Origin must be our
# own, and data needs the token in a header, which no other site can set. The token stands behind the `#` of the
# address: browsers send that part nowhere.


Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

_OPEN = ("/", "/page/")  # without the token: the page itself, which knows nothing of any run
_HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


def own_names() -> FrozenSet[str]:
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0], socket.getfqdn().lower()})


class Guard:
    def __init__(self, app: App, token: str, names: FrozenSet[str]) -> None:
        self.app, self.names = app, names
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        why = self.refusal(scope)

        async def send_with_headers(message: Dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        if why is None:
            await self.app(scope, receive, send_with_headers)
            return
        status, text = why
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": (text + "\n").encode()})

    def refusal(self, scope: Scope) -> Optional[Tuple[int, str]]:
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        host = headers.get("host", b"").decode("latin-1")
        if not self._is_ours(host):
            return 403, "this Host is not a name of this machine; open the address that drumbeat printed"
        origin = headers.get("origin")
        if origin is not None and origin.decode("latin-1").lower() != f"http://{host.lower()}":
            return 403, "requests from other sites are refused"
        if headers.get("sec-fetch-site", b"none") not in (b"none", b"same-origin") and scope["path"] != "/":
            return 403, "requests from other sites are refused"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page can only be read"
        if scope["path"] == _OPEN[0] or scope["path"].startswith(_OPEN[1]):
            return None
        scheme, _, given = headers.get("authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            why = "the token is missing or wrong: open the address that drumbeat printed, including the part after #"
            return 401, why
        return None

    def _is_ours(self, host: str) -> bool:
        """Return true for our own origin on any port: a tunnel may use another one than we do."""
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", host)
        if not found:
            return False
        name = found.group(1).strip("[]").lower()
        try:
            ipaddress.ip_address(name)
            return True  # no name, so nobody else can have made it point here
        except ValueError:
            return name in self.names


PORT = 8765
_WAITING = 3  # messages that a slow browser may have waiting before it is sent everything anew
_MOST_STREAMS = 64  # pages that may be open at a time
_SILENT = 20.0  # seconds after which a connection that has not sent a whole request is closed
_UNTAKEN = 30.0  # seconds after which an answer that is no stream and was not taken is cut off
_MOST_CONNECTIONS = 160  # open at a time: the streams, and more than one other for each page
_AT_ONCE = 16  # connections accepted in one go, before any of them is counted
_PIECE = 1 << 16  # bytes of a file that are handed over at a time: a browser that does not read holds no more
_STREAM = "drumbeat.stream"  # in the scope of a request that is answered by a stream
_CHOOSE_EVERY = 30.0  # seconds
_PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class Hub:
    """Reads the run every second or two, however many pages are open, and sends each browser what is new."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._queues: Set[asyncio.Queue[str]] = set()
        self._widths: List[Any] = []
        self._own: Dict[str, List[int]] = {}  # nodes with lines of their own in the charts
        self._chosen = 0.0  # when, by the monotonic clock

    async def run(self) -> None:
        while True:
            if self.session.due:
                self.session.settle(await asyncio.to_thread(self.session.ask))
            for _ in range(20):
                if not self.session.tick(look=False):
                    break
                await asyncio.sleep(0)  # answer requests between two reads of a run that is still to be read
            if self._queues:
                self._send()
            await asyncio.sleep(self.session.interval)

    @property
    def full(self) -> bool:
        return len(self._queues) >= _MOST_STREAMS

    async def messages(self) -> AsyncIterator[str]:
        if self.full:
            return
        queue: asyncio.Queue[str] = asyncio.Queue(_WAITING)
        self._queues.add(queue)
        try:
            yield self.message(whole=True)
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)

    def _send(self) -> None:
        found = widths(self.session, self._lines())
        message = self.message(whole=found != self._widths)
        self._widths = found
        slow = [queue for queue in self._queues if queue.full()]
        whole = self.message(whole=True) if slow else ""
        for queue in self._queues:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(whole)
            else:
                queue.put_nowait(message)

    def _lines(self) -> Dict[str, List[int]]:
        """Choose the nodes with lines of their own only now and then: a new choice sends all curves again."""
        now = time.monotonic()
        if now - self._chosen > _CHOOSE_EVERY or not any(self._own.values()):
            self._own, self._chosen = lines(self.session), now
        return self._own

    def message(self, whole: bool = False) -> str:
        since = None if whole else overlap_begin(self.session)
        data = {**head_data(self.session), "curves": curves(self.session, self._lines(), since)}
        return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def build_app(session: Session, token: str) -> Guard:
    hub = Hub(session)
    files = _page_files()

    async def page(request: Request) -> Response:
        found = files.get(request.path_params.get("name", "index.html"))
        if found is None:
            return PlainTextResponse("no such file\n", 404)
        kind, data, packed = found
        headers = {"cache-control": "no-cache", "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers = packed, {**headers, "content-encoding": "gzip"}
        headers["content-length"] = str(len(data))
        return StreamingResponse(_pieces(data), media_type=kind, headers=headers)

    async def stream(request: Request) -> Response:
        if hub.full:
            return PlainTextResponse(f"{_MOST_STREAMS} pages are open already: close some\n", 503)
        request.scope[_STREAM] = True
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(hub.messages(), media_type="text/event-stream", headers=headers)

    async def heat(request: Request) -> Response:
        show = request.query_params.get("show", "use")
        return _json(heat_map(session, show) if show in HEAT else None)

    async def nodes(request: Request) -> Response:
        return _json(node_table(session, request.query_params.get("filter", "")[:100]))

    async def node(request: Request) -> Response:
        number = _number(request, "node")
        return _json(None if number is None else node_data(session, number))

    async def lines(request: Request) -> Response:
        number = _number(request, "node")
        return _json(None if number is None else last_lines(session, number, _number(request, "rank")))

    async def metrics(request: Request) -> Response:
        body, kind = exposition(session, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind, "cache-control": "no-store"})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(hub.run())
        yield
        reading.cancel()

    routes = [
        Route("/", page), Route("/page/{name}", page), Route("/api/stream", stream), Route("/api/heat", heat),
        Route("/api/nodes", nodes), Route("/api/node", node), Route("/api/lines", lines), Route("/metrics", metrics),
    ]  # fmt: skip
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, own_names())


def page_token(environ: Mapping[str, str]) -> str:
    """Return the user's token for pages: the same at each start, so that a scraper of /metrics need not be reconfigured."""
    try:
        return hmac.new(users_token(environ).encode(), b"drumbeat watch", "sha256").hexdigest()[:32]
    except Problem:  # nowhere to keep one
        return secrets.token_urlsafe(24)


def serve(session: Session, listen: str = "127.0.0.1", port: Optional[int] = None) -> int:
    token = page_token(os.environ)
    bound = _bind(listen, port)
    address, number = bound.getsockname()[:2]
    _announce(session, address, number, token)
    settings = uvicorn.Config(
        build_app(session, token), log_level="error", access_log=False, timeout_graceful_shutdown=1, server_header=False,
        http=Connection, backlog=_AT_ONCE,
    )  # fmt: skip
    # Open pages are cut off when it ends: nothing to report.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "graceful shutdown" not in record.getMessage())
    Server(settings).run(sockets=[bound])
    return 0


class Connection(H11Protocol):
    """Connection of h11, which bounds the size of a request's head. When too many are open, a new one takes the place of
    the oldest."""

    made = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.made = time.monotonic()
        if len(self.connections) >= _MOST_CONNECTIONS:
            _close_oldest(self.connections)
        super().connection_made(transport)


def _close_oldest(connections: Set[Any]) -> None:
    others = [each for each in connections if not _streams(getattr(each, "cycle", None))]
    if others:
        oldest = min(others, key=lambda each: getattr(each, "made", 0.0))
        connections.discard(oldest)  # now, for the next one may come before this one is closed
        oldest.transport.abort()


def _streams(cycle: Any) -> bool:
    """Return true while a stream is being sent. The path does not show that: a refused request has the same one."""
    return cycle is not None and not cycle.response_complete and _STREAM in cycle.scope


class Server(uvicorn.Server):
    """Server that closes connections that do not send a whole request, or do not take the answer: uvicorn itself would
    keep them until no file can be opened."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._since: Dict[Any, float] = {}  # connection, its last request, whether that is answered -> since when

    async def startup(self, sockets: Optional[List[socket.socket]] = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen()  # more may wait than are accepted in one go

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # every second
            now = time.monotonic()
            known = [(each, getattr(each, "cycle", None)) for each in self.server_state.connections]
            idle = [(each, cycle) for each, cycle in known if not _streams(cycle)]
            waiting = [(each, cycle, cycle is None or cycle.response_complete) for each, cycle in idle]
            self._since = {key: self._since.get(key, now) for key in waiting}
            for (connection, _, silent), since in self._since.items():
                transport = getattr(connection, "transport", None)
                if transport is not None and now - since > (_SILENT if silent else _UNTAKEN):
                    transport.abort()
        return await super().on_tick(counter)


def _announce(session: Session, address: str, port: int, token: str) -> None:
    shown = f"[{address}]" if ":" in address else address
    host = socket.gethostname() if address in ("0.0.0.0", "::") else shown  # noqa: S104
    print(f"watching   {session.run.run_id}")
    print(f"page       http://{host}:{port}/#{token}")
    if address in ("127.0.0.1", "::1"):
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"
        print(f"elsewhere  {tunnel}, then open that address")
    else:
        print("open to    everyone who can reach this machine and has this address; the connection is not encrypted")
    print(f"metrics    http://{host}:{port}/metrics, with the header 'Authorization: Bearer {token}'")
    print("Ctrl-C ends it; the run goes on.")
    sys.stdout.flush()


def _bind(listen: str, port: Optional[int]) -> socket.socket:
    """Bind the requested port; else our usual one, or any other if that is taken."""
    last: Optional[OSError] = None
    for number in (PORT, 0) if port is None else (port,):
        try:
            family = socket.getaddrinfo(listen, number, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError):
            what = f"'{listen}' is not an address of this machine"
            raise Problem(what, "--listen 0.0.0.0 is every address") from None
        bound = socket.socket(family[0], socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIECE)  # nor does the system hold much of an answer
            bound.bind(family[4])
            bound.listen()  # from now on a browser waits instead of being refused
            return bound
        except OSError as error:
            bound.close()
            last = error
    fix = "--port 0 takes any free one" if port is not None else "--listen names the address to listen on"
    place = f"{listen}:{PORT if port is None else port}"
    raise Problem(f"cannot listen on {place}: {last.strerror if last else ''}", fix)


def _page_files() -> Dict[str, Tuple[str, bytes, bytes]]:
    """Map each name to type, content, and content as gzip. The charts are drawn by the JavaScript that comes with Plotly's
    package."""
    import plotly

    paths = {name: os.path.join(_PAGE, name) for name in os.listdir(_PAGE)}
    paths["plotly.js"] = os.path.join(os.path.dirname(plotly.__file__), "package_data", "plotly.min.js")
    found = {}
    for name, path in paths.items():
        kind = _TYPES.get(os.path.splitext(name)[1])
        if kind:
            with open(path, "rb") as file:
                data = file.read()
            found[name] = (f"{kind}; charset=utf-8", data, gzip.compress(data, 6))
    return found


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), _PIECE):
        yield data[begin : begin + _PIECE]


def _json(data: Any) -> Response:
    if data is None:
        return PlainTextResponse("not found in this run\n", 404)
    return JSONResponse(data, headers={"cache-control": "no-store"})


def _number(request: Request, name: str) -> Optional[int]:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


# /metrics: the run's numbers, for Prometheus to scrape.


def exposition(session: Session, accept: str) -> Tuple[bytes, str]:
    """Return Prometheus' text or OpenMetrics, as the scraper asks for, and the name of the format."""
    head, view = session.head(), session.view
    found = families(head, (view.nodes[number] for number in sorted(view.nodes)))
    kinds = ("text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0")
    open_metrics = "application/openmetrics-text" in accept
    return text(found, {"run": head.run_id}, open_metrics).encode(), f"{kinds[open_metrics]}; charset=utf-8"
