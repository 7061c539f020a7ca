"""What the doctor says of each machine, and of one thing wrong at a time."""

import dataclasses
import random

import pytest

from drumbeat.doctor.case import make_case
from drumbeat.doctor.examine import COMBINATIONS, examine, preflight
from drumbeat.doctor.network import compare_with_host, package_of
from drumbeat.findings.catalog import entries
from drumbeat.findings.model import SEVERITIES
from drumbeat.machine.model import Facts, Gpu, GpuHealth, Interface, Library, PciLink
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.plan.damage import damaged

GIB = 1 << 30


def said(facts, order=None, peers=None):
    return {(each.code, each.severity) for each in examine(facts, order, peers) if each.severity not in ("ok", "info")}


def change(name, **parts):
    """Facts of a machine with some fields of its parts changed: limits={...}, kernel={...}, or a field itself."""
    facts = facts_of(name, 1)[0]
    made = {}
    for part, value in parts.items():
        held = getattr(facts, part)
        made[part] = (
            dataclasses.replace(held, **value)
            if isinstance(value, dict) and part not in ("environment", "versions")
            else value
        )
    return dataclasses.replace(facts, **made)


@pytest.mark.parametrize(
    "name,expected",
    [
        ("lumi-g", set()),
        ("olivia", set()),
        ("mi300x-thor2", set()),
        ("mi300x-cx7", set()),
        ("rcp-pod", {("cores-not-beside-gpu", "warning")}),
        ("dgx-h100", set()),
        ("workstation", set()),
        ("twelve-mlx5", set()),
        ("one-ipv4-gid", {("cores-not-beside-gpu", "warning")}),
        ("no-ipv4-gid", {("cores-not-beside-gpu", "warning"), ("gid-missing", "error")}),
        ("bond-only", set()),
        ("cpuset-of-3", {("ranks-share-cores", "warning")}),
        ("interface-down", {("rdma-port-down", "warning")}),
        ("empty-gid", {("gid-missing", "error")}),
        ("ib-and-roce", {("rdma-mixed", "warning")}),
        ("slingshot-single-node", set()),
    ],
)
def test_a_whole_machine(name, expected):
    assert said(facts_of(name, 1)[0]) == expected


def without(name, start):
    facts = facts_of(name, 1)[0]
    kept = tuple(one for one in facts.libraries if not one.name.startswith(start))
    return dataclasses.replace(facts, libraries=(*kept, Library(f"{start}.so.1", why_not="not on the library path")))


@pytest.mark.parametrize(
    "name,parts,expected",
    [
        ("dgx-h100", {"limits": {"memlock": 65536}}, ("memlock-low", "error")),
        ("dgx-h100", {"limits": {"memlock": 8 * GIB}}, ("memlock-low", "warning")),
        ("dgx-h100", {"limits": {"shm_bytes": 64 << 20}}, ("shm-small", "error")),
        ("dgx-h100", {"limits": {"shm_bytes": 2 * GIB}}, ("shm-small", "warning")),
        ("dgx-h100", {"limits": {"nofile": 1024}}, ("nofile-low", "warning")),
        ("dgx-h100", {"limits": {"cgroup_memory_bytes": 8 * GIB}}, ("memory-limit-low", "warning")),
        ("mi300x-thor2", {"kernel": {"numa_balancing": True}}, ("numa-balancing", "warning")),
        ("mi300x-thor2", {"kernel": {"iommu": "on"}}, ("iommu-translating", "warning")),
        ("mi300x-thor2", {"kernel": {"acs_enabled": True}}, ("acs-on", "warning")),
        ("workstation", {"kernel": {"release": "5.15.90.1-microsoft-standard-WSL2"}}, ("wsl", "error")),
        ("lumi-g", {"container": {"image_arch": "aarch64"}}, ("image-architecture", "error")),
        ("lumi-g", {"libraries": ()}, ("ofi-plugin-missing", "warning")),
        ("dgx-h100", {"without": "libibverbs"}, ("library-missing", "error")),
        ("dgx-h100", {"without": "libmlx5"}, ("library-missing", "error")),
        ("dgx-h100", {"without": "librdmacm"}, ("library-missing", "warning")),
        ("lumi-g", {"without": "libcxi"}, ("library-missing", "warning")),
        ("mi300x-thor2", {"versions": {"rccl": "2.20.5", "rocm": "6.2.4"}, "kernel": {"release": "6.8.0-45-generic"}},
         ("rccl-kernel-gdr", "warning")),
        ("mi300x-thor2", {"environment": {"NCCL_CUMEM_ENABLE": "0"}}, ("rccl-cumem-thor", "warning")),
        ("dgx-h100", {"environment": {"NCCL_IB_HCA": "rdma0"}}, ("hca-missing", "error")),
    ],
)  # fmt: skip
def test_one_thing_wrong(name, parts, expected):
    facts = without(name, parts["without"]) if "without" in parts else change(name, **parts)
    assert expected in said(facts)
    finding = next(each for each in examine(facts) if each.code == expected[0])
    assert finding.fix or finding.support or finding.cause, "no way out is given"


def gpus(machine, **changes):
    facts = facts_of(machine, 1)[0]
    return dataclasses.replace(facts, gpus=(dataclasses.replace(facts.gpus[0], **changes), *facts.gpus[1:]))


def test_gpus():
    second = facts_of("dgx-h100", 1)[0].gpus[1]
    assert ("gpu-in-use", "warning") in said(gpus("dgx-h100", pids=(4711,)))
    assert ("gpu-twice", "error") in said(gpus("dgx-h100", pci=second.pci))
    assert ("gpus-differ", "warning") in said(gpus("dgx-h100", name="NVIDIA A2"))
    assert ("pcie-narrow", "warning") in said(gpus("dgx-h100", link=PciLink(32.0, 8, 32.0, 16)))
    assert said(gpus("dgx-h100", link=PciLink(2.5, 16, 32.0, 16))) == set(), "an idle GPU slows its link down"


def test_a_job_without_its_gpus_would_fail():
    job = dataclasses.replace(order_of("dgx-h100", facts_of("dgx-h100")), gpus=8)
    bare = dataclasses.replace(facts_of("dgx-h100")[0], gpus=())
    assert ("no-gpu", "error") in said(bare, job)


def test_what_breaks_several_nodes_is_a_warning_for_one():
    facts = facts_of("empty-gid")[0]
    one = order_of("empty-gid", facts_of("empty-gid", 1))
    assert ("gid-missing", "warning") in said(facts, one)
    locked = change("dgx-h100", limits={"memlock": 65536})
    assert ("memlock-low", "warning") in said(locked, order_of("dgx-h100", facts_of("dgx-h100", 1)))


def test_a_node_whose_ports_are_all_down():
    facts = facts_of("dgx-h100")
    down = dataclasses.replace(
        facts[0],
        rdma=tuple(
            dataclasses.replace(one, ports=tuple(dataclasses.replace(port, state="DOWN") for port in one.ports))
            for one in facts[0].rdma
        ),
    )
    job = order_of("dgx-h100", facts)
    assert ("rdma-all-down", "error") in said(down, job, peers_of([down, facts[1]])), "its peer has the network"
    assert ("rdma-all-down", "warning") in said(down, job, peers_of([down, down])), "nobody has it: TCP"


def test_the_package_is_the_distributions():
    assert package_of("libmlx5", "Ubuntu 22.04.5 LTS") == "ibverbs-providers"
    assert package_of("libmlx5", "SUSE Linux Enterprise Server 15 SP5") == "libmlx5-1"
    assert package_of("libibverbs.so", "Rocky Linux 9.4") == "libibverbs"
    assert "libibverbs1 or libibverbs" in package_of("libibverbs.so", None)
    ubuntu = dataclasses.replace(without("dgx-h100", "libmlx5"), os="Ubuntu 24.04 LTS")
    assert any("install ibverbs-providers" in each.fix for each in examine(ubuntu))


def test_broadcoms_library_must_be_the_hosts():
    host = facts_of("mi300x-thor2", 1)[0]
    other = tuple(
        dataclasses.replace(one, digest="0" * 64) if one.name.startswith("libbnxt_re") else one
        for one in host.libraries
    )
    inside = dataclasses.replace(host, libraries=other)
    found = list(compare_with_host(make_case(host, None), make_case(inside, None)))
    assert [(each.code, each.severity) for each in found] == [("provider-differs", "error")]
    assert "/usr/local/lib" in found[0].fix
    same = list(compare_with_host(make_case(host, None), make_case(host, None)))
    assert [each.code for each in same] == ["provider-equal"]


def test_two_broadcom_libraries():
    host = facts_of("mi300x-thor2", 1)[0]
    inbox = Library(
        "libbnxt_re-rdmav34.so", "/usr/lib/x86_64-linux-gnu/libibverbs/libbnxt_re-rdmav34.so", digest="1" * 64
    )
    assert ("bnxt-two-libraries", "warning") in said(dataclasses.replace(host, libraries=(*host.libraries, inbox)))


def test_a_link_that_came_up_slow():
    facts = facts_of("dgx-h100")[0]
    slow = tuple(
        dataclasses.replace(one, ports=(dataclasses.replace(one.ports[0], rate_gbps=100.0),))
        if one.name == "mlx5_4"
        else one
        for one in facts.rdma
    )
    found = [each for each in examine(dataclasses.replace(facts, rdma=slow)) if each.code == "rdma-rate-low"]
    assert [each.severity for each in found] == ["warning"] and "mlx5_4" in found[0].title and found[0].support


def test_a_device_that_the_container_was_not_given():
    facts = facts_of("rcp-pod")[0]
    shown_only = dataclasses.replace(facts, rdma=(dataclasses.replace(facts.rdma[0], openable=False),))
    assert ("rdma-device-hidden", "error") in said(shown_only)


def test_a_pod_with_part_of_its_machines_gpus():
    facts = facts_of("rcp-pod")[0]
    here = len(facts.gpus)
    part = dataclasses.replace(facts, gpus_on_bus={"nvidia": 2 * here})
    assert ("part-of-a-node", "warning") in said(part)
    whole = dataclasses.replace(facts, gpus_on_bus={"nvidia": here})
    assert "part-of-a-node" not in [code for code, _ in said(whole)]


def test_gpu_direct_on_nvidia():
    old = change("dgx-h100", kernel={"nvidia_peermem": False, "release": "5.4.0-generic"})
    assert ("peermem-missing", "warning") in said(old)
    new = change("dgx-h100", kernel={"nvidia_peermem": False, "release": "6.8.0-generic"})
    assert "peermem-missing" in [each.code for each in examine(new) if each.severity == "info"]
    assert "peermem" in [each.code for each in examine(change("dgx-h100", kernel={"nvidia_peermem": True}))]
    cloud = change("dgx-h100", virtual_machine=True)
    assert "vm-without-topology" in [each.code for each in examine(cloud)]
    told = change("dgx-h100", virtual_machine=True, environment={"NCCL_TOPO_FILE": "/opt/ndv5.xml"})
    assert "vm-without-topology" not in [each.code for each in examine(told)]


def test_no_way_out_suggests_to_stay_offline():
    lost = change("lumi-g", default_route="")
    assert "no-route-out" in [each.code for each in examine(lost)]
    offline = change("lumi-g", default_route="", environment={"HF_HUB_OFFLINE": "1"})
    assert "no-route-out" not in [each.code for each in examine(offline)]


def test_preflight_is_the_doctor_and_the_plan_for_this_job():
    facts = facts_of("empty-gid")
    job = order_of("empty-gid", facts)
    found = preflight(job, facts[0], peers_of(facts), 0)
    assert [each.severity for each in found] == sorted((e.severity for e in found), key=SEVERITIES.index, reverse=True)
    assert found[0].code == "gid-missing" and found[0].node == 0 and all(each.severity != "ok" for each in found)
    doubled = dataclasses.replace(facts[0], environment={"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"})
    assert "visibility-double-filter" in [each.code for each in preflight(job, doubled, peers_of(facts), 0)]


def test_a_healthy_node_starts_without_a_word():
    for name in ("lumi-g", "olivia", "mi300x-thor2", "mi300x-cx7", "dgx-h100", "workstation"):
        facts = facts_of(name)
        loud = [
            each for each in preflight(order_of(name, facts), facts[0], peers_of(facts), 0) if each.severity != "info"
        ]
        assert loud == [], name


@pytest.mark.parametrize("name", ["lumi-g", "mi300x-thor2", "rcp-pod", "workstation"])
def test_partial_facts_never_stop_the_doctor(name):
    rng = random.Random(name)
    facts = facts_of(name)
    for chance in (0.05, 0.2, 0.5, 0.9) * 3:
        examine(damaged(facts[0], rng, chance))
        preflight(order_of(name, facts), damaged(facts[0], rng, chance))
    examine(Facts("empty"))
    examine(Facts("one", gpus=(Gpu(0, "unknown"),)))


def test_every_combination_names_its_reference():
    words = entries("doctor")
    assert all(words[code]["source"] and words[code]["fix"] for code in COMBINATIONS)


def looked(facts):
    (finding,) = [each for each in examine(facts) if each.code == "looked-at"]
    return finding


def test_what_was_looked_at_is_said_where_there_is_little():
    finding = looked(Facts("laptop", gpus_on_bus={"nvidia": 2}))
    assert (
        "GPUs: none" in finding.seen[0]
        and "the PCI bus has 2 nvidia, and none is given to this process" in finding.seen[0]
    )
    assert "none in /sys/class/infiniband" in finding.seen[1] and "none that is up" in finding.seen[3]
    assert "unknown" in finding.seen[4] and finding.severity == "ok"
    whole = looked(facts_of("dgx-h100", 1)[0])
    assert whole.seen[0] == "GPUs: 8" and whole.seen[1] == "RDMA devices: 12"


def test_faults_of_programs_are_no_errors_of_the_gpu():
    gpu = Gpu(0, "nvidia", pci="0000:c1:00.0", memory_bytes=80 * GIB)
    fault, error = "Xid 13 on 0000:c1:00: pid=7, Graphics SM Warp Exception", "Xid 74 on 0000:c1:00: NVLink"

    def found(*events):
        facts = Facts("n", gpus=(gpu,), gpu_events=events)
        return {
            (each.code, each.severity)
            for each in examine(facts)
            if each.code.startswith("gpu-") and each.severity != "ok"
        }

    assert found(fault) == {("gpu-program-faults", "info")}
    assert found(error) == {("gpu-events", "warning")}
    assert found(fault, error) == {("gpu-program-faults", "info"), ("gpu-events", "warning")}
    gone = "Xid 79 on 0000:c1:00: off the bus"  # until a reset
    assert found(gone) == {("gpu-lost", "error")}
    assert found(gone, error) == {("gpu-lost", "error"), ("gpu-events", "warning")}


def test_one_gpu_or_interface_unlike_the_others():
    """Two thirds, and at least two, show what is usual."""

    def card(index, watts=700.0, mode="Default", default=None):
        settings = (("compute mode", mode),)
        return Gpu(index, "nvidia", health=GpuHealth(power_limit_w=watts, power_default_w=default, settings=settings))

    def found(gpus=(), interfaces=()):
        facts = Facts("n", gpus=tuple(gpus), interfaces=tuple(interfaces))
        kinds = ("power-limit-low", "gpu-set-apart", "interface-down", "interface-unreachable")
        return {each.code: each.title for each in examine(facts, shown=frozenset()) if each.code in kinds}

    assert found(map(card, range(4))) == {}
    assert found([card(0), card(1), card(2, 350.0)]) == {
        "power-limit-low": "GPU 2 is limited to 350 W, the others to 700 W"
    }
    assert found([card(0), card(1), card(2, 800.0)]) == {}, "a higher limit slows nobody"
    assert found([card(0), card(1, 350.0)]) == {} == found([card(n, 350.0 * (n % 2 + 1)) for n in range(4)])
    assert found([card(0, default=700.0), card(1), card(2, 350.0, default=350.0)]) == {}, "its own default is right"
    apart = found([card(0), card(1), card(2, mode="Exclusive_Process")])
    assert apart == {"gpu-set-apart": "GPU 2 is set to compute mode Exclusive_Process, the others to Default"}

    def hsn(number, up=True, address="10.1.0.{}/16"):
        return Interface(f"hsn{number}", up, (address.format(number),) if address else ())

    assert found((), map(hsn, range(4))) == {}
    down = found((), [hsn(0), hsn(1, False, ""), hsn(2), hsn(3, address="169.254.3.4/16")])
    assert down["interface-down"] == "hsn1 has no link, unlike hsn0, hsn2, hsn3"
    assert down["interface-unreachable"].startswith(
        "hsn3 has no address that another node could reach, unlike hsn0, hsn2"
    )
    assert found((), [hsn(0), hsn(1, False, "")]) == {}, "of two, one may be unused on purpose"


def test_a_gpu_without_links_among_joined_ones_has_lost_them():
    def joined(count, alone=()):
        def links(one):
            others = (n for n in range(count) if n != one)
            return {f"GPU {n}": "SYS" if {n, one} & set(alone) else "NV18" for n in others}

        return Facts("n", gpus=tuple(Gpu(n, "nvidia", links=links(n)) for n in range(count)))

    def severity(facts):
        return [each.severity for each in examine(facts, shown=frozenset()) if each.code == "nvlink-partial"]

    assert severity(joined(4)) == [] and severity(joined(4, alone=[3])) == ["warning"]
    assert severity(joined(4, alone=[2, 3])) == ["info"], "a board with one bridge"
