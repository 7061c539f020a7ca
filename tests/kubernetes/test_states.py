"""What the cluster says, in one line with the fix; which kind is chosen; what kubectl's complaints mean."""

import re
import subprocess

import pytest

from drumbeat.backends import kubernetes
from drumbeat.backends.contract import FAILED, FINISHED, QUEUED, RUNNING
from drumbeat.backends.kubernetes import About, SubmittedJob
from drumbeat.backends.kubernetes.client import (
    Cluster,
    handle_of,
    judge,
    of_run,
    problem_of,
    read_handle,
    read_job,
    read_pods,
    reasons_for_pending,
)
from drumbeat.backends.kubernetes.options import Settings, settings_of
from drumbeat.backends.kubernetes.submit import check_claims
from drumbeat.base.problem import Problem
from tests.kubernetes.rendering import order_of

HANDLE = "kubernetes://team@bench/run"


def pod(node, phase="Running", created="2026-01-01T00:00:00Z", container=None, labels=None, deleted=False, **status):
    name = f"run-{node}-x{created[-3:-1]}"
    meta = {"name": name, "creationTimestamp": created, "labels": labels or {"drumbeat/node": str(node)}}
    if deleted:
        meta["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    state = container or ({"running": {}} if phase == "Running" else {})
    statuses = [{"state": state}] if state else []
    body = {"phase": phase, "containerStatuses": statuses, **status}
    return {"metadata": meta, "spec": {"hostname": f"run-{node}", "nodeName": f"k{node + 1}"}, "status": body}


def status(*pods, job=({"status": {}},), events=(), nodes=2):
    return judge(HANDLE, nodes, read_job(list(job)), read_pods(pods), list(events))


def unscheduled(message):
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            pod(1, "Pending", conditions=unscheduled("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")),
            ("is pending: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "ask for fewer GPUs"),
        ),
        (
            pod(1, "Pending", conditions=unscheduled("0/2 nodes are available: 2 had taint {a: }, that the pod didn't tolerate")),
            ("--toleration KEY",),
        ),
        (
            pod(1, "Pending", container={"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}}),
            ('cannot get its image: Back-off pulling image "x:1"', "--pull-secret NAME"),
        ),
        (
            pod(1, "Failed", container={"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            ("used more memory than its limit (OOMKilled)", "--memory"),
        ),
        (
            pod(1, "Failed", reason="Evicted", message="The node was low on resource: memory."),
            ("was evicted: The node was low on resource: memory.", "ran short of memory or disk"),
        ),
        (
            pod(1, "Failed", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]),
            ("was preempted by a pod with a higher priority", "replaced when there is room"),
        ),
        (pod(1, "Failed", reason="NodeLost"), ("was lost with its node", "last checkpoint")),
        (
            pod(1, conditions=[{"type": "Ready", "status": "False"}]),
            ("run-1-x00 does not answer: its node k2 is not ready", "it is replaced after some minutes"),
        ),
        (
            pod(1, "Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds the limit of 20Mi."),
            ("was evicted: Pod ephemeral local storage usage", "--resource ephemeral-storage=SIZE"),
        ),
    ],
)  # fmt: skip
def test_each_trouble_has_its_fix(one, words):
    told = status(pod(0), one)
    assert told.state == RUNNING and told.detail.startswith("1 of 2 pods run")
    for word in words:
        assert word in told.detail


def test_a_pod_that_was_taken_away_is_named_beside_the_one_in_its_place():
    waiting = pod(1, "Pending", "2026-01-01T00:00:05Z", conditions=unscheduled("0/2 nodes are available"))
    words = {"reason": "Preempted", "message": "Preempted by default/other on node k2"}
    events = [{"involvedObject": {"name": "run-1-x00"}, **words}]
    told = status(pod(0), waiting, events=events).detail
    assert "run-1-x05 is pending" in told
    assert "run-1-x00 was preempted by a pod with a higher priority: Preempted by default/other on node k2" in told
    assert "preempted" not in status(pod(0), pod(1), events=events).detail, "another one has taken its place"
    marked = {"involvedObject": {"name": "run-1-x00"}, "reason": "TaintManagerEviction"}
    lost = [{**marked, "message": "Marking for deletion Pod team/run-1-x00"}]
    assert "was lost with its node" in status(pod(0), waiting, events=lost).detail
    kept = [{**marked, "message": "Cancelling deletion of Pod team/run-1-x00"}]
    assert "lost" not in status(pod(0), waiting, events=kept).detail


def test_states():
    waiting = pod(0, "Pending", conditions=unscheduled("0/2 nodes are available"))
    assert status(waiting).state == QUEUED
    assert status().detail == "no pod of 2 has been made yet"
    assert status(pod(0), pod(1)).detail == ""
    done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    assert status(pod(0, "Succeeded"), job=[done]).state == FINISHED
    broken = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}}
    failed = status(pod(0, "Failed", container={"terminated": {"exitCode": 3}}), job=[broken])
    assert failed.state == FAILED and failed.exit_code == 3 and "ended with 3" in failed.detail
    assert status(pod(0, "Failed", container={"terminated": {"exitCode": 3}})).state == QUEUED, "it may be replaced"
    assert status(job=[{"spec": {"suspend": True}}]).detail.startswith("suspended")


def test_one_job_per_node_has_ended_when_all_have():
    done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    assert status(pod(0, "Running"), pod(1, "Succeeded"), job=[{"status": {}}, done]).state == RUNNING


def test_the_newest_pod_of_a_node_counts():
    lost = pod(1, "Failed", reason="NodeLost", created="2026-01-01T00:00:00Z")
    told = status(pod(0), lost, pod(1, created="2026-01-01T00:00:09Z"))
    assert told.state == RUNNING and told.detail == ""


def test_nodes_of_every_kind_are_found():
    index = "batch.kubernetes.io/job-completion-index"
    by_annotation = pod(0, labels={"a": "b"})
    by_annotation["metadata"]["annotations"] = {index: "1"}
    operator = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"}
    master = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    pods = read_pods([by_annotation, pod(2, labels=operator), pod(3, labels=master)])
    assert [each.node for each in pods] == [0, 1]
    second = {**operator, "training.kubeflow.org/replica-index": "4"}
    assert [each.node for each in read_pods([pod(9, labels=second)])] == [5], (
        "the master is node 0, so worker 4 is node 5"
    )


def test_a_quota_that_keeps_pods_from_being_made():
    message = (
        'Error creating: pods "run-0-abc" is forbidden: exceeded quota: small, requested: requests.cpu=4, '
        "used: requests.cpu=0, limited: requests.cpu=1"
    )
    event = {"reason": "FailedCreate", "message": message, "involvedObject": {"name": "run-0"}}
    other = {"reason": "FailedCreate", "message": "no", "involvedObject": {"name": "another"}}
    told = status(events=of_run("run", [other, event]))
    assert told.state == QUEUED and "the quota small does not allow it: requested: requests.cpu=4" in told.detail
    assert "kubectl describe quota" in told.detail


def test_pending_pods_are_named_after_the_muster_has_given_up():
    scheduling = {"reason": "FailedScheduling", "message": "0/2 nodes", "involvedObject": {"name": "run-1-abc"}}
    placed = {"reason": "Scheduled", "involvedObject": {"name": "run-0-abc"}}
    first = {"reason": "FailedScheduling", "message": "busy", "involvedObject": {"name": "run-0-abc"}}
    assert reasons_for_pending([first, scheduling, placed], {"run-0-abc"}) == ["run-1-abc was pending: 0/2 nodes"]


OFFERS = {
    "jobset": (kubernetes.Offer((1, 31), frozenset({"jobsets.jobset.x-k8s.io"}), frozenset({"jobset"})), "", "jobset"),
    "no rights": (kubernetes.Offer((1, 31), frozenset({"jobsets.jobset.x-k8s.io"}), frozenset()), "", "job"),
    "operator": (kubernetes.Offer((1, 28), frozenset({"pytorchjobs.kubeflow.org"}), frozenset({"pytorchjob"})), "", "pytorchjob"),
    "plain": (kubernetes.Offer((1, 24), frozenset(), frozenset()), "", "job"),
    "old": (kubernetes.Offer((1, 20), frozenset(), frozenset()), "", "jobs"),
    "asked": (kubernetes.Offer((1, 31), frozenset({"jobsets.jobset.x-k8s.io"}), frozenset({"jobset"})), "job", "job"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERS)
def test_choice(name):
    offer, asked, kind = OFFERS[name]
    chosen = kubernetes.choose(Settings(kind=asked), offer)
    assert chosen.kind == kind and chosen.why
    why = {"no rights": "you may not create", "plain": "a pod that is lost ends the job", "old": "one Job per node"}
    assert why.get(name, "") in chosen.why


def test_a_kind_that_the_cluster_does_not_have():
    with pytest.raises(Problem, match="drops completionMode"):
        kubernetes.choose(Settings(kind="job"), OFFERS["old"][0])
    with pytest.raises(Problem, match="has no trainjobs"):
        kubernetes.choose(Settings(kind="trainjob"), OFFERS["plain"][0])


@pytest.mark.parametrize(
    ("stderr", "words", "fix"),
    [
        (
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
            "there is no kubeconfig here",
            "export KUBECONFIG",
        ),
        ('error: context "prod" does not exist', "no context prod", "get-contexts"),
        ('Error from server (NotFound): namespaces "teem" not found', "has no namespace teem", "--account"),
        (
            'Error from server (Forbidden): error when creating "STDIN": jobs.batch is forbidden: User "ada" cannot create '
            'resource "jobs" in API group "batch" in the namespace "team"',
            "you (ada) may not create jobs in namespace team",
            "kubectl auth can-i",
        ),
        (
            'Error from server (Forbidden): jobs.batch "x" is forbidden: exceeded quota: few, requested: count/jobs.batch=1, '
            "used: count/jobs.batch=2, limited: count/jobs.batch=2",
            "the quota few of namespace team does not allow it: requested: count/jobs.batch=1",
            "describe quota",
        ),
        ("Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout", "cannot be reached", "VPN"),
        (
            "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?",
            "cannot be reached from here: connection to the server 10.0.0.1:6443 was refused",
            "VPN",
        ),
        (
            'error: error loading config file "/home/a/k": yaml: line 1: did not find',
            "kubeconfig /home/a/k cannot be read: yaml: line 1",
            "kubectl config view",
        ),
        (
            "Error in configuration: context was not found for specified context: prod",
            "has no context prod",
            "get-contexts",
        ),
        (
            "Unable to connect to the server: getting credentials: exec: executable gke-auth not found\n\nIt looks like",
            "logs in with gke-auth, which is not installed here",
            "PATH",
        ),
        ("error: You must be logged in to the server (Unauthorized)", "does not accept your login", "log in again"),
        (
            'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
            "has no JobSet",
            "leave --kind and --scheduler out",
        ),
        ("something else", "Kubernetes refuses: something else", "plan --render"),
    ],
)
def test_complaints(stderr, words, fix):
    problem = problem_of(stderr, "team")
    assert words in str(problem) and fix in str(problem)


def test_a_handle_means_the_same_cluster_tomorrow():
    cluster = Cluster({}, "arn:aws:eks:eu-1:12:cluster/x y", "team-a")
    handle = handle_of(cluster, "run")
    assert read_handle(handle, {}) == (cluster, "run")
    with pytest.raises(Problem, match="is not a job of Kubernetes"):
        read_handle("kubernetes://nowhere/run", {})


FORBIDDEN = (
    'Error from server (Forbidden): {0} is forbidden: User "ada" cannot {1} resource "{0}" in API group "" in the '
    'namespace "team"'
)


def test_somebody_who_may_not_read_events_still_gets_the_status(monkeypatch):
    job = SubmittedJob(HANDLE, {})
    pending = pod(0, "Pending", conditions=unscheduled("0/2 nodes are available: 2 Insufficient cpu."))

    def answer(cluster, *words):
        if words == ("events",):
            raise problem_of(FORBIDDEN.format("events", "list"), "team")
        return [pending] if words[0] == "pods" else [{"status": {}}]

    monkeypatch.setattr(Cluster, "list", answer)
    monkeypatch.setattr(SubmittedJob, "about", lambda job: About("job", 1, "/drumbeat-run/run", False, "python3"))
    found = job.status()
    assert found.state == QUEUED and "Insufficient cpu" in found.detail


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ('Error from server (NotFound): persistentvolumeclaims "scratch" not found', "has no volume claim scratch"),
        (FORBIDDEN.format("persistentvolumeclaims", "get"), "you (ada) may not get persistentvolumeclaims"),
    ],
)
def test_a_claim_that_is_not_there_or_may_not_be_looked_at(monkeypatch, stderr, words):
    order = order_of()
    answer = subprocess.CompletedProcess([], 1, b"", stderr.encode())
    monkeypatch.setattr(Cluster, "try_call", lambda cluster, *words, **options: answer)
    with pytest.raises(Problem, match=re.escape(words)):
        check_claims(Cluster({}, "bench", "team"), order, settings_of(order))
