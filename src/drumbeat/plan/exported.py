"""Questions to what the user exported: it is kept, but what looks wrong is said, with the right name or value."""

from __future__ import annotations

import difflib
from typing import Dict, List, Mapping, Optional

from drumbeat.base.order import EnvVar
from drumbeat.findings.model import Evidence, Finding
from drumbeat.machine.model import Facts
from drumbeat.plan import masks
from drumbeat.plan.network import active_ports, own_addresses, usable_gids
from drumbeat.plan.scene import Scene, matches
from drumbeat.plan.variables import DEAD, DEBUGGING, OLD, SPELT, steers

MOST_SOCKETS = 64  # NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD
_NEAR = 0.92  # likeness from which an unknown name counts as a slip of the pen

_OPEN_ENDED = ("OMPI_MCA_",)  # every component has names of its own, and many are a letter apart


def question(facts: Facts, here: Scene, final: Mapping[str, EnvVar]) -> List[Finding]:
    """`final` is what the ranks will get: the user's own values among it, and what they meet."""
    mine = {name: variable.value for name, variable in final.items() if variable.source == "user" and steers(name)}
    findings = _names(mine, here, facts) + _debugging(mine)
    findings += _interfaces(mine, here, facts)
    findings += _hcas(mine, here, facts)
    findings += _gid(mine, here, facts)
    findings += _transport(mine, here)
    findings += _openib(mine)
    findings += _sockets({name: variable.value for name, variable in final.items()})
    findings += _corruption(here, facts, final)
    findings += _slurm(facts, here, final)
    return findings


def _say(code: str, severity: str, title: str, cause: str, fix: str, *evidence: str) -> Finding:
    return Finding(code, severity, title, cause, fix, tuple(Evidence(text) for text in evidence))


def _names(mine: Mapping[str, str], here: Scene, facts: Facts) -> List[Finding]:
    findings = []
    for name, value in mine.items():
        dead = DEAD.get(name)
        if dead is not None and matches(dead.when, here, facts):
            fix = f"use {dead.use}" if dead.use else "remove it"
            findings.append(_say("variable-dead", "warning", f"{name} has no effect", dead.why, fix, f"{name}={value}"))
        elif name in OLD:
            title = f"{name} is the old name of {OLD[name]}"
            findings.append(
                _say("variable-old", "info", title, "it is still read", f"use {OLD[name]}", f"{name}={value}")
            )
        elif name not in SPELT and name not in DEAD and name not in DEBUGGING and not name.startswith(_OPEN_ENDED):
            near = difflib.get_close_matches(name, SPELT, 1, _NEAR)
            if near:
                title = f"{name} looks like a slip of the pen for {near[0]}"
                cause = "nothing reads a misspelt variable, and nothing complains"
                findings.append(_say("variable-misspelt", "warning", title, cause, f"use {near[0]}", f"{name}={value}"))
    return findings


def _debugging(mine: Mapping[str, str]) -> List[Finding]:
    findings = []
    for name, value in mine.items():
        entry = DEBUGGING.get(name)
        if entry is None or value in entry.harmless:
            continue
        severity = "warning" if name == "NCCL_DEBUG" and value.upper() == "TRACE" else entry.severity
        title = f"{name}={value} is for debugging"
        findings.append(_say("debug-left-on", severity, title, entry.cost, "unset it once the run works", name))
    return findings


def _interfaces(mine: Mapping[str, str], here: Scene, facts: Facts) -> List[Finding]:
    findings: List[Finding] = []
    known = {interface.name: interface for interface in facts.interfaces}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = mine.get(name, "")
        if not value or not known:
            continue
        shown = f"{name}={value}"
        if value.startswith("^"):
            if name == "NCCL_SOCKET_IFNAME" and "docker" not in value:
                cause = "an exclusion list also switches off NCCL's own avoidance of docker bridges"
                title = f"{shown} lets NCCL take a docker bridge"
                findings.append(
                    _say("interface-exclusion", "warning", title, cause, f"{name}={value},docker, or name one", shown)
                )
            continue
        gloo = name == "GLOO_SOCKET_IFNAME"  # takes plain names, no = and no prefixes
        exact = gloo or value.startswith("=")
        wanted = [part for part in (value if gloo else value.lstrip("=")).split(",") if part]
        found = [each for each in known for part in wanted if each == part or (not exact and each.startswith(part))]
        if not found:
            severity = "error" if here.nodes == "many" else "warning"
            title = f"{shown} names no interface of this node"
            cause = "NCCL stops with 'no socket interface found'" if name.startswith("NCCL") else "Gloo cannot start"
            fix = f"this node has {', '.join(known)}; or unset it and drumbeat chooses on each node"
            findings.append(_say("interface-missing", severity, title, cause, fix, shown))
            continue
        down = [each for each in found if known[each].up is False]
        if down:
            title = f"{name} names {', '.join(down)}, which is down"
            findings.append(_say("interface-down", "warning", title, "", "name one that is up, or unset it", shown))
        local = [each for each in found if each == "lo" or each.startswith("docker")]
        if local and here.nodes == "many" and here.fabric != "loopback":
            title = f"{name} names {', '.join(local)}, which no other node can reach"
            findings.append(_say("interface-local", "error", title, "", "unset it: drumbeat chooses one", shown))
        if here.fabric == "slingshot" and not all(each.startswith("hsn") for each in found):
            title = f"{name} names interfaces that are not Slingshot"
            cause = "management networks are slow, or closed to ranks"
            findings.append(_say("interface-not-fast", "warning", title, cause, "hsn0,hsn1,hsn2,hsn3", shown))
    return findings


def _hcas(mine: Mapping[str, str], here: Scene, facts: Facts) -> List[Finding]:
    value = mine.get("NCCL_IB_HCA", "")
    names = [device.name for device in facts.rdma]
    if not value or not names or value.startswith("^"):
        return []
    exact, shown = value.startswith("="), f"NCCL_IB_HCA={value}"
    parts = [part.split(":")[0] for part in value.lstrip("=").split(",") if part]
    reach: Dict[str, List[str]] = {
        part: [name for name in names if name == part or (not exact and name.startswith(part))] for part in parts
    }
    findings = []
    missing = [part for part, found in reach.items() if not found]
    if len(missing) == len(parts):
        findings.append(
            _say(
                "hca-missing",
                "error" if here.nodes == "many" else "warning",
                f"{shown} names no RDMA device of this node",
                "NCCL then finds no device and falls back to TCP, or stops",
                f"this node has {', '.join(names)}; unset it and drumbeat chooses on each node",
                shown,
            )
        )
    elif missing:
        title = f"NCCL_IB_HCA names {', '.join(missing)}, which this node does not have"
        findings.append(
            _say("hca-missing", "warning", title, "a list for another node", "unset it: drumbeat chooses", shown)
        )
    for part, found in reach.items():
        extra = [name for name in found if name != part and part in names]
        if extra:
            title = f"{part} in NCCL_IB_HCA also takes {', '.join(extra)}"
            findings.append(_say("hca-prefix", "warning", title, "names are prefixes", f"NCCL_IB_HCA=={value}", shown))
    chosen = {name for found in reach.values() for name in found}
    for name, reason in here.nics.left_out:
        if name in chosen:
            title = f"NCCL_IB_HCA includes {name}: {reason}"
            findings.append(_say("hca-unfit", "warning", title, "", "leave it out, or unset the list", shown))
    return findings


def _gid(mine: Mapping[str, str], here: Scene, facts: Facts) -> List[Finding]:
    value = mine.get("NCCL_IB_GID_INDEX")
    if value is None:
        return []
    shown = f"NCCL_IB_GID_INDEX={value}"
    if here.fabric == "infiniband":
        return [_say("gid-on-infiniband", "warning", f"{shown} on InfiniBand", "it is for RoCE", "unset it", shown)]
    if here.fabric != "roce" or value.strip() == "-1":
        return []
    if not value.strip().isdigit():
        cause = "a number is expected; this is often the output of a command that went wrong"
        return [_say("gid-unreadable", "error", f"{shown} is no index", cause, "unset it: drumbeat finds it", shown)]
    findings = []
    for device in here.nics.devices:
        for port in active_ports(device):
            good = {gid.index for gid in usable_gids(port, own_addresses(facts))}
            if port.gids and int(value) not in good:
                held = next((gid for gid in port.gids if gid.index == int(value)), None)
                title = f"{shown} is not a RoCE v2 GID with an IPv4 address on {device.name}"
                cause = f"it holds {held.gid} ({held.type or 'type unknown'})" if held else "that entry is empty"
                fix = f"on this node it is {', '.join(map(str, sorted(good)))}" if good else "the link has no such GID"
                severity = "error" if here.nodes == "many" else "warning"
                findings.append(_say("gid-wrong", severity, title, cause, f"unset it; {fix}", shown))
    return findings


def _openib(mine: Mapping[str, str]) -> List[Finding]:
    value = mine.get("OMPI_MCA_btl", "")
    if value.startswith("^") or "openib" not in value.split(","):
        return []
    cause = "Open MPI 5 no longer has openib and MPI_Init fails; in Open MPI 4 it is no longer maintained"
    title = f"OMPI_MCA_btl={value} names openib"
    fix = "unset OMPI_MCA_btl; OMPI_MCA_pml=ucx uses InfiniBand and RoCE"
    return [_say("mpi-openib", "warning", title, cause, fix, f"OMPI_MCA_btl={value}")]


def _transport(mine: Mapping[str, str], here: Scene) -> List[Finding]:
    findings = []
    fast = here.fabric in ("infiniband", "roce", "slingshot", "efa")
    net = mine.get("NCCL_NET", "")
    if here.nodes == "many" and fast:
        for name, bad in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "socket")):
            if mine.get(name, "").lower() == bad and not (
                name == "NCCL_IB_DISABLE" and here.fabric in ("slingshot", "efa")
            ):
                title = f"{name}={mine[name]} sends the job over TCP, although there is {here.fabric}"
                findings.append(_say("fast-network-off", "warning", title, here.fabric_why, f"unset {name}", name))
    ofi = net.lower() in ("aws libfabric", "libfabric", "ofi")
    if ofi and here.nodes == "one" and here.fabric == "slingshot":
        title = f"NCCL_NET={net} on one node"
        cause = "a job on one node gets no network id, so the plug-in cannot start and NCCL stops"
        findings.append(_say("ofi-on-one-node", "error", title, cause, "unset NCCL_NET, or start with "
                             "--network=single_node_vni", f"NCCL_NET={net}"))  # fmt: skip
    if ofi and here.net_plugin is None and here.fabric != "unknown":
        title = f"NCCL_NET={net}, but no libfabric plug-in was found"
        cause = "NCCL stops when the network it is told to use cannot be loaded"
        findings.append(_say("ofi-without-plugin", "error", title, cause, "put the folder of libnccl-net.so or "
                             "librccl-net.so into LD_LIBRARY_PATH", f"NCCL_NET={net}"))  # fmt: skip
    if ofi and mine.get("NCCL_NET_PLUGIN", "").lower() == "ofi":
        cause = "with both, some plug-in builds answer 'network AWS Libfabric not found'"
        title = "NCCL_NET and NCCL_NET_PLUGIN=ofi together"
        findings.append(
            _say("ofi-named-twice", "warning", title, cause, "unset NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN=ofi")
        )
    if net.lower() == "ib" and here.nodes == "many" and here.fabric in ("slingshot", "ethernet"):
        title = f"NCCL_NET=IB, but this is {here.fabric}"
        findings.append(_say("ib-without-device", "error", title, here.fabric_why, "unset NCCL_NET", "NCCL_NET=IB"))
    if mine.get("NCCL_P2P_DISABLE") == "1":
        title = "NCCL_P2P_DISABLE=1: GPUs of a node talk through host memory"
        fix = "unset it unless a peer check failed on this machine"
        findings.append(
            _say("p2p-off", "warning", title, "a workaround that is often copied along", fix, "NCCL_P2P_DISABLE=1")
        )
    if here.fabric == "slingshot" and mine.get("FI_MR_CACHE_MONITOR") == "memhooks":
        title = "FI_MR_CACHE_MONITOR=memhooks can deadlock with NCCL and RCCL"
        findings.append(_say("memhooks", "warning", title, "", "userfaultfd or kdreg2", "FI_MR_CACHE_MONITOR=memhooks"))
    if mine.get("NCCL_IGNORE_NET_MISMATCH") == "1":
        title = "NCCL_IGNORE_NET_MISMATCH=1 hides nodes that lack a NIC"
        findings.append(_say("mismatch-hidden", "warning", title, "", "unset it", "NCCL_IGNORE_NET_MISMATCH=1"))
    return findings


def _sockets(final: Mapping[str, str]) -> List[Finding]:
    threads = _number(final.get("NCCL_SOCKET_NTHREADS"))
    sockets = _number(final.get("NCCL_NSOCKS_PERTHREAD"))
    if threads is None or sockets is None or threads * sockets <= MOST_SOCKETS:
        return []
    return [
        _say(
            "too-many-sockets",
            "warning",
            f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD = {threads * sockets}, more than {MOST_SOCKETS}",
            "NCCL cuts it down by itself",
            "4 and 4 fill 100 Gb/s; they matter to TCP only",
            f"NCCL_SOCKET_NTHREADS={threads}",
            f"NCCL_NSOCKS_PERTHREAD={sockets}",
        )
    ]


def _corruption(here: Scene, facts: Facts, final: Mapping[str, EnvVar]) -> List[Finding]:
    """GH200 on Slingshot: LL128 with eager messages gives wrong sums (NVIDIA/nccl issue 2001)."""
    if not (
        here.fabric == "slingshot" and here.nodes == "many" and here.vendor == "nvidia" and facts.arch == "aarch64"
    ):
        return []
    values = {name: variable.value for name, variable in final.items()}
    safe = values.get("FI_CXI_RDZV_THRESHOLD") == "0" and values.get("FI_CXI_RDZV_GET_MIN") == "0"
    proto = values.get("NCCL_PROTO", "").upper()
    without = "LL128" in proto if proto.startswith("^") else bool(proto) and "LL128" not in proto.split(",")
    if safe or without or values.get("NCCL_LL128_C2C") == "0":
        return []
    return [
        _say(
            "ll128-wrong-sums",
            "error",
            "these settings let NCCL's LL128 protocol produce wrong sums on GH200 with Slingshot",
            "small messages take the eager path and are copied while the GPU still writes them",
            "FI_CXI_RDZV_THRESHOLD=0 with FI_CXI_RDZV_GET_MIN=0, or NCCL_PROTO=^LL128",
            *[f"{name}={values[name]}" for name in ("FI_CXI_RDZV_THRESHOLD", "FI_CXI_RDZV_GET_MIN") if name in values],
        )
    ]


def alt_read_is_idle(facts: Facts) -> bool:
    """FI_CXI_RDZV_PROTO=alt_read takes effect only in a job that was started for it."""
    return facts.identity.scheduler == "slurm" and "disable_rdzv_get" not in facts.environment.get("SLURM_NETWORK", "")


def _slurm(facts: Facts, here: Scene, final: Mapping[str, EnvVar]) -> List[Finding]:
    """What the scheduler's own variables say: masks that overlap, the network option that alt_read needs."""
    findings = []
    bind = facts.environment.get("SLURM_CPU_BIND", "")
    entries = masks.from_slurm(bind)
    if len(entries) > 1:
        findings += masks.check(entries, len(entries), ())[1]
    proto: Optional[EnvVar] = final.get("FI_CXI_RDZV_PROTO")
    if proto is not None and proto.value == "alt_read" and facts.identity.scheduler == "slurm":
        network = facts.environment.get("SLURM_NETWORK", "")
        if here.nodes == "many" and "disable_rdzv_get" not in network:
            title = "FI_CXI_RDZV_PROTO=alt_read has no effect in this job"
            cause = "the job was not started with --network=disable_rdzv_get, so libfabric keeps its default protocol"
            findings.append(_say("alt-read-idle", "info", title, cause, "#SBATCH --network=disable_rdzv_get",
                                 f"SLURM_NETWORK={network}"))  # fmt: skip
    return findings


def _number(text: Optional[str]) -> Optional[int]:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
