"""Throttle reasons, energy, ECC and link counters: through NVML, from amdgpu's own table, and from vendor tools."""

import json
import os
import shlex
import shutil
import struct
import subprocess

import pytest

from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Gpu
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.sample import Sampler
from drumbeat.machine.vendors.amd import AMD_SMI_MONITOR, ROCM_SMI_TABLE, AmdMetrics, parse_gpu_metrics, slowed_by
from drumbeat.machine.vendors.nvidia import SAMPLE_QUERIES, open_nvml

# A library with the functions of NVML that we call: two GPUs, of which the second supports little.
NVML = """
#include <string.h>
typedef struct { unsigned gpu, memory; } use_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef union { double d; unsigned u; unsigned long long q; } value_t;
typedef struct { unsigned id, scope; long long t, latency; unsigned type; int error; value_t value; } field_t;
#define ONLY(d) if ((long)(d) != 1) return 3
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *d, use_t *u) { u->gpu = 90 + (long)d; u->memory = 40; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory_t *m) { m->total = 80ull << 30; m->used = 61ull << 30; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *mw) { ONLY(d); *mw = 651500; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *mw) { ONLY(d); *mw = 700000; return 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *c) { *c = 64 + sensor; return 0; }
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1755 : 2619; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *r) { ONLY(d); *r = 0x44; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj) { ONLY(d); *mj = 123456789ull; return 0; }
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int scope, unsigned long long *n) {
  ONLY(d); *n = kind ? 1 : 12 + scope; return 0;
}
int nvmlDeviceGetName(void *d, char *name, unsigned size) { strncpy(name, "NVIDIA H200", size); return 0; }
int nvmlDeviceGetFieldValues(void *d, int n, field_t *f) {
  for (int i = 0; i < n; i++) {
    f[i].type = 3; f[i].error = (long)d == 1 && (f[i].id < 140 ? f[i].scope == 0xFFFFFFFF : 1) ? 0 : 3;
    f[i].value.q = f[i].id * 1000ull;
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    path = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, folder / "nvml.c"], check=True)
    return str(path)


class HostWith(FolderHost):
    """A replayed machine that opens one library all the same."""

    def __init__(self, folder, path):
        super().__init__(str(folder))
        self.path = path

    def library(self, name):
        return LiveHost().library(self.path)


def test_nvml(library, tmp_path):
    one, two = open_nvml(HostWith(tmp_path, library)).samples()
    assert (one.index, one.busy, one.memory_busy, one.name) == (0, 91.0, 40.0, "NVIDIA H200")
    assert (one.memory_used, one.memory_total) == (61 << 30, 80 << 30)
    assert (one.power, one.power_cap, one.temperature) == (651.5, 700.0, 64.0)
    assert (one.clock, one.memory_clock, one.energy) == (1755.0, 2619.0, 123456.789)
    assert one.throttle == ("power limit", "temperature (hardware)")
    assert (one.ecc_corrected, one.ecc_uncorrected) == (12, 1)
    assert (one.link_sent, one.link_received) == (138_000 * 1024, 139_000 * 1024)
    assert (one.pcie_sent, one.pcie_received) == (197_000, 198_000)
    assert two.busy == 92.0 and (two.power, two.throttle, two.energy, two.ecc_uncorrected) == (None,) * 4
    assert (two.link_sent, two.pcie_sent) == (None, None)


@pytest.mark.parametrize("name", ["/nonexistent/none.so", "libc.so.6"])  # none, and another one
def test_no_nvml(name, tmp_path):
    assert open_nvml(HostWith(tmp_path, name)) is None


def test_the_sampler_prefers_nvml(library, tmp_path):
    found = Sampler(HostWith(tmp_path, library), [Gpu(0, "nvidia"), Gpu(1, "nvidia")]).sample()
    assert [gpu["busy"] for gpu in found["gpus"]] == [91.0, 92.0] and json.dumps(found)


def table(minor, size, **values):
    data = bytearray(size)
    struct.pack_into("<HBB", data, 0, size, 1, minor)
    for form, at, *numbers in values.values():
        struct.pack_into(f"<{len(numbers)}{form}", data, at, *numbers)
    return bytes(data)


def test_mi200_table():
    bits = 1 << 0 | 1 << 36  # PPT0, hot spot
    found = parse_gpu_metrics(table(3, 120, energy=("Q", 24, 65536 * 500), throttle=("Q", 112, bits)))
    assert found == AmdMetrics(energy=500.0, throttle=("power limit", "temperature"))
    assert parse_gpu_metrics(table(3, 120, throttle=("Q", 112, 0))).throttle == ()


@pytest.mark.parametrize(
    ("minor", "energy", "links"), [(4, 24, 104), (5, 88, 176), (6, 16, 128), (7, 24, 136), (8, 24, 136)]
)
def test_mi300_tables(minor, energy, links):
    reads, writes = ("Q", links, *[10] * 8), ("Q", links + 64, *[3] * 7, (1 << 64) - 1)
    found = parse_gpu_metrics(table(minor, 400, energy=("Q", energy, 65536), reads=reads, writes=writes))
    assert (found.energy, found.link_received, found.link_sent) == (1.0, 80 * 1024, 21 * 1024)


def test_residencies_that_grow_are_reasons():
    before = parse_gpu_metrics(table(8, 400, acc=("I", 44, 5, 5, 5, 5, 5))).residencies
    after = parse_gpu_metrics(table(8, 400, acc=("I", 44, 5, 9, 5, 5, 6))).residencies
    assert slowed_by(before, after) == ("power limit", "memory temperature") and slowed_by(None, after) is None


@pytest.mark.parametrize("data", [None, b"", b"\x01", table(3, 30), table(99, 400), b"\xff" * 120, table(8, 400)[:60]])
def test_tables_that_are_not_understood(data):
    found = parse_gpu_metrics(data)
    assert found.throttle in (None, ()) and found.energy in (None, 0.0)


def test_amd_from_sysfs(tmp_path):
    base = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    (base / "ras").mkdir(parents=True)
    (base / "gpu_busy_percent").write_text("97")
    (base / "ras/umc_err_count").write_text("ue: 1\nce: 7\n")
    (base / "gpu_metrics").write_bytes(table(8, 400, energy=("Q", 24, 65536 * 9), acc=("I", 44, 5, 5, 5, 5, 5)))
    sampler = Sampler(FolderHost(str(tmp_path)), [Gpu(0, "amd", pci="0000:c1:00.0")])
    (first,) = sampler.sample()["gpus"]
    assert (first["energy"], first["ecc_corrected"], first["ecc_uncorrected"], first["throttle"]) == (9.0, 7, 1, None)
    (base / "gpu_metrics").write_bytes(table(8, 400, energy=("Q", 24, 65536 * 19), acc=("I", 44, 5, 6, 5, 5, 5)))
    (second,) = sampler.sample()["gpus"]
    assert second["throttle"] == ["power limit"] and second["energy"] == 19.0


def host_with(tmp_path, commands):
    (tmp_path / ".drumbeat").mkdir()
    told = {"hostname": "n", "environ": {}, "commands": {shlex.join(argv): text for argv, text in commands.items()}}
    (tmp_path / ".drumbeat/host.json").write_text(json.dumps(told))
    return FolderHost(str(tmp_path))


HEAD = "index, utilization.gpu [%], clocks_throttle_reasons.active, ecc.errors.uncorrected.volatile.total\n"


@pytest.mark.parametrize(
    ("commands", "vendor", "busy"),
    [
        ({SAMPLE_QUERIES[0]: HEAD + "0, 55 %, 0x0000000000000004, 2\n"}, "nvidia", 55.0),
        ({SAMPLE_QUERIES[1]: "index, utilization.gpu [%]\n0, 56 %\n"}, "nvidia", 56.0),
        ({AMD_SMI_MONITOR: "gpu,power,gpu_t,gfx_clk,gfx%\n0,600,50,1900,57\n"}, "amd", 57.0),
        ({ROCM_SMI_TABLE: "0    45.0c  89.0W   800Mhz   1600Mhz  0%   auto  560.0W    3%   58%\n"}, "amd", 58.0),
    ],
)
def test_tools_where_nothing_else_can_be_read(tmp_path, commands, vendor, busy):
    found = Sampler(host_with(tmp_path, commands), [Gpu(0, vendor, pci="0000:c1:00.0")]).sample()
    assert found["gpus"][0]["busy"] == busy
    if busy == 55.0:
        assert (found["gpus"][0]["throttle"], found["gpus"][0]["ecc_uncorrected"]) == (["power limit"], 2)


def test_an_expensive_tool_is_asked_rarely(tmp_path, monkeypatch):
    host = host_with(tmp_path, {SAMPLE_QUERIES[0]: HEAD + "0, 55 %, 0x0, 2\n"})
    spent = iter([0.0, 0.5, 0.5, 0.5])  # seconds of processor time: the first question costs half a second
    monkeypatch.setattr(os, "times", lambda: (next(spent), 0.0, 0.0, 0.0, 0.0))
    sampler = Sampler(host, [Gpu(0, "nvidia")])
    assert sampler.sample()["gpus"] and sampler.sample()["gpus"] == []
    import time

    assert sampler._samplers[0].due - time.monotonic() > 60  # 0.5 s / 0.8 %
