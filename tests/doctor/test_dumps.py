"""Pasted dumps: what each tool prints, and what that means for a job. All written here."""

import dataclasses
import gzip
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import drumbeat
from drumbeat.doctor.dumps import judge, judged
from drumbeat.doctor.examine import examine
from drumbeat.logs.reader import Reader
from drumbeat.logs.show import render
from drumbeat.machine.dumps import MAX_BYTES, READERS
from drumbeat.machine.dumps import read_dumps as parse
from tests.plan.archetype import facts_of


def read_dumps(text, file):
    return tuple(judged(parse(text, file)))


def dump(text, kind):
    (found,) = [one for one in read_dumps(textwrap.dedent(text).strip("\n") + "\n", "pasted.txt") if one.kind == kind]
    return found


def codes(found):
    return [finding.code for finding in found.findings]


TOPO = """
    \tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
    GPU0\t X \tNV4\tPIX\tSYS\tSYS\t0-15\t0\t\tN/A
    GPU1\tNV4\t X \tSYS\tPXB\tSYS\t16-31\t1\t\tN/A
    NIC0\tPIX\tSYS\t X \tSYS\tSYS
    NIC1\tSYS\tPXB\tSYS\t X \tSYS
    NIC2\tSYS\tSYS\tSYS\tSYS\t X

    Legend:
      X    = Self
    NIC Legend:
      NIC0: mlx5_0
      NIC1: mlx5_4
      NIC2: mlx5_bond_0
"""


def test_which_card_belongs_to_which_gpu():
    found = dump(TOPO, "nvidia-smi topo -m")
    assert found.data["nearest"] == {"GPU0": ["mlx5_0"], "GPU1": ["mlx5_4"]}
    assert found.data["numa"] == {"GPU0": 0, "GPU1": 1}
    (note,) = found.findings
    assert note.code == "nic-near-no-gpu" and "mlx5_bond_0" in note.title and "NCCL_IB_HCA==mlx5_0,mlx5_4 " in note.fix


def test_a_gpu_without_a_card_on_its_side():
    text = (
        "        GPU0  GPU1  mlx5_0  CPU Affinity\nGPU0  X   SYS  PHB 0-7\nGPU1  SYS  X  SOC 8-15\nmlx5_0 PHB SOC X\n"
    )
    found = dump(text, "nvidia-smi topo -m")
    assert codes(found) == ["gpu-far-from-nic"] and "GPU 1" in found.findings[0].title


def test_a_table_of_peer_access_is_no_topology():
    assert not read_dumps("      GPU0  GPU1 GPU2\nGPU0  X  OK OK\nGPU1  OK X OK\nGPU2 OK OK X\n", "x")


def test_ports_of_rdma_link_old_and_new():
    text = """
    link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ens1
    link mlx5_1/1 state DOWN physical_state DISABLED netdev ens2
    9/1: mlx5_2/1: state ACTIVE physical_state LINK_UP netdev ens3
    """
    found = dump(text, "rdma link")
    assert found.data["active"] == ["mlx5_0", "mlx5_2"] and found.data["down"] == ["mlx5_1"]
    assert codes(found) == ["rdma-port-down"] and "mlx5_1 port 1 is down (DISABLED)" in found.findings[0].title


IBSTAT = """
    CA 'mlx5_0'
    \tCA type: MT4123
    \tPort 1:
    \t\tState: {state}
    \t\tPhysical state: LinkUp
    \t\tRate: 200
    \t\tLink layer: InfiniBand
    CA 'mlx4_0'
    \tPort 1:
    \t\tState: Active
    \t\tPhysical state: LinkUp
    \t\tRate: 10
    \t\tLink layer: Ethernet
"""


def test_ibstat_mixed_slow_and_without_a_subnet_manager():
    assert codes(dump(IBSTAT.format(state="Active"), "ibstat")) == ["rdma-mixed"]
    ethernet = IBSTAT.format(state="Active").replace("InfiniBand", "Ethernet")
    assert codes(dump(ethernet, "ibstat")) == ["rdma-rate-low"]
    assert codes(dump(IBSTAT.format(state="Initializing"), "ibstat")) == ["ib-no-subnet-manager"]


def test_ibv_devinfo_and_devices():
    text = """
    hca_id: mlx5_0
            transport:                      InfiniBand (0)
            phys_port_cnt:                  1
                    port:   1
                            state:                  PORT_ACTIVE (4)
                            active_mtu:             1024 (3)
                            link_layer:             Ethernet
    """
    found = dump(text, "ibv_devinfo")
    assert found.data["active"] == ["mlx5_0"] and codes(found) == ["mtu-small"]
    text = "    device      node GUID\n    ------   ----------------\n    rxe0     9c7ff4fffeaff293\n"
    assert codes(dump(text, "ibv_devices")) == ["software-rdma"]


def test_show_gids_names_the_right_index():
    rows = """
    DEV     PORT    INDEX   GID                                     IPv4            VER     DEV
    mlx5_0  1       0       fe80:0000:0000:0000:1270:fdff:fe00:0001                 v1      ens1
    mlx5_0  1       3       0000:0000:0000:0000:0000:ffff:0a00:0001 10.0.0.1        v2      ens1
    mlx5_1  1       {index}       0000:0000:0000:0000:0000:ffff:0a00:0002 10.0.0.2        v2      ens2
    n_gids_found=3
    """
    found = dump(rows.format(index=3), "show_gids")
    assert found.data["roce_v2_ipv4_index"] == {"mlx5_0": [3], "mlx5_1": [3]} and codes(found) == ["gid-index"]
    assert codes(dump(rows.format(index=5), "show_gids")) == ["gid-index-differs"]


def test_rocm_and_amd_smi():
    text = "\n".join(f"GPU[{gpu}]\t\t: (Topology) Numa Node: {node}" for gpu, node in enumerate((3, 3, 1, 1)))
    found = dump(text, "rocm-smi --showtopo")
    assert found.data["numa"] == {"GPU0": 3, "GPU1": 3, "GPU2": 1, "GPU3": 1} and codes(found) == [
        "gpu-order-not-numa-order"
    ]
    table = "             0000:03:00.0 0000:0c:00.0\n0000:03:00.0 {0}      {1}\n0000:0c:00.0 {1}     {0}\n"
    text = "ACCESS TABLE:\n" + table.format("ENABLED", "DISABLED") + "LINK TYPE TABLE:\n" + table.format("SELF", "PCIE")
    found = dump(text, "amd-smi topology")
    assert found.data["gpus"] == 2 and found.data["links"] == ["PCIE"] and codes(found) == ["gpu-peer-access-off"]
    text = "GPU: 0\n  BUS:\n    BDF: 0000:0c:00.0\n  NUMA:\n    NODE: 1\n  PARTITION:\n    COMPUTE_PARTITION: CPX\n"
    found = dump(text + "    MARKET_NAME: MI300X\nNUMA_NODE\n", "amd-smi static")
    assert found.data["numa"] == {"GPU0": 1} and codes(found) == ["gpu-divided"]


def test_nvidia_query():
    text = """
    Driver Version                            : 550.54.15
    Attached GPUs                             : 1
    GPU 00000000:17:00.0
        Product Name                          : NVIDIA H100
        MIG Mode
            Current                           : Enabled
        ECC Errors
            Volatile
                DRAM Uncorrectable            : 2
        Remapped Rows
            Pending                           : Yes
        Clocks Event Reasons
            SW Power Cap                      : Active
            HW Slowdown                       : Active
    """
    found = dump(text, "nvidia-smi -q")
    assert codes(found) == ["gpu-memory-errors", "gpu-remap-pending", "gpu-throttled", "gpu-divided"]
    healthy = text.replace("Uncorrectable            : 2", "Uncorrectable            : 0").replace(
        "Enabled", "Disabled"
    )
    assert codes(dump(healthy.replace("HW Slowdown", "Idle       "), "nvidia-smi -q")) == ["gpu-remap-pending"]

    low = text.replace("MIG Mode", "GPU Power Readings\n            Current Power Limit : 350.00 W\n"
                       "            Default Power Limit : 700.00 W\n        MIG Mode")  # fmt: skip
    assert "power-limit-low" in codes(dump(low, "nvidia-smi -q"))


XML = """
<system version="1">
  <cpu numaid="0"><pci busid="0:1"><pci busid="0:2"><gpu dev="0"/></pci>
    <pci busid="0:3"><nic><net name="mlx5_0"/></nic></pci></pci></cpu>
  <cpu numaid="1"><pci busid="1:1"><gpu dev="1"/></pci></cpu>
</system>
"""


def test_nccl_topology_file():
    found = dump(XML, "NCCL topology file")
    assert found.data["nearest"] == {"GPU0": ["mlx5_0"], "GPU1": ["mlx5_0"]} and codes(found) == ["gpu-far-from-nic"]
    assert dump("<graphs version='1'></graphs>", "NCCL graph file").facts


def test_ds_report():
    text = """
    DeepSpeed C++/CUDA extension op report
    cpu_adam ............... [YES] ...... [OKAY]
    sparse_attn ............ [NO] ....... [NO]
    DeepSpeed general environment info:
    torch version .................... 2.1.1+cu121
    torch cuda version ............... 12.1
    nvcc version ..................... 11.3
    deepspeed wheel compiled w. ...... torch 2.0, cuda 11.7
    shared memory (/dev/shm) size .... 0.06 GB
    """
    assert codes(dump(text, "ds_report")) == [
        "shm-small",
        "cuda-versions-differ",
        "deepspeed-operators",
        "deepspeed-torch",
    ]


def test_ip_addr():
    text = """
    1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN
        link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00
        inet 127.0.0.1/8 scope host lo
    2: ens1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP
        link/ether 10:70:fd:00:00:01 brd ff:ff:ff:ff:ff:ff
        inet 10.0.0.1/24 scope global ens1
    3: ens2: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc mq state DOWN
        link/ether 10:70:fd:00:00:02 brd ff:ff:ff:ff:ff:ff
        inet 10.0.1.1/24 scope global ens2
    """
    found = dump(text, "ip addr")
    assert found.data["usable"] == ["ens1"] and codes(found) == ["interface-down"]


def test_every_finding_says_where_it_was_seen_and_the_text_shows_it():
    reader = Reader()
    reader.pasted.extend(read_dumps(textwrap.dedent(TOPO), "topo.txt"))
    text = render(reader.report())
    assert "GPU 0: mlx5_0 (PIX), NUMA 0" in text and "failure" not in text and "[topo.txt:7]" in text
    for found in reader.pasted:
        assert all(finding.seen == (f"{found.kind}: topo.txt",) for finding in found.findings)
        assert [finding.evidence[0].text.split()[0] for finding in found.findings] == ["NIC2"]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_mark_alone_is_no_dump(reader):
    for mark in READERS[reader]:
        assert not [one for one in read_dumps(f"some text {mark} and more\n", "x") if "NCCL" not in one.kind]


def test_hostile_text_is_read_in_bounded_time():
    many = range(2_000)
    for text in (
        "<" * 100_000 + "<system" + "<a" * 100_000, "GPU0 " * 50_000, "JobId=" * 50_000, "CA '" * 90_000,
        "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Down\n" * 2_000,
        "".join(f"link mlx5_{n}/1 state DOWN physical_state DISABLED netdev e{n}\n" for n in many),
        "".join(f"link mlx5_0/{n} state DOWN physical_state DISABLED netdev e\n" for n in many),
        "<system>" + "".join(f'<cpu numaid="0"><gpu dev="{n}"/><net name="n{n}"/></cpu>' for n in many) + "</system>",
    ):  # fmt: skip
        found = read_dumps(text, "x")
        assert len(found) <= 64 and all(len(one.findings) <= 4200 for one in found)
    assert MAX_BYTES <= 8 << 20


def test_damaged_dumps_stop_nothing():
    rng = random.Random(7)
    texts = [textwrap.dedent(each) for each in (TOPO, IBSTAT, XML, TOPO_WITHOUT_LEGEND, CUT)]
    odd = ("9" * 30, "-1", "\0", "\u0663", "GPU0", "'", "\n", '"', "NIC0: ", "NV18", "SYS")
    for _ in range(400):
        text = rng.choice(texts) + rng.choice(texts)
        for _ in range(rng.randint(1, 6)):
            start, length = rng.randrange(len(text)), rng.randint(0, 60)
            text = text[:start] + rng.choice(odd) * rng.randint(0, 1) + text[start + length :]
        judge(parse(text, "x") or parse(IBSTAT, "x"))


TOPO_WITHOUT_LEGEND = """
        GPU0    GPU1    NIC0    NIC1    NIC2    CPU Affinity    NUMA Affinity
GPU0     X      SYS     PIX     SYS     SYS     0-3             0
GPU1    SYS      X      SYS     PIX     SYS     4-7             1
"""


@pytest.mark.parametrize(
    "text, kind, words",
    [
        ("DEV\tPORT\tINDEX\tGID\n---\t----\nn_gids_found=0\n", "show_gids", "no RDMA device has a GID here"),
        (TOPO_WITHOUT_LEGEND, "nvidia-smi topo -m", "the NIC legend below the table names the devices"),
        ("HOPS TABLE:\n   0000:c1:00.0 0000:c6:00.0\n0000:c1:00.0 0 1\n0000:c6:00.0 1 0\n", "amd-smi topology", "GPU 1: at"),
        ("op name ................ installed .. compatible\nfp_quantizer ........... [NO] ....... [NO]\n", "ds_report",
         "fp_quantizer"),
        ("1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536\nlink/loopback 00:00\n2: p1: <UP,LOWER_UP> mtu 1500\nlink/ether 9c:63\n"
         "inet 192.168.1.6/24 scope global p1\n", "ip addr", "could carry a job: p1"),
        ("hca_id: mlx5_0\n  port:   1\n  state:  PORT_ACTIVE (4)\n  link_layer: Ethernet\n  active_width: 4X (2)\n"
         "  active_speed: 25.0 Gbps (32)\n", "ibv_devinfo", "100 Gb/s"),
        ("    GPU UUID   : GPU-1\n    PCI\n        Bus Id     : 00000000:82:00.0\n", "nvidia-smi -q", "0000:82:00.0"),
        ('<nvidia_smi_log>\n<driver_version>550.1</driver_version>\n<gpu id="00000000:01:00.0">\n<product_name>X</product_name>',
         "nvidia-smi -q -x", "without -x"),
    ],
)  # fmt: skip
def test_forms_that_people_paste(text, kind, words):
    (dump,) = read_dumps(text, "x")
    assert dump.kind == kind
    assert words in " ".join([*dump.facts, *(f"{each.title} {each.fix}" for each in dump.findings)])
    assert "NCCL_IB_HCA=NIC" not in str(dump)


def test_ibstatus():
    text = (
        "Infiniband device 'mlx5_11' port 1 status:\n\tbase lid:\t 0xffff\n\tstate:\t\t 1: DOWN\n\tphys state:\t 3: Disabled\n"
        "\trate:\t\t 10 Gb/sec (4X SDR)\n\tlink_layer:\t InfiniBand\n\n"
        "Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n"
        "\trate:\t\t 100 Gb/sec (4X EDR)\n\tlink_layer:\t Ethernet\n"
    )
    (dump,) = read_dumps(text, "x")
    assert dump.kind == "ibstatus"
    assert dump.facts == ("mlx5_11 port 1: down, InfiniBand", "mlx5_0 port 1: active, Ethernet, 100 Gb/s")
    assert [each.code for each in dump.findings][0] == "rdma-port-down" and "Disabled" in dump.findings[0].title


def test_the_interface_of_an_infiniband_port_is_not_the_port():
    text = (
        "mlx5_0   port  1  ==>  ibp26s0        (Down)  # card 1\nmlx5_1   port  1  ==>  enp27s0f0np0   (Up)\n"
        "mlx5_2   port  1  ==>  enp27s0f1np1   (Down)\n"
    )
    (dump,) = read_dumps(text, "x")
    assert [(each.code, each.severity) for each in dump.findings] == [
        ("rdma-port-down", "warning"), ("rdma-port-not-shown", "info"),
    ]  # fmt: skip
    assert "mlx5_2" in dump.findings[0].title and "state not shown" in dump.facts[0]


@pytest.mark.parametrize("state", ["Act", "Dow", ""])
def test_a_port_whose_state_is_cut_is_not_down(state):
    text = f"CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\nCA 'mlx5_1'\n\tPort 1:\n\t\tState: {state}"
    (dump,) = read_dumps(text, "x")
    assert "rdma-port-down" not in codes(dump) and dump.data["down"] == []
    assert not state or f"cut here, at the state '{state}'" in dump.facts[1]


def test_a_rate_in_the_last_line_may_be_cut():
    port = "CA 'mlx5_{}'\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: {}\n"
    whole = port.format(0, 400) + port.format(1, 40) + "\t\tBase lid: 7\n"
    assert codes(read_dumps(whole, "x")[0]) == ["rdma-rate-low"]
    assert codes(read_dumps(port.format(0, 400) + port.format(1, 40), "x")[0]) == []


CUT = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-31\t0
"""


@pytest.mark.parametrize(
    "row", ["", "GPU1\tNV18\t X \tNV1", "GPU1\tNV18\t X \tNV18\tNV18\tSYS\tSYS", "GPU1\tSYS\t X \tSYS\tSYS\tSYS"]
)
def test_a_row_of_the_topology_that_is_cut_is_not_judged(row):
    (dump,) = read_dumps(CUT + row, "x")
    assert dump.data["nearest"] == {"GPU0": ["NIC0"]} and codes(dump) == []
    assert (
        "between the GPUs: NV18" in dump.facts and "cut here" in dump.facts[-1] and "GPU1, GPU2, GPU3" in dump.facts[-1]
    )


def test_two_topologies_in_one_paste_are_both_read():
    first, second = (
        f"\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t{link}\t{near}\t0-31\t0\nGPU1\t{link}\t X \tSYS\t32-63\t1\n"
        f"NIC0\t{near}\tSYS\t X \n\nNIC Legend:\n  NIC0: {name}\n\n"
        for link, near, name in (("NV18", "PIX", "mlx5_0"), ("SYS", "SYS", "mlx5_8"))
    )
    one, other = read_dumps(first + second, "x")
    assert "GPU 0: mlx5_0 (PIX), NUMA 0" in one.facts and "GPU 0: mlx5_8 (SYS), NUMA 0" in other.facts
    assert [(each.title, each.evidence[0].line) for found in (one, other) for each in found.findings] == [
        ("no NIC is on the same socket as GPU 1", 3), ("no NIC is on the same socket as GPU 0, GPU 1", 10),
    ]  # fmt: skip
    assert read_dumps(first + first, "x") == read_dumps(first, "x")


def test_two_nodes_in_one_paste_are_both_read():
    node = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: {}\n\t\tPhysical state: {}\n"
    one, other = read_dumps(node.format("Active", "LinkUp") + node.format("Down", "Disabled"), "x")
    assert codes(one) == [] and [(each.code, each.evidence[0].line) for each in other.findings] == [
        ("rdma-port-down", 7)
    ]


def test_dumps_of_one_node_together_know_which_port_is_beside_a_gpu():
    topo = "\tGPU0\tmlx5_0\tmlx5_1\tCPU Affinity\nGPU0\t X \tPIX\tSYS\t0-7\n"
    down, up = "state DOWN physical_state DISABLED netdev a", "state ACTIVE physical_state LINK_UP netdev b"
    ports = f"link mlx5_0/1 {down}\nlink mlx5_1/1 {up}\n"
    _, found = judged([*parse(topo, "topo.txt"), *parse(ports, "ports.txt")])
    (finding,) = [each for each in found.findings if each.code == "rdma-port-down"]
    assert "beside a GPU" in finding.title and finding.evidence[0].place == "ports.txt:1"
    assert finding.support == "the port of mlx5_0 on the node is down"


def test_standard_input_is_judged_as_a_file_is_by_diagnose_and_doctor(tmp_path):
    fields = "\t\tState: {}\n\t\tPhysical state: {}\n\t\tRate: 10\n\t\tLink layer: InfiniBand\n"
    text = "CA 'mlx5_0'\n\tPort 1:\n" + fields.format("Active", "LinkUp")
    text += "CA 'mlx5_1'\n\tPort 1:\n" + fields.format("Down", "Polling")
    (tmp_path / "ibstat.txt").write_text(text)
    with gzip.open(tmp_path / "ibstat.gz", "wt") as file:
        file.write(text)

    def said(*arguments):
        command = [sys.executable, "-m", "drumbeat", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(Path(drumbeat.__file__).parents[1])}
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=150
        )
        return re.sub("ibstat.txt|ibstat.gz|stdin", "FILE", " ".join(done.stdout.split()))

    for arguments in (("diagnose",), ("doctor", "--from")):
        as_file, packed, piped = (said(*arguments, path) for path in ("ibstat.txt", "ibstat.gz", "-"))
        assert as_file == packed == piped and "mlx5_1 port 1 is down (Polling)" in piped, (piped, packed)
        assert "FILE:9" in piped


def test_a_live_node_is_judged_by_the_checks_that_only_dumps_had():
    def live(name="dgx-h100", **changes):
        return [each.code for each in examine(dataclasses.replace(facts_of(name, 1)[0], **changes))]

    facts = facts_of("dgx-h100", 1)[0]
    first, *gpus = facts.gpus
    waiting = dataclasses.replace(facts.rdma[0].ports[0], state="INIT", link_layer="InfiniBand")
    assert "ib-no-subnet-manager" in live(rdma=(dataclasses.replace(facts.rdma[0], ports=(waiting,)), *facts.rdma[1:]))
    assert "software-rdma" in live(rdma=(*facts.rdma, dataclasses.replace(facts.rdma[0], name="rxe0")))
    assert "gpu-numa-unknown" in live(gpus=(dataclasses.replace(first, numa=None), *gpus))
    assert "gpu-peer-access-off" in live(gpus=(dataclasses.replace(first, no_access=(1,)), *gpus))
    assert "nvlink-partial" in live(gpus=(dataclasses.replace(first, links={"GPU 1": "NV18", "GPU 2": "SYS"}), *gpus))
    assert "gpu-divided" in live(gpus=(dataclasses.replace(first, partition="CPX"), *gpus))
    up = next(one for one in facts.interfaces if one.up and one.addresses and one.kind == "physical")
    assert "interface-down" in live(interfaces=(dataclasses.replace(up, up=False),))
    assert "gpu-order-not-numa-order" in live("lumi-g")
    assert not {"gpu-far-from-nic", "nic-near-no-gpu", "topology-flat"} & {
        *live(),
        *live("lumi-g"),
        *live("mi300x-thor2"),
    }
    assert "gpu-far-from-nic" in live(rdma=facts.rdma[:1])


def test_evidence_names_the_line_it_stands_on():
    fields = "\t\tState: Down\n\t\tPhysical state: Polling\n\t\tRate: 10\n\t\tLink layer: InfiniBand\n"
    (dump,) = parse(f"see below\n\nCA 'mlx5_0'\n\tPort 1:\n{fields}", "ibstat.txt")
    evidence = dump.lines["mlx5_0"]
    assert (evidence.place, evidence.text) == ("ibstat.txt:5", "State: Down")
