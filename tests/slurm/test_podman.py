"""A job of two nodes whose ranks run in real podman containers, from an image that holds nothing but empty folders."""

import json
from pathlib import Path

import pytest

from tests.bench import apptainer
from tests.bench import podman as bench
from tests.slurm.conftest import output


@pytest.fixture
def podman(oar):
    if bench.why_not():
        pytest.skip(bench.why_not())
    (oar.home / "containers.conf").write_text(bench.CONTAINERS)
    (oar.home / "storage.conf").write_text(bench.STORAGE)
    bench.image(apptainer.tree(oar.home / "hull"), oar.home / "hull.tar")
    before = bench.groups()
    environ = {
        "CONTAINERS_CONF": str(oar.home / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(oar.home / "storage.conf"),
    }
    for node in ("oar9", "oar10"):
        mounted = oar.cluster.run(node, ["sh", "-ec", bench.cgroups()])
        assert mounted.returncode == 0, mounted.stderr
        done = oar.cluster.run(
            node, ["podman", "load", "-q", "-i", str(oar.home / "hull.tar")], env=environ, timeout=90
        )
        assert done.returncode == 0, done.stderr
    yield environ
    bench.remove_groups(before)


def test_two_nodes_in_podman(oar, podman):
    (oar.home / "harbour.yaml").write_text(
        f"summary: the test's own\nbackend: slurm\ncontainer: {{runtime: podman, binds: {json.dumps(apptainer.binds())}}}\n"
    )
    job = oar.job("hulls", ranks_per_node=1, site=oar.home / "harbour.yaml", container="localhost/hull:1",
                  command=f"python3 {oar.ranks('boxed', bench.WHO)}", submit_options='["--nodelist=oar[9-10]"]',
                  setup='cd "$OLDPWD"; echo began in "$PWD"')  # fmt: skip
    done = oar("submit", job, env=podman)
    assert done.returncode == 0, done.stderr
    number, folder = (
        int(done.stdout.split("slurm://bench/")[1].split()[0]),
        Path(done.stdout.split("folder")[1].split()[0]),
    )
    state = oar.cluster.wait(number, ["COMPLETED", "FAILED"], 120)
    text = output(folder)
    assert state["JobState"] == "COMPLETED", text
    for rank, host in enumerate(("oar9", "oar10")):
        assert "began in /\n" in text  # the image's own folder
        assert f"in ['/run/.containerenv'] rank {rank} of 2 on {host}" in text, text
    for node in ("oar9", "oar10"):
        left = oar.cluster.run(node, ["podman", "ps", "-aq"], env=podman)
        assert left.returncode == 0 and left.stdout.strip() == ""
    assert json.loads((folder / "nodes/1/facts.json").read_text())["container"]["runtime"] == "podman"
