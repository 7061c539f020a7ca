"""The gate's thinking: lines, counters and a false clock in; verdicts, warnings and stops out."""

import pytest

from drumbeat.agent.watchers.contract import Emit, Saw, Stop, Warn
from drumbeat.agent.watchers.transport import Gate, Place, named
from drumbeat.base.order import Expect
from tests.gate.logs import channel_lines, log

MB = 1 << 20
WANTED = (("GLOO_SOCKET_IFNAME", "fast0"),)


class World:
    """A gate with its clock; remembers all it asked for."""

    def __init__(self, expect=None, level="stop", **place):
        self.gate = Gate(expect or Expect(), level, Place(**{"node": 0, "host": "n0", "nodes": 2, **place}))
        self.now, self.number = 100.0, 0
        self.actions = []
        self.counters(**dict.fromkeys(("eth0", "fast0", "mgmt0", "ib0", "lo", "mlx5_0"), 0))
        self.saw("started", pids=[1])

    def saw(self, kind, **data):
        found = self.gate.on(Saw(kind, data), self.now)
        self.actions += found
        return found

    def lines(self, lines):
        for text in lines:
            self.number += 1
            self.saw("line", rank=0, stream="nccl", file="nccl-rank0.log", number=self.number, text=text)
        return self

    def counters(self, rdma=True, part=1.0, **bytes_each_way):
        """Bytes received since the start; `part` of them were sent."""
        net = {name: (int(part * n), n) for name, n in bytes_each_way.items() if not name.startswith("mlx5")}
        ports = {f"{name}:1": (n, n) for name, n in bytes_each_way.items() if name.startswith("mlx5")}
        self.now += 1
        self.saw("counters", net=net, rdma=ports if rdma else {})
        return self

    def wait(self, seconds):
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.saw("tick")
        return self

    def end(self):
        self.saw("ended")
        return self

    def verdict(self, check="transport"):
        found = [a.data["verdict"] for a in self.actions if isinstance(a, Emit) and a.data["verdict"].check == check]
        assert len(found) <= 1, "a verdict is said once"
        return found[0] if found else None

    @property
    def stops(self):
        return [action.finding for action in self.actions if isinstance(action, Stop)]

    @property
    def warnings(self):
        return [action.finding for action in self.actions if isinstance(action, Warn)]


def test_the_expected_network_is_recorded_within_seconds_of_the_first_collective():
    world = World(Expect("rdma", True)).lines(log(channels=False)).wait(30)
    assert world.verdict() is None, "NCCL connects lazily: a choice is not a use"
    world.lines(channel_lines()).wait(2)
    assert world.verdict().answer == "rdma" and world.verdict().confidence == "certain"
    said = next(action.data["seconds"] for action in world.actions if isinstance(action, Emit))
    assert said <= 32.5
    assert not world.stops and not world.warnings and not world.gate.mismatch


def test_tcp_instead_of_rdma_stops_with_the_logs_own_cause():
    before = ["Failed to open libibverbs.so[.1]"]
    world = World(Expect("rdma")).lines(log(network="Socket", before=before)).wait(2)
    (stop,) = world.stops
    assert stop.code == "transport-mismatch" and stop.severity == "error" and stop.host == "n0"
    assert "libibverbs" in stop.cause and "rdma-core" in stop.cause and "libibverbs1" in stop.fix
    assert any("via NET/Socket/0" in evidence.text for evidence in stop.evidence)
    assert stop.evidence[0].file == "nccl-rank0.log" and stop.evidence[0].line > 5
    assert world.gate.mismatch


def test_warn_is_only_a_warning():
    world = World(Expect("rdma"), level="warn").lines(log(network="Socket")).wait(2)
    assert not world.stops and [each.code for each in world.warnings] == ["transport-mismatch"]


@pytest.mark.parametrize(
    "expect,made,right",
    [
        (Expect("rdma"), {"network": "IB", "link": "IB"}, True),
        (Expect("rdma"), {"network": "AWS Libfabric"}, True),
        (Expect("ib"), {"network": "IB", "link": "IB"}, True),
        (Expect("ib"), {"network": "IB", "link": "RoCE"}, False),
        (Expect("roce"), {"network": "IB", "link": "RoCE"}, True),
        (Expect("ofi"), {"network": "IB"}, False),
        (Expect("ofi", True), {"network": "AWS Libfabric"}, True),
        (Expect("tcp"), {"network": "Socket"}, True),
        (Expect("tcp"), {"network": "IB"}, False),
        (Expect("rdma", True), {"network": "IB", "gdr": False}, False),
        (Expect("any", True), {"network": "IB", "gdr": False}, False),
        (Expect("any", False), {"network": "IB", "gdr": True}, False),
        (Expect("any", True), {"network": "Socket"}, False),
        (Expect(), {"network": "Socket"}, True),
    ],
)
def test_what_is_a_mismatch(expect, made, right):
    world = World(expect).lines(log(**made)).wait(2)
    assert world.verdict() is not None
    assert bool(world.stops) != right, world.verdict()


def test_one_node_uses_no_network_and_that_is_no_mismatch():
    world = World(Expect("rdma", True), nodes=1).lines(log(nodes=1)).wait(2)
    assert world.verdict().answer == "local" and not world.stops and not world.warnings


def test_several_nodes_of_which_only_insides_were_seen_are_not_proved():
    world = World(Expect("rdma")).lines(log(nodes=1)).wait(10)
    assert world.verdict() is None
    world.end()
    assert [each.code for each in world.warnings] == ["transport-unproved"] and not world.stops


def test_a_communicator_that_never_formed_is_no_local_transport():
    """Two ranks on one GPU: NCCL refuses (Duplicate GPU) before anything is connected."""
    lines = [
        line for line in log(nodes=1, channels=False) if "Init COMPLETE" not in line and "nnodes" not in line.lower()
    ]
    world = World(nodes=1).lines(lines).wait(2).end()
    assert world.verdict().answer == "unknown" and world.verdict().confidence == "unknown"


def test_what_is_only_likely_is_said_late_and_as_that():
    world = World(Expect("rdma")).lines(log(network="IB", channels=False)).wait(130)
    assert world.verdict().answer == "rdma" and world.verdict().confidence == "likely"


def test_tcp_beside_an_idle_rdma_port_is_a_warning_even_where_nothing_was_expected():
    world = World(fast=("mlx5_0 (Ethernet)",)).lines(log(network="Socket")).wait(2)
    assert [each.code for each in world.warnings] == ["fast-network-unused"] and not world.stops


def test_a_log_that_says_rdma_while_the_interface_carries_the_bytes():
    world = World(Expect("rdma")).lines(log()).wait(2).counters(eth0=400 * MB, mlx5_0=MB).wait(1)
    assert world.verdict().answer == "rdma"
    assert [each.code for each in world.stops] == ["rdma-not-used"]
    assert world.verdict("traffic").answer == "eth0"


def test_one_node_has_no_traffic_between_nodes_whatever_its_interfaces_carry():
    world = World(nodes=1, wanted=WANTED).counters(mgmt0=900 * MB, fast0=0).wait(5).end()
    assert world.verdict("traffic").answer == "unknown" and not world.stops and not world.warnings


def test_the_cause_is_the_logs_own_and_no_passing_advice():
    advice = ["NUMA auto balancing enabled which can lead to variability in the RCCL performance!"]
    world = World(Expect("rdma")).lines(log(network="Socket", before=advice)).wait(2)
    assert "NUMA" not in world.stops[0].cause and "tcp" in world.stops[0].cause


def test_rdma_counters_confirm_the_log():
    world = World(Expect("rdma")).lines(log()).wait(2).counters(eth0=2 * MB, mlx5_0=500 * MB).wait(1)
    assert world.verdict("traffic").answer == "rdma" and not world.stops and world.gate.done


def test_the_cards_in_use_are_recorded_per_rank_and_per_port():
    world = World(Expect("rdma")).lines(log()).wait(2).counters(mlx5_0=900 * MB).wait(1)
    said = {action.data["verdict"].check: action.data for action in world.actions if isinstance(action, Emit)}
    assert said["transport"]["nics"] == {"0": ("mlx5_0",)}
    assert said["traffic"]["carried"] == {"mlx5_0:1": 900 * MB}


def test_without_rdma_counters_the_log_is_not_doubted():
    world = World(Expect("rdma")).lines(log()).wait(2).counters(rdma=False, eth0=400 * MB).wait(1).end()
    assert not world.stops and not world.warnings


def test_ip_over_infiniband_counts_at_the_port_as_well_and_is_taken_off():
    world = World(Expect("rdma"), over_ib=("ib0",)).lines(log(link="IB")).wait(2)
    world.counters(ib0=400 * MB, mlx5_0=405 * MB).wait(1)
    assert [each.code for each in world.stops] == ["rdma-not-used"]


def test_gloo_over_the_wrong_interface():
    world = World(wanted=WANTED).counters(mgmt0=20 * MB, fast0=100_000).wait(1)
    (stop,) = world.stops
    assert stop.code == "wrong-interface" and "mgmt0" in stop.title and "GLOO_SOCKET_IFNAME=fast0" in stop.title


def test_gloo_over_the_right_interface_is_tcp_by_the_counters():
    world = World(Expect("tcp"), wanted=WANTED).counters(mgmt0=100_000, fast0=20 * MB).wait(1)
    assert world.verdict("traffic").answer == "fast0"
    assert world.verdict().answer == "tcp" and world.verdict().confidence == "likely" and not world.stops


def test_a_download_is_one_sided_and_no_talk_between_ranks():
    world = World(Expect("rdma"), wanted=WANTED).counters(part=0.02, mgmt0=90_000 * MB, fast0=0).wait(5)
    assert not world.actions
    world.end()
    assert not world.stops


def test_the_chatter_of_a_system_is_no_talk_between_ranks():
    world = World(wanted=WANTED)
    for second in range(1, 300):
        world.counters(mgmt0=second * 200_000, fast0=0).wait(0.25)
    assert not world.actions


def test_on_gpu_nodes_nothing_is_concluded_before_nccl_speaks():
    """Ranks that fetch and exchange data before their first collective are not talking over the wrong network."""
    world = World(Expect("rdma", True), gpus=True).counters(eth0=900 * MB, mlx5_0=0).wait(60)
    assert not world.actions
    world.lines(log()).wait(2).counters(eth0=900 * MB, mlx5_0=9000 * MB).wait(1)
    assert world.verdict().answer == "rdma" and world.verdict("traffic").answer == "rdma" and not world.stops


def test_on_gpu_nodes_without_any_log_the_expected_network_is_not_proved():
    world = World(Expect("rdma"), gpus=True).counters(eth0=900 * MB, mlx5_0=0).wait(60).end()
    assert world.verdict().answer == "unknown" and not world.stops
    assert [each.code for each in world.warnings] == ["transport-unproved"]


def test_gloo_where_rdma_was_expected():
    world = World(Expect("rdma")).counters(eth0=50 * MB, mlx5_0=0).wait(1)
    assert [each.code for each in world.stops] == ["transport-mismatch"]


def test_loopback_is_unknown_and_stops_nobody():
    world = World(Expect("rdma"), emulated=True).counters(lo=500 * MB).wait(300).end()
    assert [each.code for each in world.warnings] == ["expectation-not-checked"], "nobody takes silence for a proof"
    assert world.verdict().answer == "unknown" and world.verdict("traffic").answer == "unknown"
    assert not world.stops


def test_bytes_are_counted_from_before_the_ranks():
    world = World(wanted=WANTED)
    world.gate = Gate(Expect(), "stop", world.gate.place)
    world.counters(mgmt0=900 * MB, fast0=0)
    world.saw("started", pids=[1])
    world.counters(mgmt0=900 * MB, fast0=30 * MB).wait(1)
    assert world.verdict("traffic").answer == "fast0" and not world.stops


def test_when_all_is_said_nothing_more_is():
    world = World(Expect("rdma")).lines(log()).wait(2).counters(mlx5_0=500 * MB).wait(1)
    before = len(world.actions)
    world.lines(log(rank=1, network="Socket")).counters(eth0=900 * MB).wait(5).end()
    assert len(world.actions) == before


@pytest.mark.parametrize(
    "value,interface,prefixes,takes",
    [
        ("hsn", "hsn0", True, True),
        ("=hsn", "hsn0", True, False),
        ("=hsn0,hsn1", "hsn1", True, True),
        ("^docker,lo", "eth0", True, True),
        ("^docker,lo", "docker0", True, False),
        ("eth", "eth0", False, False),
        ("eth1,eth0", "eth0", False, True),
    ],
)
def test_interface_names(value, interface, prefixes, takes):
    assert named(value, interface, prefixes) is takes
