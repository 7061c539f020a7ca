"""What is sampled while a job runs: AMD from the kernel's files, NVIDIA from nvidia-smi's rows; unknown is None."""

from drumbeat.facts.replay import open_host
from drumbeat.facts.telemetry import parse_nvidia, sample

FILES = {
    "sys/bus/pci/devices/0000:c1:00.0/gpu_busy_percent": "97",
    "sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_total": "68702699520",
    "sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_used": "1234567168",
    "sys/bus/pci/devices/0000:c1:00.0/power_dpm_force_performance_level": "auto",
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
    found = sample(open_host(str(tmp_path)), [(0, "0000:c1:00.0"), (1, "0000:c6:00.0")], nvidia=False)
    first, second = found["gpus"]
    assert first["use_percent"] == 97 and first["memory_total"] == 68702699520 and first["memory_used"] == 1234567168
    assert (first["temperature_c"], first["power_w"], first["power_cap_w"]) == (43.0, 302.0, 560.0)
    assert (first["sclk_mhz"], first["mclk_mhz"], first["performance"]) == (1700.0, 1600.0, "auto")
    assert second["use_percent"] == 0 and second["power_w"] is None and second["power_cap_w"] is None
    assert found["cpu"] == {"busy_ticks": 150, "all_ticks": 1000, "load": 1.5}
    assert found["memory"] == {"total": 1024000, "used": 614400}
    assert found["network"] == {
        "hsn0": {"received": 5000, "sent": 7000},
        "mlx5_0:1": {"received": 100, "sent": 200},
    }


def test_nvidia_rows():
    text = (
        "0, NVIDIA GH200 120GB, 98, 41, 97871, 80123, 55, 612.30, 900.00, 1980, 2619, [N/A], P0\n"
        "some warning of the driver\n"
    )
    (gpu,) = parse_nvidia(text)
    assert gpu["name"] == "NVIDIA GH200 120GB" and gpu["use_percent"] == 98 and gpu["memory_use_percent"] == 41
    assert gpu["memory_total"] == 97871 << 20 and gpu["memory_used"] == 80123 << 20
    assert gpu["power_w"] == 612.3 and gpu["fan_percent"] is None and gpu["performance"] == "P0"


def test_a_bare_machine_is_unknown_not_zero(tmp_path):
    found = sample(open_host(str(tmp_path)), [(0, "0000:c1:00.0")], nvidia=False)
    assert found["gpus"][0]["use_percent"] is None and found["cpu"]["busy_ticks"] is None
    assert found["memory"] == {"total": None, "used": None} and found["network"] == {}
