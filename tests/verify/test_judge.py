"""What measurements mean, on data: ceilings against published figures, wrong values, slow hosts, floors, stragglers."""

import pytest

from drumbeat.base.order import Floor
from drumbeat.machine.peaks import gpu_link_rate
from drumbeat.verify.judge import ceilings, judge
from tests.verify.making import ethernet, gemm, measured, pair, rails, results, slingshot


def verdict(check, measured_results, where=None, floors=None, emulated=False):
    judgement = judge(measured_results, where or rails(), floors or {}, emulated)
    return next(each for each in judgement.verdicts if each.check == check)


@pytest.mark.parametrize(
    "where,size,bound,usual",
    [
        (rails(nodes=2), 16, 450, 400),  # the network would allow 750: the links inside bound it first
        (slingshot(), 8, 175, 100),
        (rails(nodes=4, rate=200.0), 32, 258.3, 200),
        (rails(nodes=2, rate=100.0, nics=4), 16, 93.75, 50),
    ],
)
def test_all_reduce_ceilings_of_known_fabrics(where, size, bound, usual):
    found = ceilings(results(len(where.nodes), size // len(where.nodes)), where, False)["all_reduce"]
    assert (found.bound, found.usual) == (pytest.approx(bound, rel=0.001), pytest.approx(usual))


def test_ceilings_of_the_other_operations():
    found = ceilings(results(2, 8), rails(), False)
    assert found["send_recv"].bound == 50 and found["broadcast"].bound == 400
    assert found["all_to_all"].bound == pytest.approx(50 * 15 / 8)
    assert found["all_gather"].bound == found["reduce_scatter"].bound == found["all_reduce"].bound


def test_the_slowest_node_sets_the_pace_and_an_unknown_one_makes_it_unknown():
    slow, fast = rails(nodes=2, rate=100.0), rails(nodes=2)
    mixed = type(fast)((fast.nodes[0], slow.nodes[1]), fast.master_addr, 1)
    assert ceilings(results(2, 8), mixed, False)["broadcast"].bound == 100
    unknown = type(fast)((fast.nodes[0], rails(nodes=2, rate=None).nodes[1]), fast.master_addr, 1)
    found = ceilings(results(2, 8), unknown, False)["broadcast"]
    assert found.bound is None and "n1" in found.why


def test_gloo_is_bound_by_the_interface_it_uses():
    gloo = results(backend="gloo", device="cpu")
    assert ceilings(gloo, ethernet(), False)["broadcast"].bound == pytest.approx(1.25)
    assert ceilings(gloo, ethernet(kind="virtual"), False)["broadcast"].bound is None
    assert ceilings({**gloo, "interfaces": {"GLOO_SOCKET_IFNAME": "ib9"}}, ethernet(), False)["broadcast"].bound is None
    assert ceilings(gloo, ethernet(), True)["broadcast"].why == "the nodes are emulated on one machine"


def test_inside_one_node():
    assert ceilings(results(1, 8), rails(nodes=1), False)["all_reduce"].bound == 450
    assert ceilings(results(1, 1), rails(nodes=1, per_node=1), False)["all_reduce"].bound is None
    assert gpu_link_rate("AMD Instinct MI300X", 8) == 448 and gpu_link_rate("AMD Instinct MI300X", 2) == 64
    assert gpu_link_rate("NVIDIA H100 PCIe", 8) is None and gpu_link_rate("Some GPU", 2) is None
    assert gpu_link_rate("NVIDIA H100 80GB HBM3", 2) == 450 and gpu_link_rate("NVIDIA GB200", 4) == 900
    assert gpu_link_rate("NVIDIA GH200 120GB", 4) == 450 and gpu_link_rate("NVIDIA A100-PCIE-40GB", 2) is None
    assert gpu_link_rate("NVIDIA H200 NVL", 2) is None


def test_bandwidth_within_low_and_not_told():
    within = results(2, 8, collectives=[measured(size=8 << 30, busbw=350)])
    assert verdict("bandwidth", within).answer == "within"
    low = results(2, 8, collectives=[measured(size=8 << 30, busbw=5.4)])
    for busbw, answer in ((0.51, "within"), (0.49, "low")):  # half of what the links usually give
        usual = ceilings(results(2, 8), rails(), False)["all_reduce"].usual
        assert (
            verdict("bandwidth", results(2, 8, collectives=[measured(size=8 << 30, busbw=busbw * usual)])).answer
            == answer
        )
    assert verdict("bandwidth", low).answer == "low" and "5.4 GB/s" in verdict("bandwidth", low).findings[0].title
    short = results(2, 8, collectives=[measured(size=16 << 20, busbw=45)])  # an eighth of the rate is healthy there
    assert verdict("bandwidth", short).answer == "unknown"
    assert verdict("bandwidth", results(2, 8)).answer == "unknown"


def test_above_the_nics_rate_is_no_mistake_between_two_nodes():
    made = results(2, 4, collectives=[measured(size=1 << 27, busbw=122.6)])
    judgement = judge(made, slingshot(), {}, False)
    assert judgement.rows[0].ratio == pytest.approx(122.6 / 175) and not judgement.failed


def mistake(op, rank, source=None):
    return {
        "op": op, "dtype": "float32", "bytes": 1024, "rank": rank, "source": source, "element": 7, "got": "1",
        "want": "2", "count": 1, "of": 256,
    }  # fmt: skip


def test_wrong_values_are_an_error_and_copies_name_who_sent_them():
    made = results(4, mistakes=[mistake("all_reduce", 0), mistake("all_reduce", 1), mistake("all_gather", 1, 3)])
    said = verdict("values", made)
    assert said.answer == "wrong" and said.findings[0].severity == "error"
    assert said.findings[0].rank == 3 and said.findings[0].host == "n3" and "all_gather" in said.findings[0].title
    assert "element 7 is 1, must be 2" in said.findings[0].evidence[0].text
    assert judge(made, rails(nodes=4), {}, False).failed


def test_wrong_values_on_one_rank_alone_are_that_ranks():
    assert verdict("values", results(4, mistakes=[mistake("all_reduce", 2)])).findings[0].rank == 2
    both = results(4, mistakes=[mistake("all_reduce", 0), mistake("all_reduce", 2)])
    assert verdict("values", both).findings[0].rank is None


def test_a_product_that_differs_is_a_broken_device():
    made = results(4, gemm={"side": 8, "dtype": "x", "ranks": [gemm(0), gemm(1), gemm(2, check=4.0), gemm(3)]})
    said = verdict("values", made)
    assert said.answer == "wrong" and said.findings[0].code == "wrong-product" and said.findings[0].rank == 2


def test_an_unfinished_test_proves_nothing():
    assert verdict("values", results(complete=False)).answer == "unknown"
    assert verdict("values", results()).answer == "right"


ALL_PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def rates(slow):
    """All pairs of four; `slow` holds ways as (sender, receiver)."""
    return [pair(a, b, 1.0 if (a, b) in slow else 10.0, 1.0 if (b, a) in slow else 10.5) for a, b in ALL_PAIRS]


def test_a_host_that_sends_slowly_is_named():
    said = verdict("pairs", results(4, pairs=rates({(1, 0), (1, 2), (1, 3)})), rails(nodes=4))
    assert said.answer == "slow" and len(said.findings) == 1
    assert "node 1 (n1) sends slowly" in said.findings[0].title and said.findings[0].host == "n1"


def test_a_host_that_receives_slowly_is_named():
    said = verdict("pairs", results(4, pairs=rates({(0, 2), (1, 2), (3, 2)})), rails(nodes=4))
    assert len(said.findings) == 1 and "node 2 (n2) receives slowly" in said.findings[0].title


def test_a_host_that_sends_slowly_is_named_on_a_busy_network_too():
    """Three nodes as measured on a busy machine: the way from 0 to 2 is slow as well, but three times faster."""
    measured = [pair(0, 1, 0.4, 0.0517), pair(0, 2, 0.159, 0.355), pair(1, 2, 0.0521, 0.36)]
    said = verdict("pairs", results(3, pairs=measured), rails(nodes=3))
    assert "node 1 (n1) sends slowly" in said.findings[0].title
    assert ["rank 0 on node 0" in finding.title for finding in said.findings] == [False, True]


def test_one_slow_way_is_the_link():
    said = verdict("pairs", results(4, pairs=rates({(0, 3)})), rails(nodes=4))
    assert len(said.findings) == 1 and "rank 0 on node 0 (n0) to rank 3 on node 3 (n3)" in said.findings[0].title


def test_with_two_nodes_only_the_way_can_be_named():
    said = verdict("pairs", results(2, pairs=[pair(0, 1, 0.5, 10)]))
    assert "either one" in said.findings[0].title and "rank 0" in said.findings[0].title


def test_one_slow_gpu_or_nic_of_a_host():
    """Four nodes of two ranks; rank 3 (node 1, second GPU) sends slowly, its neighbour does not."""
    pairs = []
    for a, b in ALL_PAIRS:
        for local in (0, 1):
            low, high = 2 * a + local, 2 * b + local
            pairs.append(pair(low, high, 1.0 if low == 3 else 10, 1.0 if high == 3 else 10))
    made = results(4, 2, pairs=pairs)
    said = verdict("pairs", made, rails(nodes=4))
    assert len(said.findings) == 1 and said.findings[0].rank == 3, said
    assert "rank 3 on node 1 (n1) sends slowly: GPU 1, its NIC or the cable" in said.findings[0].title
    made["ranks"][3]["nic"] = "mlx5_7"
    assert "GPU 1, mlx5_7 or the cable" in verdict("pairs", made, rails(nodes=4)).findings[0].title


def test_a_slow_gpu_inside_a_node():
    inside = [pair(a, b, 1.0 if 2 in (a, b) else 10, 1.0 if 2 in (a, b) else 10, "inside") for a, b in ALL_PAIRS]
    said = verdict("pairs", results(1, 4, pairs=inside), rails(nodes=1, per_node=4))
    assert {finding.rank for finding in said.findings} == {2} and "GPU 2 or its links" in said.summary


def test_even_pairs_and_emulated_ones():
    assert verdict("pairs", results(4, pairs=rates(set())), rails(nodes=4)).answer == "even"
    assert verdict("pairs", results(4, pairs=rates({(0, 3)})), rails(nodes=4), emulated=True).answer == "unknown"
    assert verdict("pairs", results(1, 1), rails(nodes=1, per_node=1)).answer == "unknown"


def test_a_broken_pair_is_an_error_also_where_nodes_are_emulated():
    broken = {"a": 0, "b": 2, "kind": "between", "bytes": 1, "error": "TimeoutError: not done after 30 s"}
    made = results(3, pairs=[pair(0, 1), broken], complete=False)
    for emulated in (False, True):
        judgement = judge(made, rails(nodes=3), {}, emulated)
        said = next(each for each in judgement.verdicts if each.check == "pairs")
        assert judgement.failed and said.answer == "broken"
        assert "rank 0 on node 0 (n0) and rank 2 on node 2 (n2) cannot communicate" in said.summary
        assert "rank 0 could with another" in said.findings[0].cause


def test_floors():
    made = results(2, 8, collectives=[measured(size=8 << 30, busbw=300), measured("all_to_all", 8 << 30, 40)])
    floors = {"all_reduce": Floor(330, 2, "May"), "all_to_all": Floor(35), "broadcast": Floor(9)}
    said = verdict("floor", made, floors=floors)
    assert said.answer == "missed" and [finding.severity for finding in said.findings] == ["error"]
    assert "below the site's floor of 330" in said.summary
    quick = verdict("floor", {**made, "quick": True}, floors=floors)
    assert [finding.severity for finding in quick.findings] == ["warning"]
    assert verdict("floor", made, floors={"all_reduce": Floor(290)}).answer == "met"
    other_size = judge(made, rails(), {"all_reduce": Floor(330, nodes=4)}, False)
    assert "floor" not in {each.check for each in other_size.verdicts}


def test_stragglers():
    slow = results(2, 2, gemm={"side": 8, "dtype": "x", "ranks": [gemm(0), gemm(1), gemm(2, 0.014), gemm(3)]})
    said = verdict("stragglers", slow)
    assert said.answer == "straggler" and said.findings[0].rank == 2 and "1.40 times" in said.findings[0].title
    assert verdict("stragglers", results(2, 2)).answer == "even"
    assert verdict("stragglers", results(1, 1), rails(nodes=1)).answer == "unknown"
    crowded = {**slow, "device": "cpu"}
    assert verdict("stragglers", crowded, rails(nodes=2, per_node=65)).answer == "unknown"


def test_one_rank_measures_nothing_between_ranks():
    alone = results(1, 1, collectives=[measured(busbw=34_371.0)])
    judgement = judge(alone, rails(nodes=1, per_node=1), {"all_reduce": Floor(100.0)}, False)
    assert judgement.rows == (), "a figure that nothing moved for is not printed"
    found = {each.check: each for each in judgement.verdicts}
    assert found["bandwidth"].answer == "unknown" and "one rank" in found["bandwidth"].summary
    assert found["values"].confidence == "likely" and found["network"].answer == "unknown" and "floor" not in found


def test_ranks_of_one_node_say_nothing_of_the_network():
    inside = results(1, 8, collectives=[measured()])
    assert "nothing crossed the network" in verdict("network", inside, rails(nodes=1)).summary
    assert "emulated" in verdict("network", results(2, 8), rails(), emulated=True).summary
    checks = [each.check for each in judge(results(2, 8), rails(), {}, False).verdicts]
    assert "network" not in checks
