"""Real machines' PCI trees, as NCCL writes them: does every GPU get a NIC of its own switch, and the fast ones only?"""

import xml.etree.ElementTree as tree

from drumbeat.machine.model import Cpus, Facts, Gpu, RdmaDevice, RdmaPort
from drumbeat.plan.binding import binding
from drumbeat.plan.network import compute_nics
from tests.corpus import corpus
from tests.plan.making import order


def facts_of(file):
    """GPUs and NICs with their places; a node of the tree is a step of the PCI path."""
    gpus, nics, numa = [], [], {}

    def walk(node, path, home):
        for child in node:
            step = [*path, child.get("busid", child.tag)] if child.tag == "pci" else path
            if child.tag == "cpu":
                home = int(child.get("numaid"))
                numa[str(home)] = tuple(range(home * 16, home * 16 + 16))
                step = [f"pci{home:04x}:00"]
            if child.tag == "gpu":
                gpus.append(Gpu(len(gpus), "amd", pci=path[-1], numa=home, pci_path="/".join(path)))
            if child.tag == "net":
                port = RdmaPort(1, "ACTIVE", "LinkUp", "InfiniBand", float(child.get("speed", 0)) / 1000)
                nics.append(RdmaDevice(child.get("name"), "mlx5_core", path[-1], home, ports=(port,),
                                       pci_path="/".join(path)))  # fmt: skip
            walk(child, step, home)

    walk(tree.parse(file).getroot(), [], None)
    cpus = tuple(cpu for members in numa.values() for cpu in members)
    return Facts(file.stem, gpus=tuple(gpus), rdma=tuple(nics), cpus=Cpus(online=cpus, allowed=cpus, numa=numa))


def steps_apart(gpu, nic):
    """How many bridges lie between them, counted the plain way."""
    one, other = gpu.pci_path.split("/"), nic.pci_path.split("/")
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    return len(one) - common, common


def test_every_gpu_gets_a_nic_that_none_is_nearer_than():
    seen = 0
    for file in sorted(corpus("C_topology/nccl_xml").glob("*.xml")):
        facts = facts_of(file)
        if len(facts.gpus) < 2 or len(facts.rdma) < 2:
            continue
        seen += 1
        chosen = {nic.name: nic for nic in compute_nics(facts).devices}
        bound = binding(order(emulated=False, nodes=1, ranks_per_node=len(facts.gpus)), facts, 0)
        for slot in bound.slots:
            gpu = facts.gpus[slot.gpu]
            shared = {name: steps_apart(gpu, nic)[1] for name, nic in chosen.items()}
            if max(shared.values()):
                assert shared[slot.nic] == max(shared.values()), (file.name, slot)
            assert set(slot.cpus) <= set(facts.cpus.numa[str(gpu.numa)]), (file.name, slot)
        if len(chosen) == len(facts.gpus):
            assert len({slot.nic for slot in bound.slots}) == len(chosen), (file.name, "a NIC is idle")
    assert seen >= 3
