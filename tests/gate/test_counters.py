"""Byte counters in sysfs' own shapes, in a folder laid out like a machine's `/`."""

import json

from drumbeat.agent.watchers.transport import Counters
from drumbeat.machine.host import LiveHost
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.sample import read_counters


def machine(tmp_path, files):
    for path, text in files.items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")
    (tmp_path / "host.json").write_text(json.dumps({"hostname": "n1"}))
    return FolderHost(str(tmp_path))


def test_interfaces_and_ports_of_every_driver(tmp_path):
    port = "sys/class/infiniband/{}/ports/1/{}"
    host = machine(
        tmp_path,
        {
            "sys/class/net/eth0/statistics/tx_bytes": 1000,
            "sys/class/net/eth0/statistics/rx_bytes": 2000,
            "sys/class/net/odd0/statistics/tx_bytes": "not a number",
            port.format("mlx5_0", "counters/port_xmit_data"): 25,  # words of four bytes
            port.format("mlx5_0", "counters/port_rcv_data"): 50,
            port.format("rdmap0s6", "hw_counters/tx_bytes"): 7,  # EFA
            port.format("rdmap0s6", "hw_counters/rx_bytes"): 8,
            port.format("ionic_0", "hw_counters/tx_rdma_ucast_bytes"): 9,
            port.format("ionic_0", "hw_counters/rx_rdma_ucast_bytes"): 10,
            port.format("dark_0", "state"): "4: ACTIVE",
        },
    )
    counted = read_counters(host)
    assert counted["net"] == {"eth0": (1000, 2000)}
    assert counted["rdma"] == {"mlx5_0:1": (100, 200), "rdmap0s6:1": (7, 8), "ionic_0:1": (9, 10)}


def test_this_machine_has_a_loopback():
    assert read_counters(LiveHost())["net"]["lo"] >= (0, 0)


def test_once_a_second_while_wanted(tmp_path):
    wanted = [True]
    counters = Counters(machine(tmp_path, {}), lambda: wanted[0])
    seen = [now for now in (0.0, 0.25, 0.9, 1.0, 1.5, 2.1) if counters.poll(now)]
    assert seen == [0.0, 1.0, 2.1]
    assert counters.poll(2.2, final=True)
    wanted[0] = False
    assert not counters.poll(9.0)
