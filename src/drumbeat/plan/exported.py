"""Find suspicious variables that the user exported; they are reported but kept."""

from __future__ import annotations

import difflib
from typing import Dict, Iterator, List, Mapping, Optional

from drumbeat.base.order import EnvVar
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts
from drumbeat.plan.binding import check_masks, from_slurm
from drumbeat.plan.network import active_ports, own_addresses, usable_gids
from drumbeat.plan.scene import Scene, matches
from drumbeat.plan.variables import DEAD, DEBUGGING, OLD, SPELT, steers

find = Catalog("plan")
MOST_SOCKETS = 64  # NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD
ALT_READ, NO_RDZV_GET = (
    "FI_CXI_RDZV_PROTO",
    "disable_rdzv_get",
)  # the one takes effect only in a job started with the other
_RDMA = ("ib", "roce", "ofi", "rdma")  # transports that a job may expect
_NEAR = 0.92  # similarity from which an unknown name counts as a typo

_OPEN_ENDED = ("OMPI_MCA_",)  # every component has names of its own, many of which differ by a letter


def question(facts: Facts, here: Scene, final: Mapping[str, EnvVar]) -> List[Finding]:
    """Return findings on the user's own variables. `final` is the complete environment of the ranks."""
    mine = {name: variable.value for name, variable in final.items() if variable.source == "user" and steers(name)}
    values = {name: variable.value for name, variable in final.items()}
    return [
        *_names(mine, here, facts), *_debugging(mine), *_interfaces(mine, here, facts), *_hcas(mine, here, facts),
        *_gid(mine, here, facts), *_transport(mine, here), *_sockets(values), *_corruption(here, facts, values),
        *_slurm(facts, here, values),
    ]  # fmt: skip


def _names(mine: Mapping[str, str], here: Scene, facts: Facts) -> Iterator[Finding]:
    for name, value in mine.items():
        dead, shown = DEAD.get(name), [f"{name}={value}"]
        if dead is not None and matches(dead.when, here, facts):
            advice = f"use {dead.use}" if dead.use else "remove it"
            yield find("variable-dead", name=name, why=dead.why, advice=advice, evidence=shown)
        elif name in OLD:
            yield find("variable-old", name=name, new=OLD[name], evidence=shown)
        elif name not in SPELT and name not in DEAD and name not in DEBUGGING and not name.startswith(_OPEN_ENDED):
            near = difflib.get_close_matches(name, SPELT, 1, _NEAR)
            if near:
                yield find("variable-misspelt", name=name, near=near[0], evidence=shown)


def _debugging(mine: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in mine.items():
        entry = DEBUGGING.get(name)
        if entry is None or value in entry.harmless:
            continue
        severity = "warning" if name == "NCCL_DEBUG" and value.upper() == "TRACE" else entry.severity
        cost = entry.cost
        yield find("debug-left-on", name=name, value=value, cost=cost, severity=severity, evidence=[name])


def _interfaces(mine: Mapping[str, str], here: Scene, facts: Facts) -> Iterator[Finding]:
    known = {interface.name: interface for interface in facts.interfaces}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = mine.get(name, "")
        if not value or not known:
            continue
        shown = [f"{name}={value}"]
        if value.startswith("^"):
            if name == "NCCL_SOCKET_IFNAME" and "docker" not in value:
                yield find("interface-exclusion", name=name, value=value, evidence=shown)
            continue
        gloo = name == "GLOO_SOCKET_IFNAME"  # accepts plain names, no = and no prefixes
        exact = gloo or value.startswith("=")
        wanted = [part for part in (value if gloo else value.lstrip("=")).split(",") if part]
        found = [each for each in known for part in wanted if each == part or (not exact and each.startswith(part))]
        if not found:
            severity = "error" if here.nodes == "many" else "warning"
            yield find(
                "interface-missing", name=name, value=value, known=", ".join(known), severity=severity, evidence=shown,
                then="Gloo cannot start" if gloo else "NCCL stops with 'no socket interface found'",
            )  # fmt: skip
            continue
        down = [each for each in found if known[each].up is False]
        if down:
            yield find("interface-down", name=name, down=", ".join(down), evidence=shown)
        local = [each for each in found if each == "lo" or each.startswith("docker")]
        if local and here.nodes == "many" and here.fabric != "loopback":
            yield find("interface-local", name=name, shown=", ".join(local), evidence=shown)
        if here.fabric == "slingshot" and not all(each.startswith("hsn") for each in found):
            yield find("interface-not-fast", name=name, evidence=shown)


def _hcas(mine: Mapping[str, str], here: Scene, facts: Facts) -> Iterator[Finding]:
    value = mine.get("NCCL_IB_HCA", "")
    names = [device.name for device in facts.rdma]
    if not value or not names or value.startswith("^"):
        return
    exact, shown = value.startswith("="), [f"NCCL_IB_HCA={value}"]
    parts = [part.split(":")[0] for part in value.lstrip("=").split(",") if part]
    reach: Dict[str, List[str]] = {
        part: [name for name in names if name == part or (not exact and name.startswith(part))] for part in parts
    }
    missing = [part for part, found in reach.items() if not found]
    if len(missing) == len(parts):
        severity = "error" if here.nodes == "many" else "warning"
        yield find("hca-missing", value=value, known=", ".join(names), severity=severity, evidence=shown)
    elif missing:
        yield find("hca-missing", "some", missing=", ".join(missing), evidence=shown)
    for part, found in reach.items():
        extra = [name for name in found if name != part and part in names]
        if extra:
            yield find("hca-prefix", part=part, extra=", ".join(extra), value=value, evidence=shown)
    chosen = {name for found in reach.values() for name in found}
    for name, reason in here.nics.left_out:
        if name in chosen:
            yield find("hca-unfit", name=name, why=reason, evidence=shown)


def _gid(mine: Mapping[str, str], here: Scene, facts: Facts) -> Iterator[Finding]:
    value = mine.get("NCCL_IB_GID_INDEX")
    if value is None:
        return
    shown = [f"NCCL_IB_GID_INDEX={value}"]
    if here.fabric == "infiniband":
        yield find("gid-on-infiniband", value=value, evidence=shown)
    if here.fabric != "roce" or value.strip() == "-1":
        return
    if not value.strip().isdigit():
        yield find("gid-unreadable", value=value, evidence=shown)
        return
    for device in here.nics.devices:
        for port in active_ports(device):
            good = {gid.index for gid in usable_gids(port, own_addresses(facts))}
            if port.gids and int(value) not in good:
                held = next((gid for gid in port.gids if gid.index == int(value)), None)
                yield find(
                    "gid-wrong",
                    value=value,
                    device=device.name,
                    held=f"it holds {held.gid} ({held.type or 'type unknown'})" if held else "that entry is empty",
                    right=f"on this node it is {', '.join(map(str, sorted(good)))}" if good else "there is none",
                    severity="error" if here.nodes == "many" else "warning",
                    evidence=shown,
                )


def against_expected(env: Mapping[str, str], transport: str, gdr: Optional[bool], nodes: int) -> List[Finding]:
    """Question a job's variables against the network that the job or its site expects, before any node is known."""
    if nodes < 2:
        return []
    plugin = transport == "ofi" or (transport == "rdma" and "FI_PROVIDER" in env)
    names = _without_rdma(env, "slingshot" if plugin else "") if transport in _RDMA else []
    names += [name for name in ("NCCL_NET_GDR_LEVEL",) if gdr and env.get(name, "").upper() in ("LOC", "0")]
    wanted = transport if transport in _RDMA else "GPU-direct"
    return [find("against-expected", name=name, value=env[name], wanted=wanted, evidence=[name]) for name in names]


def _without_rdma(mine: Mapping[str, str], fabric: str) -> List[str]:
    """Return the variables that make NCCL use TCP on a fabric."""
    plugin = fabric in ("slingshot", "efa")  # it is no InfiniBand to NCCL
    off = (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "socket"))[plugin:]
    return [name for name, bad in off if mine.get(name, "").lower() == bad]


def _transport(mine: Mapping[str, str], here: Scene) -> Iterator[Finding]:
    fast = here.fabric in ("infiniband", "roce", "slingshot", "efa")
    net = mine.get("NCCL_NET", "")
    if here.nodes == "many" and fast:
        for name in _without_rdma(mine, here.fabric):
            yield find(
                "fast-network-off",
                name=name,
                value=mine[name],
                fabric=here.fabric,
                why=here.fabric_why,
                evidence=[name],
            )
    ofi = net.lower() in ("aws libfabric", "libfabric", "ofi")
    if ofi and here.nodes == "one" and here.fabric == "slingshot":
        yield find("ofi-on-one-node", net=net, evidence=[f"NCCL_NET={net}"])
    if ofi and here.net_plugin is None and here.fabric != "unknown":
        yield find("ofi-without-plugin", net=net, evidence=[f"NCCL_NET={net}"])
    if ofi and mine.get("NCCL_NET_PLUGIN", "").lower() == "ofi":
        yield find("ofi-named-twice", evidence=["NCCL_NET_PLUGIN=ofi"])
    if net.lower() == "ib" and here.nodes == "many" and here.fabric in ("slingshot", "ethernet"):
        yield find("ib-without-device", fabric=here.fabric, why=here.fabric_why, evidence=["NCCL_NET=IB"])
    if mine.get("NCCL_P2P_DISABLE") == "1":
        yield find("p2p-off", evidence=["NCCL_P2P_DISABLE=1"])
    if here.fabric == "slingshot" and mine.get("FI_MR_CACHE_MONITOR") == "memhooks":
        yield find("memhooks", evidence=["FI_MR_CACHE_MONITOR=memhooks"])
    if mine.get("NCCL_IGNORE_NET_MISMATCH") == "1":
        yield find("mismatch-hidden", evidence=["NCCL_IGNORE_NET_MISMATCH=1"])
    layer = mine.get("OMPI_MCA_btl", "")
    if not layer.startswith("^") and "openib" in layer.split(","):
        yield find("mpi-openib", value=layer, evidence=[f"OMPI_MCA_btl={layer}"])


def _sockets(final: Mapping[str, str]) -> Iterator[Finding]:
    threads = _number(final.get("NCCL_SOCKET_NTHREADS"))
    sockets = _number(final.get("NCCL_NSOCKS_PERTHREAD"))
    if threads is not None and sockets is not None and threads * sockets > MOST_SOCKETS:
        shown = [f"NCCL_SOCKET_NTHREADS={threads}", f"NCCL_NSOCKS_PERTHREAD={sockets}"]
        yield find("too-many-sockets", product=threads * sockets, most=MOST_SOCKETS, evidence=shown)


def _corruption(here: Scene, facts: Facts, values: Mapping[str, str]) -> Iterator[Finding]:
    """Warn about GH200 on Slingshot: LL128 with eager messages gives wrong sums (NVIDIA/nccl issue 2001)."""
    gh200 = matches({"vendor": "nvidia", "fabric": "slingshot", "nodes": "many"}, here, facts)
    if not gh200 or facts.arch != "aarch64":
        return
    safe = values.get("FI_CXI_RDZV_THRESHOLD") == "0" and values.get("FI_CXI_RDZV_GET_MIN") == "0"
    proto = values.get("NCCL_PROTO", "").upper()
    without = "LL128" in proto if proto.startswith("^") else bool(proto) and "LL128" not in proto.split(",")
    if not (safe or without or values.get("NCCL_LL128_C2C") == "0"):
        settings = ("FI_CXI_RDZV_THRESHOLD", "FI_CXI_RDZV_GET_MIN")
        yield find("ll128-wrong-sums", evidence=[f"{name}={values[name]}" for name in settings if name in values])


def alt_read_is_idle(facts: Facts) -> bool:
    """FI_CXI_RDZV_PROTO=alt_read takes effect only in a job that was started for it."""
    return facts.identity.scheduler == "slurm" and NO_RDZV_GET not in facts.environment.get("SLURM_NETWORK", "")


def _slurm(facts: Facts, here: Scene, values: Mapping[str, str]) -> Iterator[Finding]:
    """Check the scheduler's own variables: masks that overlap, the network option that alt_read needs."""
    entries = from_slurm(facts.environment.get("SLURM_CPU_BIND", ""))
    if len(entries) > 1:
        yield from check_masks(entries, len(entries), ())[1]
    if values.get(ALT_READ) == "alt_read" and here.nodes == "many" and alt_read_is_idle(facts):
        yield find("alt-read-idle", evidence=[f"SLURM_NETWORK={facts.environment.get('SLURM_NETWORK', '')}"])


def _number(text: Optional[str]) -> Optional[int]:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
