"""podman as it works on a node that is a set of namespaces: its settings, and an image that holds nothing but empty folders."""

import hashlib
import io
import json
import platform
import shutil
import tarfile
from pathlib import Path

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


def why_not() -> str:
    missing = [program for program in ("podman", "runc", "busybox") if shutil.which(program) is None]
    return f"needs {', '.join(missing)}: apt-get install podman runc busybox-static" if missing else ""


def groups():
    return set(Path("/sys/fs/cgroup").glob("*/libpod_parent"))


def remove_groups(before) -> None:
    """podman leaves its empty groups behind."""
    for parent in groups() - before:
        for folder in sorted((path for path in parent.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        parent.rmdir()
