"""The plan of an archetype: a job on the machines of tests/trees, with the profile of their site."""

import functools
import os
import tempfile

from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site
from drumbeat.machine.gather import gather
from drumbeat.machine.model import Peer, Peers
from drumbeat.machine.replay import FolderHost
from drumbeat.plan.network import address_of, candidates
from drumbeat.plan.show import plan_node
from tests.trees.archetypes import build

SITES = {
    "lumi-g": "lumi",
    "cpuset-of-3": "lumi",
    "slingshot-single-node": "lumi",
    "olivia": "olivia",
    "mi300x-thor2": "mi300x-thor2",
    "interface-down": "mi300x-thor2",
    "empty-gid": "mi300x-thor2",
    "mi300x-cx7": "mi300x-cx7",
    "rcp-pod": "rcp",
    "one-ipv4-gid": "rcp",
    "two-ipv4-gids": "rcp",
    "no-ipv4-gid": "rcp",
    "dgx-h100": "dgx-h100",
    "twelve-mlx5": "dgx-h100",
    "bond-only": "rcp",
    "ib-and-roce": "dgx-h100",
    "workstation": "workstation",
}


@functools.cache
def node_facts(name, node):
    """Facts are plain data: the folder they were read from is not needed any more."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of small files
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        build(name, folder, node)
        return gather(FolderHost(folder))


def facts_of(name, nodes=2):
    return [node_facts(name, node) for node in range(nodes)]


def peers_of(facts, ranks=1):
    nodes = []
    for node, each in enumerate(facts):
        reachable = candidates(each)
        nodes.append(Peer(node, each.host, (address_of(reachable[0]) if reachable else "") or "", each, ranks=ranks))
    return Peers(tuple(nodes), nodes[0].address, 61000)


def order_of(name, facts, text="command: python train.py\n"):
    gpus = len([gpu for gpu in facts[0].gpus if not gpu.integrated])
    identity = facts[0].identity
    here = Here(facts[0].host, "/work", {"HOME": "/home/u"}, 8, gpus or None, "u", 0.0, "e", identity.job_id,
                identity.step_id, tuple(each.host for each in facts))  # fmt: skip
    return resolve(job_from_text(text), load_site(SITES[name], {}), here)


def plans_of(name, text="command: python train.py\n", nodes=2):
    facts = facts_of(name, nodes)
    order = order_of(name, facts, text)
    return [plan_node(order, each, peers_of(facts), node) for node, each in enumerate(facts)]


def shown(plan):
    """What a person reviews, a line each."""
    return {
        "fabric": f"{plan.fabric}: {plan.fabric_why}",
        "variables": [f"{each.name}={each.value} [{each.source}] {each.why}" for each in plan.variables],
        "left alone": [f"{each.name}: {each.why}" for each in plan.left],
        "slots": [
            f"{slot.local_rank}: GPU {','.join(map(str, slot.gpus))} NUMA {slot.numa} cores {slot.cores} mask {slot.mask} "
            f"NIC {slot.nic}"
            for slot in plan.binding.slots
        ],
        "binding": plan.binding.threads_why,
        "rendezvous": f"{plan.rendezvous.address} {plan.rendezvous.run_id} {plan.rendezvous.why}",
        "findings": [f"{each.severity} {each.code}: {each.title}" for each in plan.findings],
    }
