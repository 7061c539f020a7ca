"""The environment of a node's ranks: every variable with its reason and its source."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import SOURCES, EnvVar, Order
from drumbeat.base.text import count
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.machine.vendors import vendor_named
from drumbeat.plan.argv import flight_recorder
from drumbeat.plan.binding import Binding, binding
from drumbeat.plan.exported import ALT_READ, NO_RDZV_GET, alt_read_is_idle
from drumbeat.plan.network import (
    choose,
    common_gid_index,
    hca_value,
    lone_rails,
    own_addresses,
    roce_ports,
    slingshot_interfaces,
)
from drumbeat.plan.scene import NETWORKS, Scene, fits, matches, scene
from drumbeat.plan.variables import SETTINGS, steers

find = Catalog("plan")
FAST_ETHERNET_MBPS = 25_000  # from here one socket thread cannot fill the link
EXPORTED = "exported where drumbeat was started"
_AMD_ON_SLINGSHOT = {"vendor": "amd", "fabric": "slingshot", "nodes": "many"}


@dataclass(frozen=True)
class Left:
    """A variable that is not set, on purpose."""

    name: str
    why: str


@dataclass(frozen=True)
class Decision:
    variables: Tuple[EnvVar, ...]  # sorted by name
    left: Tuple[Left, ...]
    findings: Tuple[Finding, ...]


def environment(order: Order, facts: Facts, peers: Peers, node: int) -> List[EnvVar]:
    """Return node-wide variables, sorted by name. RANK and the like are set elsewhere; a slot may add its own."""
    return list(decide(order, facts, peers, node).variables)


def decide(order: Order, facts: Facts, peers: Peers, node: int, bound: Optional[Binding] = None) -> Decision:
    """Decide what is set and what is left alone; if sources disagree, the strongest wins and that is reported."""
    here = scene(order, facts, peers)
    left: List[Left] = []
    proposals = list(order.env)
    proposals += [
        EnvVar(name, value, EXPORTED, "user") for name, value in sorted(facts.environment.items()) if steers(name)
    ]
    if order.expect.transport == "tcp" and here.nodes == "many":
        proposals.append(EnvVar("NCCL_NET", "Socket", "the job expects TCP", "user"))
    about_interfaces: List[Finding] = []
    chosen_already = any(each.name == "NCCL_SOCKET_IFNAME" for each in proposals)
    proposals += _interfaces(here, facts, peers, node, left, about_interfaces)
    findings = [] if chosen_already else about_interfaces
    proposals += _rdma(here, facts, left)
    findings += lone_rails(here.nics, facts.host) if here.nodes == "many" else []
    proposals += _plugin(here, facts, left)
    proposals += [
        EnvVar(rule.name, rule.value, f"{rule.why} ({rule.reference})", "default")
        for rule in SETTINGS
        if matches(rule.when, here, facts) and not _idle(rule.name, facts, left)
    ]
    if matches(_AMD_ON_SLINGSHOT, here, facts):
        left.append(Left("NCCL_NET_GDR_LEVEL", "PHB is RCCL's own default from ROCm 6.2"))
    if here.vendor and here.fabric == "ethernet":
        left.append(Left("NCCL_P2P_DISABLE", "only where a check of copies between the GPUs has failed"))
    bound = bound or binding(order, facts, node, peers)
    proposals += bound.variables
    cores = f"{count(bound.threads, 'core')} per rank: {bound.threads_why}"
    proposals.append(EnvVar("OMP_NUM_THREADS", str(bound.threads), cores, "detected"))
    proposals += _caches(order, here, node, left)
    if order.checks.get("hang", "off") != "off":
        proposals += flight_recorder(proposals)
    variables, conflicts = settle(proposals)
    names = {variable.name for variable in variables}
    kept = tuple(item for item in left if item.name not in names)
    return Decision(tuple(variables), kept, tuple(findings + conflicts + _expected(order, here)))


def _idle(name: str, facts: Facts, left: List[Left]) -> bool:
    """Return true if this default has no effect because of how the job was started."""
    if name != ALT_READ or not alt_read_is_idle(facts):
        return False
    left.append(Left(name, f"alt_read takes effect only in a job started with --network={NO_RDZV_GET}"))
    return True


def settle(proposals: List[EnvVar]) -> Tuple[List[EnvVar], List[Finding]]:
    """Choose the strongest source of each name, the first among equals. Overruled values that differ are reported."""
    by_name: Dict[str, List[EnvVar]] = {}
    for proposal in proposals:
        by_name.setdefault(proposal.name, []).append(proposal)
    chosen, conflicts = [], []
    for name in sorted(by_name):
        ranked = sorted(by_name[name], key=lambda variable: SOURCES.index(variable.source))
        winner = ranked[0]
        chosen.append(winner)
        other = next((variable for variable in ranked[1:] if variable.value != winner.value), None)
        # A site may well differ from our default; but a user's value that contradicts a reason of ours is reported.
        if other is not None and (winner.source == "user" or other.source == "detected"):
            conflicts.append(
                find(
                    "variable-overruled", "exported" if winner.why == EXPORTED else "",
                    name=name, value=winner.value, whose=_whose(winner), other=_whose(other), instead=other.value,
                    why=other.why, evidence=[f"{name}={winner.value}"],
                )
            )  # fmt: skip
    return chosen, conflicts


def _whose(variable: EnvVar) -> str:
    if variable.why == EXPORTED:
        return "exported"
    return {"user": "the job's", "site": "the site's", "detected": "what fits this node", "default": "the default"}[
        variable.source
    ]


def _interfaces(
    here: Scene, facts: Facts, peers: Peers, node: int, left: List[Left], findings: List[Finding]
) -> List[EnvVar]:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    if here.fabric == "loopback":
        why = f"{here.fabric_why}: they meet on its loopback"
        return [EnvVar(name, "lo", why, "detected") for name in names]
    if here.nodes == "one":
        left.extend(Left(name, "one node: its ranks find each other on any interface") for name in names)
        return []
    if here.fabric == "slingshot":
        found = slingshot_interfaces(facts)
        if found:
            value = ",".join(interface.name for interface in found)
            why = "the Slingshot interfaces that are up; the others lead to management networks"
            return [EnvVar(name, value, why, "detected") for name in names]
    choice = choose(facts, peers, node, here.nics, fastest=here.fabric == "ethernet")
    if choice.interface is None:
        left.extend(Left(name, choice.why) for name in names)
        states = [f"{one.name}: {'up' if one.up else 'not up'}" for one in facts.interfaces[:8]]
        severity = "error" if facts.interfaces else "warning"
        findings.append(find("no-interface", why=choice.why, severity=severity, evidence=states, host=facts.host))
        return []
    if choice.shared is False:
        addresses = choice.interface.addresses
        findings.append(find("no-common-subnet", interface=choice.interface.name, evidence=addresses, host=facts.host))
    name = choice.interface.name
    variables = [
        EnvVar("NCCL_SOCKET_IFNAME", "=" + name, f"{choice.why}; = is for the exact name", "detected"),
        EnvVar("GLOO_SOCKET_IFNAME", name, choice.why, "detected"),
    ]
    speed = choice.interface.speed_mbps or 0
    if here.fabric == "ethernet" and speed >= FAST_ETHERNET_MBPS:
        why = f"one thread cannot fill {speed / 1000:g} Gb/s; 4 x 4 sockets stay within NCCL's 64"
        variables += [EnvVar(key, "4", why, "detected") for key in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    return variables


def _rdma(here: Scene, facts: Facts, left: List[Left]) -> List[EnvVar]:
    """Propose NCCL_IB_HCA and NCCL_IB_GID_INDEX."""
    if here.fabric not in ("infiniband", "roce") or here.nodes == "one":
        return []
    variables = []
    if here.nics.devices:
        out = f"; left out: {', '.join(name for name, _ in here.nics.left_out)}" if here.nics.left_out else ""
        why = f"{here.fabric_why}; = is for exact names{out}"
        if len(here.nics.devices) == 1 and here.nics.devices[0].bond:
            why = f"the only active RDMA device is a bond, so it carries the job{out}"
        variables.append(EnvVar("NCCL_IB_HCA", hca_value(here.nics), why, "detected"))
    name = "NCCL_IB_GID_INDEX"
    if here.fabric == "infiniband":
        left.append(Left(name, "InfiniBand needs no GID index"))
        return variables
    left.append(Left("NCCL_IB_TC", "the traffic class of the lossless queue is set on the switches: a site's matter"))
    version = facts.versions.get(vendor_named(here.vendor).collectives)
    rocm_chooses = version is None and matches({"vendor": "amd", "rocm": ">=6.3"}, here, facts)
    if fits(">=2.21", version) or rocm_chooses:
        which = f"version {version}" if version else f"ROCm {facts.versions.get('rocm')}"
        left.append(Left(name, f"{which} looks up the RoCE v2 GID itself, for each device"))
        return variables
    index, why = common_gid_index(roce_ports(here.nics), own_addresses(facts))
    if index is None:
        left.append(Left(name, why))
    else:
        known = f"version {version} would take index 0" if version else "the library's version is not known"
        variables.append(EnvVar(name, str(index), f"{why}; {known}", "detected"))
    return variables


def _plugin(here: Scene, facts: Facts, left: List[Left]) -> List[EnvVar]:
    """Propose NCCL_NET_PLUGIN, and the plug-in that a fabric requires."""
    if here.nodes == "one" and here.fabric in ("slingshot", "efa"):
        left.append(Left("NCCL_NET", "one node: the plug-in gets no network id there and forcing it would fail"))
    if here.fabric in ("slingshot", "efa") and here.nodes == "many" and here.net_plugin is None:
        left.append(Left("NCCL_NET", "the libfabric plug-in was not found, so forcing it would end the job at once"))
    if here.fabric in ("infiniband", "roce") and here.nodes == "many" and here.net_plugin is not None:
        file = here.net_plugin.path or here.net_plugin.name
        left.append(Left("NCCL_NET", f"{file} brings a network of its own name; NCCL_NET=IB would switch it off"))
    names = {library.name for library in facts.libraries if library.path and library.loadable is not False}
    if matches(_AMD_ON_SLINGSHOT, here, facts):
        plugin = here.net_plugin
        if plugin is not None and plugin.path and plugin.name.startswith("librccl") and "libnccl-net.so" not in names:
            why = "some RCCL builds look for libnccl-net.so, which is not here"
            return [EnvVar("NCCL_NET_PLUGIN", plugin.path, why, "detected")]
    pensando = (here.nic_driver or "").startswith("ionic") and not fits(">=7.2.1", facts.versions.get("rocm"))
    if pensando and "librccl-anp.so" in names:
        why = "before ROCm 7.2.1 RCCL drives Pensando NICs through this plug-in"
        net = "the plug-in's own name for its network: RCCL stops instead of falling back to TCP"
        return [
            EnvVar("NCCL_NET_PLUGIN", "librccl-anp.so", why, "detected"),
            EnvVar("NCCL_NET", "RCCL-ANP", net, "detected"),
        ]
    return []


def _expected(order: Order, here: Scene) -> List[Finding]:
    """Report if this node cannot use the network that the job or its site expects."""
    wanted = order.expect.transport
    by_plugin = here.fabric in NETWORKS["ofi"]
    possible = here.fabric in NETWORKS.get(wanted, ()) and not (by_plugin and here.net_plugin is None)
    if possible or wanted not in NETWORKS or here.nodes == "one" or here.fabric in ("loopback", "unknown"):
        return []
    missing = "the libfabric plug-in was not found" if by_plugin else here.fabric_why
    severity = "error" if order.checks.get("transport") == "stop" else "warning"
    return [find("expected-network-missing", wanted=wanted, fabric=here.fabric, why=missing, severity=severity)]


def project_caches(order: Order) -> List[EnvVar]:
    """Propose folders for downloads, if job or site says where the project's storage is."""
    why = "downloads go to the project's storage, not to the home folder's quota"
    folders = (("HF_HOME", "huggingface"), ("TORCH_HOME", "torch")) if order.cache_dir else ()
    return [EnvVar(name, f"{order.cache_dir}/{folder}", why, "site") for name, folder in folders]


def _caches(order: Order, here: Scene, node: int, left: List[Left]) -> List[EnvVar]:
    owner = order.user or order.run_id

    def local(kind: str) -> str:
        return f"{order.local_dir}/{owner}-{kind}-cache-{node}"

    variables = [EnvVar(name, local(kind), why, "default") for name, kind, why in vendor_named(here.vendor).caches]
    if here.vendor:
        why = "compiled kernels stay on this node: no locks and no stampede on shared storage"
        variables += [
            EnvVar("TRITON_CACHE_DIR", local("triton"), why, "default"),
            EnvVar("TORCHINDUCTOR_CACHE_DIR", local("inductor"), why, "default"),
        ]
    variables += project_caches(order)
    if not order.cache_dir and here.vendor:
        reason = "neither site nor job says where the project's storage is (caches)"
        left.extend(Left(name, reason) for name in ("HF_HOME", "TORCH_HOME"))
    return variables
