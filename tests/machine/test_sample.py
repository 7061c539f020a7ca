"""What is sampled while a job runs; unknown is None."""

from drumbeat.machine.model import Gpu
from drumbeat.machine.replay import open_host
from drumbeat.machine.sample import Sampler

FILES = {
    "sys/bus/pci/devices/0000:c1:00.0/gpu_busy_percent": "97",
    "sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_total": "68702699520",
    "sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_used": "1234567168",
    "sys/bus/pci/devices/0000:c1:00.0/hwmon/hwmon3/temp1_input": "43000",
    "sys/bus/pci/devices/0000:c1:00.0/hwmon/hwmon3/power1_average": "302000000",
    "sys/bus/pci/devices/0000:c1:00.0/hwmon/hwmon3/power1_cap": "560000000",
    "sys/bus/pci/devices/0000:c1:00.0/hwmon/hwmon3/freq1_input": "1700000000",
    "sys/bus/pci/devices/0000:c1:00.0/hwmon/hwmon3/freq2_input": "1600000000",
    # the second GCD of the module: no power, and a cap of 0
    "sys/bus/pci/devices/0000:c6:00.0/gpu_busy_percent": "0",
    "sys/bus/pci/devices/0000:c6:00.0/hwmon/hwmon4/temp1_input": "41000",
    "sys/bus/pci/devices/0000:c6:00.0/hwmon/hwmon4/power1_cap": "0",
    "proc/stat": "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4\n",
    "proc/loadavg": "1.50 1.00 0.50 1/100 1\n",
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n",
    "sys/class/net/hsn0/statistics/rx_bytes": "5000",
    "sys/class/net/hsn0/statistics/tx_bytes": "7000",
    "sys/class/net/lo/statistics/rx_bytes": "1",
    "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "25",
    "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "50",
}


def test_amd_from_sysfs(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = Sampler(
        open_host(str(tmp_path)), [Gpu(0, "amd", pci="0000:c1:00.0"), Gpu(1, "amd", pci="0000:c6:00.0")]
    ).sample()
    first, second = found["gpus"]
    assert first["busy"] == 97 and first["memory_total"] == 68702699520 and first["memory_used"] == 1234567168
    assert (first["temperature"], first["power"], first["power_cap"]) == (43.0, 302.0, 560.0)
    assert (first["clock"], first["memory_clock"]) == (1700.0, 1600.0)
    assert second["busy"] == 0 and second["power"] is None and second["power_cap"] is None
    assert found["cpu"] == {"busy_ticks": 150, "all_ticks": 1000, "load": 1.5}
    assert found["memory"] == {"total": 1024000, "used": 614400}
    assert found["network"] == {
        "hsn0": {"received": 5000, "sent": 7000},
        "mlx5_0:1": {"received": 100, "sent": 200},
    }


def test_a_bare_machine_is_unknown_not_zero(tmp_path):
    found = Sampler(open_host(str(tmp_path)), [Gpu(0, "amd", pci="0000:c1:00.0")]).sample()
    assert found["gpus"][0]["busy"] is None and found["cpu"]["busy_ticks"] is None
    assert found["memory"] == {"total": None, "used": None} and found["network"] == {}
