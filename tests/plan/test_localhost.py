"""Nodes emulated on one machine."""

from dataclasses import replace

import pytest

from drumbeat.base.order import EnvVar
from drumbeat.plan.binding import binding
from drumbeat.plan.environment import environment
from tests.plan.making import machine, named, order, peers


def test_emulated_nodes_share_out_the_machine():
    facts = machine(8)
    slots = binding(order(), facts, 0).slots + binding(order(), facts, 1).slots
    assert [slot.cpus for slot in slots] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    env = named(environment(order(), facts, peers(facts), 1))
    assert env["OMP_NUM_THREADS"].value == "2"
    assert env["GLOO_SOCKET_IFNAME"].value == "lo" and "loopback" in env["GLOO_SOCKET_IFNAME"].why


@pytest.mark.parametrize("launcher", ["torchrun", "once"])
def test_threads_are_shared_out_whoever_starts_the_ranks(launcher):
    facts = machine(8)
    asked = order(launcher=launcher)
    assert named(environment(asked, facts, peers(facts), 0))["OMP_NUM_THREADS"].value == "2"
    assert [slot.cpus for slot in binding(asked, facts, 1).slots] == [(4, 5), (6, 7)]  # a rank's shim binds it


def test_more_ranks_than_cores_share_them_and_it_is_said():
    facts = machine(2)
    bound = binding(order(), facts, 0)
    assert [slot.cpus for slot in bound.slots] == [(), ()]
    variable = named(environment(order(), facts, peers(facts), 0))["OMP_NUM_THREADS"]
    assert variable.value == "1" and "share" in variable.why


def test_user_then_site_then_detected():
    facts = machine(8, environment={"OMP_NUM_THREADS": "3"})
    site = EnvVar("GLOO_SOCKET_IFNAME", "eth9", "the site's", "site")
    env = named(environment(order(env=(site,)), facts, peers(facts), 0))
    assert (env["OMP_NUM_THREADS"].value, env["OMP_NUM_THREADS"].source) == ("3", "user")
    assert env["GLOO_SOCKET_IFNAME"] == site


def test_a_rank_without_a_gpu_has_the_numa_node_of_its_cores():
    facts = machine(8)
    facts = replace(facts, cpus=replace(facts.cpus, numa={"0": (0, 1, 2), "1": (3, 4, 5, 6, 7)}))
    slots = binding(order(), facts, 0).slots + binding(order(), facts, 1).slots
    assert [(slot.cpus, slot.numa) for slot in slots] == [((0,), 0), ((1,), 0), ((3, 4), 1), ((5, 6), 1)]
    mixed = replace(facts, cpus=replace(facts.cpus, numa={"0": (0, 2, 4, 6), "1": (1, 3, 5, 7)}))
    own = replace(order(), cpu_bind=("0-1", "2-3", "4-5", "6-7"))
    assert [slot.numa for slot in binding(own, mixed, 0).slots] == [None, None], "cores of both"
