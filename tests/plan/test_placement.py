"""Where the ranks really sit, on machines of every kind: right, wrong, shared, without a GPU, unknown."""

from dataclasses import replace

import pytest

from drumbeat.inspector.record import RankSeen
from drumbeat.jobfile.job import job_from_text
from drumbeat.plan.binding import binding, mask, right_binding, typed_by_user
from drumbeat.plan.placement import (
    NO_GPU,
    NOT_PINNED,
    RIGHT,
    SHARED,
    UNKNOWN,
    WRONG,
    changed,
    rows,
    task_binding,
    text_table,
    verdict,
)
from tests.plan.archetype import facts_of, order_of, plans_of
from tests.plan.making import machine, order

IN_ORDER = {local: tuple(range(8 * local + 1, 8 * local + 8)) for local in range(8)}  # fe, fe00, ...


class Seats:
    """One node of an archetype, and what its ranks show."""

    def __init__(self, name, job="command: x\n", **changes):
        facts = facts_of(name)
        self.order = order_of(name, facts, job)
        self.facts = replace(facts[0], **changes)
        self.right = right_binding(self.order, self.facts, 0)
        self.bound = binding(self.order, self.facts, 0)

    def seen(self, cpus=None, gpus=lambda slot: slot.gpus, **more):
        """As bound, but for `cpus` (local rank -> cores) and `gpus` (slot -> those in use)."""
        every = tuple(gpu.index for gpu in self.facts.gpus)
        return [
            RankSeen(slot.local_rank, 100 + slot.local_rank, (cpus or {}).get(slot.local_rank, slot.cpus), gpus(slot),
                     every, **more)
            for slot in self.bound.slots
        ]  # fmt: skip

    def table(self, seen):
        return rows(self.facts, self.bound, self.right, seen)

    def verdict(self, seen):
        return verdict(self.table(seen), self.facts, self.bound)


def words(table):
    return [row.verdict for row in table]


@pytest.mark.parametrize("name", ["lumi-g", "olivia", "mi300x-cx7", "mi300x-thor2", "dgx-h100"])
def test_as_we_bind_them_and_read(name):
    seats = Seats(name)
    answer = seats.verdict(seats.seen())
    count = len(seats.bound.slots)
    assert (answer.answer, answer.confidence) == ("as planned", "certain"), answer
    assert answer.summary == f"{count}/{count} ranks beside their GPU" and len(answer.seen) == count


@pytest.mark.parametrize("name", ["lumi-g", "olivia", "dgx-h100"])
def test_which_gpu_a_rank_uses_was_not_read(name):
    seats = Seats(name)
    answer = seats.verdict(seats.seen(gpus=lambda slot: None))
    assert answer.confidence == "likely" and "which GPU it uses" in answer.unseen[0]
    assert "(" in text_table(seats.table(seats.seen(gpus=lambda slot: None)))[1].split()[1]


@pytest.mark.parametrize("name", ["lumi-g", "olivia", "mi300x-cx7", "mi300x-thor2", "dgx-h100"])
def test_ranks_on_the_wrong_cores(name):
    """Whoever set the masks: each is compared with the NUMA node of the GPU that the rank uses."""
    seats = Seats(name)
    away = {slot.local_rank: seats.bound.slots[-1 - slot.local_rank].cpus for slot in seats.bound.slots}
    table = seats.table(seats.seen(away))
    homes = {gpu.index: gpu.numa for gpu in seats.facts.gpus}
    for row, slot in zip(table, seats.bound.slots):
        beside = set(away[slot.local_rank]) <= set(seats.facts.cpus.numa[str(homes[slot.gpu])])
        assert row.verdict == (RIGHT if beside else WRONG)
        assert beside or row.right == slot.cpus
    assert seats.verdict(seats.seen(away)).answer == "mismatch"


@pytest.mark.parametrize("name", ["lumi-g", "olivia", "mi300x-cx7", "dgx-h100", "rcp-pod"])
def test_a_gpu_that_is_missing_is_never_as_planned(name):
    whole = facts_of(name)[0]
    count = len(whole.gpus)
    seats = Seats(name, f"command: x\nranks-per-node: {count}\n", gpus=whole.gpus[:-1])
    assert "more-ranks-than-gpus" in [each.code for each in seats.bound.findings]
    answer = seats.verdict(seats.seen(stepped=True))
    assert answer.answer == "mismatch" and any("no GPU" in each.title for each in answer.findings)


def test_a_divided_gpu_in_a_pod_is_never_certainly_as_planned():
    seats = Seats("rcp-pod")
    seats.facts = replace(seats.facts, gpus=tuple(replace(gpu, mig=True) for gpu in seats.facts.gpus[:1]))
    answer = seats.verdict(seats.seen(gpus=lambda slot: (0,)))
    assert "gpu-shared" not in [each.code for each in answer.findings]


def test_a_pod_whose_cores_are_all_on_one_socket():
    seats = Seats("rcp-pod")
    table = seats.table(seats.seen())
    assert words(table) == [RIGHT] * 4 + [WRONG] * 4
    assert table[7].note == "no core beside its GPU is among those this job may use" and table[7].right == ()


def test_the_schedulers_masks_in_order_on_lumi():
    """srun -c 7 gives task n the n-th group of cores; six of the eight GPUs are beside another group."""
    seats = Seats("lumi-g")
    table = seats.table(seats.seen(IN_ORDER))
    assert words(table) == [WRONG, WRONG, RIGHT, RIGHT, WRONG, WRONG, WRONG, WRONG]
    answer = seats.verdict(seats.seen(IN_ORDER))
    assert answer.answer == "mismatch" and answer.summary == "2/8 ranks beside their GPU"
    (finding,) = answer.findings
    assert finding.title == "6 of 8 ranks are not beside their GPU"
    assert "mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00" in finding.fix


def test_a_schedulers_default_is_bound_again():
    seats = Seats("lumi-g")
    bound = task_binding(seats.right, IN_ORDER, seats.facts, by_user=False)
    assert [slot.cpus for slot in bound.slots] == [slot.cpus for slot in seats.right.slots]
    assert [each.code for each in bound.findings] == ["tasks-bound-again"] and "6 of 8" in bound.findings[0].title


def test_a_users_own_masks_stay_and_the_right_ones_are_said():
    seats = Seats("lumi-g")
    bound = task_binding(seats.right, IN_ORDER, seats.facts, by_user=True)
    assert bound.slots[0].cpus == IN_ORDER[0]
    (finding,) = bound.findings
    assert finding.severity == "warning" and finding.fix.startswith("--cpu-bind=mask_cpu:0xfe000000000000,")
    answer = verdict(rows(seats.facts, bound, seats.right, seats.seen(IN_ORDER)), seats.facts, bound)
    assert "srun" in answer.findings[0].cause, "the cause names who put them there"


def test_right_masks_of_tasks_stay_as_they_are():
    seats = Seats("lumi-g")
    mine = {slot.local_rank: slot.cpus[:3] for slot in seats.right.slots}
    bound = task_binding(seats.right, mine, seats.facts, by_user=False)
    assert [slot.cpus for slot in bound.slots] == list(mine.values()) and bound.findings == () and bound.threads == 3


def test_a_jobs_own_cpu_bind_in_that_order_is_questioned():
    masks = ", ".join(mask(cpus) for cpus in IN_ORDER.values())
    seats = Seats("lumi-g", f"command: x\ncpu-bind: [{masks}]\n")
    answer = seats.verdict(seats.seen())
    assert answer.answer == "mismatch" and answer.findings[0].cause == "the job's own cpu-bind put them there"
    plan = plans_of("lumi-g", f"command: x\ncpu-bind: [{masks}]\n")[0]
    assert "cpu-bind-away-from-gpu" in [each.code for each in plan.findings], "the plan says it before anything starts"


@pytest.mark.parametrize(
    "text, typed",
    [
        ("quiet,mask_cpu:0xfe,0xfe00", True),
        ("quiet,mask_cpu:0x00000000000000FE,0x000000000000FE00", False),
        ("quiet,mask_cpu:fe,fe00", True),
        ("quiet,map_cpu:49,57", True),
        ("quiet,cores", False),
        ("", False),
    ],
)
def test_who_wrote_slurms_masks(text, typed):
    assert typed_by_user(text) is typed


def test_two_ranks_on_one_gpu():
    seats = Seats("dgx-h100")
    answer = seats.verdict(seats.seen(gpus=lambda slot: (0,) if slot.local_rank < 2 else slot.gpus))
    assert answer.answer == "mismatch" and "gpu-shared" in [each.code for each in answer.findings]
    assert words(seats.table(seats.seen(gpus=lambda slot: (0,))))[:2] == [SHARED, SHARED]


def test_a_rank_without_a_gpu_is_never_beside_it():
    seats = Seats("dgx-h100")
    missing = lambda slot: () if slot.local_rank == 3 else slot.gpus  # noqa: E731
    before = seats.verdict(seats.seen(gpus=missing))
    assert before.answer == "unknown" and "rank 3" in before.summary and "7/8" in before.summary
    after = seats.table(seats.seen(gpus=missing, stepped=True))
    assert after[3].verdict == NO_GPU and seats.verdict(seats.seen(gpus=missing, stepped=True)).answer == "mismatch"


def test_instances_of_a_divided_gpu_are_not_called_shared():
    seats = Seats("dgx-h100")
    seats.facts = replace(seats.facts, gpus=tuple(replace(gpu, mig=True) for gpu in seats.facts.gpus))
    table = seats.table(seats.seen(gpus=lambda slot: (0,)))
    assert SHARED not in words(table) and "MIG" in table[0].note


def test_each_rank_on_its_own_instance_and_two_on_one():
    seats = Seats("dgx-h100")
    seats.facts = replace(seats.facts, gpus=tuple(replace(gpu, mig=True) for gpu in seats.facts.gpus))
    beside = {slot.local_rank: (2 * slot.local_rank, 2 * slot.local_rank + 1) for slot in seats.bound.slots}
    on_first = seats.seen(beside, gpus=lambda slot: (0,))
    apart = [replace(each, instances=(f"gi{each.rank + 1}/ci0",)) for each in on_first]
    table = seats.table(apart)
    assert SHARED not in words(table) and not any("not shown" in row.note for row in table)
    assert text_table(table)[3].split()[:3] == ["2", "0", "gi3/ci0"]
    together = [replace(each, instances=("gi1/ci0",)) for each in on_first[:2]] + apart[2:]
    assert words(seats.table(together))[:3].count(SHARED) == 2
    assert seats.table(together)[0].note == "instance gi1/ci0 is also used by rank 1"


def test_the_cards_that_were_used_stand_beside_the_nearest():
    seats = Seats("dgx-h100")
    table = seats.table(seats.seen())
    nearest = [row.nic for row in table]
    lines = text_table(table, {"0": (nearest[0],), "1": (nearest[5],), "2": ("AWS Libfabric/3",)})
    assert "NIC used" in lines[0] and "(not the nearest)" not in lines[1]
    assert f"{nearest[5]} (not the nearest)" in lines[2] and "(not the nearest)" not in lines[3]
    assert "not seen" in lines[4]


def test_the_view_of_a_run_puts_both_together():
    from drumbeat.base.record import to_plain
    from drumbeat.desk.state import placement_lines
    from drumbeat.runfolder.events import parse_event

    seats = Seats("dgx-h100")
    table = seats.table(seats.seen())
    about = {"kind": "verdict", "t": 1.0, "node": 0}
    said = {"verdict": seats.verdict(seats.seen()), "table": text_table(table), "rows": table}
    transport = {
        "verdict": {"check": "transport", "answer": "rdma", "confidence": "certain"},
        "nics": {"0": ["mlx5_0"]},
    }
    traffic = {
        "verdict": {"check": "traffic", "answer": "rdma", "confidence": "likely"},
        "carried": {"mlx5_0:1": 9_000_000},
    }

    class Run:
        def events(self):
            return [parse_event(to_plain({**about, **data})) for data in (said, transport, traffic)]

        def nodes(self):
            return [0, 1]

    lines = placement_lines(Run())
    assert "NIC used" in lines[1] and "mlx5_0" in lines[2] and "not seen" in lines[3]
    assert "  carried, by the counters: mlx5_0:1 9 MB each way" in lines and lines[-1].startswith("node 1: not checked")


def test_a_rank_that_may_use_every_core():
    seats = Seats("lumi-g")
    table = seats.table(seats.seen({0: seats.facts.cpus.allowed}))
    assert table[0].verdict == NOT_PINNED and table[0].right == seats.right.slots[0].cpus


def test_the_other_cache_of_the_right_numa_node():
    seats = Seats("lumi-g")
    swapped = {0: seats.bound.slots[1].cpus, 1: seats.bound.slots[0].cpus}
    table = seats.table(seats.seen(swapped))
    assert words(table) == [WRONG, WRONG, *[RIGHT] * 6], "the CCD of the other GCD of the same NUMA node"
    assert "L3" in table[0].note and table[0].right == seats.bound.slots[0].cpus
    answer = seats.verdict(seats.seen(swapped))
    assert answer.answer == "mismatch" and answer.findings[0].title == "2 of 8 ranks are not beside their GPU"


def test_a_part_of_the_right_cache_is_right():
    seats = Seats("lumi-g")
    assert seats.table(seats.seen({0: seats.bound.slots[0].cpus[:2]}))[0].verdict == RIGHT


@pytest.mark.parametrize("name", ["mi300x-cx7", "dgx-h100", "olivia"])
def test_caches_say_nothing_where_they_are_not_one_per_gpu(name):
    seats = Seats(name)
    numa = {gpu.index: str(gpu.numa) for gpu in seats.facts.gpus}
    ends = {
        slot.local_rank: seats.facts.cpus.numa[numa[slot.gpu]][-2 - 2 * slot.local_rank :][:2]
        for slot in seats.bound.slots
    }
    assert set(words(seats.table(seats.seen(ends)))) == {RIGHT}


def test_ranks_that_share_cores():
    seats = Seats("lumi-g")
    table = seats.table(seats.seen({1: seats.bound.slots[1].cpus + seats.bound.slots[0].cpus[:1]}))
    assert table[1].verdict == WRONG and "with rank 0" in table[1].note


def test_what_was_not_seen_is_unknown():
    seats = Seats("lumi-g")
    answer = seats.verdict([each for each in seats.seen() if each.rank != 5])
    assert (answer.answer, answer.confidence) == ("unknown", "unknown") and "rank 5" in answer.summary
    once = seats.verdict(seats.seen(settled=False))
    assert once.answer == "unknown" and once.seen == (), "one look while a library sets itself up proves nothing"


def test_ranks_started_by_the_command_itself():
    seats = Seats("dgx-h100", "command: bash train.sh\nlauncher: once\n")
    assert len(seats.bound.slots) == 1
    every = tuple(range(8))
    seen = [RankSeen(rank, 50 + rank, seats.facts.cpus.allowed, (rank,), every) for rank in range(8)]
    table = seats.table(seen)
    assert words(table) == [NOT_PINNED] * 8 and table[7].gpus == (7,) and table[7].right
    seen = [RankSeen(None, 50 + rank, seats.right.slots[rank].cpus, (rank,), every) for rank in range(8)]
    assert words([row for row in seats.table(seen) if row.rank is None]) == [RIGHT] * 8


def test_a_gpu_whose_numa_node_is_unknown():
    seats = Seats("lumi-g")
    seats.facts = replace(seats.facts, gpus=tuple(replace(gpu, numa=None) for gpu in seats.facts.gpus))
    assert set(words(seats.table(seats.seen()))) == {UNKNOWN}


def test_many_ranks_on_a_laptop_are_no_mismatch():
    facts, job = machine(2), order(nodes=1, ranks_per_node=8)
    bound = binding(job, facts, 0)
    seen = [RankSeen(rank, rank, (0, 1)) for rank in range(8)]
    answer = verdict(rows(facts, bound, bound, seen), facts, bound)
    assert (answer.answer, answer.findings) == ("not pinned", ()) and "8 ranks share 2 cores" in answer.summary


def test_ranks_in_a_corner_of_a_large_machine():
    seats = Seats("cpuset-of-3")
    seen = [RankSeen(rank, rank, (1, 2, 3), (rank,)) for rank in range(8)]
    assert "all-ranks-on-few-cores" in [each.code for each in seats.verdict(seen).findings]


def test_a_changed_environment_is_said_once_per_variable():
    plan = plans_of("lumi-g")[0]
    env = {each.name: each.value for each in plan.variables}
    del env["NCCL_NET"]
    (finding,) = changed(dict.fromkeys(range(8), env), plan.variables, plan.binding, 0)
    assert "8 of 8 ranks have NCCL_NET=unset" in finding.title and "set it in the job's env" in finding.fix


def test_a_variable_that_the_job_cannot_set_is_left_to_drumbeat():
    from drumbeat.base.order import EnvVar

    port = EnvVar("MASTER_PORT", "63359", "free on node 0", "detected")
    (finding,) = changed({0: {"MASTER_PORT": "29500"}}, [port], binding(order(), machine(4), 0), 0)
    assert finding.fix.startswith("leave MASTER_PORT as drumbeat sets it")


def test_what_mpi_tells_each_process_is_no_change():
    from drumbeat.base.order import EnvVar

    mine = EnvVar("OMPI_MCA_ess_base_vpid", "0", "exported", "user")
    assert changed({1: {"OMPI_MCA_ess_base_vpid": "1"}}, [mine], binding(order(), machine(4), 0), 0) == []


def test_gpus_hidden_by_the_jobs_own_variables():
    seats = Seats("mi300x-cx7", "command: x\nenv: {HIP_VISIBLE_DEVICES: '1,3'}\n")
    assert seats.order.ranks_per_node == 2 and [slot.gpu for slot in seats.bound.slots] == [1, 3]
    assert seats.bound.findings == ()
    twice = Seats("mi300x-cx7", "command: x\nenv: {HIP_VISIBLE_DEVICES: '0,0'}\nranks-per-node: 2\n")
    assert "visibility-repeated" in [each.code for each in twice.bound.findings]


def test_gpus_hidden_by_exported_variables(monkeypatch):
    from drumbeat.desk.start import place

    monkeypatch.setattr(place, "detect", lambda host: facts_of("mi300x-cx7")[0].gpus[:4])
    assert place.look_around({"HIP_VISIBLE_DEVICES": "1,3"}).gpus == 2
    assert place.look_around({}).gpus == 4
    assert job_from_text("command: x\n").env == {}
