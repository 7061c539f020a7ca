"""What the server alone decides: rights, quotas, queues, places. Nothing here waits for a pod to run.

`make kube-server` runs these without kubelets, `make cluster` with them.
"""

import json
import os
from pathlib import Path

import pytest

WAITS = "import time; print('here', flush=True); time.sleep(900)"
CRDS = os.environ.get("DRUMBEAT_CRDS", "")
# What a person who submits needs, and no more.
RULES = [
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "list", "watch", "delete", "patch"]},
    {
        "apiGroups": [""],
        "resources": ["services", "configmaps", "secrets", "pods", "pods/log", "pods/exec", "events"],
        "verbs": ["create", "get", "list", "watch", "delete", "patch"],
    },
]


def test_pending_says_why_and_can_be_cancelled(desk):
    run = desk.submit(desk.job("large", "pass", cpus=1000))
    state = desk.waited(run["handle"], 60, lambda state: "Insufficient cpu" in state["detail"])
    assert state["state"] == "queued" and "ask for fewer GPUs, cores or memory" in state["detail"]
    assert desk("cancel", run["run_id"]).returncode == 0 and desk.state(run["handle"])["state"] == "cancelled"
    desk.left()


def test_a_quota_that_allows_no_pod(desk):
    desk.cluster.kubectl("create", "namespace", "poor")
    desk.cluster.kubectl("create", "quota", "none", "--hard=pods=0", "-n", "poor")
    run = desk.submit(desk.job("poor", "pass", account="poor"))
    state = desk.waited(run["handle"], 60, lambda state: "quota" in state["detail"])
    assert state["state"] == "queued" and "the quota none does not allow it" in state["detail"]
    assert desk("cancel", run["run_id"]).returncode == 0
    desk.left()


def test_refusals_leave_nothing(desk):
    nobody = str(desk.cluster.base / "kubeconfig-nobody")
    for keys, more, words in (
        ({}, {"KUBECONFIG": nobody}, "you (nobody) may not"),
        ({"account": "nowhere"}, {}, "the cluster has no namespace nowhere"),
        ({}, {"KUBECONFIG": "/nonexistent"}, "there is no kubeconfig here"),
        ({"submit-options": "['--pvc nothing:/data']"}, {}, "has no volume claim nothing"),
        ({"submit-options": "['--context=other']"}, {}, "no context other"),
    ):
        done = desk("submit", desk.job("refused", "pass", **keys), **more)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)
    assert not list(desk.base.glob("runs/*"))
    desk.left()


def test_a_desk_that_is_killed_while_it_submits(desk):
    """kill -9 at some moment of the submit: what is left can be found by its label and cancelled, or is not there."""
    job = desk.job("killed", WAITS)
    for seconds in (1.5, 3.0, 4.5):
        done = desk("submit", job, kill_after=seconds)
        runs = (
            sorted(path.name for path in (desk.base / "runs").glob("killed-*")) if (desk.base / "runs").exists() else []
        )
        for run in runs:
            told = desk("cancel", run)
            assert "Traceback" not in told.stderr, (done, told.stderr)
    desk.left()


@pytest.fixture
def team(desk):
    """A namespace in which ada and bob may submit, and nowhere else."""
    make = desk.cluster.kubectl
    name = f"team-{desk.base.name[-6:].lower().replace('_', 'x')}"
    make("create", "namespace", name)
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "submits", "namespace": name}}
    role = {**rbac, "kind": "Role", "rules": RULES}
    users = [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"} for user in ("ada", "bob")]
    reference = {"kind": "Role", "name": "submits", "apiGroup": "rbac.authorization.k8s.io"}
    binding = {**rbac, "kind": "RoleBinding", "subjects": users, "roleRef": reference}
    for item in (role, binding):
        make("create", "-f", "-", input=json.dumps(item))
    yield name
    make("delete", "namespace", name, "--wait=false")


def of(desk, user):
    return {"KUBECONFIG": str(desk.cluster.base / f"kubeconfig-{user}")}


def test_two_people_in_one_namespace(desk, team):
    """The same job of two people: each has objects of their own, and a cancel touches nothing of the other's."""
    job = desk.job("same", WAITS, account=team)
    runs = [desk.submit(job, **of(desk, user)) for user in ("ada", "bob")]
    assert len({run["handle"] for run in runs}) == 2
    done = desk("cancel", runs[0]["run_id"], **of(desk, "ada"))
    assert done.returncode == 0, done.stderr
    left = desk.cluster.kubectl(
        "get", "jobs,services,configmaps,secrets", "-n", team, "-l", "drumbeat/run", "-o", "json"
    )
    names = {item["metadata"]["labels"]["drumbeat/run"] for item in json.loads(left)["items"]}
    assert names == {runs[1]["handle"].rpartition("/")[2]}, names
    assert desk("cancel", runs[1]["run_id"], **of(desk, "bob")).returncode == 0
    desk.left()


def test_rights_end_at_the_namespace(desk, team):
    done = desk("submit", desk.job("outside", "pass", account="default"), **of(desk, "ada"))
    assert done.returncode == 2 and "you (ada) may not" in done.stderr and "namespace default" in done.stderr, (
        done.stderr
    )
    desk.left()


def test_a_right_taken_away_is_named(desk, team):
    """Somebody may submit and not delete: cancel says so, instead of claiming that the job is gone."""
    run = desk.submit(desk.job("stays", WAITS, account=team), **of(desk, "ada"))
    desk.cluster.kubectl("delete", "rolebinding", "submits", "-n", team)
    done = desk("cancel", run["run_id"], **of(desk, "ada"))
    assert done.returncode != 0 and "you (ada) may not" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert desk("cancel", run["run_id"]).returncode == 0
    desk.left()


def test_a_priority_class_that_does_not_exist(desk):
    """The server accepts the Job, and refuses its pods later."""
    run = desk.submit(desk.job("urgent", "pass", qos="nothing"))
    state = desk.waited(run["handle"], 60, lambda state: "PriorityClass" in state["detail"])
    assert state["state"] == "queued" and "nothing" in state["detail"], state
    assert desk("cancel", run["run_id"]).returncode == 0
    desk.left()


def test_no_node_has_the_label(desk):
    run = desk.submit(desk.job("picky", "pass", submit_options="['--node-selector pool=h200']"))
    state = desk.waited(run["handle"], 60, lambda state: "nodes are available" in state["detail"])
    assert state["state"] == "queued" and "no node has these labels" in state["detail"], state
    assert desk("cancel", run["run_id"]).returncode == 0
    desk.left()


def test_volcano_is_refused_where_it_is_not_installed(desk):
    done = desk("submit", desk.job("gang", "pass", submit_options="['--scheduler=volcano']"))
    assert done.returncode == 2 and "this cluster has no PodGroup" in done.stderr, done.stderr
    assert "--scheduler" in done.stderr
    desk.left()


@pytest.mark.skipif(not CRDS, reason="needs Volcano's definition: DRUMBEAT_CRDS=FOLDER with podgroups.yaml")
def test_volcanos_group_is_kept_whole_and_goes_with_the_run(desk):
    definition = str(Path(CRDS) / "podgroups.yaml")
    desk.cluster.kubectl("create", "-f", definition)
    try:
        desk.cluster.wait(lambda: "podgroups" in desk.cluster.kubectl("api-resources", "-o", "name"), 60, "PodGroup")
        run = desk.submit(desk.job("gang", WAITS, partition="training", submit_options="['--scheduler=volcano']"))
        name = run["handle"].rpartition("/")[2]
        group = json.loads(desk.cluster.kubectl("get", "podgroups.scheduling.volcano.sh", name, "-o", "json"))
        assert group["spec"]["minMember"] == 2 and group["spec"]["queue"] == "training"
        assert group["metadata"]["ownerReferences"], "it belongs to the job"
        listed = ("get", "pods", "-l", f"drumbeat/run={name}", "-o", "json")
        desk.cluster.wait(lambda: len(json.loads(desk.cluster.kubectl(*listed))["items"]) == 2, 60, "pods")
        pods = json.loads(desk.cluster.kubectl(*listed))["items"]
        assert {pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for pod in pods} == {name}
        assert desk("cancel", run["run_id"]).returncode == 0
        assert desk.cluster.kubectl("get", "podgroups.scheduling.volcano.sh", "-o", "name") == ""
        desk.left()
    finally:
        desk.cluster.kubectl("delete", "-f", definition, "--wait=false")
