"""Whatever a node says or leaves out: a plan comes out, and no two ranks share a core unless they must."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.machine.model import Cpus, Facts, Gpu
from drumbeat.plan.binding import binding
from drumbeat.plan.show import differences, plan_lines, plan_node
from drumbeat.plan.variables import COMPUTED, SETTINGS
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.plan.damage import damaged
from tests.plan.making import machine, order

NAMES = ("lumi-g", "mi300x-thor2", "rcp-pod", "dgx-h100", "workstation")
KNOWN = {entry.name for entry in (*SETTINGS, *COMPUTED)}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 10**9), st.sampled_from((0.02, 0.2, 0.6)))
def test_a_plan_comes_out_of_partial_facts(name, seed, chance):
    rng = random.Random(seed)
    facts = [damaged(each, rng, chance) for each in facts_of(name)]
    job = order_of(name, facts_of(name))
    plans = [plan_node(job, each, peers_of(facts), node) for node, each in enumerate(facts)]
    assert plan_lines(plans[0], explain=True)
    differences(plans[0], plans[1])
    for plan in plans:
        bound = [slot.cpus for slot in plan.binding.slots]
        assert len({cpu for cpus in bound for cpu in cpus}) == sum(map(len, bound))
        assert {each.name for each in plan.variables if each.source in ("detected", "default")} <= KNOWN
        assert all(each.why for each in plan.variables)


@st.composite
def machines(draw):
    """Any shape: NUMA nodes of unequal size, hardware threads, holes in what may be used, GPUs anywhere."""
    nodes = draw(st.integers(1, 4))
    sizes = [draw(st.integers(0, 6)) for _ in range(nodes)]
    smt = draw(st.sampled_from((1, 2)))
    total = sum(sizes)
    siblings = tuple(tuple(core + total * thread for thread in range(smt)) for core in range(total))
    numa, start = {}, 0
    for node, size in enumerate(sizes):
        numa[str(node)] = tuple(cpu for core in siblings[start : start + size] for cpu in core)
        start += size
    online = tuple(range(total * smt))
    allowed = tuple(cpu for cpu in online if draw(st.booleans()))
    width = draw(st.integers(1, 4))
    l3 = tuple(tuple(c for core in siblings[at : at + width] for c in core) for at in range(0, total, width))
    gpus = tuple(
        Gpu(index, "amd", numa=draw(st.sampled_from((None, -1, 0, 1, 2, 3))))
        for index in range(draw(st.integers(0, 6)))
    )
    return Facts("m", cpus=Cpus(online=online, allowed=allowed, numa=numa, l3=l3, siblings=siblings), gpus=gpus)


@settings(max_examples=150, deadline=None)
@given(machines(), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_no_two_ranks_share_a_core(facts, ranks, nodes, emulated):
    job = order(ranks_per_node=ranks, nodes=nodes, emulated=emulated)
    slots = [slot for node in range(nodes if emulated else 1) for slot in binding(job, facts, node).slots]
    bound = [slot.cpus for slot in slots]
    cores = {cpu: core for core, group in enumerate(facts.cpus.siblings) for cpu in group}
    used = [{cores[cpu] for cpu in cpus} for cpus in bound]
    assert len(set().union(*used)) == sum(map(len, used)), "hardware threads of one core in two ranks"
    assert {cpu for cpus in bound for cpu in cpus} <= set(facts.cpus.allowed or facts.cpus.online)
    usable = {cores[cpu] for cpu in facts.cpus.allowed or facts.cpus.online}
    assert all(bound) == (len(usable) >= len(slots)), "all are bound, or none is"
    assert binding(job, facts, 0).threads >= 1


def test_the_same_job_gets_the_same_plan():
    facts = machine(8)
    assert binding(order(), facts, 0) == binding(order(), facts, 0)
