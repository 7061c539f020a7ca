"""Each kind of object on an API server that knows it: accepted, nothing of it dropped, and run by the pods that come of it.

Needs a newer server than Debian's source makes (KUBE_BIN=FOLDER), and the operators' definitions (DRUMBEAT_CRDS=FOLDER).
"""

import json
import os
from pathlib import Path

import pytest
import yaml

from drumbeat.backends.kubernetes.pod import RESOURCE
from tests.cluster import operators

CRDS = os.environ.get("DRUMBEAT_CRDS", "")
FILES = {"jobset": "jobsets.yaml", "trainjob": "trainjobs.yaml", "pytorchjob": "pytorchjobs.yaml"}
WHO = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)"


@pytest.fixture(scope="module", autouse=True)
def newer(cluster):
    if cluster.old:
        pytest.skip("needs a newer API server: make cluster KUBE_BIN=FOLDER")


@pytest.fixture(scope="module")
def definitions(cluster, newer):
    if not CRDS:
        pytest.skip("needs the operators' definitions: DRUMBEAT_CRDS=FOLDER")
    for file in FILES.values():
        cluster.kubectl("create", "-f", str(Path(CRDS) / file))
    listed = ("api-resources", "-o", "name")
    cluster.wait(
        lambda: all(RESOURCE[kind] in cluster.kubectl(*listed, check=False) for kind in FILES), 60, "definitions"
    )
    yield
    for file in FILES.values():
        cluster.kubectl("delete", "-f", str(Path(CRDS) / file), "--wait=false", check=False)


def dropped(sent, stored, path=""):
    """What was sent and is not in what the server keeps."""
    if isinstance(sent, dict):
        if not isinstance(stored, dict):
            return [path]
        return [each for key, value in sent.items() for each in dropped(value, stored.get(key), f"{path}/{key}")]
    if isinstance(sent, list):
        if not isinstance(stored, list) or len(stored) != len(sent):
            return [path]
        return [
            each for number, value in enumerate(sent) for each in dropped(value, stored[number], f"{path}/{number}")
        ]
    return [] if str(sent) == str(stored) else [f"{path}: {sent!r} is {stored!r}"]


def stored_and_sent(desk, run, kind):
    name = run["handle"].rpartition("/")[2]
    documents = list(yaml.safe_load_all((Path(run["folder"]) / "manifest.yaml").read_text()))
    (sent,) = [each for each in documents if each["kind"].lower() == kind]
    return json.loads(desk.cluster.kubectl("get", RESOURCE[kind], name, "-o", "json")), sent


def test_an_indexed_job_is_kept_whole(desk):
    shown = desk("plan", "--render", desk.job("indexed", WHO))
    assert "# kind job: the cluster has no operator for training jobs, and 1." in shown.stdout, (
        shown.stdout[:400] + shown.stderr
    )
    run = desk.submit(desk.job("indexed", WHO))
    stored, sent = stored_and_sent(desk, run, "job")
    assert stored["spec"]["completionMode"] == "Indexed" and dropped(sent["spec"], stored["spec"]) == []
    followed = desk("logs", "--follow", run["run_id"], timeout=600)
    assert sorted(line.split()[2] for line in followed.stdout.splitlines() if " of 4" in line) == ["0", "1", "2", "3"]
    desk.left()


def test_the_first_operator_that_may_be_used_is_chosen(desk, definitions):
    shown = desk("plan", "--render", desk.job("chosen", WHO))
    assert "has jobsets.jobset.x-k8s.io, and you may create them" in shown.stdout, shown.stdout[:400] + shown.stderr


@pytest.mark.parametrize("kind", FILES)
def test_an_operators_object_is_kept_whole_and_its_pods_train(desk, definitions, kind):
    run = desk.submit(desk.job(kind, WHO, submit_options=f"['--kind={kind}']"))
    stored, sent = stored_and_sent(desk, run, kind)
    assert dropped(sent["spec"], stored["spec"]) == []
    for item in getattr(operators, kind)(stored):
        desk.cluster.kubectl("create", "-f", "-", input=json.dumps(item))
    followed = desk("logs", "--follow", run["run_id"], timeout=600)
    assert sorted(line.split()[2] for line in followed.stdout.splitlines() if " of 4" in line) == [
        "0",
        "1",
        "2",
        "3",
    ], followed.stdout + followed.stderr
    assert desk.state(run["run_id"])["state"] == "finished"
    desk.left()
    assert desk.cluster.kubectl("get", RESOURCE[kind], "-o", "name") == ""
