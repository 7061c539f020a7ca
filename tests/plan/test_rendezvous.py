"""Where the ranks meet."""

import dataclasses

from drumbeat.machine.model import Interface, Peer, Peers
from drumbeat.plan.network import ComputeNics, choose
from drumbeat.plan.scene import CANDIDATES, ports, rendezvous
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.plan.making import machine, order, peers

NORMAL = (32768, 60999)


def test_ports_belong_to_job_and_step_and_lie_outside_what_the_kernel_gives_away():
    found, findings = ports("812.0", NORMAL)
    assert found == ports("812.0", NORMAL)[0] and len(set(found)) == CANDIDATES and not findings
    assert all(60999 < port < 65536 for port in found)
    assert found != ports("812.1", NORMAL)[0] and found != ports("813.0", NORMAL)[0]


def test_other_ranges_of_the_kernel():
    low, findings = ports("812.0", (30000, 65535))
    assert all(20000 <= port < 29500 for port in low) and not findings
    tight, findings = ports("812.0", (21500, 65535))
    assert all(20000 <= port < 21500 for port in tight) and not findings
    narrow, _ = ports("812.0", (32768, 64600))  # 935 ports above are too few to meet on by chance
    assert all(20000 <= port < 29500 for port in narrow)
    none_left, findings = ports("812.0", (1024, 65535))
    assert len(none_left) == CANDIDATES and [each.code for each in findings] == ["ephemeral-range-wide"]


def test_two_steps_on_one_node_meet_apart():
    everywhere = [ports(f"{job}.{step}", NORMAL)[0][0] for job in range(100, 130) for step in range(3)]
    assert len(set(everywhere)) > 85


def test_the_address_is_node_0_on_the_right_interface():
    facts = facts_of("lumi-g")
    meeting = rendezvous(order_of("lumi-g", facts), peers_of(facts))
    assert (meeting.address, meeting.run_id) == ("10.253.0.26", "8123.0")
    thor = facts_of("mi300x-thor2")
    assert rendezvous(order_of("mi300x-thor2", thor), peers_of(thor)).address == "10.1.0.10"


def test_the_address_by_which_node_0_was_reached_is_kept_on_its_interface():
    facts = facts_of("mi300x-thor2")
    two = dataclasses.replace(
        facts[0],
        interfaces=tuple(
            dataclasses.replace(one, addresses=("10.1.0.9/24", *one.addresses)) if one.name == "ens50f0np0" else one
            for one in facts[0].interfaces
        ),
    )
    known = peers_of([two, facts[1]])
    reached = Peers((dataclasses.replace(known.nodes[0], address="10.1.0.10"), known.nodes[1]), "", 0)
    assert rendezvous(order_of("mi300x-thor2", facts), reached).address == "10.1.0.10"


def test_one_node_and_emulated_nodes_stay_at_home():
    facts = facts_of("lumi-g", 1)
    assert rendezvous(order_of("lumi-g", facts), peers_of(facts)).address == "127.0.0.1"
    here = machine(2)
    assert rendezvous(order(master="127.0.0.1"), peers(here)).address == "127.0.0.1"


def test_a_master_that_sends_each_node_to_itself_is_said():
    facts = facts_of("dgx-h100")
    wrong = [dataclasses.replace(each, environment={"MASTER_ADDR": "localhost"}) for each in facts]
    found = rendezvous(order_of("dgx-h100", facts), peers_of(wrong))
    assert [each.code for each in found.findings] == ["master-is-localhost"] and found.address == "10.0.0.1"
    pods = [dataclasses.replace(each, identity=dataclasses.replace(each.identity, own_home=True)) for each in wrong]
    assert not rendezvous(order_of("dgx-h100", facts), peers_of(pods)).findings, (
        "an operator sets it in the master's pod"
    )


def test_nothing_known_is_left_open():
    assert rendezvous(order(emulated=False), Peers((), "", 0)).address == ""


def two_networks(**environment):
    """Each node has a slow interface first by name, and a fast one."""
    found = []
    for node in range(2):
        slow = Interface("eno1", True, (f"10.9.0.{node + 1}/24",), 1000)
        fast = Interface("ens50f0np0", True, (f"10.1.0.{node + 1}/24",), 200_000)
        found.append(dataclasses.replace(machine(4, interfaces=(slow, fast), environment=environment), host=f"n{node}"))
    return found


def meeting(facts, address="", **changes):
    nodes = tuple(Peer(node, each.host, address if node == 0 else "", each, ranks=2) for node, each in enumerate(facts))
    return rendezvous(order(emulated=False, **changes), Peers(nodes, "", 0))


def test_a_fast_interface_before_a_slow_one_and_the_reason_that_was_used():
    facts = two_networks()
    assert meeting(facts).address == "10.1.0.1" and "reached" not in meeting(facts).why
    assert meeting(facts, address="10.9.0.1").address == "10.1.0.1", (
        "200 times as fast, and the others are in its subnet"
    )
    choice = choose(
        facts[0], Peers(tuple(Peer(n, f.host, "", f) for n, f in enumerate(facts)), "", 0), 0, ComputeNics()
    )
    assert "the fastest of 2" in choice.why and "reached" not in choice.why


def test_of_two_fast_enough_ones_that_by_which_it_was_reached():
    facts = two_networks()
    facts = [
        dataclasses.replace(
            each, interfaces=tuple(dataclasses.replace(one, speed_mbps=25_000) for one in each.interfaces)
        )
        for each in facts
    ]
    assert meeting(facts, address="10.1.0.1").why == "node 0's address on ens50f0np0, where it was reached"
    peers = Peers((Peer(0, "n0", "10.1.0.1", facts[0]), Peer(1, "n1", "", facts[1])), "", 0)
    assert "the other nodes reached this one by it" in choose(facts[0], peers, 0, ComputeNics()).why


def test_an_exported_address_and_port_are_the_users():
    found = meeting(two_networks(MASTER_ADDR="10.9.0.1", MASTER_PORT="29512"))
    assert found.address == "10.9.0.1" and found.ports[0] == 29512 and len(found.ports) == CANDIDATES + 1
    assert "MASTER_ADDR is exported; node 0 has it on eno1" in found.why and "MASTER_PORT=29512" in found.why
    elsewhere = meeting(two_networks(MASTER_ADDR="10.99.0.1"))
    assert [each.code for each in elsewhere.findings] == ["master-is-elsewhere"] and elsewhere.address == "10.1.0.1"
    assert meeting(two_networks(MASTER_ADDR="n0")).findings == ()
