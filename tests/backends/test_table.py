"""The table of backends, what one cannot do, and the variables that a backend of one's own sets on its nodes."""

import zipfile

import pytest

from drumbeat import backends
from drumbeat.backends.contract import Backend, job_handle
from drumbeat.backends.local import own_handle
from drumbeat.base.problem import Problem
from drumbeat.desk.status import array_tasks
from drumbeat.machine.model import Identity
from tests.machine.test_identity import read


def test_names():
    assert {"local", "slurm"} <= set(backends.names())
    assert backends.get("slurm") is backends.get("slurm") and backends.get("slurm").title == "Slurm"
    with pytest.raises(Problem, match=r"s\.yaml:2: backend: there is no backend 'slrum'"):
        backends.get("slrum", "s.yaml:2: backend")


def test_backends_with_login_nodes():
    asked = {name for name in backends._BUILT_IN if type(backends.get(name)).submits_here is not Backend.submits_here}
    assert asked == {*backends._HAS_LOGIN_NODES}


def test_a_backend_in_an_archive_is_found(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "toy.whl", "w") as wheel:
        wheel.writestr("toy-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
        wheel.writestr("toy-1.dist-info/entry_points.txt", "[drumbeat.backends]\ntoy = toy_backend:Toy\n")
    monkeypatch.syspath_prepend(str(tmp_path / "toy.whl"))
    backends._installed.cache_clear()
    try:
        assert "toy" in backends.names()
    finally:
        backends._installed.cache_clear()


def test_what_a_backend_cannot_do_is_said_in_one_line():
    class Small(Backend):
        name = title = "Small"

    small = Small()
    calls = [
        lambda: small.render(None), lambda: small.submit(None, {}), lambda: small.status("", {}), lambda: small.cancel("", {}),
        lambda: small.shell("", "n1", {}), lambda: small.fan_out(None, {}), lambda: small.render_command(None, "", "", "", ""),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(Problem, match="^Small "):
            call()
    assert small.submits_here({}) is False and small.notes(None) == [] and small.finish("", {}) is None


def test_handles_lead_to_their_backend():
    assert backends.of_handle("slurm://lumi/12_3").name == "slurm" and backends.of_handle(own_handle()).name == "local"
    assert backends.of_handle("/a/folder") is None and backends.of_handle("pbs://x/1") is None
    local = backends.get("local")
    assert local.status(own_handle(), {}).state == "running"
    assert local.status("local://elsewhere/1-2", {}).detail == "started on elsewhere: ask there"
    with pytest.raises(Problem, match="already ended"):
        local.cancel(own_handle().rpartition("-")[0] + "-1", {})
    inside = Identity("openmpi", "77", batch="slurm", cluster="lumi", array_job="70", array_task="7")
    assert job_handle(inside) == "slurm://lumi/70_7" and job_handle(Identity()) == ""


def test_arrays_as_text():
    assert array_tasks("0-3%2") == [0, 1, 2, 3] and array_tasks("1,5-9:2") == [1, 5, 7, 9] and array_tasks("x") == []
    assert len(array_tasks("0-9999999")) == 100_000


def test_variables_of_a_backend_of_ones_own(tmp_path):
    job = {"DRUMBEAT_SCHEDULER": "toy", "DRUMBEAT_JOB": "7", "DRUMBEAT_HOSTS": "n[1-2]"}
    shell, notes = read(tmp_path, **job)
    assert (shell.place, shell.nodes, shell.hosts, shell.node_rank) == (
        "allocation",
        2,
        ("n1", "n2"),
        None,
    ) and not notes
    more = {"DRUMBEAT_NODE": 1, "DRUMBEAT_GPUS": "8", "DRUMBEAT_ARRAY": 7, "DRUMBEAT_TASK": 3, "DRUMBEAT_STARTS": 2}
    node, _ = read(tmp_path, **job, **more)
    assert (node.place, node.node_rank, node.gpus, node.starts, node.master) == ("inside", 1, 8, 2, "n1")
    assert job_handle(node) == "toy://cluster/7_3"
