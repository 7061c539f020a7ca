"""The progress of a run in the status of its TrainJob, posted to a server that speaks Kubeflow Trainer's protocol."""

import dataclasses
import json
import os
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from drumbeat.watch.prometheus import Publisher, trainer_status
from tests.watch.recorded import recorded

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/llama/status"
STEPS = """
import json, os, time
for step in range(1, 41):
    with open(os.environ["DRUMBEAT_METRICS"], "a") as file:
        record = {"t": time.time(), "rank": 0, "kind": "step", "step": step, "steps": 40, "loss": 2.5}
        file.write(json.dumps(record) + "\\n")
    time.sleep(0.05)
"""


class Server:
    """The controller's status server: the same path, token and answers."""

    def __init__(self, folder):
        self.folder, self.posts, self.code = folder, [], 200
        key, cert = folder / "key.pem", folder / "ca.crt"
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        new += [
            "-keyout",
            str(key),
            "-out",
            str(cert),
            "-subj",
            "/CN=trainer",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ]
        subprocess.run(new, check=True, capture_output=True)
        (folder / "token").write_text("first\n")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.posts.append((self.path, self.headers["Authorization"], body))
                self.send_response(outer.code)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *words):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def variables(self):
        names = {"URL": f"https://127.0.0.1:{self.http.server_port}{PATH}"}
        names.update(CA_CERT=str(self.folder / "ca.crt"), TOKEN=str(self.folder / "token"))
        return {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in names.items()}


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "server"
    folder.mkdir()
    made = Server(folder)
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_numbers_in_the_form_that_the_status_has(server, tmp_path):
    publisher = Publisher("", recorded(tmp_path / "r").path, server.variables())
    publisher.update()
    publisher.update()  # at most every 15 s
    (server.folder / "token").write_text("second")
    publisher.end()
    (path, first, body), (_, second, _) = server.posts
    assert path == PATH and (first, second) == ("Bearer first", "Bearer second")
    status = body["trainerStatus"]
    assert 0 <= status["progressPercentage"] <= 100 and "estimatedRemainingSeconds" not in status  # no step for long
    head = dataclasses.replace(publisher._look(), seconds_left=3e9, loss_not_finite="nan since step 7")
    status = trainer_status(head, 0.0)
    assert status["estimatedRemainingSeconds"] == 2**31 - 1 and {"name": "loss", "value": "nan"} in status["metrics"]
    status = body["trainerStatus"]
    metrics = {metric["name"]: metric["value"] for metric in status["metrics"]}
    assert metrics["step"] == "40" and float(metrics["loss"]) and metrics["tokens_per_second"] == "4000.0"
    assert status["lastUpdatedTime"].endswith("Z")
    assert all(isinstance(metric["value"], str) and len(metric["value"]) <= 64 for metric in status["metrics"])


@pytest.mark.parametrize("trouble", ["refused", "no token", "another authority", "no address"])
def test_what_fails_is_said_once_and_stops_nothing(trouble, server, tmp_path, capsys):
    environ = server.variables()
    if trouble == "refused":
        server.code = 403
    elif trouble == "no token":
        (server.folder / "token").unlink()
    elif trouble == "another authority":
        environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = Server(tmp_path).variables()["KUBEFLOW_TRAINER_SERVER_CA_CERT"]
    else:
        environ["KUBEFLOW_TRAINER_SERVER_URL"] = "nowhere"
    publisher = Publisher("", recorded(tmp_path / "r").path, environ)
    for _ in range(3):
        publisher._next = 0.0
        publisher.update()
    assert capsys.readouterr().err.count("cannot post the TrainJob's progress") == 1


def test_the_lead_of_a_real_run_posts_it(server, drumbeat, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    environ = {**os.environ, **server.variables()}
    done = drumbeat("run", "--", sys.executable, str(tmp_path / "steps.py"), env=environ)
    assert done.returncode == 0, done.stderr
    last = server.posts[-1][2]["trainerStatus"]
    assert last["progressPercentage"] == 100 and {"name": "loss", "value": "2.5"} in last["metrics"], server.posts
