"""A job of two nodes whose ranks run in real podman containers, from an image that holds nothing but empty folders."""

import hashlib
import io
import json
import platform
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.bench import apptainer
from tests.slurm.conftest import output

WHO = """
import os, socket
marks = [name for name in ("/run/.containerenv", "/.dockerenv") if os.path.exists(name)]
print("in", marks, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname(), flush=True)
"""
# Without systemd, and without the right to raise limits: runc and plain cgroups, storage on each node's own disk.
CONTAINERS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
"""
STORAGE = """
[storage]
driver = "vfs"
graphroot = "/tmp/podman/graph"
runroot = "/tmp/podman/run"
"""


def cgroups() -> str:
    """A node's own /sys has no cgroups, and runc wants them: the machine's hierarchies, mounted again on the node."""
    lines = ["mount -t tmpfs cgroups /sys/fs/cgroup"]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        kinds = line.split(":")[1]
        if kinds:
            place = f"/sys/fs/cgroup/{kinds.partition('=')[2] or kinds}"
            options = f"none,{kinds}" if "=" in kinds else kinds
            lines += [f"mkdir -p {place}", f"mount -t cgroup -o {options} cgroups {place}"]
    return "\n".join(lines)


def image(tree: Path, target: Path) -> None:
    """A docker archive, as `docker save` writes it, without any tool to build one."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(tree, arcname=".")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    arch = {"aarch64": "arm64", "x86_64": "amd64"}[platform.machine()]
    config = json.dumps({"architecture": arch, "os": "linux", "config": {"Env": ["PATH=/usr/bin:/bin"]},
                         "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}).encode()  # fmt: skip
    manifest = json.dumps(
        [{"Config": "config.json", "RepoTags": ["localhost/hull:1"], "Layers": ["layer.tar"]}]
    ).encode()
    with tarfile.open(target, "w") as archive:
        for name, data in (("config.json", config), ("layer.tar", layer.getvalue()), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


@pytest.fixture
def podman(oar):
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install podman runc")
    (oar.home / "containers.conf").write_text(CONTAINERS)
    (oar.home / "storage.conf").write_text(STORAGE)
    image(apptainer.tree(oar.home / "hull"), oar.home / "hull.tar")
    before = set(Path("/sys/fs/cgroup").glob("*/libpod_parent"))
    environ = {
        "CONTAINERS_CONF": str(oar.home / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(oar.home / "storage.conf"),
    }
    for node in ("oar9", "oar10"):
        mounted = oar.cluster.run(node, ["sh", "-ec", cgroups()])
        assert mounted.returncode == 0, mounted.stderr
        done = oar.cluster.run(
            node, ["podman", "load", "-q", "-i", str(oar.home / "hull.tar")], env=environ, timeout=90
        )
        assert done.returncode == 0, done.stderr
    yield environ
    for parent in set(Path("/sys/fs/cgroup").glob("*/libpod_parent")) - before:  # podman leaves its empty groups behind
        for folder in sorted((path for path in parent.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        parent.rmdir()


def test_two_nodes_in_podman(oar, podman):
    (oar.home / "harbour.yaml").write_text(
        f"summary: the test's own\nbackend: slurm\ncontainer: {{runtime: podman, binds: {json.dumps(apptainer.binds())}}}\n"
    )
    job = oar.job("hulls", ranks_per_node=1, site=oar.home / "harbour.yaml", container="localhost/hull:1",
                  command=f"python3 {oar.ranks('boxed', WHO)}", submit_options='["--nodelist=oar[9-10]"]')  # fmt: skip
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
        assert f"in ['/run/.containerenv'] rank {rank} of 2 on {host}" in text, text
    for node in ("oar9", "oar10"):
        left = oar.cluster.run(node, ["podman", "ps", "-aq"], env=podman)
        assert left.returncode == 0 and left.stdout.strip() == ""
    assert json.loads((folder / "nodes/1/facts.json").read_text())["container"]["runtime"] == "podman"
