"""The same jobs inside a real apptainer, from an image that was built here and holds nothing of drumbeat."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench import apptainer
from tests.bench.cluster import HEAD
from tests.slurm.conftest import ROOT, output
from tests.slurm.test_join import WHO, iam

IMAGES = Path("/var/tmp/drumbeat-test-apptainer")  # kept: it is some 100 MB from Debian's archive


@pytest.fixture(scope="module")
def image(oar):
    folder, reason = apptainer.get(IMAGES)
    if folder is None:
        pytest.skip(reason)
    oar.cluster.environ["PATH"] += f":{folder}"
    path = oar.home / "image.sif"
    apptainer.build(folder, apptainer.tree(oar.home / "tree"), path)
    return path


def binds():
    return [word for bind in apptainer.binds() for word in ("--bind", bind)]


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_join_line_in_a_users_script(oar, image, tasks):
    """srun apptainer exec IMAGE python3 drumbeat.pyz run -- python train.py"""
    who = oar.ranks("who", WHO)
    done = oar.srun("-woar[9-10]", "-N2", f"--ntasks-per-node={tasks}", "--gpus-per-node=2", "apptainer", "exec", *binds(), image,
                    "python3", oar.pyz, "run", "--", "python3", who)  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = iam(done.stdout)
    assert [ranks[rank][0] for rank in range(4)] == ["oar9", "oar9", "oar10", "oar10"]
    assert "end        finished" in done.stderr


def test_an_allocation_starts_the_container_itself(oar, image):
    """The same job file in an salloc shell; inside a step it is refused, because the ranks would run outside the image."""
    (oar.home / "shore.yaml").write_text(
        f"summary: the test's own\nbackend: slurm\ncontainer: {{runtime: apptainer, binds: {json.dumps(apptainer.binds())}}}\n"
    )
    job = oar.job("boxed", ranks_per_node=1, site=oar.home / "shore.yaml", container=image,
                  command=f"python3 {oar.ranks('who', WHO)}")  # fmt: skip
    run = [sys.executable, str(oar.pyz), "run", str(job)]
    done = oar.cluster.run(HEAD, ["salloc", "-woar[9-10]", "-N2", *run])
    assert done.returncode == 0, done.stderr
    assert [iam(done.stdout)[rank][0] for rank in range(2)] == ["oar9", "oar10"]
    refused = oar.srun("-N2", "--ntasks-per-node=1", *run)
    assert refused.returncode == 2 and "but this is not inside it" in refused.stderr


def test_the_hosts_libraries_inside_the_image(oar, image):
    """From the job file: the host's library is found by its pattern, bound in, and stands first in the search path."""
    libraries = oar.home / "opt" / "fabric"
    for version in ("1.9.0", "1.15.2", "1.10.1"):
        (libraries / version / "lib64").mkdir(parents=True)
        (libraries / version / "lib64" / "libfabric.so.1").write_text(version)
    (oar.home / "boat.yaml").write_text(
        f"summary: the test's own\nbackend: slurm\ncontainer: {{runtime: apptainer, binds: {json.dumps(apptainer.binds())}}}\n"
        f"paths:\n  libfabric: {{pattern: '{libraries}/*/lib64', why: drives the network, prepend: LD_LIBRARY_PATH}}\n"
        f"  driver: {{pattern: '{libraries}/1.9.*/lib64/libfabric.so.1', why: at its own place, target: /etc/driver}}\n"
    )
    command = f"python3 {oar.ranks('who', WHO)}"
    setup = f"sh -c 'echo path $LD_LIBRARY_PATH; cat /opt/host/libfabric/libfabric.so.1 /etc/driver; head -n 1 {ROOT}/README.md'"
    job = oar.job("boxed", ranks_per_node=1, site=oar.home / "boat.yaml", container=image, command=command, setup=setup,
                  binds=f"[{ROOT}]")  # fmt: skip
    number, folder = oar.submit(job)
    state = oar.cluster.wait(number, ["COMPLETED", "FAILED"], 120)
    text = output(folder)
    assert state["JobState"] == "COMPLETED", text
    assert "path /opt/host/libfabric:" in text and "1.15.21.9.0" in text and "# drumbeat" in text
    found = (folder / "nodes/1/host-paths.tsv").read_text().splitlines()
    assert found[0].split("\t")[:2] == ["libfabric", f"{libraries}/1.15.2/lib64"]
    assert len(found[1].split("\t")[3]) == 64  # a file's checksum
    assert json.loads((folder / "nodes/0/facts.json").read_text())["container"]["runtime"] == "apptainer"


def test_a_pattern_that_matches_nothing_ends_the_job(oar, image):
    (oar.home / "gone.yaml").write_text(
        f"summary: the test's own\nbackend: slurm\ncontainer: {{runtime: apptainer, binds: {json.dumps(apptainer.binds())}}}\n"
        "paths:\n  libcxi: {pattern: /no/such/*/libcxi.so.1, why: the network needs it, prepend: LD_LIBRARY_PATH}\n"
    )
    number, folder = oar.submit(oar.job("nothing", site=oar.home / "gone.yaml", container=image, command="python3 -V"))
    assert oar.cluster.wait(number, ["FAILED"])["ExitCode"] == "78:0"
    assert "nothing matches /no/such/*/libcxi.so.1 (libcxi)" in output(folder)


def test_an_image_for_another_machine_is_refused(oar, image):
    other = "aarch64" if apptainer_arch(image) == "x86_64" else "x86_64"
    (oar.home / "other.yaml").write_text(
        f"summary: the test's own\nbackend: slurm\narch: {other}\ncontainer: {{runtime: apptainer}}\n"
    )
    done = oar("submit", oar.job("foreign", site=oar.home / "other.yaml", container=image, command="python3 -V"))
    assert done.returncode == 2
    assert f"but the nodes of other are {other}" in done.stderr


def apptainer_arch(image):
    from drumbeat.containers.image import image_arch

    found = image_arch(str(image))
    assert found == {"arm64": "aarch64"}.get(
        sys.implementation._multiarch.split("-")[0], sys.implementation._multiarch.split("-")[0]
    )
    return found
