"""Runs on ssh hosts whose ranks live in real containers: podman, and with `make everywhere` apptainer and docker."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.bench import apptainer, podman
from tests.conftest import wait_for

SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("ready", os.path.exists("/run/.containerenv"), flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def boxes(desk):
    """The hosts with podman; its settings come by a wrapper, because a login by ssh has no environment of the test's."""
    if podman.why_not():
        pytest.skip(podman.why_not())
    base = Path(desk.machines.base)
    (base / "containers.conf").write_text(podman.CONTAINERS)
    (base / "storage.conf").write_text(podman.STORAGE)
    wrapper = base / "bin" / "podman"
    settings = f"CONTAINERS_CONF={base}/containers.conf CONTAINERS_STORAGE_CONF={base}/storage.conf"
    wrapper.write_text(f'#!/bin/sh\nexport {settings}\nexec /usr/bin/podman "$@"\n')
    wrapper.chmod(0o755)
    podman.image(apptainer.tree(base / "hull"), base / "hull.tar")
    before = podman.groups()
    for host in ("oar1", "oar2"):
        for argv in (["sh", "-ec", podman.cgroups()], ["podman", "load", "-q", "-i", f"{base}/hull.tar"]):
            done = desk.machines.run(argv, on=host)
            assert done.returncode == 0, done.stderr
    yield desk
    wrapper.unlink()
    podman.remove_groups(before)


def job(desk, name, script, **keys):
    lines = {
        "name": name, "hosts": "[oar1, oar2]", "ranks-per-node": 1, "container": "localhost/hull:1", "workdir": desk.shared,
        "container-runtime": "podman", "binds": json.dumps(apptainer.binds()), "runs": desk.own / "boxed",
        "command": f"python3 {desk.ranks(name, script)}", "stop-grace": "10s", **keys,
    }  # fmt: skip
    path = desk.shared / f"{name}.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return path


def nothing_left(desk):
    for host in ("oar1", "oar2"):
        left = desk.machines.run(["podman", "ps", "-aq"], on=host)
        assert left.returncode == 0 and left.stdout.strip() == "", left
    wait_for(lambda: not desk.left(), 120, "all processes on the hosts to end")


def test_two_hosts_in_podman(boxes):
    shown = boxes("plan", "--render", job(boxes, "boxed", podman.WHO))
    assert "podman run --name" in shown.stdout and "TASK=" in shown.stdout, shown.stderr
    done = boxes("run", job(boxes, "boxed", podman.WHO))
    assert done.returncode == 0, done.stderr
    for rank, host in enumerate(("oar1", "oar2")):
        assert f"in ['/run/.containerenv'] rank {rank} of 2 on {host}" in done.stdout, done.stdout + done.stderr
    folder = re.search(r"folder +(\S+)", done.stderr).group(1)
    assert json.loads(boxes.read(f"{folder}/nodes/1/facts.json"))["container"]["runtime"] == "podman"
    nothing_left(boxes)


@pytest.mark.skipif(not os.environ.get("DRUMBEAT_EVERYWHERE"), reason="make everywhere")
def test_a_detached_one_is_cancelled_with_time_to_save(boxes):
    done = boxes("submit", job(boxes, "saves", SAVES), "--json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run_id"]
    wait_for(lambda: boxes("logs", run).stdout.count("ready True") == 2, 180, "both ranks")
    done = boxes("cancel", run)
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert boxes("logs", run).stdout.count("saved") == 2
    nothing_left(boxes)


def test_what_only_a_scheduler_starts_is_refused(boxes):
    done = boxes("submit", job(boxes, "pyxis", "", **{"container-runtime": "pyxis"}))
    assert done.returncode == 2 and "pyxis needs a scheduler, and there is none" in done.stderr, done.stderr


@pytest.fixture
def dockers(boxes):
    """Each host with a daemon of its own, as far as a machine without the right to raise limits can run one."""
    missing = [program for program in ("docker", "dockerd", "containerd") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"make everywhere needs {', '.join(missing)}: apt-get install docker.io")
    base = boxes.machines.base
    words = f"dockerd --iptables=false --bridge=none --storage-driver=vfs --data-root={base}/own/docker"
    words += " --exec-opt native.cgroupdriver=cgroupfs"
    before = set(Path("/sys/fs/cgroup").glob("*/docker"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [boxes.machines.start(words.split(), on=host, **quiet) for host in ("oar1", "oar2")]
    try:
        for host in ("oar1", "oar2"):
            load = ["docker", "load", "-q", "-i", f"{base}/hull.tar"]
            wait_for(
                lambda h=host: boxes.machines.run(["docker", "info"], on=h).returncode == 0, what="docker's daemon"
            )
            assert boxes.machines.run(load, on=host).returncode == 0
        yield boxes
    finally:
        for daemon in daemons:
            daemon.terminate()  # nsenter waits for it, and passes nothing on
            daemon.wait(30)
        for host in ("oar1", "oar2"):
            boxes.machines.run(["sh", "-c", "kill $(cat /run/docker.pid)"], on=host)
        for parent in set(Path("/sys/fs/cgroup").glob("*/docker")) - before:
            parent.rmdir()


@pytest.mark.skipif(not os.environ.get("DRUMBEAT_EVERYWHERE"), reason="make everywhere")
def test_two_hosts_in_docker(dockers):
    site = Path(dockers.shared, "harbour.yaml")
    options = ["--ulimit=memlock=8388608:8388608"]  # ours asks for no limit, which this machine does not grant
    inside = {"runtime": "docker", "binds": apptainer.binds(), "options": options}
    site.write_text(
        json.dumps({"summary": "two hosts", "backend": "ssh", "hosts": ["oar1", "oar2"], "container": inside})
    )
    keys = {"container-runtime": "docker", "site": site, "binds": "[]"}
    done = dockers("run", job(dockers, "docked", podman.WHO, **keys))
    assert done.returncode == 0, done.stderr
    for rank, host in enumerate(("oar1", "oar2")):
        assert f"in ['/.dockerenv'] rank {rank} of 2 on {host}" in done.stdout, done.stdout + done.stderr
    for host in ("oar1", "oar2"):
        assert dockers.machines.run(["docker", "ps", "-aq"], on=host).stdout.strip() == ""


@pytest.mark.skipif(not os.environ.get("DRUMBEAT_EVERYWHERE"), reason="make everywhere")
def test_two_hosts_in_apptainer(desk):
    program, reason = apptainer.get(Path("/var/tmp/drumbeat-test-apptainer"))
    if program is None:
        pytest.skip(reason)
    base = Path(desk.machines.base)
    wrapper = base / "bin" / "apptainer"  # found on the hosts' PATH
    wrapper.write_text(f'#!/bin/sh\nexec {program}/apptainer "$@"\n')
    wrapper.chmod(0o755)
    image = desk.shared / "hull.sif"
    apptainer.build(program, apptainer.tree(base / "plain-hull"), image)
    script = "import os, socket; print('in', os.environ.get('APPTAINER_CONTAINER'), socket.gethostname(), flush=True)"
    keys = {"container": image, "container-runtime": "apptainer"}
    try:
        done = desk("run", job(desk, "inside", script, **keys))
        assert done.returncode == 0, done.stderr
        for host in ("oar1", "oar2"):
            assert f"in {image} {host}" in done.stdout, done.stdout + done.stderr
        wait_for(lambda: not desk.left(), what="all processes on the hosts to end")
    finally:
        wrapper.unlink()
