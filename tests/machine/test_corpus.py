"""Every parser over real output of other machines: none may fail, and where the truth is known, it must be found."""

import xml.etree.ElementTree as ElementTree

from drumbeat.base.ranges import HostlistError, expand
from drumbeat.machine import identity, topology
from drumbeat.machine.libraries import parse_cache
from drumbeat.machine.model import Gpu, RdmaDevice
from drumbeat.machine.parse import cpulist, natural, pci_address, properties
from drumbeat.machine.topology import nearest
from drumbeat.machine.vendors import amd, nvidia
from tests.corpus import corpus

PARSERS = (
    nvidia.parse_query,
    amd.parse_cards,
    topology.parse_fib_trie,
    topology.parse_routes,
    topology.parse_if_inet6,
    topology.parse_gid,
    topology.parse_rate,
    nvidia.parse_nvidia_csv,
    amd.parse_rocm_smi_table,
    amd.parse_amd_smi_monitor,
    cpulist,
    natural,
    pci_address,
    properties,
)


def test_no_parser_fails_on_any_of_it():
    seen = 0
    for path in sorted(corpus("C_topology").rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            text = data.decode("utf-8", "replace")
            for part in (text, *text.splitlines()[:200]):
                for parse in PARSERS:
                    parse(part)
                for parse in (expand, identity.tasks_per_node):
                    try:
                        parse(part)
                    except (HostlistError, ValueError):
                        pass
            parse_cache(data)
            seen += 1
    assert seen > 20


def test_nvidia_csv():
    samples = nvidia.parse_nvidia_csv((corpus("C_topology") / "nvidia_csv/rtx4090_util_power.csv").read_text())
    assert len(samples) == 119 and samples[3].busy == 34.0 and samples[3].memory_used == 17304 << 20
    assert {sample.name for sample in samples} == {"NVIDIA GeForce RTX 4090"} and samples[0].power == 33.09


def test_rocm_smi_tables():
    place = corpus("C_topology") / "rocm_smi"
    samples = amd.parse_rocm_smi_table((place / "concise_rdna2_na_partitions.txt").read_text())
    assert [(one.index, one.power, one.power_cap, one.memory_percent) for one in samples] == [
        (0, 6.0, 150.0, 3.0),
        (1, 8.0, 213.0, 0.0),
    ]
    samples = amd.parse_rocm_smi_table((place / "concise_stas_mi300.txt").read_text())
    assert [one.index for one in samples] == list(range(len(samples))) and len(samples) >= 6
    assert (samples[3].memory_percent, samples[3].power, samples[3].temperature, samples[3].clock) == (
        17.0,
        178.0,
        45.0,
        131.0,
    )


def test_amd_smi_monitor():
    text = (corpus("C_topology") / "amd_smi/monitor_cpx.txt").read_text()
    samples = amd.parse_amd_smi_monitor(text)
    assert [one.index for one in samples[:3]] == [0, 1, 2] and len(samples) >= 30
    assert (samples[0].power, samples[0].temperature, samples[0].memory_used) == (248.0, 55.0, 283 << 20)


def test_gids_of_a_card_without_version_1_entries():
    text = (corpus("C_topology") / "ib/show_gids_bluefield_v2_only_index1.txt").read_text()
    rows = [line.split() for line in text.splitlines()[2:]]
    four = [(row[0], int(row[2])) for row in rows if (topology.parse_gid(row[3]) or "").startswith("::ffff:")]
    assert ("mlx5_2", 1) in four, "the usual index 3 is not there"


def from_nccl(path):
    """GPUs and NICs with their places, from a topology that NCCL or RCCL wrote."""
    gpus, nics = [], []

    def walk(node, path, numa):
        for child in node:
            if child.tag == "cpu":
                walk(child, [f"pci{child.get('numaid')}"], int(child.get("numaid")))
            elif child.tag == "pci":
                walk(child, [*path, child.get("busid")], numa)
            elif child.tag == "nic":
                walk(child, path, numa)
            elif child.tag == "gpu":
                gpus.append(Gpu(len(gpus), "unknown", numa=numa, pci_path="/".join(path)))
            elif child.tag == "net":
                nics.append(RdmaDevice(child.get("name"), numa=numa, pci_path="/".join(path)))

    walk(ElementTree.parse(path).getroot(), [], None)
    return [[nic.name for nic in nearest(gpu, tuple(nics))] for gpu in gpus]


def test_nearest_nics_on_real_servers():
    place = corpus("C_topology") / "nccl_xml"
    assert from_nccl(place / "rccl_topo_8p_940.xml") == [[f"mlx5_{index}"] for index in range(8)]
    assert from_nccl(place / "yccl_topo_h800.xml") == [[f"mlx5_{index}"] for index in (0, 3, 4, 5, 6, 7, 8, 9)]
    assert from_nccl(place / "oci_H100-topology.xml")[1] == ["mlx5_3", "mlx5_4"]
    assert from_nccl(place / "rccl_topo_8p_940vm.xml")[7] == ["mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"], (
        "a VM shows no tree"
    )
