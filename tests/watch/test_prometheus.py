"""A real Prometheus scrapes /metrics; promtool likes the names."""

import inspect
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request

import pytest

from tests.conftest import ROOT
from tests.watch.pages import running, served, until
from tests.watch.recorded import recorded

pytest.importorskip("starlette")
openmetrics = pytest.importorskip("drumbeat.watch.openmetrics")

CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: drumbeat
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_real_prometheus(tmp_path):
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        pytest.skip("needs prometheus with promtool")
    run = running(recorded(tmp_path / "r"))
    with served(run, tmp_path) as page:
        assert until(lambda: "drumbeat_step 40.0" in page.ask("/metrics")[2])
        text = page.ask("/metrics")[2]
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=60
        )
        assert checked.returncode == 0 and checked.stderr == "", checked.stderr
        kind = page.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert kind[1]["content-type"].startswith("application/openmetrics-text") and kind[2].endswith("# EOF\n")
        config, port = tmp_path / "prometheus.yml", free_port()
        config.write_text(CONFIG.format(token=page.token, port=page.port))
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
            assert list(ask('sum(drumbeat_gpu_power_watts{job="drumbeat"})').values()) == [2000.0]
            assert len(ask("drumbeat_gpu_energy_joules_total")) == 4
        finally:
            prometheus.terminate()
            prometheus.wait(30)


def test_every_name_on_the_grafana_board_exists():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"drumbeat_\w+", target["expr"])
    }
    known = {"drumbeat_tokens_per_second", "drumbeat_samples_per_second", "drumbeat_slowest_rank_step_duration_seconds"}
    known |= {"drumbeat_median_rank_step_duration_seconds"} | {f"drumbeat_{name}" for name, _, _ in openmetrics._OF_RUN}
    known |= set(re.findall(r'"(drumbeat_node_\w+)"', inspect.getsource(openmetrics)))
    known |= {f"drumbeat_gpu_{name}" for name in re.findall(r'\("(\w+)", "', inspect.getsource(openmetrics._of_gpus))}
    assert asked and asked <= known
