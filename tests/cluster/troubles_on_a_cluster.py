"""What goes wrong on a real cluster, each told with its fix: run by `make cluster`, never by `make test`."""

import json
from pathlib import Path

from tests.cluster.desk import node_of
from tests.kubernetes.programs import goes_on

WAITS = "import time; print('here', flush=True); time.sleep(900)"


def test_an_image_that_does_not_exist(desk):
    run = desk.submit(desk.job("noimage", "pass", container="localhost/nothing:7"))
    state = desk.waited(run["handle"], 120, lambda state: "cannot get its image" in state["detail"])
    assert state["state"] == "queued" and "check the name and tag" in state["detail"]
    assert desk("cancel", run["run_id"]).returncode == 0
    desk.left()


def test_out_of_memory_is_named(desk):
    script = "import time\nblocks = []\nwhile True:\n    blocks.append(bytearray(8 << 20)); time.sleep(0.02)\n"
    run = desk.submit(desk.job("greedy", script, memory="256M", requeues=0))
    desk.cluster.wait(
        lambda: "host memory ran out" in desk("status", run["run_id"]).stdout, 240, "the run to be fetched"
    )
    assert "ask for more memory" in desk("status", run["run_id"]).stdout
    desk.left()


def test_a_pod_that_is_too_small_for_its_agent(desk):
    """Nothing of drumbeat is left to say why: the exit code and the cluster's own words are kept."""
    run = desk.submit(desk.job("tiny", "pass", memory="24M", requeues=0))
    state = desk.waited(run["handle"], 240, lambda state: state["state"] == "failed")
    assert "--memory" in state["detail"], state
    desk("cancel", run["run_id"])  # what is known stays when the job is gone
    assert "--memory" in desk("status", run["run_id"]).stdout
    desk.left()


def test_a_pod_that_never_comes_is_named(desk):
    """Three nodes on a cluster of two: at the muster's limit the two that came are released."""
    run = desk.submit(desk.job("three", "pass", nodes=3, ranks_per_node=1, submit_options="['--muster=45s']"))
    state = desk.waited(run["handle"], 300, lambda state: state["state"] == "failed")
    told = desk("status", run["run_id"]).stdout
    assert "was pending: 0/2 nodes are available" in told, (state, told)
    desk("cancel", run["run_id"])  # where the lead itself never came, nothing was fetched
    desk.left()


def test_evicted_by_its_node(desk):
    """A kubelet evicts a pod that writes more to its disk than it asked for."""
    script = "import time; open('/drumbeat-run/large', 'wb').write(bytes(80 << 20)); time.sleep(600)"
    options = "['--resource ephemeral-storage=40Mi']"
    run = desk.submit(desk.job("writes", script, nodes=1, ranks_per_node=1, submit_options=options, requeues=0))
    state = desk.waited(run["handle"], 240, lambda state: "evicted" in state["detail"])
    assert "was evicted: " in state["detail"] and "--resource ephemeral-storage=SIZE" in state["detail"], state
    desk("cancel", run["run_id"])
    desk.left()


def test_evicted_by_somebody_who_empties_a_node(desk):
    """Through the eviction API, as kubectl drain does it: the pod is replaced, and the run goes on."""
    kept = desk.base / "kept"
    kept.mkdir()
    run = desk.submit(desk.job("drained", goes_on(0.5), env=f"{{KEPT: {kept}}}", ranks_per_node=1))
    desk.cluster.wait(lambda: (kept / "step-1").exists() and int((kept / "step-1").read_text() or 0) > 6, 240, "steps")
    (pod,) = desk.pods_of_node(1)
    body = {
        "apiVersion": "policy/v1beta1" if desk.cluster.old else "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod},
    }
    path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    desk.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))
    state = desk.waited(run["handle"], 300, lambda state: state["state"] in ("finished", "failed"))
    summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
    assert state["state"] == "finished" and len(summary["attempts"]) == 2, (state, summary)
    desk.left()


def test_preempted_by_a_pod_with_a_higher_priority(desk):
    make = desk.cluster.kubectl
    make("create", "priorityclass", "high", "--value=1000", check=False)
    run = desk.submit(desk.job("low", WAITS, ranks_per_node=1, cpus=2))
    desk.waited(run["handle"], 180, lambda state: state["state"] == "running" and not state["detail"])
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "important"},
        "spec": {
            "priorityClassName": "high", "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "localhost/pause:1", "resources": {"requests": {"cpu": "2"}}}],
        },
    }  # fmt: skip
    make("create", "-f", "-", input=json.dumps(pod))
    try:
        state = desk.waited(run["handle"], 180, lambda state: "preempted" in state["detail"])
        assert "was preempted by a pod with a higher priority" in state["detail"], state
        assert "it is replaced when there is room again" in state["detail"]
    finally:
        make("delete", "pod", "important", "--wait=false")
        desk("cancel", run["run_id"])
    desk.left()


def test_a_node_that_is_lost_and_comes_back(desk):
    kept = desk.base / "kept"
    kept.mkdir()
    run = desk.submit(desk.job("survives", goes_on(1.0), env=f"{{KEPT: {kept}}}", ranks_per_node=1))
    desk.cluster.wait(lambda: (kept / "step-1").exists() and int((kept / "step-1").read_text() or 0) > 3, 240, "steps")
    lead = desk.cluster.kubectl("get", "pods", "-l", "drumbeat/run", "-o", "json")
    (away,) = [pod["spec"]["nodeName"] for pod in json.loads(lead)["items"] if node_of(pod) == 1]
    desk.cluster.lose(away)
    try:
        state = desk.waited(run["handle"], 240, lambda state: "does not answer" in state["detail"])
        assert (
            f"its node {away} is not ready" in state["detail"]
            and "it is replaced after some minutes" in state["detail"]
        )
    finally:
        desk.cluster.back(away)
    state = desk.waited(run["handle"], 400, lambda state: state["state"] in ("finished", "failed"))
    summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
    assert state["state"] == "finished" and len(summary["attempts"]) >= 2, (state, summary)
    desk.left()


def claim(desk, name, mode):
    """A volume on a folder of this machine, which is that of all nodes, and a claim on it."""
    folder = desk.base / name
    folder.mkdir()
    amount = {"storage": "1Gi"}
    volume = {"hostPath": {"path": str(folder)}, "capacity": amount, "accessModes": [mode], "storageClassName": ""}
    wanted = {"accessModes": [mode], "resources": {"requests": amount}, "volumeName": name, "storageClassName": ""}
    for kind, spec in (("PersistentVolume", volume), ("PersistentVolumeClaim", wanted)):
        item = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        desk.cluster.kubectl("create", "-f", "-", input=json.dumps(item))
    return folder


def test_a_run_folder_on_a_claim(desk):
    """With several nodes it must be ReadWriteMany, which is looked at before anything is sent; then it outlives the pods."""
    claim(desk, "single", "ReadWriteOnce")
    folder = claim(desk, "shared", "ReadWriteMany")
    refused = desk(
        "submit", desk.job("single", "pass", submit_options="['--pvc single:/data', '--run-folder=/data/runs']")
    )
    assert refused.returncode == 2 and "which only one node may write (ReadWriteOnce)" in refused.stderr, refused.stderr
    assert "take a claim with ReadWriteMany" in refused.stderr
    desk.left()
    options = "['--pvc shared:/data', '--run-folder=/data/runs']"
    run = desk.submit(desk.job("kept", "import os; print('rank', os.environ['RANK'])", submit_options=options))
    assert desk("logs", "--follow", run["run_id"], timeout=400).stdout.count("rank") == 4
    assert (folder / "runs" / run["run_id"] / "summary.json").exists()
    desk.left()


def test_two_submits_at_once_and_odd_names(desk):
    one = desk.job("first", "import os; print(repr(os.environ['ODD']))", env='{ODD: "a \'b\' \\"c\\" d \\n ü"}')
    two = desk.job("Some_Name." + "x" * 54, "import os; print('second')")
    submits = [desk.begin("submit", job, "--json") for job in (one, two)]
    told = [json.loads(each.communicate(timeout=1200)[0]) for each in submits]
    assert len({each["handle"] for each in told}) == 2
    printed = [desk("logs", "--follow", each["run_id"], timeout=400).stdout for each in told]
    assert printed[0].count("""a 'b' "c" d \\n ü""") == 4 or printed[0].count("ü") == 4, printed[0]
    assert printed[1].count("second") == 4
    desk.left()
