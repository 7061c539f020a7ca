"""The built-in profiles, paths that age, and a profile made from a machine."""

import json

import pytest

from drumbeat.base.order import HostPath
from drumbeat.cli import main
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import (
    built_in,
    built_in_text,
    detect,
    detect_of,
    expand_pattern,
    find_paths,
    load_site,
    new_site,
    site_from_text,
    site_lines,
)
from drumbeat.jobfile.yamlfile import load_text
from drumbeat.machine.model import Pool
from drumbeat.plan.variables import SPELT
from tests.plan.archetype import SITES, facts_of

BUILT_IN = (
    "alps",
    "dgx-h100",
    "frontier",
    "kubernetes",
    "leonardo",
    "localhost",
    "lumi",
    "mi300x-cx7",
    "mi300x-thor2",
    "mi325x",
    "mi355x",
    "olivia",
    "rcp",
    "slurm",
    "ssh",
    "workstation",
)
HERE = Here("login1", "/w", {"HOME": "/h"}, 8, None, "u", 0.0, "e")


def test_they_are_all_there():
    assert tuple(built_in()) == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_value_has_its_reason_and_source(name):
    site = load_site(name, {})
    for entry in (*site.env.values(), *site.submit.values(), *site.paths.values()):
        assert entry.why and (entry.source or name == "localhost")
    assert set(site.env) <= SPELT, "a misspelt variable"
    for part in (site.cpus, site.storage):
        assert part is None or (part.why and part.source)
    said = site_lines(site)
    assert site.summary in said[0]
    keys = set(load_text(built_in_text(name), name, "a site profile").entries) - {"summary"}
    assert not [key for key in keys if not any(line.startswith((f"{key}:", f"{key} =")) for line in said)], said


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_order_can_be_made_on_its_login_node(name):
    order = resolve(Job(command=("python", "train.py")), load_site(name, {}), HERE)
    assert order.site == name and order.ranks_per_node == (load_site(name, {}).gpus or 1)
    assert [path.name for path in order.host_paths] == list(load_site(name, {}).paths)
    if order.backend != "local":
        assert order.master == "", "nobody knows node 0 before the scheduler has chosen"


POD = {"RUNAI_NUM_OF_GPUS": "4", "PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "1",
       "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "8"}  # fmt: skip


def test_rcp_is_found_in_a_pod_and_keeps_what_it_expects(monkeypatch, tmp_path):
    from drumbeat.desk.start.make_order import make_order, site_of
    from drumbeat.desk.start.place import find_place
    from drumbeat.machine.host import LiveHost

    environ = {"HOME": str(tmp_path), **POD}
    monkeypatch.setattr("os.environ", environ)
    place = find_place(LiveHost())
    for job in (Job(command=("python", "train.py")), Job(command=("python", "train.py"), site="rcp")):
        order = make_order(job, site_of(job, place, environ), place, environ)
        assert order.site == "rcp" and order.expect.transport == "roce" and order.expect.gdr
        assert order.nodes == 2 and order.ranks_per_node == 4 and order.master == "job-master-0"


def test_a_profile_of_ones_own_wins_over_a_built_in_one_by_the_same_variables(tmp_path):
    sites = tmp_path / ".config" / "drumbeat" / "sites"
    sites.mkdir(parents=True)
    (sites / "mine.yaml").write_text("summary: x\ndetect: {variables: ['RUNAI_NUM_OF_GPUS', 'PET_NNODES=?']}\n")
    environ = {"HOME": str(tmp_path), **POD}
    assert detect(environ, "pod", None).name == "mine"
    assert detect({**environ, "PET_NNODES": "16"}, "pod", None).name == "rcp"
    assert detect({"HOME": str(tmp_path), "PET_NNODES": "2"}, "pod", None).name == "localhost"


def test_lumi_keeps_the_first_core_of_each_ccd():
    order = resolve(Job(command=("x",)), load_site("lumi", {}), HERE)
    assert order.reserved_cpus[:8] == tuple(range(0, 64, 8)) and order.threads_per_core == 1


def test_sites_are_known_by_their_clusters_name():
    for name in ("lumi", "olivia"):
        assert detect({}, "nid001", name).name == name
    assert detect({}, "login-1.olivia.sigma2.no", None).name == "olivia"
    assert detect({}, "nid001", None).name == "localhost"


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_short_way_to_a_sites_signs_is_right(name):
    assert detect_of(name) == load_site(name, {}).detect


def listing(tree):
    return lambda folder: sorted(tree.get(folder.rstrip("/") or "/", ()))


OLIVIA = listing(
    {
        "/": ["opt"],
        "/opt": ["cray"],
        "/opt/cray": ["libfabric"],
        "/opt/cray/libfabric": ["1.22.0", "2.3.1", "2.10.0"],
        "/opt/cray/libfabric/1.22.0": ["lib64"],
        "/opt/cray/libfabric/2.3.1": ["lib64"],
        "/opt/cray/libfabric/2.10.0": ["include"],
    }
)


def test_the_newest_version_that_is_whole_is_taken():
    wanted = HostPath("libfabric", "/opt/cray/libfabric/*/lib64", "drives the network")
    found, missing = find_paths([wanted], OLIVIA, "n1")
    assert found == {"libfabric": "/opt/cray/libfabric/2.3.1/lib64"} and missing == []
    assert expand_pattern(OLIVIA, "/opt/cray/libfabric/*")[0].endswith("2.10.0")


def test_a_path_that_is_gone_says_what_was_looked_for():
    wanted = HostPath("hpc_sdk", "/opt/nvidia/hpc_sdk/*/lib", "the site's NCCL needs it")
    found, missing = find_paths([wanted], OLIVIA, "n1")
    assert found == {} and missing[0].severity == "error"
    assert "/opt/nvidia/hpc_sdk/*/lib" in missing[0].evidence[0].text and missing[0].cause == "the site's NCCL needs it"


@pytest.mark.parametrize("machine", list(SITES))
def test_a_profile_made_from_a_machine_is_a_right_one(machine):
    facts = facts_of(machine, 1)[0]
    site = site_from_text(new_site(facts, "slurm"), "new", "new.yaml")
    discrete = [gpu for gpu in facts.gpus if not gpu.integrated]
    assert site.gpus == len(discrete) and (site.detect.cluster or site.detect.hosts)
    assert site.backend == "slurm"


def test_a_profile_made_on_a_login_node_says_what_its_scheduler_said():
    pools = [Pool("cpu", True, 90, 64, 256_000, 0), Pool("gpu", False, 16, 96, 1_800_000, 8)]
    site = site_from_text(new_site(facts_of("lumi-g", 1)[0], "slurm", pools, "lake"), "new", "new.yaml")
    assert (site.gpus, site.cores, site.memory, site.detect.cluster) == (8, 96, "1800000M", ("lake",))
    assert site.submit["partition"].value == "--partition=gpu" and not site.env
    plain = site_from_text(new_site(facts_of("lumi-g", 1)[0], "slurm", pools[:1]), "new", "new.yaml")
    assert plain.gpus is None and not plain.submit


def test_the_command(capsys, tmp_path):
    assert main(["site", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in BUILT_IN) and "* localhost" in shown
    assert main(["site", "show", "lumi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["env"]["NCCL_SOCKET_IFNAME"]["value"] == "hsn0,hsn1,hsn2,hsn3"
    assert main(["site", "show", "olivia", "--source"]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out)
    assert main(["site", "check", str(mine), "--root", str(tmp_path)]) == 1, "its paths are not here"
    assert "nothing here matches /opt/cray/libfabric/*/lib64" in capsys.readouterr().out
    mine.write_text("summary: x\nnodez: 2\n")
    assert main(["site", "check", str(mine)]) == 2
    assert "did you mean 'nodes'" in capsys.readouterr().err
    mine.write_text("summary: x\nmodules: [NCCL]\n")
    assert main(["site", "check", str(mine)]) == 2 and "modules is a key of a job file" in capsys.readouterr().err
    mine.write_text("summary: x\nbackend: slurm\ngpus-as: gress\n")
    assert main(["site", "check", str(mine)]) == 2, "what no plan would take is not valid"
    assert "mine.yaml:3: gpus-as: 'gress' is not one of gpus-per-node, gres" in capsys.readouterr().err
    assert main(["site", "show"]) == 2 and main(["site", "show", "lumy"]) == 2
    assert "did you mean 'lumi'" in capsys.readouterr().err


def tool(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_list_marks_the_site_that_a_plan_would_use(tmp_path, monkeypatch, capsys):
    """Found by the scheduler's own name for the cluster, which only its tools know on a login node."""
    sites = tmp_path / "drumbeat/sites"
    sites.mkdir(parents=True)
    (sites / "lake.yaml").write_text("summary: mine\nbackend: slurm\ndetect: {cluster: [lake]}\n")
    tool(tmp_path / "bin", "sbatch", "exit 1")
    tool(tmp_path / "bin", "scontrol", "echo 'ClusterName = lake'")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    assert main(["site", "list", "--json"]) == 0
    here = [each["name"] for each in json.loads(capsys.readouterr().out) if each["here"]]
    assert main(["plan", "--json", "--", "python", "x.py"]) == 0
    assert [json.loads(capsys.readouterr().out)["order"]["site"]] == here == ["lake"]


def test_a_scheduler_that_does_not_answer_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    tool(tmp_path / "bin", "sinfo", "echo 'sinfo: error: no controller' >&2; exit 1")
    assert main(["site", "new"]) == 0
    out, err = capsys.readouterr()
    assert "sinfo failed: no controller" in err and "not Slurm's nodes" in err and "backend: " in out
    tool(tmp_path / "bin", "sinfo", "echo 'gpu*|4|64|512000|gpu:a100:4'")
    tool(tmp_path / "bin", "apptainer", "exit 0")
    assert main(["site", "new"]) == 0
    out, err = capsys.readouterr()
    assert not err and "backend: slurm" in out and "gpus: 4 " in out
    assert "# For jobs with an image: apptainer is installed here." in out


def test_a_new_profile_names_the_container_runtime():
    facts = facts_of("lumi-g", 1)[0]
    site = site_from_text(new_site(facts, "slurm", runtime="singularity"), "new", "new.yaml")
    assert (site.container.runtime, site.container.vendor) == ("singularity", "amd")
    text = new_site(facts, "slurm")
    assert "# container: {runtime: apptainer, vendor: amd}" in text and "none of them was found here" in text


def test_ones_own_profile_wins(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "drumbeat/sites"
    folder.mkdir(parents=True)
    (folder / "lumi.yaml").write_text("summary: mine\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["site", "show", "lumi"]) == 0
    assert capsys.readouterr().out.startswith("lumi: mine")
