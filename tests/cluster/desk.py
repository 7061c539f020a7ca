"""The desk of a person who uses the cluster: drumbeat's own commands, typed in the head's network."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.bench import BUSY

SRC = Path(__file__).parent.parent.parent / "src"
PACKAGES = [path for path in sys.path if path.endswith("site-packages") and os.path.isdir(path)]


class Desk:
    def __init__(self, cluster, base):
        self.cluster, self.base, self.runs = cluster, base, []
        python = Path(sys.executable).resolve()
        self.python = str(python)
        binds = ["/usr", str(python.parent.parent), *PACKAGES, str(base)]
        self.site = base / "bench.yaml"
        self.site.write_text(
            "summary: the bench\nbackend: kubernetes\ncontainer: {runtime: pod, binds: [" + ", ".join(binds) + "]}\n"
        )
        self.environ = {
            "PATH": f"{cluster.programs}:{python.parent}:/usr/bin:/bin", "HOME": str(base), "LANG": "C.UTF-8",
            "PYTHONPATH": ":".join([str(SRC), *PACKAGES]), "KUBECONFIG": str(cluster.kubeconfig),
        }  # fmt: skip

    def __call__(self, *words, timeout=300, stdin=None, kill_after=None, **more):
        argv = self.cluster.inside(sys.executable, "-m", "drumbeat", *map(str, words))
        if kill_after:
            argv = ["timeout", "-s", "KILL", str(kill_after), *argv]
        return subprocess.run(argv, env={**self.environ, **more}, cwd=self.base, input=stdin, capture_output=True, text=True,
                              timeout=BUSY * timeout, check=False)  # fmt: skip

    def begin(self, *words):
        argv = self.cluster.inside(sys.executable, "-m", "drumbeat", *map(str, words))
        return subprocess.Popen(
            argv, env=self.environ, cwd=self.base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def job(self, name, script, **keys):
        (self.base / f"{name}.py").write_text(script)
        lines = {
            "name": name, "site": self.site, "nodes": 2, "ranks-per-node": 2, "container": "localhost/host:1",
            "python": self.python, "workdir": self.base, "command": f"{self.python} {self.base}/{name}.py", "stop-grace": "5s",
        }  # fmt: skip
        lines.update((key.replace("_", "-"), value) for key, value in keys.items())
        path = self.base / f"{name}.yaml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return path

    def submit(self, job, *words, **more):
        done = self("submit", job, "--json", *words, **more)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        self.runs.append(told["run_id"])
        return told

    def state(self, run):
        done = self("status", "--json", run)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["status"]

    def waited(self, run, seconds, fits):
        """`seconds` are those of idle cores."""
        until = time.monotonic() + BUSY * seconds
        while True:
            state = self.state(run)
            if fits(state):
                return state
            assert time.monotonic() < until, state
            time.sleep(2)

    def pods_of_node(self, node):
        found = json.loads(self.cluster.kubectl("get", "pods", "-l", "drumbeat/run", "-o", "json"))["items"]
        return [pod["metadata"]["name"] for pod in found if node_of(pod) == node]

    def cancel_all(self):
        """A test that failed half way leaves nothing for the next one."""
        for run in self.runs:
            self("cancel", run)

    def left(self):
        """What carries a run's label in the cluster; pods that are going do not count."""
        self.cluster.wait(lambda: not self._left(), 240, "everything to be removed")

    def _left(self):
        kinds = "jobs,services,configmaps,secrets,pods"
        found = self.cluster.kubectl("get", kinds, "--all-namespaces", "-l", "drumbeat/run", "-o", "json")
        # without a kubelet a pod that is told to go stays for ever
        return [item for item in json.loads(found)["items"] if "deletionTimestamp" not in item["metadata"]]


def node_of(pod):
    """Which node of its run a pod is, by the mark of whatever made it."""
    marks = {**pod["metadata"].get("labels", {}), **pod["metadata"].get("annotations", {})}
    return int(marks.get("drumbeat/node", marks.get("batch.kubernetes.io/job-completion-index", -1)))
