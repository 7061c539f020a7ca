"""`site check` names every mistake of a profile at once; plan shows what a site asks; rendering needs no client."""

import pytest

from drumbeat.base.data import read
from drumbeat.base.problem import Problem
from drumbeat.desk.start.site_check import check_site
from drumbeat.jobfile.site import built_in, detect, host_patterns
from tests.conftest import ROOT

WRONG = """\
summary: x
backend: slurm
gpu: 4
env:
  NCCL_IB_HCAS: {value: mlx5, why: x}
  NCCL_SOCKET_IFNAME: {value: "ib0 ib1", why: x}
  GLOO_SOCKET_IFNAME: {value: ib0, why: x}
submit:
  partition: {value: "partition=gpu", why: x}
  network: {value: --network=single, why: x}
expect: {transport: infiniband}
needs: [account, acount]
cpus: {reserved: "0-", why: x}
storage: {local: /local}
detect: {hosts: ["gpu[01-24"]}
runs: /scratch/$USER/$NOBODY_SET_THIS/runs
"""
RIGHT = """\
summary: 24 nodes with 4 A100
backend: slurm
gpus: 4
cores: 64
memory: 480G
vendor: nvidia
needs: [account, time]
submit: {partition: {value: --partition=gpu, why: these have GPUs}}
runs: /scratch/$USER/runs
env: {NCCL_IB_HCA: {value: "=mlx5_0,mlx5_1", why: mlx5_2 is for storage}}
expect: {transport: rdma, gdr: true}
detect: {hosts: ["gpu-a[01-24]"]}
"""


def write(tmp_path, text):
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    return str(path)


def test_all_mistakes_are_named_at_once_each_by_its_place(tmp_path):
    checked = check_site(write(tmp_path, WRONG), {})
    said = {int(str(each).split(":")[1]): str(each) for each in checked.mistakes}
    assert sorted(said) == [3, 5, 6, 9, 11, 12, 13, 14, 15], "\n".join(said.values())
    for line, words in {
        3: "did you mean 'gpus'?", 5: "NCCL_IB_HCA", 6: "blank", 9: "submit.partition: 'partition=gpu' is not an option",
        12: "did you mean 'account'?", 13: "cpus.reserved", 14: "storage has no 'why'", 15: "never closed",
    }.items():  # fmt: skip
        assert words in said[line], said[line]
    assert next(each for each in checked.mistakes if ":9: " in str(each)).fix == "write it as one word: --partition=gpu"


def test_a_right_profile_is_valid_without_the_users_environment(tmp_path, drumbeat, monkeypatch):
    checked = check_site(write(tmp_path, RIGHT), {})
    assert not checked.mistakes and checked.site.cores == 64
    monkeypatch.delenv("USER", raising=False)
    done = drumbeat.here("site", "check", write(tmp_path, RIGHT.replace("$USER", "$NOBODY_SET_THIS")))
    assert done.returncode == 0 and "valid" in done.stdout and "$NOBODY_SET_THIS is not set here" in done.stderr
    installed = tmp_path / "config" / "drumbeat" / "sites"
    installed.mkdir(parents=True)
    write(installed, RIGHT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert "ours: valid" in drumbeat.here("site", "check", "ours").stdout, "by the name that the list shows"
    done = drumbeat.here("site", "check", write(tmp_path, RIGHT.replace("/scratch", "/no-such-disk")))
    assert done.returncode == 0 and "runs: /no-such-disk is not on this machine" in done.stdout


@pytest.mark.parametrize("name", built_in())
def test_the_built_in_profiles_have_no_mistakes(tmp_path, name):
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(read("drumbeat.jobfile.sites", f"{name}.yaml"))
    assert not check_site(str(path), {}).mistakes


def test_a_refused_option_of_the_site_is_not_blamed_on_the_job(tmp_path, drumbeat):
    site = write(tmp_path, RIGHT.replace("--partition=gpu", "partition=gpu"))
    done = drumbeat.here("plan", "--render", "--site", site, "--", "true")
    assert (
        done.returncode == 2 and "ours.yaml:8: submit.partition" in done.stderr and "submit-options" not in done.stderr
    )
    site = write(tmp_path, RIGHT.replace("account, time", "acount"))
    done = drumbeat.here("plan", "--site", site, "--", "true")
    assert done.returncode == 2 and "ours.yaml:7: needs: 'acount'" in done.stderr


def test_a_plan_shows_what_the_site_asks_and_what_the_job_lacks(tmp_path, drumbeat, monkeypatch):
    for name in ("USER", "SBATCH_ACCOUNT", "SBATCH_TIMELIMIT"):
        monkeypatch.delenv(name, raising=False)
    done = drumbeat.here("plan", "--site", write(tmp_path, RIGHT), "--time", "1h", "--", "true")
    assert "per node  4 GPUs, 64 cores, 480G memory" in done.stdout, done.stdout + done.stderr
    assert "expects   transport rdma, GPU-direct" in done.stdout
    assert "requires account" in done.stderr and "requires time" not in done.stderr


def test_host_patterns_may_have_ranges(tmp_path):
    assert host_patterns("gpu[01-03]", "x") == ["gpu01", "gpu02", "gpu03"]
    assert host_patterns("nid??[1-2]*", "x") == ["nid??1*", "nid??2*"]
    with pytest.raises(Problem, match="is not a pattern of host names"):
        host_patterns("gpu[01-", "x")
    folder = tmp_path / "drumbeat" / "sites"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(RIGHT)
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert detect(environ, "gpu-a07", None).name == "ours" and detect(environ, "gpu-a25", None).name == "localhost"


PODS = "summary: x\nbackend: {0}\nvendor: nvidia\ncontainer: {{runtime: pod}}\n{1}"
KIND = "submit: {kind: {value: --kind=pytorchjob, why: x}}\n"


@pytest.mark.parametrize(
    "backend, more, client, shown",
    [
        ("kubernetes", "", "kubectl", "kind: Job"),
        ("kubernetes", KIND, "kubectl", "kind: PyTorchJob"),
        ("runai", "", "runai", "runai training pytorch submit"),
    ],
)
def test_rendering_needs_no_client(tmp_path, drumbeat, monkeypatch, backend, more, client, shown):
    site = write(tmp_path, PODS.format(backend, more))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = (
        "--site",
        site,
        "--account",
        "ml",
        "--nodes",
        2,
        "--gpus",
        8,
        "--container",
        "example.org/x:1",
        "--workdir",
        "/code",
    )
    done = drumbeat.here("plan", "--render", *words, "--", "true")
    assert done.returncode == 0 and shown in done.stdout, done.stderr
    assert f"was not asked (there is no {client} here)" in done.stderr and "not asked" in done.stdout
    assert drumbeat.here("submit", *words, "--", "true").returncode == 2, "what is sent is never assumed"


def test_the_docs_name_the_ports_that_are_listened_on():
    from drumbeat.plan.scene import DEFAULT_EPHEMERAL, LOW_PORTS, TOP, ports
    from drumbeat.watch.web import PORT

    text = (ROOT / "docs" / "security.md").read_text()
    found, _ = ports("muster/any", DEFAULT_EPHEMERAL)
    assert f"{DEFAULT_EPHEMERAL[1] + 1} to {TOP}" in text and all(DEFAULT_EPHEMERAL[1] < port <= TOP for port in found)
    assert (
        f"127.0.0.1:{PORT}" in text and f"{LOW_PORTS[0]} to {LOW_PORTS[1]}" in text and f"{TOP - 1000} or above" in text
    )


@pytest.mark.parametrize(
    "lines",
    [
        'backend: slurm\nenv: {NCCL_SOCKET_IFNAME: {value: "eth0, ib0", why: x}}\n',
        "backend: slurm\nenv: {NCCL_DEBUG: {value: INFOO, why: x}}\n",
        'backend: slurm\nsubmit: {bad: {value: "nosuch=3", why: x}}\n',
        "backend: kubernetes\nsubmit: {bad: {value: --nosuch=3, why: x}}\n",
        "backend: slurm\nneeds: [acount]\n",
    ],
)
def test_plan_and_submit_refuse_what_site_check_refuses(tmp_path, lines, drumbeat):
    site = tmp_path / "ours.yaml"
    site.write_text(f"summary: ours\nvendor: nvidia\ngpus: 4\ncores: 64\nmemory: 500G\n{lines}")
    wanted = ("--site", site, "--nodes", "2", "--time", "1h", "--", "python", "train.py")
    said = [drumbeat.here("site", "check", site), drumbeat.here("plan", *wanted), drumbeat.here("submit", *wanted)]
    assert [done.returncode for done in said] == [2, 2, 2], [done.stdout + done.stderr for done in said]
    checked, *others = [done.stderr.partition(": ")[2].partition("\n")[0] for done in said]
    assert "ours.yaml:" in checked and others == [checked, checked]
