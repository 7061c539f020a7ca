"""The model of a step: one formula for plain numbers and arrays, terms that add up, and what must make a step slower."""

import dataclasses
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumbeat.predict import cost
from drumbeat.predict.cost import Constants, Layout, Software, Work, fit, plain, stack
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.machine import FRAMEWORKS, find_cluster, machine_of, states_of
from drumbeat.predict.models import named

MODEL = named("llama3-8b").model
MACHINE = machine_of(find_cluster("h100"), "bf16")
layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 16, 64]),
    vp=st.sampled_from([1, 2]), zero=st.sampled_from([0, 1, 2, 3]), micro=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from([0, 1, 2]), sp=st.sampled_from([0, 1]),
)  # fmt: skip


def seconds(layout, machine=MACHINE, constants=None, work=None, software=None, x=plain, model=MODEL):
    return cost.step(
        model, work or Work(8192, 512), layout, software or Software(), machine, constants or Constants(), x
    )


@given(layouts)
def test_the_terms_add_up_and_none_is_nan(layout):
    terms = seconds(layout)
    total = terms.pop("total")
    assert math.isfinite(total) and total > 0
    assert sum(terms.values()) == pytest.approx(total)


@given(st.lists(layouts, min_size=1, max_size=20))
def test_arrays_and_plain_numbers_agree(many):
    rows = stack(many)
    found = seconds(rows, x=numpy)["total"]
    states = FRAMEWORKS["megatron"].states
    held = cost.peak(MODEL, Work(8192, 512), rows, Software(), states, numpy)
    for i, layout in enumerate(many):
        assert found[i] == pytest.approx(seconds(layout)["total"], rel=1e-9)
        assert held[i] == pytest.approx(cost.peak(MODEL, Work(8192, 512), layout, Software(), states), rel=1e-9)


@given(layouts)
def test_a_slower_machine_is_never_faster(layout):
    for name in ("flops", "memory_rate", "link", "nic"):
        worse = dataclasses.replace(MACHINE, **{name: getattr(MACHINE, name) / 2})
        assert seconds(layout, worse)["total"] >= seconds(layout)["total"] * 0.999


def test_full_recomputation_costs_a_forward_pass_and_saves_memory():
    keep, again = Layout(dp=8, zero=1), Layout(dp=8, zero=1, recompute=2)
    ratio = seconds(again)["total"] / seconds(keep)["total"]
    assert 1.2 < ratio < 1.4
    states = FRAMEWORKS["megatron"].states
    assert cost.peak(MODEL, Work(8192, 8), again, Software(), states) < cost.peak(
        MODEL, Work(8192, 8), keep, Software(), states
    )


def test_a_pipeline_waits_by_its_bubble():
    few, many = (seconds(Layout(pp=4, dp=1, micro=1), work=Work(8192, n)) for n in (4, 64))
    assert few["bubble"] / few["total"] == pytest.approx(3 / 7, abs=0.06)
    assert many["bubble"] / many["total"] < 0.06
    halved = seconds(Layout(pp=4, vp=2, dp=1, micro=1), work=Work(8192, 4))
    assert halved["bubble"] == pytest.approx(few["bubble"] / 2, rel=0.01)


def test_groups_share_the_adapters_of_a_node():
    """Tensor parallelism over two nodes has all adapters; replicas of a rank have one of eight."""
    assert cost.members_per_node(16, 1, 8, plain) == 8
    assert cost.members_per_node(32, 8, 8, plain) == 1
    constants, machine = Constants(delay=1e-9), dataclasses.replace(MACHINE, link=1e15)
    whole = cost.gather_seconds(16, 1, 1e9, machine, constants, plain)
    share = cost.gather_seconds(16, 8, 1e9, machine, constants, plain)
    assert share / whole == pytest.approx(8 * (15 / 16) / (1 / 2), rel=0.01)


def test_few_gpus_joined_in_pairs_have_few_links():
    machine = machine_of(find_cluster("mi300x"), "bf16")
    assert cost.link_rate(8, machine, Constants(), plain) == pytest.approx(
        7 * cost.link_rate(2, machine, Constants(), plain)
    )


@pytest.mark.parametrize(
    ("model", "precision", "batch", "recompute", "gib", "ms"),
    [  # measured on one H200 with drumbeat's runtime: measured/gpu.md
        ("1b", "bf16-master", 2, 0, 38.6, 283.3),
        ("1b", "bf16-master", 8, 0, 98.5, 1098.3),
        ("1b", "fp8", 8, 0, 92.9, 823.7),  # 94.9 GiB when a slice's 8-bit gradient (2.0) outlived its use
        ("8b", "bf16-master", 1, 1, 130.9, 778.0),
    ],
)
def test_own_runtime_is_predicted_as_it_was_measured(model, precision, batch, recompute, gib, ms):
    framework = FRAMEWORKS["drumbeat"]
    layout = Layout(micro=batch, recompute=recompute)
    case = Case(
        named(model).model, Work(8192, batch), layout, framework, find_cluster("h200"), precision, framework.constants
    )
    found = forecast(case)
    assert (found.memory - cost.CONTEXT) / 2**30 == pytest.approx(gib, rel=0.02)
    assert found.seconds * 1e3 == pytest.approx(ms, rel=0.05)


def test_a_fit_finds_the_constants_that_made_the_data():
    true = Constants(product=0.7, nic=0.4, launch=1e-3)
    rows = stack(
        [Layout(tp=t, pp=p, dp=64 // t // p, micro=b, zero=1) for t in (1, 2, 8) for p in (1, 4) for b in (1, 4)]
    )
    measured = seconds(rows, constants=true, x=numpy)["total"]
    found = fit(lambda c: seconds(rows, constants=c, x=numpy)["total"], measured, Constants(), noise=0.01)
    again = seconds(rows, constants=found, x=numpy)["total"]
    assert numpy.abs(again / measured - 1).max() < 0.02


def test_one_disturbed_run_does_not_bend_the_constants():
    rows = stack([Layout(dp=8, micro=b, zero=z) for b in (1, 2, 4) for z in (0, 1, 3)])
    measured = seconds(rows, x=numpy)["total"]
    disturbed = measured.copy()
    disturbed[0] *= 3
    found = fit(lambda c: seconds(rows, constants=c, x=numpy)["total"], disturbed, Constants(), noise=0.03)
    assert numpy.abs(seconds(rows, constants=found, x=numpy)["total"] / measured - 1).max() < 0.05


def test_states_follow_precision_and_sharding():
    own, megatron = FRAMEWORKS["drumbeat"], FRAMEWORKS["megatron"]
    assert states_of(own, "bf16-master", False).weights == 2 and states_of(own, "bf16", True).gathered == 1
    assert states_of(megatron, "bf16", False) == megatron.states and states_of(megatron, "fp32", False).weights == 4
