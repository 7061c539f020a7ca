"""Names, values and paths that somebody may have written with bad intent, or by mistake: one clear error, or kept as they are."""

import json
import os
import stat
import subprocess

import pytest

from drumbeat.backends.kubernetes.client import Cluster, handle_of, problem_of, read_handle, read_pods
from drumbeat.backends.kubernetes.options import settings_of
from drumbeat.backends.kubernetes.pod import pod_script
from drumbeat.backends.kubernetes.submit import documents_of, passed_values
from drumbeat.base.order import load_order
from drumbeat.base.problem import Problem
from drumbeat.runfolder.mirror import answer
from tests.kubernetes.rendering import JOB, KINDS, manifest, order_of

ODD = ["a\nb: c", "--x", "$$(PATH)", "ünï", "'\"`", "x" * 300, "\u2028\x85\t", "- a"]


def job_with(key, value):
    kept = [line for line in JOB.strip().splitlines() if not line.startswith(f"{key}:")]
    return "\n".join(kept) + f"\n{key}: {json.dumps(value)}\n"


@pytest.mark.parametrize("key", ["name", "account", "partition", "qos", "container", "python"])
@pytest.mark.parametrize("value", [*ODD[:5], "a b", "a/../b c"])
def test_names_that_are_none(key, value):
    if key == "python" and value == "ünï":
        return  # a program may be called so
    with pytest.raises(Problem) as caught:
        manifest("job", job=job_with(key, value.replace("$$", "$")))
    assert len(str(caught.value).splitlines()) <= 2 and str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "option",
    [
        "--label drumbeat/run=other",
        "--label app.kubernetes.io/managed-by=me",
        "--annotation a=b\nc: d",
        "--annotation a\x1bb=c",
        "--service-account=$(x)",
        "--scheduler=a\nb",
        "--node-selector a=b c",
        "--toleration a=b c:NoSchedule",
        "--user=99999999999",
        "--muster=0s",
        "--pvc a:/",
        "--pvc a:/drumbeat",
        "--pvc a:/drumbeat-run/",
        "--pvc a:/dev/shm",
        "--pvc a:/data",
        "--pvc a:/x/../y",
        "--run-folder=relative",
        "--context=a\nb",
        "--pull-secret A",
        "--annotation " + "x" * 300 + "=b",
    ],
)
def test_options_that_would_break_out_or_hide_something(option):
    with pytest.raises(Problem) as caught:
        manifest("job", job=JOB + f"submit-options: {json.dumps([option])}\n")
    assert caught.value.fix and len(str(caught.value)) < 600 and str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("bind", ["/a:b", "/a:/b:rx", "/a:/b/../c", "/a:/drumbeat", "/a:/"])
def test_folders_of_a_machine_that_cannot_be_mounted(bind):
    with pytest.raises(Problem):
        manifest("job", job=JOB + f"binds: {json.dumps([bind])}\n")


def test_a_folder_that_is_only_read():
    (made,) = [
        each for each in documents_of(manifest("job", job=JOB + "binds: [/data2:/in:ro]\n")) if each["kind"] == "Job"
    ]
    mounts = made["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "host-0", "mountPath": "/in", "readOnly": True} in mounts


@pytest.mark.parametrize("kind", KINDS)
def test_values_arrive_as_they_were_written(kind):
    """Kubernetes expands $(NAME) in env and args: the user's own texts are in neither."""
    job = job_with("env", {f"ODD_{number}": text for number, text in enumerate(ODD)}).replace(
        "command: torchrun train.py --batch-size 2048",
        'command: [python, train.py, $$(HOME), "a\\nb", \'--\', "\'\\""]',
    )
    documents = documents_of(manifest(kind, job=job))
    order = load_order(documents[0]["data"]["order.json"])
    values = {each.name: each.value for each in order.env}
    assert [values[f"ODD_{number}"] for number in range(len(ODD))] == [text.replace("$$", "$") for text in ODD]
    assert order.command[2:] == ("$(HOME)", "a\nb", "--", "'\"")
    outside = json.dumps([each for each in documents if each["kind"] != "ConfigMap"], ensure_ascii=False)
    assert "$(" not in outside and not any(text in outside for text in ("ünï", "a\nb", "b: c"))


def test_a_value_that_is_no_text_is_not_changed_in_secret():
    order = order_of()
    with pytest.raises(Problem, match="HF_TOKEN is to be passed on, but its value is not UTF-8"):
        passed_values(order, {"HF_TOKEN": os.fsdecode(b"\xff")})
    assert passed_values(order, {"HF_TOKEN": "$(HOME)\n"}) == {"HF_TOKEN": "$(HOME)\n"}


@pytest.mark.parametrize("context", ['a")].x', "a b", "-n", "ü/@%", "arn:aws:eks:eu:1:cluster/x", "'; reboot"])
def test_any_name_of_a_context(context, tmp_path):
    """kubectl's answers are read as JSON, and a handle means the same cluster tomorrow."""
    kubectl = tmp_path / "kubectl"
    contexts = [
        {"name": "other", "context": {"namespace": "wrong"}},
        {"name": context, "context": {"namespace": "team"}},
    ]
    (tmp_path / "config").write_text(json.dumps({"contexts": contexts}))
    (tmp_path / "current").write_text(context + "\n")
    kubectl.write_text(
        f'#!/bin/sh\ncase "$*" in *current-context) cat {tmp_path}/current;; *) cat {tmp_path}/config;; esac\n'
    )
    kubectl.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = Cluster(environ).settled()
    assert (found.context, found.namespace) == (context, "team")
    again, name = read_handle(handle_of(found, "run-1"), environ)
    assert (again.context, again.namespace, name) == (context, "team", "run-1")
    contexts[1]["context"]["namespace"] = "../x"
    (tmp_path / "config").write_text(json.dumps({"contexts": contexts}))
    with pytest.raises(Problem, match="cannot be the name of a namespace"):
        Cluster(environ).settled()


def test_what_a_cluster_says_does_not_reach_the_terminal_raw():
    assert str(problem_of("Error from server: \x1b[2Jgone\x07")).replace("\n", "").isprintable()
    status = {"phase": "Failed", "reason": "Evicted", "message": "\x1b]0;x\x07 low on disk"}
    (pod,) = read_pods([{"metadata": {"name": "a", "labels": {"drumbeat/node": "0"}}, "status": status}])
    assert pod.told.isprintable() and "low on disk" in pod.told


def test_nothing_is_written_through_a_link_on_a_claim(tmp_path):
    """Somebody who may write to the claim has put a link where the pod notes its end."""
    order = order_of()
    text = pod_script(order, settings_of(order))
    end = [line.strip() for line in text.splitlines() if "/ended" in line]
    folder, target = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    target.write_text("kept")
    (folder / "ended").symlink_to(target)
    subprocess.run(["sh", "-c", "code=7; " + "\n".join(end)], env={**os.environ, "RUN": str(folder)}, check=True)
    assert target.read_text() == "kept" and (folder / "ended").read_text() == "7\n"
    assert stat.S_ISREG(os.lstat(folder / "ended").st_mode)


def test_no_result_is_fetched_from_a_file_that_others_may_write(tmp_path):
    """What is fetched belongs to the user at the desk, who unpickles results: the far side looks at who could have written it."""
    for name, mode in (("result-0.pkl", 0o600), ("result-1.pkl", 0o666), ("notes.out", 0o666)):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name).chmod(mode)
    *pieces, (end, _) = answer(str(tmp_path), {})
    assert [header["path"] for header, _ in pieces] == ["notes.out", "result-0.pkl"]
    assert end["left"] == ["result-1.pkl"]
