"""Do the ranks sit where they were put?"""

from drumbeat.plan.affinity import check, table
from tests.plan.archetype import plans_of


def lumi():
    return plans_of("lumi-g")[0]


def as_planned(plan, first=0):
    env = {each.name: each.value for each in plan.variables}
    return {
        first + slot.local_rank: {"cpus": slot.cpus, "visible": "0,1,2,3,4,5,6,7", "env": env}
        for slot in plan.binding.slots
    }


def test_all_in_place():
    plan = lumi()
    verdict = check(plan.binding, as_planned(plan, 8), plan.variables, 8)
    assert (verdict.answer, verdict.summary) == ("as planned", "8/8 ranks beside their GPU")
    assert verdict.findings == ()


def test_the_table_is_the_one_of_the_lumi_document():
    lines = table(lumi().binding, as_planned(lumi(), 8), 8)
    assert lines[0].split() == ["rank", "visible", "mask", "cores", "GPU", "NUMA", "NIC"]
    assert lines[1].split() == ["8", "0,1,2,3,4,5,6,7", "fe000000000000", "49-55", "0", "3", "cxi0", "ok"]
    assert lines[2].split()[2] == "fe00000000000000" and len(lines) == 9


def test_a_rank_elsewhere_is_found():
    plan = lumi()
    seen = as_planned(plan)
    seen[0]["cpus"] = (1, 2, 3)
    seen[3]["cpus"] = (25,)
    verdict = check(plan.binding, seen)
    assert verdict.answer == "mismatch" and "2 of 8 ranks" in verdict.summary
    assert [(each.rank, each.code) for each in verdict.findings] == [(0, "affinity-mismatch"), (3, "affinity-mismatch")]
    assert "fewer cores" in verdict.findings[1].cause
    assert table(plan.binding, seen)[1].endswith("planned 49-55")


def test_a_changed_environment_is_found():
    plan = lumi()
    seen = as_planned(plan)
    del seen[2]["env"]["NCCL_NET"]
    verdict = check(plan.binding, seen, plan.variables)
    assert [each.rank for each in verdict.findings] == list(range(8)), "they share one dict here"
    assert "NCCL_NET=unset" in verdict.findings[0].title


def test_what_was_not_seen_is_unknown():
    plan = lumi()
    seen = as_planned(plan)
    del seen[5]
    verdict = check(plan.binding, seen)
    assert (verdict.answer, verdict.confidence) == ("unknown", "unknown") and "5" in verdict.summary
    assert "unknown" in table(plan.binding, seen)[6]


def test_all_ranks_on_one_core():
    plan = plans_of("lumi-g", "command: x\ncpu-bind: [none]\n")[0]
    seen = {rank: {"cpus": (1,)} for rank in range(8)}
    verdict = check(plan.binding, seen)
    assert [each.code for each in verdict.findings] == ["all-ranks-on-few-cores"] and verdict.answer == "mismatch"


def test_gpus_fenced_off_one_by_one():
    plan = lumi()
    seen = as_planned(plan)
    for rank in seen:
        seen[rank].update(visible="0", pci=f"0000:{rank:02x}:00.0")
    assert "per-task-device-group" in [each.code for each in check(plan.binding, seen).findings]


def test_ranks_that_share_few_cores_are_said_even_if_planned():
    plan = plans_of("cpuset-of-3")[0]
    verdict = check(plan.binding, {rank: {"cpus": (1, 2, 3)} for rank in range(8)})
    assert verdict.answer == "mismatch" and [each.code for each in verdict.findings] == ["all-ranks-on-few-cores"]
