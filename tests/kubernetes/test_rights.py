"""The Role on docs/kubernetes.md holds the rights that the calls of drumbeat need, and for no other object."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import yaml

from drumbeat.backends.kubernetes import PodFiles, SubmittedJob, ask
from drumbeat.backends.kubernetes.client import Cluster, problem_of
from drumbeat.backends.kubernetes.pod import POD_GROUP, RESOURCE
from drumbeat.backends.kubernetes.submit import submit
from tests.kubernetes.rendering import EVERYTHING, KINDS, request
from tests.kubernetes.stand_in import documents

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
# Verb of kubectl -> rights on the object that it names, and on others. delete -l lists first; patch reads first.
NEEDS = {
    "create": (("create",), ()),
    "patch": (("get", "patch"), ()),
    "delete": (("list", "delete"), ()),
    "exec": (("get",), (("pods/exec", "create"), ("pods/exec", "get"))),
    "logs": (("get",), (("pods/log", "get"),)),
}
ASK_NOTHING = {"version", "api-resources", "auth", "config"}  # every user may
SHORT = {
    "configmap": "configmaps",
    "secret": "secrets",
    "service": "services",
    "persistentvolumeclaim": "persistentvolumeclaims",
}


OPERATORS = " ".join(dict.fromkeys((*RESOURCE.values(), POD_GROUP)))


def granted():
    (text,) = [
        block for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "kind: Role" in block
    ]
    rights = set()
    for rule in yaml.safe_load(text)["rules"]:
        rights |= {(what, verb) for what in rule["resources"] for verb in rule["verbs"]}
    return rights, {group for rule in yaml.safe_load(text)["rules"] for group in rule["apiGroups"]}


def rights_of(argv, stdin):
    verb, words = argv[0], [word for word in argv[1:] if not word.startswith("-")]
    if verb in ASK_NOTHING:
        return set()
    if verb == "create":
        whats = [f"{each['kind'].lower()}s" for each in documents(stdin) if each]
    elif verb == "patch":
        whats = [word.partition("/")[0] for word in words if "/" in word and not word.startswith("{")]
    elif verb in ("exec", "logs"):
        whats = ["pods"]
    else:
        whats = words[0].split(",")
    names = {SHORT.get(what, what).partition(".")[0] for what in whats}
    if verb == "get":
        return {
            (name, "get" if len(words) > 1 and words[1] != "json" and "-l" not in argv else "list") for name in names
        }
    own, others = NEEDS[verb]
    return {(name, each) for name in names for each in own} | set(others)


def needed_for(kind, monkeypatch, tmp_path, cache):
    """Submit, look, fetch and remove, with every option; return the rights that the calls need."""
    needed = set()
    pod = {"metadata": {"name": "p", "annotations": {"batch.kubernetes.io/job-completion-index": "0"}}, "spec": {},
           "status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}}  # fmt: skip

    def answer(self, *argv, stdin=b"", seconds=0):
        needed.update(rights_of(argv, stdin))
        notes = {"drumbeat/kind": kind, "drumbeat/folder": "/f"}
        answers = {
            "pods": {"items": [pod]},
            "configmap": {"metadata": {"annotations": notes}},
            "persistentvolumeclaim": {"spec": {"accessModes": ["ReadWriteMany"]}},
        }
        out = json.dumps(answers.get(argv[1] if argv[0] == "get" else "", {"items": []}))
        if argv[0] == "create" and "-o" in argv:
            out = "\n".join(
                json.dumps({**each, "metadata": {**each["metadata"], "uid": "1"}}) for each in documents(stdin) if each
            )
        out = {"version": '{"serverVersion": {"major": "1", "minor": "31"}}', "api-resources": OPERATORS}.get(
            argv[0], out
        )
        return subprocess.CompletedProcess(argv, 0, out.encode(), b"")

    monkeypatch.setattr(Cluster, "try_call", answer)
    ask(Cluster({}, "bench", "team-a"))
    sent = request(kind, job=EVERYTHING)
    sent = dataclasses.replace(sent, order=dataclasses.replace(sent.order, folder=str(tmp_path)))
    handle = submit(sent, {"HF_TOKEN": "hf_x", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache)})
    job = SubmittedJob(handle, {})
    job.status()
    files = PodFiles(str(tmp_path), job)
    files.sources()
    files._all_here()
    return needed | rights_of(tuple(job.cluster.argv("exec", "-it", "p")[3:]), b"")


def test_the_role_holds_what_the_code_calls(monkeypatch, tmp_path, cache):
    needed = set()
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        needed |= needed_for(kind, monkeypatch, tmp_path / kind, cache)
    rights, groups = granted()
    assert needed - rights == set()
    assert rights - needed == {("persistentvolumeclaims", "list")}, "for `kubectl get pvc`, as a message advises"
    assert groups == {"", *(name.partition(".")[2] for name in OPERATORS.split())}


def test_a_quota_that_refuses_is_told_as_the_page_shows():
    told = problem_of(
        'Error from server (Forbidden): error when creating "STDIN": jobs.batch "llama" is forbidden: exceeded quota: team, '
        "requested: count/jobs.batch=1, used: count/jobs.batch=4, limited: count/jobs.batch=4",
        "team-a",
    )
    assert told.what in PAGE.read_text()
