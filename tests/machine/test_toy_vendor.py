"""A third vendor is one file and one tree: every room knows its GPUs without a word of their own."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drumbeat.agent.watchers.contract import Saw
from drumbeat.agent.watchers.kernel_log import GpuErrors
from drumbeat.backends.kubernetes.pod import gpu_resource
from drumbeat.base.problem import Problem
from drumbeat.doctor.examine import examine
from drumbeat.machine.gather import gather, read
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.sample import Sampler
from drumbeat.machine.vendors import VENDORS, count_shown, vendor_named
from drumbeat.plan.binding import choose
from drumbeat.plan.show import plan_node
from tests.machine.toy_vendor import Toy
from tests.plan.making import named, order, peers
from tests.trees.tree import Tree

ROOT = Path(__file__).parent.parent.parent
# Two behind one switch of NUMA node 1 and a single one before them: a job of two GPUs takes the pair.
PLACES = ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0",
          "pci0000:80/0000:80:01.0/0000:81:00.0/0000:83:00.0")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tree = Tree(tmp_path_factory.mktemp("toys"), "toybox")
    tree.cpus(8, 2, 4)
    for index, path in enumerate(PLACES):
        tree.pci(path, "0x70e0", "0x0001", "0x030200", int(index > 0), "toydrm")
        base = f"/sys/class/toy/toy{index}"
        for name, value in (
            ("pci", path.rsplit("/", 1)[1]),
            ("memory", 16 << 30),
            ("busy", 90 + index),
            ("errors", index // 2),
        ):
            tree.file(f"{base}/{name}", value)
    tree.file("/sys/class/toy/toy1/users", "4711")
    tree.file("/sys/module/toydrm/version", "1.2")
    tree.file("/proc/cmdline", "ro iommu=on")
    tree.file("/proc/sys/kernel/dmesg_restrict", "0")
    tree.told["commands"]["dmesg"] = "[1.0] toydrm 0000:82:00.0: the toy was lost\n[2.0] usb 1-1: new device\n"
    tree.net("eth0")
    tree.address("eth0", "10.0.0.1/24")
    tree.done()
    return str(tree.root)


@pytest.fixture
def facts(folder):
    VENDORS.append(Toy())
    yield gather(FolderHost(folder))
    assert VENDORS.pop().name == "toy"


def test_without_its_file_nobody_knows_it(folder):
    assert (gather(FolderHost(folder)).gpus, vendor_named("toy").pod_resource) == ((), "")


def test_facts(facts):
    assert [(gpu.vendor, gpu.name, gpu.numa, gpu.driver) for gpu in facts.gpus] == [
        ("toy", "Toy T1", 0, "toydrm"), ("toy", "Toy T1", 1, "toydrm"), ("toy", "Toy T1", 1, "toydrm"),
    ]  # fmt: skip
    assert [gpu.pids for gpu in facts.gpus] == [(), (4711,), ()]
    assert facts.gpus[1].pci_path == PLACES[1] and facts.gpus_on_bus == {"toy": 3}
    assert (facts.versions["toy-driver"], facts.gpus[2].health.uncorrected_errors) == ("1.2", 1)
    assert facts.gpu_events == ("toydrm 0000:82:00.0: the toy was lost",)


def test_plan(facts):
    asked = order(nodes=1, ranks_per_node=2, gpus=2, emulated=False, local_dir="/tmp", user="u")
    plan = plan_node(asked, facts, peers(facts), 0)
    variables = named(plan.variables)
    assert variables["TOY_VISIBLE_DEVICES"].value == "1,2"
    assert variables["TOY_CACHE"].value == "/tmp/u-toy-cache-0"
    assert [slot.gpu for slot in plan.binding.slots] == [1, 2]


def test_doctor(facts):
    found = {finding.code: finding.title for finding in examine(facts)}
    assert found["gpus"] == "3 GPUs: Toy T1" and found["toy-driver"] == "Toy driver 1.2"
    assert {"gpu-in-use", "gpu-memory-errors", "gpu-events"} <= set(found)
    assert "GPU 1 (0000:82:00.0) is already used by process 4711" in found["gpu-in-use"]
    assert "iommu-translating" in found


def test_telemetry(facts, folder):
    samples = Sampler(FolderHost(folder), facts.gpus).sample()["gpus"]
    assert [sample["busy"] for sample in samples] == [90, 91, 92]


def test_kernel_log(facts):
    line = {"text": "[9.0] toydrm 0000:83:00.0: the toy was lost", "source": "/dev/kmsg"}
    (warning,) = GpuErrors(facts.gpus, 0, "toybox", {}).on(Saw("kernel", line), 1.0)
    assert (warning.finding.code, warning.finding.title[:5]) == ("gpu-lost", "GPU 2")


def test_variables_that_hide_its_gpus(facts):
    environ = read({"TOY_VISIBLE_DEVICES": "0,2", "UNRELATED": "1"})
    assert environ == {"TOY_VISIBLE_DEVICES": "0,2"} and count_shown(environ, 3) == 2
    chosen = choose(order(emulated=False), replace(facts, environment=environ))
    assert [gpu.index for gpu in chosen.gpus] == [0, 2] and not chosen.variables


def test_pod_resource(facts):
    assert gpu_resource(order(vendor="toy")) == "toys.example.org/gpu"
    with pytest.raises(Problem) as problem:
        gpu_resource(order())
    assert "write vendor: nvidia or vendor: amd or vendor: toy in its profile" in str(problem.value.fix)


@pytest.fixture
def drumbeat(tmp_path, cache):
    return functools.partial(_drumbeat, tmp_path, cache)


def _drumbeat(home, cache, *words):
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "LANG": "C.UTF-8",
        "XDG_CACHE_HOME": str(cache),
    }  # fmt: skip
    argv = [sys.executable, "-m", "tests.machine.toy_vendor", *words]
    done = subprocess.run(argv, cwd=home, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "site, image, wanted",
    [
        ("backend: slurm\ncontainer: {runtime: apptainer, vendor: toy}", "/toys.sif", "apptainer exec --toy $binds"),
        ("backend: slurm\ncontainer: {runtime: docker, vendor: toy}", "toys:1", 'flags="$flags --device /dev/toys"  # toys'),
    ],
)  # fmt: skip
def test_a_site_with_toys(drumbeat, tmp_path, site, image, wanted):
    sites = tmp_path / ".config" / "drumbeat" / "sites"
    sites.mkdir(parents=True)
    (sites / "toybox.yaml").write_text(f"summary: toys\nvendor: toy\n{site}\n")
    asked = ["plan", "--site", "toybox", "--nodes", "2", "--gpus", "2", "--container", image]
    assert wanted in drumbeat(*asked, "--render", "--", "python", "x.py")
    text = drumbeat(*asked, "--", "python", "x.py")
    assert "CUDA_VISIBLE_DEVICES" not in text and "ROCR_VISIBLE_DEVICES" not in text and "MIOPEN" not in text


def test_commands_as_they_are_typed(drumbeat, folder):
    assert json.loads(drumbeat("facts", "--root", folder, "--json"))["gpus"][2]["vendor"] == "toy"
    plan = json.loads(drumbeat("plan", "--root", folder, "--visibility", "own", "--json", "--", "x"))
    ranks = plan["nodes"][0]["binding"]["slots"]
    assert [[(entry["name"], entry["value"]) for entry in rank["env"]] for rank in ranks] == [
        [("TOY_VISIBLE_DEVICES", str(index))] for index in range(3)
    ]
    assert "3 GPUs: Toy T1" in drumbeat("doctor", "--root", folder)
