"""Terminal, page, /metrics and report say what Run says, number by number."""

import json
import os
import re
import time

import pytest

from drumbeat.cli import main
from drumbeat.desk.state import state_of
from drumbeat.runfolder import run as run_module
from drumbeat.runfolder.follow import EVENTS, METRICS, Follower
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import parse_metric, so_far_line
from drumbeat.watch import session, web
from drumbeat.watch.model import RunView
from drumbeat.watch.session import Session
from drumbeat.watch.text import screen
from tests.runfolder.folders import metrics
from tests.watch.pages import running, served, until
from tests.watch.recorded import recorded

parser = pytest.importorskip("prometheus_client.parser")
pytest.importorskip("starlette")
exposition = pytest.importorskip("drumbeat.watch.web").exposition


def page_head(page):
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", "/api/stream", headers={"Authorization": f"Bearer {page.token}"})
    line = connection.getresponse().readline()
    connection.close()
    return json.loads(line[len(b"data: ") :])["head"]


def exposed(page, run):
    text = page.ask("/metrics")[2]
    families = parser.text_string_to_metric_families(text)
    samples = [one for family in families for one in family.samples]
    assert {one.labels.pop("run") for one in samples} == {run.run_id}, "each sample names its run"
    return {(one.name, *sorted(one.labels.items())): one.value for one in samples}


def terminal_numbers(session):
    text = "\n".join(screen(session, 200, 50))
    step, steps = re.search(r"step (\d+)/(\d+)", text).groups()
    rate = re.search(r"([\d,]+|\d+\.\d+) tokens/s", text).group(1)
    return int(step), int(steps), float(rate.replace(",", "")), float(re.search(r"loss ([\d.]+)", text).group(1))


def add_steps(run, first, last, start):
    """As an agent does: now and then it says what the steps add up to. The batch grows, so no part of the run speaks for all."""
    for node in range(2):
        part = Progress()
        with open(run.folder.node(node).metrics, "w") as file:
            for step in range(first, last + 1):
                for rank in (2 * node, 2 * node + 1):
                    line = {
                        "t": start + 0.01 * step,
                        "rank": rank,
                        "kind": "step",
                        "step": step,
                        "steps": 9000,
                        "loss": 9 / step,
                    }
                    line["tokens"] = 1000 + step
                    file.write(json.dumps(line) + "\n")
                    part.add(parse_metric(line, node))
                if step % 30 == 0:
                    file.write(so_far_line(part.snapshot(), line["t"]))


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """One of which every view reads only the end."""
    run = running(recorded(tmp_path / "long"))
    add_steps(run, 1, 1050, time.time() - 20)
    for module, name in ((run_module, "_HEAD"), (session, "_FIRST_READ")):
        monkeypatch.setattr(module, name, 32 << 10)
    assert os.path.getsize(run.folder.node(0).metrics) > 4 * (32 << 10)
    return run


def test_a_long_run_has_one_speed(long_run):
    """Read from the beginning, from the end, or only in its last part: the same figure."""
    everything = Follower(long_run, what=(EVENTS, METRICS))
    view = RunView(long_run.order())
    for records in everything.drain():
        for record in records:
            view.add(record)
    late = Session(long_run)
    late.load()
    assert (
        view.progress.rate()
        == (late.head().rate, late.head().rate_unit)
        == long_run.progress().rate()
        == state_of(long_run).rate
    )
    tokens = 2 * sum(1000 + step for step in range(2, 1051)) * 2
    assert view.progress.rate()[0] == pytest.approx(tokens / (0.01 * 1049))


@pytest.mark.parametrize("which", ["running", "ended"])
def test_the_views_agree(which, tmp_path, demo_run, drumbeat):
    run = running(recorded(tmp_path / "r")) if which == "running" else demo_run
    if which == "running":
        progress, rate = run.progress(), run.progress().rate()[0]
    else:
        progress, rate = run.summary().progress, run.summary().throughput.value
    session = Session(run)
    session.load()
    head = session.head()
    with served(run, tmp_path) as page:
        assert until(lambda: page_head(page)["step"] == progress.step and page_head(page)["state"] == head.state)
        shown, metrics = page_head(page), exposed(page, run)
    assert (shown["step"], shown["steps"], shown["loss"]) == (progress.step, progress.steps, progress.last_loss)
    assert shown["rate"] == rate == head.rate == metrics["drumbeat_tokens_per_second", ("over", "run")]
    assert metrics["drumbeat_step",] == progress.step and metrics["drumbeat_loss",] == progress.last_loss
    assert terminal_numbers(session) == (
        progress.step, progress.steps, float(f"{rate:.0f}"), float(f"{progress.last_loss:.3f}")
    )  # fmt: skip
    if which == "ended":
        told = json.loads(drumbeat.here("report", "--json", run.path).stdout)
        assert (told["step"], told["loss"][1], told["speed"]["value"]) == (progress.step, progress.last_loss, rate)
    for name in ("gpus", "gpu_use", "gpu_memory", "power", "energy", "received", "sent", "nodes_here", "world"):
        assert shown[name] == getattr(head, name), name
    used = [value for (name, *_), value in metrics.items() if name == "drumbeat_gpu_utilization_ratio"]
    assert len(used) == head.gpus and (not used or 100 * sum(used) / len(used) == pytest.approx(head.gpu_use))
    watts = sum(value for (name, *_), value in metrics.items() if name == "drumbeat_gpu_power_watts")
    assert watts == pytest.approx(head.power or 0)


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_the_views_agree_that_a_loss_is_no_number(loss, tmp_path, capsys):
    run = running(recorded(tmp_path / "runs" / "r", last=4))
    start = time.time()
    for number, value in ((5, 3.5), (6, loss), (7, loss)):
        metrics(run, {"t": start + number, "rank": 0, "kind": "step", "step": number, "steps": 100, "loss": value})
    metrics(run, {"t": start + 8, "rank": 0, "kind": "validation", "step": 7, "loss": loss})
    words = f"loss {loss} since step 6"
    session = Session(run)
    session.load()
    head = session.head()
    assert (head.loss, head.loss_not_finite) == (None, f"{loss} since step 6")
    assert (head.validation_loss, head.validation_not_finite) == (None, loss)
    json.dumps(web.head_data(session), allow_nan=False)
    json.dumps(web.curves(session, web.lines(session)), allow_nan=False)
    seen = {sample.name: sample.value for family in parser.text_string_to_metric_families(
        exposition(session, "")[0].decode()) for sample in family.samples}  # fmt: skip
    assert str(seen["drumbeat_loss"]) == str(seen["drumbeat_validation_loss"]) == loss
    assert words in "\n".join(screen(session, 200, 50)) and f"validation {loss}" in "\n".join(screen(session, 200, 50))
    assert main(["status", run.path]) == 0 and words in capsys.readouterr().out
    assert main(["report", run.path]) == 0 and f"{loss} since step 6" in capsys.readouterr().out
    assert main(["report", "--json", run.path]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["loss_not_finite"], told["validation_not_finite"]) == (f"{loss} since step 6", loss)
