"""Manifests of every kind: word for word, and valid by the published schemas. DRUMBEAT_WRITE_GOLDEN=1 writes them anew."""

import base64
import copy
import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from drumbeat.backends.kubernetes.options import ONCE, SEVERAL, Settings
from drumbeat.backends.kubernetes.pod import PIECE, file_secrets, hosts_of, storage
from drumbeat.backends.kubernetes.submit import documents_of, object_name
from drumbeat.base.order import FUNCTION
from drumbeat.base.problem import Problem
from tests.kubernetes.rendering import EVERYTHING, JOB, KINDS, OPTIONS, SITE, manifest, order_of

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.25", "1.31", "1.37")
CRDS = os.environ.get("DRUMBEAT_CRDS", "")  # a folder with the operators' published definitions
DEFINED_IN = {
    "JobSet": "jobsets.yaml",
    "TrainJob": "trainjobs.yaml",
    "PyTorchJob": "pytorchjobs.yaml",
    "PodGroup": "podgroups.yaml",
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind):
    # the order has a golden file of its own (tests/contracts)
    text = re.sub(r"  order.json: \|\n.*?\n    }\n", "  order.json: |\n    {...}\n", manifest(kind), flags=re.DOTALL)
    path = GOLDEN / f"{kind}.yaml"
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_secret_in_it(kind):
    text = manifest(kind)
    assert "hf_never_shown" not in text and "HF_TOKEN" in text
    assert not [document for document in documents_of(text) if document["kind"] == "Secret"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_core_objects_are_valid(kind, version):
    validate = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    server = tuple(map(int, version.split(".")))
    checked = []
    for document in documents_of(manifest(kind, server, job=EVERYTHING)) + _ranges(kind, server):
        if document["kind"] == "PodGroup":
            continue
        if "." in document["apiVersion"].split("/")[0]:
            # a definition of an operator's own: its pods are pods all the same
            document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod_of(document)}
        validate.validate(document, version, strict=True)
        checked.append(document["kind"])
    assert len(checked) >= 2


def _ranges(kind, server):
    fits = kind == "job" and server >= (1, 31)
    return documents_of(manifest(kind, server, job=JOB.replace("nodes: 2", "nodes: 2-4"))) if fits else []


def test_everything_is_everything():
    used = {option.partition("=")[0].split()[0][2:] for option in OPTIONS}
    assert used | set(re.findall(r"--([a-z-]+)", SITE)) >= {*ONCE, *SEVERAL} - {"kind"}


def pod_of(document):
    spec = document["spec"]
    if document["kind"] == "JobSet":
        return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    if document["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = copy.deepcopy(patch["template"]["spec"]["template"]["spec"])
    pod["containers"][0]["image"] = spec["trainer"]["image"]
    pod["containers"][0]["env"] = spec["trainer"]["env"]
    return pod


@pytest.mark.skipif(not CRDS, reason="needs the operators' definitions: DRUMBEAT_CRDS=FOLDER")
@pytest.mark.parametrize("kind", ("jobset", "trainjob", "pytorchjob"))
def test_operators_objects_are_valid(kind):
    jsonschema = pytest.importorskip("jsonschema", reason="needs pip install jsonschema")
    for document in documents_of(manifest(kind, job=EVERYTHING)):
        if document["kind"] in DEFINED_IN:
            definition = yaml.safe_load((Path(CRDS) / DEFINED_IN[document["kind"]]).read_text())
            group, _, version = document["apiVersion"].partition("/")
            assert definition["spec"]["group"] == group
            (schema,) = [each["schema"] for each in definition["spec"]["versions"] if each["name"] == version]
            strict = closed(schema["openAPIV3Schema"])
            problems = [
                f"{'/'.join(map(str, error.path))}: {error.message}"
                for error in jsonschema.Draft7Validator(strict).iter_errors(document)
            ]
            assert problems == []


def closed(schema):
    """The same schema, in which an unknown key is an error: an API server would drop it without a word."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items() if key not in ("pattern", "x-kubernetes-validations")}
    if schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema:
        made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        if set(schema["properties"]) >= {"apiVersion", "kind", "metadata"}:
            made["properties"] = {**made["properties"], "metadata": {"type": "object"}}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if schema == {"type": "object"}:
        made = {"type": "object"}
    return made


def test_only_a_server_that_knows_it_gets_a_failure_policy():
    (old,) = [each for each in documents_of(manifest("job", (1, 25))) if each["kind"] == "Job"]
    assert "podFailurePolicy" not in old["spec"] and old["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_nodes_is_over_when_its_lead_is(kind):
    job = JOB.replace("nodes: 2", "nodes: 2-4")
    if kind in ("trainjob", "jobs"):
        with pytest.raises(Problem, match="also those for which there was no room"):
            manifest(kind, (1, 31), job=job)
        return
    made = documents_of(manifest(kind, (1, 31), job=job))[-1]["spec"]
    if kind == "pytorchjob":
        assert made["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
        return
    spec = made if kind == "job" else made["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == 4 and spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    with pytest.raises(Problem, match="on Kubernetes 1.30"):
        manifest(kind, (1, 30), job=job)


@pytest.mark.parametrize("kind", KINDS)
def test_both_shells_can_read_the_script(kind):
    script = documents_of(manifest(kind))[0]["data"]["node.sh"]
    for shell in ("bash", "sh"):
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_pods_find_each_other_by_names_that_are_names(kind):
    name = object_name("Some_Very.long-Name-of-a-job-that-nobody-would-type-20231114-221320-dd56")
    assert name.endswith("-20231114-221320-dd56") and len(name) <= 45
    for host in hosts_of(kind, name, 120):
        assert all(len(label) <= 63 for label in host.split(".")) and host == host.lower()
    assert object_name("7b-20231114-221320-dd56").startswith("r-7b")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--anotation a=b", "did you mean --annotation"),
        ("--kind=deployment", "one of jobset"),
        ("--pvc scratch", "--pvc CLAIM:/PATH"),
        ("--pvc scratch:relative", "absolute path"),
        ("--toleration a:Never", "NoSchedule"),
        ("--shm=lots", "64Gi"),
        ("--user=root", "--user=1000"),
        ("--linger=10", "needs a unit"),
        ("--resource rdma/hca=one", "not a number"),
        ("--annotation novalue", "NAME=VALUE"),
        ("--label queue=a b", "cannot be the value"),
        ("--kind", "has no value"),
        ("licenses=x", "is not an option"),
    ],
)
def test_an_option_that_cannot_be_understood(option, words):
    with pytest.raises(Problem) as caught:
        manifest("job", job=JOB + f"submit-options: [{option!r}]\n", site=SITE)
    assert words in str(caught.value)


def test_the_jobs_own_options_win_or_add():
    job = JOB + "submit-options: ['--node-selector pool=a100', '--annotation mine=1', '--shm=8Gi']\n"
    (made,) = [each for each in documents_of(manifest("job", job=job)) if each["kind"] == "Job"]
    pod = made["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"pool": "a100"}
    assert set(pod["metadata"]["annotations"]) == {"mine", "k8s.v1.cni.cncf.io/networks"}
    assert {"medium": "Memory", "sizeLimit": "8Gi"} in [each.get("emptyDir") for each in pod["spec"]["volumes"]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trainjob"])
def test_volcano_gets_a_gang_with_its_queue(kind):
    """Its default for pods of a Job is a group of one: pods would start one by one."""
    text = manifest(kind, job=JOB + "submit-options: ['--scheduler=volcano']\n")
    (group,) = [each for each in documents_of(text) if each["kind"] == "PodGroup"]
    assert group["spec"] == {"minMember": 2, "queue": "training"} and group["metadata"]["labels"]["drumbeat/run"]
    assert text.count(f"scheduling.k8s.io/group-name: {group['metadata']['name']}") in (1, 2)  # per pod template
    assert "kueue" not in text and "kueue" in manifest(kind)


def test_a_train_job_says_what_it_cannot_carry():
    with pytest.raises(Problem, match="a TrainJob cannot carry --scheduler"):
        manifest("trainjob", job=JOB + "submit-options: ['--scheduler=volcano']\n")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("container: none\n", "names none"),
        ("launcher: tasks\ncommand: python train.py\n", "a pod is a node"),
        ("modules: [CUDA]\n", "no environment modules"),
        ("array: 0-3\n", "arrays"),
    ],
)
def test_what_a_pod_cannot_be_asked(lines, words):
    keys = tuple(line.split(":")[0] for line in lines.splitlines())
    kept = "".join(line + "\n" for line in JOB.strip().splitlines() if not line.startswith(keys))
    with pytest.raises(Problem) as caught:
        manifest("job", job=kept + lines)
    assert words in str(caught.value)


def test_code_and_function_travel_in_secrets_that_the_pod_mounts(tmp_path):
    code = os.urandom(2 * PIECE + 5)
    (tmp_path / "code.tar.gz").write_bytes(code)
    (tmp_path / "call").mkdir()
    (tmp_path / "call" / "call.pkl").write_bytes(b"a function")
    order = dataclasses.replace(order_of(), folder=str(tmp_path), code_bytes=len(code), brings=(FUNCTION,))
    made = file_secrets(order, "run")
    names = [each["metadata"]["name"] for each in made]
    assert names == ["run-code-0", "run-code-1", "run-code-2", "run-call"]
    parts = {key: base64.b64decode(data) for each in made for key, data in each["data"].items()}
    assert b"".join(parts[f"code-{number}"] for number in range(3)) == code and parts["call.pkl"] == b"a function"
    mounts, volumes = storage(order, Settings(), "run")
    assert [each["name"] for each in mounts] == [each["name"] for each in volumes]
    assert volumes[0]["projected"]["sources"][2:] == [{"secret": {"name": name}} for name in names]
    assert not file_secrets(order_of(), "run")
