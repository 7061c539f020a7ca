"""A real Prometheus scrapes /metrics and reads the alert rules; promtool likes both; Grafana's own types have the board."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest

from drumbeat.runfolder.summary import Summary, write_summary
from drumbeat.watch import prometheus
from drumbeat.watch.prometheus import Publisher
from tests.conftest import ROOT, free_port
from tests.runfolder.folders import events
from tests.watch.pages import running, served, until
from tests.watch.recorded import recorded

pytest.importorskip("starlette")
pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus with promtool"
)

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: drumbeat
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

ALERTS = ROOT / "docs" / "alerts.yaml"
HANG = {"code": "hang-stopped", "severity": "warning", "title": "rank 1 is stopped", "rank": 1, "cause": "", "fix": ""}
GRAFANA = ROOT / "build" / "grafana" / "node_modules"


def test_a_real_prometheus(tmp_path):
    run = running(recorded(tmp_path / "r"))
    events(run, ("finding", {"finding": HANG}))
    with served(run, tmp_path) as page:
        assert until(lambda: f'drumbeat_step{{run="{run.run_id}"}} 40.0' in page.ask("/metrics")[2])
        text = page.ask("/metrics")[2]
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=180
        )
        assert checked.returncode == 0 and checked.stderr == "", checked.stderr
        kind = page.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert kind[1]["content-type"].startswith("application/openmetrics-text") and kind[2].endswith("# EOF\n")
        config, port = tmp_path / "prometheus.yml", free_port()
        config.write_text(CONFIG.format(token=page.token, port=page.port, rules=ALERTS))
        argv = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        prometheus = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def ask(query):
            url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    return {
                        tuple(sorted(one["metric"].items())): float(one["value"][1])
                        for one in json.load(answer)["data"]["result"]
                    }
            except OSError:
                return {}

        try:
            assert list(until(lambda: ask("drumbeat_step")).values()) == [40.0]
            assert {dict(labels)["run"] for labels in ask("drumbeat_state")} == {run.run_id}, "an alert names the run"
            assert list(ask('sum(drumbeat_gpu_power_watts{job="drumbeat"})').values()) == [2000.0]
            assert len(ask("drumbeat_gpu_energy_joules_total")) == 4
            assert until(lambda: ask('ALERTS{alertname="DrumbeatRunHangs"}')), "pending for its first minute"
            assert not ask('ALERTS{alertname="DrumbeatNodeLost"}')
        finally:
            prometheus.terminate()
            prometheus.wait(120)


def test_the_alerts_fire_for_what_they_name_alone(tmp_path):
    for path, name in ((ALERTS, "alerts-under-test.yaml"), (ROOT / "tests/watch/alerts.yaml", "tests.yaml")):
        shutil.copy(path, tmp_path / name)
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", "tests.yaml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not (GRAFANA / "@grafana/schema").exists(), reason="make dashboard brings @grafana/schema")
@pytest.mark.parametrize("wrong", [False, True])
def test_grafana_knows_every_key_of_the_board(tmp_path, wrong):
    text = (ROOT / "docs" / "grafana.json").read_text()
    if wrong:
        text = text.replace('"type": "query"', '"type": "question"')
    (tmp_path / "node_modules").symlink_to(GRAFANA)
    (tmp_path / "board.ts").write_text(
        f"import type {{ Dashboard }} from '@grafana/schema';\nexport const board: Dashboard = {text};\n"
    )
    words = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--moduleResolution",
        "bundler",
        "--module",
        "esnext",
        "board.ts",
    ]
    done = subprocess.run(
        [GRAFANA / ".bin/tsc", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode == 0) is not wrong, done.stdout


def test_the_alerts_know_how_a_run_can_end():
    ended = set(prometheus.STATES) - set(prometheus.GOING_ON)
    for named in re.findall(r'unless on \(job, instance, run\)\s+drumbeat_state\{state=~"([^"]+)"', ALERTS.read_text()):
        assert ended <= set(named.split("|")) <= set(prometheus.STATES)


def test_the_board_keeps_runs_apart():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    assert {"job", "run"} <= {each["name"] for each in board["templating"]["list"]}
    for query in (target["expr"] for panel in board["panels"] for target in panel["targets"]):
        names = re.findall(r"drumbeat_\w+(\{[^}]*\})?", query)
        assert names and all('run=~"$run"' in each for each in names), query
        assert not re.search(r"\b(?:sum|avg|max|min)\b(?! by \(run\b)", query), query


def test_every_name_on_the_grafana_board_exists():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"drumbeat_\w+", target["expr"])
    }
    asked |= set(re.findall(r"drumbeat_\w+", ALERTS.read_text())) - {"drumbeat_state"}
    known = {"drumbeat_tokens_per_second", "drumbeat_samples_per_second", "drumbeat_slowest_rank_step_duration_seconds"}
    known |= {"drumbeat_median_rank_step_duration_seconds"} | {f"drumbeat_{each[0]}" for each in prometheus._OF_RUN}
    known |= {f"drumbeat_node_{each[0]}" for each in prometheus._OF_NODE}
    known |= {f"drumbeat_gpu_{each[0]}" for each in prometheus._OF_GPU}
    assert asked and asked <= known


def test_the_text_file_for_node_exporter(tmp_path):
    run = recorded(tmp_path / "r")
    (tmp_path / "collector").mkdir()
    file = Publisher(str(tmp_path / "collector"), run.path, {})
    file.update()
    (written,) = (tmp_path / "collector").iterdir()
    assert written.name == "drumbeat-r.prom"
    text = written.read_text()
    assert 'drumbeat_step{run="r"} 40.0' in text and 'drumbeat_tokens_per_second{run="r",over="run"} 4000.0' in text
    assert 'drumbeat_gpu_energy_joules_total{run="r",node="0",host="n000",gpu="0"}' in text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=180)
    assert checked.returncode == 0 and checked.stderr == "", checked.stderr
    write_summary(run.folder, Summary("r", "doubtful", 1, 5.0, 1))
    file.end()
    text = written.read_text()
    assert (
        'drumbeat_state{run="r",state="doubtful"} 1.0' in text and 'drumbeat_state{run="r",state="running"} 0.0' in text
    )
    os.utime(written, (1.0, 1.0))
    other = Publisher(str(tmp_path / "collector"), recorded(tmp_path / "later").path, {})
    other.update()
    assert [path.name for path in (tmp_path / "collector").iterdir()] == ["drumbeat-later.prom"]


def test_a_large_run_gives_no_part_for_the_whole(tmp_path):
    (tmp_path / "collector").mkdir()
    file = Publisher(str(tmp_path / "collector"), recorded(tmp_path / "r", nodes=17, ranks=1, last=10).path, {})
    file.update()
    text = (tmp_path / "collector/drumbeat-r.prom").read_text()
    assert (
        "drumbeat_step{" in text and "tokens_per_second" not in text and 'node="0"' in text and 'node="1"' not in text
    )


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, capsys):
    file = Publisher(str(tmp_path / "nowhere"), recorded(tmp_path / "r").path, {})
    for _ in range(3):
        file._next = 0.0
        file.update()
    assert capsys.readouterr().err.count("cannot write") == 1


def test_the_lead_of_a_real_run_keeps_it(drumbeat, tmp_path):
    (tmp_path / "collector").mkdir()
    look = f"import time, glob; [time.sleep(0.1) for _ in range(1200) if not glob.glob('{tmp_path}/collector/*.prom')]"
    look += f"; print(open(glob.glob('{tmp_path}/collector/*.prom')[0]).read())"
    done = drumbeat("run", "--textfile", tmp_path / "collector", "--", sys.executable, "-c", look)
    assert done.returncode == 0 and "drumbeat_nodes_planned{run=" in done.stdout, done.stderr
    (left,) = (tmp_path / "collector").iterdir()
    assert 'state="finished"} 1.0' in left.read_text()
