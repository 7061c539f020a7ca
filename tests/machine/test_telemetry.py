import shlex

import pytest

from drumbeat.machine.replay import FolderHost
from drumbeat.machine.vendors import gpus, telemetry
from tests.trees.tree import Tree

# As LUMI prints it: the second GCD of each module has no power reading, and a cap of 0.0W.
LUMI = """
======================= ROCm System Management Interface =======================
================================= Concise Info =================================
GPU  Temp   AvgPwr  SCLK     MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    45.0c  89.0W   800Mhz   1600Mhz  0%   auto  560.0W    3%   100%
1    51.0c  N/A     1700Mhz  1600Mhz  0%   auto  0.0W     55%   99%
================================================================================
============================= End of ROCm SMI Log ==============================
"""


def test_the_concise_table_of_a_lumi_node():
    one, two = telemetry.parse_rocm_smi_table(LUMI)
    assert (one.index, one.temperature, one.power, one.power_cap, one.clock) == (0, 45.0, 89.0, 560.0, 800.0)
    assert (one.memory_percent, one.busy, one.fan, one.memory_clock) == (3.0, 100.0, 0.0, 1600.0)
    assert (two.index, two.power, two.power_cap, two.clock, two.memory_percent, two.busy) == (
        1,
        None,
        None,
        1700.0,
        55.0,
        99.0,
    )


def test_nvidia_csv_with_the_documents_columns():
    text = (
        "timestamp, index, name, utilization.gpu [%], utilization.memory [%], memory.total [MiB], memory.used [MiB]\n"
        "2025/12/11 10:00:00.123, 0, NVIDIA GH200 120GB, 97 %, 41 %, 97871 MiB, 30211 MiB\n"
        "2025/12/11 10:00:00.125, 3, NVIDIA GH200 120GB, [N/A], 0 %, 97871 MiB, [Not Supported]\n"
        "2025/12/11 10:00:05.1"
    )
    one, two = telemetry.parse_nvidia_csv(text)
    assert (one.index, one.busy, one.memory_busy, one.memory_used) == (0, 97.0, 41.0, 30211 << 20)
    assert (one.time, one.memory_total, one.power) == ("2025/12/11 10:00:00.123", 97871 << 20, None)
    assert (two.index, two.busy, two.memory_used) == (3, None, None)
    assert telemetry.parse_nvidia_csv("NVIDIA-SMI has failed") == []


def test_amd_smi_as_table_and_as_csv():
    table = (
        "GPU  POWER   GPU_T   MEM_T   GFX_CLK   GFX%   MEM%  VRAM_USED  VRAM_TOTAL\n"
        "  0  248 W   55 °C   48 °C  1317 MHz   76 %   22 %    1.5 GB    191.7 GB\n"
        "  1    N/A   50 °C   42 °C   132 MHz    0 %    0 %    283 MB   196300 MB\n"
    )
    one, two = telemetry.parse_amd_smi_monitor(table)
    assert (one.power, one.temperature, one.clock, one.busy, one.memory_busy) == (248.0, 55.0, 1317.0, 76.0, 22.0)
    assert (one.memory_used, two.power, two.memory_used) == (int(1.5 * (1 << 30)), None, 283 << 20)
    (again,) = telemetry.parse_amd_smi_monitor("gpu,power_usage,gfx,vram_used,vram_total\n0,173,12,285,196592\n")
    assert (again.power, again.busy, again.memory_total) == (173.0, 12.0, 196592 << 20)


def test_amd_sysfs_needs_no_tool(tmp_path):
    tree = Tree(tmp_path, "n1")
    for bus, power in (("c1", True), ("c6", False)):
        tree.amd_gpu(f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:00.0", 0, "0x7408", 90010, 64, power=power)
        base = f"/sys/bus/pci/devices/0000:{bus}:00.0"
        tree.file(f"{base}/gpu_busy_percent", 87)
        tree.file(f"{base}/mem_info_vram_used", 5 << 30)
    tree.done()
    host = FolderHost(str(tmp_path))
    one, two = telemetry.read_amd_sysfs(host, gpus.read(host))
    assert (one.busy, one.power, one.memory_used, one.memory_total) == (87.0, 90.0, 5 << 30, 64 << 30)
    assert (two.busy, two.power, two.power_cap) == (87.0, None, None)


@pytest.mark.parametrize("command", [telemetry.NVIDIA_COMMAND, telemetry.ROCM_COMMAND, telemetry.AMD_COMMAND])
def test_the_commands_are_plain_words(command):
    assert shlex.split(shlex.join(command)) == list(command)


@pytest.mark.parametrize("text", ["", "\0" * 50, "0 " * 500, "1 %%% W W", "GPU\n" + "9" * 400, "0,1\n" * 50, "é" * 100])
def test_nonsense_gives_nothing_and_does_not_fail(text):
    for parse in (telemetry.parse_nvidia_csv, telemetry.parse_rocm_smi_table, telemetry.parse_amd_smi_monitor):
        assert all(sample.power is None for sample in parse(text))
