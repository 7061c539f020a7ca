"""What a driver says of a GPU without root, where versions stand, and which machine this is: from files laid out by hand."""

import json
import shlex

import pytest

from drumbeat.doctor.case import stand_in
from drumbeat.doctor.examine import examine
from drumbeat.machine import software
from drumbeat.machine.gather import gather, read_container
from drumbeat.machine.model import Gpu
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.table import table
from drumbeat.machine.topology import hypervisor, virtual_machine
from drumbeat.machine.vendors import gpu_events, kernel_event, nvidia, of_program, with_health
from drumbeat.machine.vendors.amd import rocm_version
from drumbeat.machine.vendors.nvidia import cuda_version, driver_cuda
from tests.trees.archetypes import BUILDERS


@pytest.fixture
def put(tmp_path):
    """put(path, text): a file of the machine; put(environ=..., commands=...): what it says otherwise."""
    told = {"environ": {}, "commands": {}}

    def add(path=None, text="", environ=None, commands=None):
        if path:
            place = tmp_path / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        told["environ"].update(environ or {})
        told["commands"].update({shlex.join(argv): output for argv, output in (commands or {}).items()})
        (tmp_path / ".drumbeat").mkdir(exist_ok=True)
        (tmp_path / ".drumbeat/host.json").write_text(json.dumps({"hostname": "n", **told}))
        return FolderHost(str(tmp_path))

    return add


def test_health_of_nvidia_gpus(put):
    rows = (
        "0, Disabled, Enabled, 0, 700.00, 700.00, 1980, 2619, 0x0000000000000004\n"
        "1, Enabled, Disabled, [N/A], 500.00, 700.00, 1980, 2619, 0x0000000000000048\n"
    )
    remapped = "GPU-a, 0, No, No\nGPU-b, 3, Yes, No\n"
    host = put(commands={nvidia.HEALTH_QUERY: rows, nvidia.ROWS_QUERY: remapped})
    one, two = with_health(host, [Gpu(0, "nvidia", uuid="GPU-a"), Gpu(1, "nvidia", uuid="GPU-b")])
    assert (one.mig, one.health.ecc, one.health.uncorrected_errors, one.health.throttle) == (
        False, True, 0, ("power limit",),
    )  # fmt: skip
    assert (two.mig, two.health.ecc, two.health.power_limit_w, two.health.power_default_w) == (True, False, 500, 700)
    assert (
        two.health.throttle == ("hardware slowdown", "temperature (hardware)") and two.health.uncorrected_errors is None
    )
    assert (two.health.remapped_rows, two.health.remap_pending, two.health.remap_failed) == (3, True, False)


def test_health_of_amd_gpus_from_sysfs(put):
    base = "/sys/bus/pci/devices/0000:c1:00.0"
    put(f"{base}/ras/umc_err_count", "ue: 2\nce: 17\n")
    put(f"{base}/hwmon/hwmon3/power1_cap", "560000000\n")
    put(f"{base}/hwmon/hwmon3/power1_cap_default", "560000000\n")
    host = put(f"{base}/pp_dpm_sclk", "0: 500Mhz\n1: 800Mhz *\n2: 1700Mhz\n")
    (gpu,) = with_health(host, [Gpu(0, "amd", pci="0000:c1:00.0")])
    assert (gpu.health.uncorrected_errors, gpu.health.power_limit_w, gpu.health.max_clock_mhz) == (2, 560, 1700)


def test_nothing_is_made_up_where_nothing_can_be_read(put):
    assert with_health(put(), [Gpu(0, "nvidia"), Gpu(1, "amd", pci="0000:c1:00.0")])[0].health is None
    assert with_health(put(), [Gpu(0, "amd", pci="0000:c1:00.0")])[0].health is None


def test_driver_events_only_where_the_kernels_log_may_be_read(put):
    log = (
        "[1.0] NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n[2.0] usb 1-1: new device\n"
        "[3.0] amdgpu 0000:c6:00.0: amdgpu: ring comp_1.0.0 timeout, signaled seq=3\n"
    )
    found = (
        "Xid 79 on 0000:c1:00: pid=1, GPU has fallen off the bus.",
        "amdgpu 0000:c6:00.0: ring comp_1.0.0 timeout, signaled seq=3",
    )
    assert gpu_events(put("/proc/sys/kernel/dmesg_restrict", "1\n")) is None, "dmesg fails"
    for restricted in ("1\n", "0\n"):  # root may read it in both cases
        assert gpu_events(put("/proc/sys/kernel/dmesg_restrict", restricted, commands={("dmesg",): log})) == found


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("NVRM: Xid (0000:c1:00): 48, DBE", "Xid 48 on 0000:c1:00: DBE"),  # older drivers write no PCI:
        ("amdgpu 0000:c6:00.0: amdgpu: GPU Recovery Failed: -110", "amdgpu 0000:c6:00.0: amdgpu: GPU Recovery Failed: -110"),
    ],
)  # fmt: skip
def test_the_doctor_knows_each_error_that_ends_a_run(put, line, event):
    host = put("/proc/sys/kernel/dmesg_restrict", "0\n", commands={("dmesg",): f"[1.0] {line}\n"})
    assert gpu_events(host) == (event,) and kernel_event(line).code


def test_a_kernel_that_is_none_has_no_log(put):
    assert gpu_events(put(commands={("dmesg",): "[0.0] Starting gVisor...\n"})) is None


def test_faults_of_programs_do_not_push_out_errors_of_the_gpu(put):
    fault = "[2.0] NVRM: Xid (PCI:0000:c1:00): 13, pid=7, Graphics SM Warp Exception\n"
    log = "[1.0] NVRM: Xid (PCI:0000:c1:00): 48, pid=1, DBE\n" + 40 * fault
    found = gpu_events(put("/proc/sys/kernel/dmesg_restrict", "0\n", commands={("dmesg",): log}))
    assert [of_program(event) for event in found] == [False] + [True] * 4


def test_cuda_from_all_its_places(put):
    assert cuda_version(put()) is None
    host = put("/opt/x/bin/nvcc", environ={"PATH": "/opt/x/bin"},
               commands={("/opt/x/bin/nvcc", "--version"): "Cuda compilation tools, release 12.6, V12.6.77"})  # fmt: skip
    assert cuda_version(host) == "12.6"
    assert cuda_version(put(environ={"CUDA_VERSION": "13.0.1"})) == "13.0.1"
    assert cuda_version(put("/usr/local/cuda/version.json", '{"cuda": {"version": "12.8.1"}}')) == "12.8.1"
    host = put("/sys/module/nvidia/version", "580.1", commands={
        ("nvidia-smi", "--version"): "NVIDIA-SMI version  : 580.1\nDRIVER version      : 580.1\nCUDA Version        : 13.0\n"
    })  # fmt: skip
    assert driver_cuda(host) == "13.0"


def test_rocm_from_all_its_places(put):
    assert rocm_version(put()) is None
    assert rocm_version(put("/opt/rocm-6.3.1/.info/version", "6.3.1-48\n")) == "6.3.1"
    assert rocm_version(put("/opt/rocm-6.4.0/bin/x", "")) in ("6.3.1", "6.4.0")


def test_torch_without_importing_it(put):
    site = "/home/u/venv/lib/python3.11/site-packages"
    put(f"{site}/torch-2.9.0+rocm6.4.dist-info/METADATA")
    put(f"{site}/deepspeed-0.17.1.dist-info/METADATA")
    host = put(f"{site}/torch/version.py", "__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip = '6.4.1'\n",
               environ={"VIRTUAL_ENV": "/home/u/venv"})  # fmt: skip
    assert software.package_versions(host) == {"torch": "2.9.0+rocm6.4", "deepspeed": "0.17.1", "torch-rocm": "6.4.1"}


@pytest.mark.parametrize(
    "vendor, product, name",
    [("QEMU", "Standard PC", "QEMU"), ("Microsoft Corporation", "Virtual Machine", "Hyper-V"),
     ("Amazon EC2", "p5.48xlarge", "Amazon EC2"), ("Amazon EC2", "c7g.metal", None), ("HPE", "Cray EX", None)],
)  # fmt: skip
def test_virtual_machines_by_name(put, vendor, product, name):
    put("/sys/class/dmi/id/sys_vendor", vendor)
    host = put("/sys/class/dmi/id/product_name", product)
    assert hypervisor(host) == name and virtual_machine(host) is (True if name else None)


def test_a_machine_made_from_an_image_is_no_container(put):
    host = put("/.dockerenv")
    assert read_container(host).runtime == "docker"
    host = put("/proc/self/mountinfo", "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
    assert read_container(host).runtime is None and read_container(host).inside is False, (
        "its root is a disk of its own"
    )
    host = put("/proc/self/mountinfo", "21 1 0:50 / / rw - overlay overlay rw,lowerdir=/var/lib/docker/x\n")
    assert read_container(host).runtime == "docker"
    host = put("/proc/self/mountinfo", "21 1 8:1 /var/lib/x / rw - ext4 /dev/sda1 rw\n")
    assert read_container(host).runtime == "docker", "a folder of the host's disk"


def test_the_doctor_and_the_table_say_it(tmp_path):
    tree = BUILDERS["dgx-h100"](tmp_path, 0)
    rows = [f"{i}, Disabled, Enabled, 0, 700.00, 700.00, 1980, 2619, 0x0\n" for i in range(8)]
    rows[3] = "3, Enabled, Enabled, 4, 400.00, 700.00, 1980, 2619, 0x0000000000000040\n"
    tree.told["commands"][shlex.join(nvidia.HEALTH_QUERY)] = "".join(rows)
    tree.done()
    facts = gather(FolderHost(str(tmp_path)))
    codes = {each.code for each in examine(facts)}
    assert {"gpu-memory-errors", "power-limit-low", "gpu-throttled", "gpu-divided"} <= codes
    judged = {each.code: each.severity for each in examine(facts)}
    assert judged["gpu-memory-errors"] == "error"
    of_job = {each.code: each.severity for each in examine(facts, stand_in(facts))}
    assert of_job["gpu-memory-errors"] == "warning", "no run is stopped for it"
    line = next(text for text in table(facts).splitlines() if "power limit 400 W" in text)
    assert "divided (MIG)" in line and "4 uncorrected" in line
