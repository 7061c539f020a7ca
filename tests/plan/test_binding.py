"""Where ranks sit: GPUs, cores, NICs; and a user's own masks."""

import dataclasses

import pytest

from drumbeat.base.ranges import ranges
from drumbeat.machine.model import Cpus, Facts, Gpu
from drumbeat.plan.binding import Binding, Slot, binding, choose, from_slurm, mask, parse_mask
from tests.plan.archetype import facts_of, order_of, peers_of, plans_of
from tests.plan.making import machine, order

LUMI_MASKS = ["0xfe000000000000", "0xfe00000000000000", "0xfe0000", "0xfe000000", "0xfe", "0xfe00", "0xfe00000000",
              "0xfe0000000000"]  # fmt: skip


def codes(findings):
    return [finding.code for finding in findings]


def bind(name, text):
    return plans_of(name, "command: x\n" + text)[0].binding


def test_masks_and_lists_come_back():
    assert [mask(parse_mask(each)) for each in LUMI_MASKS] == LUMI_MASKS
    assert ranges(parse_mask("0xfe")) == "1-7" and parse_mask("1-3,9") == (1, 2, 3, 9)
    assert [parse_mask(text) for text in ("", "fe", "3-1", "9999-10000", "1,,2", "0x", "1-")] == [None] * 7
    assert from_slurm("quiet,mask_cpu:0xFE,0xfe00") == ("0xFE", "0xfe00")
    assert from_slurm("none") == ()


def test_a_users_own_masks_are_taken():
    bound = bind("lumi-g", f"cpu-bind: [{', '.join(LUMI_MASKS)}]\n")
    assert [slot.mask for slot in bound.slots] == LUMI_MASKS
    assert not bound.findings and bound.threads == 7


@pytest.mark.parametrize(
    "entries,code,words",
    [
        (["0xfe000000000000"] * 2 + LUMI_MASKS[2:], "mask-overlap", "local ranks 0 and 1 have the same mask"),
        (["1-7", "7-9", *LUMI_MASKS[2:4], *LUMI_MASKS[:2], *LUMI_MASKS[6:]], "mask-overlap", "CPUs 7 in common"),
        (["0x1", *LUMI_MASKS[1:]], "mask-outside", "CPUs 0 of local rank 0 are not among those"),
        (LUMI_MASKS[:4], "mask-overlap", "local ranks 0 and 4 have the same mask"),
    ],
)
def test_a_mask_list_with_a_fault_is_an_error(entries, code, words):
    quoted = ", ".join(f'"{entry}"' for entry in entries)
    found = [finding for finding in bind("lumi-g", f"cpu-bind: [{quoted}]\n").findings if finding.code == code]
    assert found and found[0].severity == "error" and any(words in finding.title for finding in found)


def test_no_affinity_when_the_job_says_so():
    assert {slot.cpus for slot in bind("lumi-g", "cpu-bind: [none]\n").slots} == {()}


def test_a_restricted_cpuset_is_shared_out_the_same_way():
    facts = facts_of("lumi-g")
    few = dataclasses.replace(facts[0], cpus=dataclasses.replace(facts[0].cpus, allowed=tuple(range(1, 64, 2))))
    bound = binding(order_of("lumi-g", facts), few, 0)
    assert [slot.cores for slot in bound.slots][:2] == ["49,51,53,55", "57,59,61,63"]
    assert bound.threads == 4


def test_the_sites_reserved_cores_are_left_out():
    facts = machine(8)
    bound = binding(order(emulated=False, nodes=1, reserved_cpus=(0, 4)), facts, 0)
    assert [slot.cpus for slot in bound.slots] == [(1, 2, 3), (5, 6, 7)]


def test_fewer_gpus_than_the_node_has_are_close_together():
    two = bind("mi300x-thor2", "gpus: 4\n")
    assert [slot.gpu for slot in two.slots] == [0, 1, 2, 3] and {slot.numa for slot in two.slots} == {0}
    assert two.variables == ()  # the first ones: torch counts them so by itself
    gpus = tuple(Gpu(index, "nvidia", numa=numa) for index, numa in enumerate((0, 1, 1, 0, 1)))
    facts = Facts("n", gpus=gpus, cpus=machine(8).cpus)
    bound = binding(order(emulated=False, nodes=1, ranks_per_node=2, gpus=2), facts, 0)
    assert [slot.gpu for slot in bound.slots] == [0, 3]
    assert [(each.name, each.value) for each in bound.variables] == [
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "0,3"),
    ]  # fmt: skip


def test_a_variable_that_only_another_vendor_reads_chooses_nothing():
    (facts,) = facts_of("dgx-h100")[:1]
    asked = order(nodes=1, ranks_per_node=2, gpus=2, emulated=False)
    shown = [
        choose(asked, dataclasses.replace(facts, environment=environ))
        for environ in ({}, {"HIP_VISIBLE_DEVICES": "6,7"})
    ]
    assert shown[0] == shown[1] and shown[0].why.startswith("they share")


def test_gpus_behind_one_switch_come_before_gpus_of_one_numa_node():
    def path(switch, slot):
        return f"pci0000:00/0000:00:0{switch}.0/0000:0{switch}:00.0/0000:0{switch}:0{slot}.0/0000:{switch}{slot}:00.0"

    gpus = tuple(Gpu(i, "amd", numa=0, pci_path=path(switch, i)) for i, switch in enumerate((1, 2, 1, 2)))
    facts = Facts("n", gpus=gpus, cpus=machine(8).cpus)
    bound = binding(order(emulated=False, nodes=1, ranks_per_node=2, gpus=2), facts, 0)
    assert [slot.gpu for slot in bound.slots] == [0, 2]
    assert [(each.name, each.value) for each in bound.variables] == [("ROCR_VISIBLE_DEVICES", "0,2")]


def test_several_gpus_a_rank_and_several_ranks_a_gpu():
    pairs = bind("lumi-g", "gpus-per-rank: 2\n")
    assert [slot.gpus for slot in pairs.slots] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert pairs.slots[0].cores == "49-55,57-63"
    shared = bind("olivia", "ranks-per-gpu: 2\n")
    assert [slot.gpu for slot in shared.slots] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "ranks-share-gpu" in codes(shared.findings)
    assert shared.slots[1].cores == "36-71"


def test_a_rank_sees_only_its_own_gpu():
    amd = bind("lumi-g", "visibility: own\n")
    assert [(each.name, each.value) for slot in amd.slots[:2] for each in slot.env] == [
        ("HIP_VISIBLE_DEVICES", "0"), ("HIP_VISIBLE_DEVICES", "1"),
    ]  # fmt: skip
    assert "visibility-own" in codes(amd.findings)
    nvidia = bind("dgx-h100", "visibility: own\n")
    assert [slot.env[0].value for slot in nvidia.slots] == list("01234567")
    assert nvidia.slots[0].env[0].name == "CUDA_VISIBLE_DEVICES"


def test_own_counts_within_what_rocr_leaves():
    gpus = tuple(Gpu(index, "amd", numa=0) for index in range(4))
    facts = Facts("n", gpus=gpus, cpus=machine(4).cpus, environment={"ROCR_VISIBLE_DEVICES": "2,3"})
    bound = binding(order(emulated=False, nodes=1, visibility="own"), facts, 0)
    assert [slot.gpu for slot in bound.slots] == [2, 3]
    assert [slot.env[0].value for slot in bound.slots] == ["0", "1"]


def test_more_ranks_than_gpus_is_an_error():
    found = [finding for finding in bind("olivia", "ranks-per-node: 6\n").findings if finding.severity == "error"]
    assert codes(found) == ["more-ranks-than-gpus"] and "2 of 6 ranks" in found[0].title


def test_more_gpus_than_can_be_seen_is_an_error():
    facts = facts_of("lumi-g")
    few = dataclasses.replace(facts[0], environment={"ROCR_VISIBLE_DEVICES": "0,1"})
    job = dataclasses.replace(order_of("lumi-g", facts), gpus=8)
    assert "fewer-gpus-than-asked" in codes(binding(job, few, 0).findings)


def test_memory_only_numa_nodes_are_no_place_for_a_rank():
    facts = facts_of("olivia")
    moved = [dataclasses.replace(gpu, numa=4 + gpu.index) for gpu in facts[0].gpus]  # where the GPU's own memory is
    bound = binding(order_of("olivia", facts), dataclasses.replace(facts[0], gpus=tuple(moved)), 0)
    assert [slot.cores for slot in bound.slots] == ["0-71", "72-143", "144-215", "216-287"]
    assert "cores-not-beside-gpu" in codes(bound.findings)


def test_hardware_threads_of_a_core_stay_together_and_count_once():
    cpus = Cpus(online=tuple(range(8)), allowed=tuple(range(8)), siblings=tuple((c, c + 4) for c in range(4)))
    bound = binding(order(emulated=False, nodes=1), Facts("n", cpus=cpus), 0)
    assert [slot.cpus for slot in bound.slots] == [(0, 1, 4, 5), (2, 3, 6, 7)] and bound.threads == 2
    one = binding(order(emulated=False, nodes=1, threads_per_core=1), Facts("n", cpus=cpus), 0)
    assert [slot.cpus for slot in one.slots] == [(0, 1), (2, 3)]


def test_a_task_with_a_quarter_of_the_cores_is_warned_of():
    facts = facts_of("olivia")
    quarter = dataclasses.replace(facts[0], cpus=dataclasses.replace(facts[0].cpus, allowed=tuple(range(72))))
    bound = binding(order_of("olivia", facts), quarter, 0)
    assert any("72 of its 288 cores" in finding.title for finding in bound.findings)


def test_emulated_nodes_on_a_gpu_machine_take_their_own_gpus():
    gpus = tuple(Gpu(index, "nvidia", numa=0) for index in range(4))
    facts = Facts("n", gpus=gpus, cpus=machine(8).cpus)
    job = order(nodes=2, ranks_per_node=2)
    assert [slot.gpu for node in (0, 1) for slot in binding(job, facts, node).slots] == [0, 1, 2, 3]


def test_nics_are_shared_evenly_where_nothing_tells_them_apart():
    facts = facts_of("mi300x-thor2")
    blind = dataclasses.replace(
        facts[0],
        gpus=tuple(dataclasses.replace(gpu, pci_path=None) for gpu in facts[0].gpus),
        rdma=tuple(dataclasses.replace(device, pci_path=None) for device in facts[0].rdma),
    )
    slots = binding(order_of("mi300x-thor2", facts), blind, 0).slots
    assert [slot.nic for slot in slots] == [f"bnxt_re{index}" for index in range(8)]  # by NUMA node, in turn
    assert peers_of(facts).nodes[1].node == 1


def test_one_process_a_node_has_all_of_it():
    bound = bind("lumi-g", "launcher: once\n")
    assert len(bound.slots) == 1 and bound.slots[0].gpus == tuple(range(8)) and bound.slots[0].cpus == ()
    assert bound.threads == 56 and bound.findings == ()


def test_ranks_of_a_launcher_inside_share_the_node():
    bound = bind("lumi-g", "launcher: once\nranks-per-node: 8\n")
    assert [slot.gpu for slot in bound.slots] == list(range(8)) and bound.threads == 7
    assert bound.slots == bind("lumi-g", "ranks-per-node: 8\n").slots


def test_masks_of_emulated_nodes():
    facts = machine(4)
    reused = [binding(order(cpu_bind=("0x3", "0xc")), facts, node) for node in (0, 1)]
    assert [slot.cpus for bound in reused for slot in bound.slots] == [(0, 1), (2, 3)] * 2
    assert [bound.findings for bound in reused] == [(), ()]
    own = [binding(order(cpu_bind=("0", "1", "2", "3")), facts, node) for node in (0, 1)]
    assert [slot.cpus for bound in own for slot in bound.slots] == [(0,), (1,), (2,), (3,)]
    assert codes(binding(order(cpu_bind=("0x3", "0x3")), facts, 0).findings) == ["mask-overlap"]


def test_devices_count_within_what_all_ranks_see():
    """As JAX_LOCAL_DEVICE_IDS wants them: places in the list of visible GPUs, not the vendor's numbers."""
    bound = Binding((Slot(0, 4, gpus=(4, 5)), Slot(1, 6, gpus=(6, 7))), 1, "")
    assert [bound.devices(rank) for rank in (0, 1)] == [(0, 1), (2, 3)]
    assert bound.devices(1, emulated_before=1) == (6, 7)
    shared = Binding((Slot(0, 0, gpus=(0,)), Slot(1, 0, gpus=(0,)), Slot(2, 1, gpus=(1,))), 1, "")
    assert [shared.devices(rank) for rank in range(3)] == [(0,), (0,), (1,)]
    assert Binding((Slot(0),), 1, "").devices(0) == ()


def test_with_few_cores_a_rank_keeps_those_of_its_own_numa_node():
    facts = facts_of("olivia", 1)[0]
    allowed = (*range(40), *range(72, 80))  # 40 cores of NUMA node 0, 8 of node 1, none of 2 and 3
    facts = dataclasses.replace(facts, cpus=dataclasses.replace(facts.cpus, allowed=allowed))
    slots = binding(order_of("olivia", [facts]), facts, 0).slots
    assert slots[1].cores == "72-79" and all(slot.cpus and max(slot.cpus) < 40 for slot in slots if slot.gpu != 1)
    assert len({cpu for slot in slots for cpu in slot.cpus}) == sum(len(slot.cpus) for slot in slots)
    one_core = dataclasses.replace(facts, cpus=dataclasses.replace(facts.cpus, allowed=(*range(40), 72)))
    assert min(len(slot.cpus) for slot in binding(order_of("olivia", [facts]), one_core, 0).slots) > 1


def two_numa_nodes():
    cpus = tuple(range(16))
    made = Cpus(
        online=cpus, allowed=cpus, siblings=tuple((cpu,) for cpu in cpus), numa={"0": cpus[:8], "1": cpus[8:]}
    )  # fmt: skip
    gpus = tuple(Gpu(place, "nvidia", f"0000:0{place}:00.0", numa=place // 2) for place in range(4))
    return dataclasses.replace(machine(16), cpus=made, gpus=gpus)


@pytest.mark.parametrize(
    ("changes", "cores"),
    [
        ({"ranks_per_node": 1, "gpus_per_rank": 4}, ["0-15"]),
        ({"ranks_per_node": 1}, ["0-15"]),  # it sees all of them
        ({"ranks_per_node": 1, "gpus": 2}, ["0-7"]),
        ({"ranks_per_node": 1, "visibility": "own"}, ["0-7"]),
        ({"ranks_per_node": 2, "gpus_per_rank": 2}, ["0-7", "8-15"]),
        ({"ranks_per_node": 4}, ["0-3", "4-7", "8-11", "12-15"]),
    ],
)
def test_a_rank_has_the_cores_beside_all_of_its_gpus(changes, cores):
    assert [
        slot.cores for slot in binding(order(nodes=1, emulated=False, **changes), two_numa_nodes(), 0).slots
    ] == cores
