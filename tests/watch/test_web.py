"""The page in a real browser: it moves, shows a failure, and gives nothing to strangers."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import types

import pytest

from tests.runfolder.folders import events, log, metrics
from tests.watch.pages import browser, running, served, until
from tests.watch.recorded import gpu, recorded, sample, steps

pytest.importorskip("starlette")
pytest.importorskip("plotly")
uvicorn = pytest.importorskip("uvicorn")
web = pytest.importorskip("drumbeat.watch.web")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> & <b>bold</b>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return running(recorded(tmp_path_factory.mktemp("runs") / "llama3-8b"))


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    with served(run, tmp_path_factory.mktemp("home")) as page:
        until(lambda: json.loads(page.ask("/api/nodes")[2])["nodes"] == 2)
        yield page


@pytest.mark.parametrize(
    "path", ["/api/stream", "/api/heat", "/api/nodes", "/api/node?node=0", "/api/lines?node=0", "/metrics"]
)
def test_data_needs_the_token(page, path):
    for token in (None, "wrong", page.token[:-1]):
        status, headers, body = page.ask(path, token=token)
        assert status == 401 and "token" in body and "llama3" not in body


def test_the_page_itself_tells_nothing_of_the_run(page):
    for path in ("/", "/page/main.js"):
        status, headers, body = page.ask(path, token=None)
        assert status == 200 and "llama3" not in body and page.token not in body
        assert (
            "default-src 'none'" in headers["content-security-policy"]
            and "http" not in headers["content-security-policy"]
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_other_names_and_other_sites_are_refused(page, headers):
    status, _, body = page.ask("/api/nodes", **headers)
    assert status == 403 and "n000" not in body


def test_a_tunnel_may_have_another_port(page):
    assert page.ask("/api/nodes", Host="localhost:1234", Origin="http://localhost:1234")[0] == 200
    assert page.ask("/api/nodes", Host="[::1]:9")[0] == 200


def test_it_can_only_be_read(page):
    assert page.ask("/api/nodes", method="POST")[0] == 405
    assert page.ask("/page/..%2fweb.py", token=None)[0] == 404
    assert page.ask("/api/heat?show=secret")[0] == 404 and page.ask("/api/node?node=99999999999999999")[0] == 404


def test_what_is_printed(page):
    assert page.address.startswith("http://127.0.0.1:") and len(page.token) >= 32
    assert page.told["elsewhere"].startswith(f"ssh -L {page.port}:127.0.0.1:{page.port} ")


def test_a_port_in_use_is_one_line(page, run, tmp_path):
    argv = [sys.executable, "-m", "drumbeat", "watch", "--web", "--port", str(page.port), run.path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert f"cannot listen on 127.0.0.1:{page.port}: Address already in use" in done.stderr
    assert "--port 0" in done.stderr and "Traceback" not in done.stderr


def figure(driver, name):
    script = "const box = document.querySelector(`[data-name=${arguments[0]}]`); return box && box.dataset.value"
    value = driver.execute_script(script, name)
    return float(value) if value else None


@pytest.mark.timeout(900)  # Chromium on busy cores takes its time
def test_in_a_browser(page, run):
    with browser() as driver:
        driver.get(page.base + "/")
        notice = until(lambda: driver.execute_script("return document.getElementById('notice').textContent"))
        assert "token is missing or wrong" in notice
        driver.get("about:blank")
        driver.get(page.address)
        assert until(lambda: figure(driver, "step") == 40)
        drawn = "return Object.values(drumbeat.charts).filter((chart) => chart.plot.querySelector('.scatterlayer path')).length"
        assert until(lambda: driver.execute_script(drawn) == 7), driver.get_log("browser")
        before = driver.execute_script("return drumbeat.charts.loss.data.loss.length")

        now = time.time()
        steps(run, 41, 46, now - 6.0)
        sample(run, 0, now, [gpu(0, 12.0), gpu(1, 14.0, throttle=["power limit"])])
        assert until(lambda: figure(driver, "step") == 46)
        assert until(lambda: driver.execute_script("return drumbeat.charts.loss.data.loss.length") > before)
        last = "const line = drumbeat.charts.loss.plot.data[0]; return line.y[line.y.length - 1]"
        assert until(lambda: driver.execute_script(last) == pytest.approx(4.0 - 0.46, abs=0.011))

        finding = {"code": "oom", "severity": "error", "title": f"out of memory {HOSTILE}", "rank": 3, "node": 1}
        events(run, ("failed", {"finding": {**finding, "fix": "a smaller batch"}}))
        shown = "const box = document.getElementById('failure'); return box.hidden ? '' : box.innerText"
        words = until(lambda: driver.execute_script(shown))
        assert HOSTILE in words and "Rank 3" in words and "a smaller batch" in words
        log(run, 0, f"rank 0 says {HOSTILE}\n")
        driver.execute_script("document.querySelector('#nodes tbody tr').click()")
        assert until(lambda: HOSTILE in driver.execute_script("return document.getElementById('lines').textContent"))
        assert driver.execute_script("return document.images.length") == 0 and "owned" not in driver.title
        assert driver.execute_script("return document.querySelectorAll('#lines b').length") == 0

        last = {"t": time.time(), "rank": 0, "kind": "step", "step": 47, "steps": 100, "loss": "nan"}
        metrics(run, last, {**last, "kind": "validation", "loss": "inf"})
        box = "return document.querySelector('[data-name=loss]').innerText"
        words = until(lambda: "nan" in driver.execute_script(box) and driver.execute_script(box))
        assert "since step 47, validation inf" in words

        driver.execute_script("document.getElementById('theme').click()")
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
        severe = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert [message for message in severe if "401" not in message] == []  # one without the token was on purpose
        sent = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        urls = {each["params"]["request"]["url"] for each in sent if each["method"] == "Network.requestWillBeSent"}
        assert urls and all(url.startswith((page.base + "/", "data:")) for url in urls)
        assert not any(page.token in url.partition("#")[0] for url in urls)


def raw(page, data):
    """Send these bytes; the first line of the answer, or nothing if the connection was closed."""
    with socket.create_connection(("127.0.0.1", page.port), timeout=120) as connection:
        try:
            connection.sendall(data)
            return connection.makefile("rb").readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_odd_and_long_requests(page):
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {page.token}\r\nConnection: close\r\n\r\n".encode()
    for path in (b"/page/%00", b"/page/../web.py", b"//evil.example/", b"/" + b"a" * 20000, b"/api/node?node=-1"):
        assert raw(page, b"GET " + path + b" HTTP/1.1\r\n" + head).split()[1] == b"404", path
    assert raw(page, b"GET /api/lines?node=0&rank=-1&node=9 HTTP/1.1\r\n" + head).split()[1] in (b"200", b"404")
    for junk in (b"\x16\x03\x01" + b"\0" * 300 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20)):
        assert raw(page, junk)[:12] in (b"", b"HTTP/1.1 400")
    assert page.ask("/api/nodes")[0] == 200


def test_many_open_pages(page):
    """As many as are allowed are served, the others are told; a page that does not read costs no memory."""
    ask = f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        codes = []
        for _ in range(web._MOST_STREAMS + 8):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=120))
            connection.sendall(ask)
            codes.append(connection.recv(12).split()[1])
        assert codes.count(b"200") <= web._MOST_STREAMS and codes[-1] == b"503"
        assert page.ask("/api/nodes")[0] == 200
    assert until(lambda: page.ask("/api/nodes")[0] == 200)


class Request:
    def __init__(self, answered, streams=False):
        self.response_complete, self.scope = answered, {web._STREAM: True} if streams else {}


class Connection:
    def __init__(self, cycle, made=0.0):
        self.cycle, self.made, self.transport, self.open = cycle, made, self, True

    def abort(self):
        self.open = False


def test_a_connection_that_sends_no_request_or_takes_no_answer_is_closed(monkeypatch):
    async def app(scope, receive, send):
        pass

    config = uvicorn.Config(app)
    config.load()
    server = web.Server(config)
    silent, slow, streams = Connection(None), Connection(Request(True)), Connection(Request(False, streams=True))
    untaken, late = Connection(Request(False)), Connection(Request(False))
    server.server_state.connections = {silent, slow, streams, untaken, late}
    now = 1000.0
    monkeypatch.setattr(web, "time", types.SimpleNamespace(monotonic=lambda: now))
    asyncio.run(server.on_tick(0))
    now += web._SILENT - 1
    asyncio.run(server.on_tick(10))
    assert silent.open and slow.open
    slow.cycle = Request(True)  # it has sent another request since
    now += 2
    asyncio.run(server.on_tick(20))
    assert (silent.open, slow.open, streams.open, untaken.open) == (False, True, True, True)
    late.cycle.response_complete = True  # all of it is on its way
    now = 1000.0 + web._UNTAKEN + 1
    asyncio.run(server.on_tick(30))
    assert (untaken.open, late.open, streams.open) == (False, True, True)


def test_a_new_connection_takes_the_place_of_the_oldest_that_is_no_stream():
    page, old, new = (
        Connection(Request(False, streams=True), 1.0),
        Connection(Request(False), 2.0),
        Connection(None, 3.0),
    )
    connections = {page, old, new}
    web._close_oldest(connections)
    assert connections == {page, new} and (page.open, old.open, new.open) == (True, False, True)
    only = {page}
    web._close_oldest(only)
    assert only == {page} and page.open


@pytest.mark.timeout(120)
def test_clients_that_do_not_read_leave_the_page_reachable(page):
    ask = b"GET /page/plotly.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(web._MOST_CONNECTIONS + 20):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(30)
            connection.connect(("127.0.0.1", page.port))
            connection.sendall(ask)
        assert page.ask("/", token=None)[0] == 200
        assert len(page.ask("/page/plotly.js", token=None)[2]) > 1_000_000
