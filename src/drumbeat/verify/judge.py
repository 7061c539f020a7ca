"""Judge the measurements: results of the collective test, facts of all nodes and the site's floors give verdicts. Pure."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import COLLECTIVES, Floor
from drumbeat.base.text import memory, step_time
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, OK, Finding, Verdict, worst
from drumbeat.machine.model import Interface, Peer, Peers
from drumbeat.machine.peaks import gpu_link_rate
from drumbeat.verify.chart import Look, line_chart, standalone

# Find slow parts: from the rates of pairs in each direction to a host, a rank's GPU and NIC, or the link between two. Pure.


_SLOW = 0.5  # of the upper median of all similar ways


@dataclass(frozen=True)
class Way:
    """One direction of one pair."""

    sender: int
    receiver: int
    rate: float  # GB/s
    slow: bool = False


def judge_pairs(results: Mapping[str, Any], emulated: bool) -> Verdict:
    pairs = results["pairs"]
    broken = [pair for pair in pairs if "error" in pair]
    if broken:
        findings = tuple(_broken(results, pairs, pair) for pair in broken)
        return Verdict("pairs", "broken", "certain", findings[0].title, findings, (f"{len(pairs)} pairs",))
    if not pairs:
        return Verdict("pairs", "unknown", "unknown", "one rank has no partner")
    if emulated:
        return Verdict("pairs", "unknown", "unknown", f"{len(pairs)} tried, all work; on one machine rates say nothing")
    findings = tuple(each for kind in ("between", "inside") for each in _slow(results, ways_of(pairs, kind), kind))
    if findings:
        return Verdict("pairs", "slow", "likely", findings[0].title, findings)
    rates = [pair[way] for pair in pairs for way in ("a_to_b", "b_to_a")]
    text = f"{len(pairs)} pairs, {min(rates):.3g} to {max(rates):.3g} GB/s each way"
    return Verdict("pairs", "even", "certain", text, seen=(f"{len(pairs)} pairs, both ways",))


def ways_of(pairs: List[Mapping[str, Any]], kind: str) -> List[Way]:
    ways = []
    for pair in pairs:
        if pair["kind"] == kind:
            ways += [(pair["a"], pair["b"], pair["a_to_b"]), (pair["b"], pair["a"], pair["b_to_a"])]
    rates = sorted(rate for _, _, rate in ways)
    return [Way(sender, receiver, rate, rate < _SLOW * rates[len(rates) // 2]) for sender, receiver, rate in ways]


def _slow(results: Mapping[str, Any], ways: List[Way], kind: str) -> List[Finding]:
    """Blame whole hosts first, then single ranks; a slow pair that neither explains is a slow link."""
    left = [way for way in ways if way.slow]
    if not left:
        return []
    host_of = _hosts(results)
    rank_of = {rank: f"rank {rank} on {host}" for rank, host in host_of.items()}
    usual = sorted(way.rate for way in ways)[len(ways) // 2]
    findings = []
    # Inside a node only ranks can differ; between nodes, partners are hosts.
    levels = [host_of, rank_of] if kind == "between" else [rank_of]
    for name_of in levels:
        for end, verb in (("sender", "sends"), ("receiver", "receives")):
            for suspect in dict.fromkeys(name_of[getattr(way, end)] for way in left):
                mine = [way for way in ways if name_of[getattr(way, end)] == suspect]
                if _all_its_fault(mine, ways, end, levels[0]):
                    rank = getattr(mine[0], end) if name_of is rank_of else None
                    words = f"{suspect} {verb} slowly: {_parts(results, rank, kind)}"
                    findings.append(_finding(results, words, rank, mine, end, usual))
                    left = [way for way in left if way not in mine]
    for way in left:
        words = f"{rank_of[way.sender]} to {rank_of[way.receiver]} is slow: either one, or the link between them"
        findings.append(_finding(results, words, None, [way], "sender", usual))
    return findings


def _parts(results: Mapping[str, Any], rank: Optional[int], kind: str) -> str:
    """Name the parts that may be at fault, as far as their names are known."""
    if rank is None:
        return "its NIC, cable or switch port"
    known = _rank(results, rank)
    gpu = f"GPU {known.get('local_rank')}" if known.get("gpu") else "its device"
    if kind == "inside":
        return f"{gpu} or its links"
    return f"{gpu}, {known.get('nic') or 'its NIC'} or the cable"


def _all_its_fault(mine: List[Way], ways: List[Way], end: str, place: Mapping[int, str]) -> bool:
    """Return true if all ways of this host or rank are slow, to several partners, and each partner has a similar way that is
    not slow or is far faster: on a busy network others are slow too, but less so."""
    other = "receiver" if end == "sender" else "sender"
    own = {place[getattr(way, end)] for way in mine}
    fastest: Dict[str, float] = {}  # of all ways to each partner
    for way in mine:
        partner = place[getattr(way, other)]
        fastest[partner] = max(fastest.get(partner, 0.0), way.rate)
    if len(fastest) < 2 or not all(way.slow for way in mine):
        return False
    others = [(place[getattr(way, other)], way) for way in ways if place[getattr(way, end)] not in own]
    known = [(partner, way) for partner, way in others if partner in fastest]
    return fastest.keys() == {to for to, way in known if not way.slow or fastest[to] < _SLOW * way.rate}


def _finding(
    results: Mapping[str, Any], words: str, rank: Optional[int], ways: List[Way], end: str, usual: float
) -> Finding:
    rates = ", ".join(f"{way.sender} to {way.receiver}: {way.rate:.3g}" for way in ways[:6])
    host = _rank(results, getattr(ways[0], end)).get("host")
    return find("slow-pair", what=words, rates=rates, usual=usual, rank=rank, host=host)


def _broken(results: Mapping[str, Any], pairs: List[Mapping[str, Any]], pair: Mapping[str, Any]) -> Finding:
    hosts, a, b = _hosts(results), pair["a"], pair["b"]
    fine = {rank for one in pairs if "error" not in one for rank in (one["a"], one["b"])}
    works = ", ".join(f"rank {rank}" for rank in (a, b) if rank in fine)
    here, there = hosts.get(a), hosts.get(b)
    return find("broken-pair", a=a, b=b, here=here, there=there, error=pair["error"], works=works, rank=a)


def _hosts(results: Mapping[str, Any]) -> Dict[int, str]:
    return {each["rank"]: f"node {each['node']} ({each['host']})" for each in results["ranks"]}


find = Catalog("verify")

# The hardware's limit for each collective, from the facts of all nodes. Pure; unknown stays unknown. B is the bandwidth of a
# node's NICs together, k the nodes, n the ranks, I the bandwidth of the links inside a node. Every node must receive S(k-1)/k
# bytes of an all-gather from the others, and half of an all-reduce is one: so no algorithm exceeds B (n-1)/n / ((k-1)/k), and
# a flat ring gets B. Two nodes may thus correctly show nearly twice their NICs' rate.


@dataclass(frozen=True)
class Ceiling:
    """Bus bandwidth in GB/s: the limit, and the rate that a healthy ring approaches."""

    bound: Optional[float]
    usual: Optional[float]
    why: str


@dataclass(frozen=True)
class Network:
    """Bandwidth of one node's NICs together, in GB/s."""

    rate: Optional[float]
    nics: int
    why: str


def ceilings(results: Mapping[str, Any], peers: Peers, emulated: bool) -> Dict[str, Ceiling]:
    if emulated and len(peers.nodes) > 1:
        return _all_unknown("the nodes are emulated on one machine")
    nodes, ranks = len(peers.nodes), int(results["world_size"])
    per_node = max(peer.ranks for peer in peers.nodes)
    inside, inside_why = _inside(results, peers, per_node)
    if nodes == 1:
        return {op: Ceiling(inside, inside, inside_why) for op in COLLECTIVES}
    network = slowest_network(results, peers)
    if network.rate is None:
        return _all_unknown(network.why)
    spread = network.rate * ((ranks - 1) / ranks) / ((nodes - 1) / nodes)
    one_nic = network.rate / max(1, network.nics)
    to_all = network.rate / per_node * (ranks - 1) / max(1, ranks - per_node)
    bounds = {
        "all_reduce": (spread, network.rate), "all_gather": (spread, network.rate),
        "reduce_scatter": (spread, network.rate), "all_to_all": (to_all, to_all),
        "broadcast": (network.rate, network.rate), "send_recv": (one_nic, one_nic),
    }  # fmt: skip
    capped = {op: [min(rate, inside) if inside else rate for rate in pair] for op, pair in bounds.items()}
    return {op: Ceiling(bound, usual, network.why) for op, (bound, usual) in capped.items()}


def slowest_network(results: Mapping[str, Any], peers: Peers) -> Network:
    """Return the network of the slowest node, which sets the pace; if any is unknown, the result is unknown."""
    networks = [(peer, node_network(results, peer)) for peer in peers.nodes]
    for peer, network in networks:
        if network.rate is None:
            return Network(None, 0, f"{peer.host}: {network.why}")
    return min((network for _, network in networks), key=lambda network: network.rate or 0.0)


def node_network(results: Mapping[str, Any], peer: Peer) -> Network:
    facts = peer.facts
    if results["backend"] == "nccl":
        ports = [port.rate_gbps for device in facts.rdma for port in device.ports if port.state == "ACTIVE"]
        rates = ports or [device.speed_gbps for device in facts.cxi]
        if None in rates:
            return Network(None, 0, "an active port does not say its rate")
        if rates:
            total = sum(rate or 0.0 for rate in rates)
            return Network(total / 8, len(rates), f"{len(rates)} active NICs, {total:g} Gb/s together")
    interface, why = _interface(results, peer)
    if interface is None:
        return Network(None, 0, why)
    if interface.kind not in ("physical", "bond") or not interface.speed_mbps:
        return Network(None, 0, f"{interface.name} ({interface.kind or 'kind unknown'}) does not say its speed")
    return Network(interface.speed_mbps / 8000, 1, f"{interface.name}, {interface.speed_mbps / 1000:g} Gb/s")


def _interface(results: Mapping[str, Any], peer: Peer) -> Tuple[Optional[Interface], str]:
    """Return the interface that variables name for the ranks, else the one with the address that other nodes use for this
    node."""
    named = results.get("interfaces") or {}
    wanted = named.get("NCCL_SOCKET_IFNAME" if results["backend"] == "nccl" else "GLOO_SOCKET_IFNAME", "")
    names = [name for name in wanted.lstrip("=").split(",") if name and not name.startswith("^")]
    for interface in peer.facts.interfaces:
        own = [address.split("/")[0] for address in interface.addresses]
        if interface.name in names if names else peer.address in own:
            return interface, ""
    return None, f"no interface is called {wanted}" if names else f"no interface has the address {peer.address}"


def _inside(results: Mapping[str, Any], peers: Peers, per_node: int) -> Tuple[Optional[float], str]:
    names = {gpu.name for peer in peers.nodes for gpu in peer.facts.gpus if not gpu.integrated}
    if results["device"] != "cuda" or len(names) != 1:
        return None, "ranks of one node share memory, and no link's rate bounds them"
    if per_node < 2:
        return None, "one rank per node: nothing crosses a link inside it"
    (name,) = names
    rate = gpu_link_rate(name, per_node)
    return rate, f"{name}: {f'{rate:g} GB/s each way between GPUs' if rate else 'the rate of its links is not known'}"


def _all_unknown(why: str) -> Dict[str, Ceiling]:
    return {op: Ceiling(None, None, why) for op in COLLECTIVES}


_LOW = 0.5  # of the rate that a healthy ring approaches
_LONG_ENOUGH = 0.004  # seconds at the ceiling: below, latency and ramp-up decide, not the links
_SLOW_GPU, _SLOW_CPU = 1.2, 1.5  # times the median of all ranks


@dataclass(frozen=True)
class CollectiveRow:
    """One operation at its largest size, with the latency at its smallest."""

    op: str
    bytes: int
    seconds: float
    algbw: float
    busbw: float
    latency: float
    ceiling: Ceiling
    ratio: Optional[float]  # share of the bound


@dataclass(frozen=True)
class Judgement:
    rows: Tuple[CollectiveRow, ...]
    verdicts: Tuple[Verdict, ...]

    @property
    def failed(self) -> bool:
        return any(finding.severity == ERROR for verdict in self.verdicts for finding in verdict.findings)


def judge(results: Mapping[str, Any], peers: Peers, floors: Mapping[str, Floor], emulated: bool) -> Judgement:
    alone = int(results["world_size"]) < 2
    rows = [] if alone else _rows(results, ceilings(results, peers, emulated))
    verdicts = [
        _values(results),
        judge_pairs(results, emulated),
        _network(peers, emulated),
        _bandwidth(rows, alone),
        _floors(results, rows, floors, len(peers.nodes)),
        _stragglers(results, peers, emulated),
    ]
    return Judgement(tuple(rows), tuple(verdict for verdict in verdicts if verdict))


def _rows(results: Mapping[str, Any], bounds: Mapping[str, Ceiling]) -> List[CollectiveRow]:
    rows = []
    for op, ceiling in bounds.items():
        measured = [one for one in results["collectives"] if one["op"] == op and one["dtype"] == "float32"]
        if not measured:
            continue
        measured.sort(key=lambda one: int(one["bytes"]))
        largest = {name: measured[-1][name] for name in ("bytes", "seconds", "algbw", "busbw")}
        ratio = largest["busbw"] / ceiling.bound if ceiling.bound else None
        rows.append(CollectiveRow(op, **largest, latency=measured[0]["seconds"], ceiling=ceiling, ratio=ratio))
    return rows


def _values(results: Mapping[str, Any]) -> Verdict:
    """Judge the sums. Wrong sums are the worst fault: training continues and learns nothing, or something else."""
    findings = []
    mistakes = results["mistakes"]
    if mistakes:
        findings.append(_wrong(results, mistakes))
    for pair in results["pairs"]:
        if pair.get("wrong"):
            a, b = who(results, pair["a"]), who(results, pair["b"])
            findings.append(find("wrong-values", "pair", a=a, b=b, count=pair["wrong"], rank=pair["b"]))
    findings += _wrong_products(results)
    if findings:
        seen = ("the values that every rank received",)
        return Verdict("values", "wrong", "certain", findings[0].title, tuple(findings), seen)
    if not results["complete"] or "checked_elements" not in results:
        return Verdict("values", "unknown", "unknown", "the test did not come to its end")
    checked = f"{results['checked_elements']:,} elements"
    if int(results["world_size"]) < 2:
        words = f"{checked} checked on one rank; sums and copies between ranks were not"
        return Verdict("values", "right", "likely", words, seen=(checked,), unseen=("sums and copies between ranks",))
    return Verdict("values", "right", "certain", f"{checked} checked, all right", seen=(checked,))


def _wrong(results: Mapping[str, Any], mistakes: List[Mapping[str, Any]]) -> Finding:
    ops = ", ".join(dict.fromkeys(each["op"] for each in mistakes))
    sources = {each["source"] for each in mistakes if each["source"] is not None}
    takers = {each["rank"] for each in mistakes}
    rank = None
    blame = "the ranks' sums cannot tell which of them is at fault"
    if len(sources) == 1:
        (rank,) = sources
        blame = f"every wrong copy came from {who(results, rank)}"
    elif len(takers) == 1:
        (rank,) = takers
        blame = f"only {who(results, rank)} got wrong values"
    shown = [
        f"{each['op']} {each['dtype']} {each['bytes']} bytes on rank {each['rank']}: element {each['element']} is "
        f"{each['got']}, must be {each['want']}; {each['count']} of {each['of']} wrong"
        for each in mistakes[:4]
    ]
    host = _rank(results, rank).get("host") if rank is not None else None
    return find("wrong-values", ops=ops, blame=blame, evidence=shown, host=host, rank=rank)


def _wrong_products(results: Mapping[str, Any]) -> List[Finding]:
    """Find ranks with a wrong matmul result: the same integers on identical devices must give the same result."""
    ranks = (results.get("gemm") or {}).get("ranks") or []
    by_device: Dict[str, List[Mapping[str, Any]]] = {}
    for each in ranks:
        by_device.setdefault(str(_rank(results, each["rank"]).get("gpu")), []).append(each)
    findings = []
    for group in by_device.values():
        checks = [each["check"] for each in group]
        common = max(set(checks), key=checks.count)
        for each in group:
            if each["check"] != common and checks.count(common) > 1:
                findings.append(find("wrong-product", who=who(results, each["rank"]), rank=each["rank"]))
    return findings


def _network(peers: Peers, emulated: bool) -> Optional[Verdict]:
    """Note that nothing crossed a network, so that none of the figures is a network's."""
    if len(peers.nodes) > 1 and not emulated:
        return None
    why = "the nodes are emulated on one machine" if len(peers.nodes) > 1 else "all ranks are on one node"
    words = f"not measured: {why}, so nothing crossed the network between nodes"
    return Verdict("network", "unknown", "unknown", words, unseen=("the network between nodes",))


def _bandwidth(rows: List[CollectiveRow], alone: bool) -> Verdict:
    if alone:
        words = "not measured: one rank has no partner to send to"
        return Verdict("bandwidth", "unknown", "unknown", words, unseen=("every link",))
    known = [row for row in rows if row.ceiling.usual]
    if not known:
        why = rows[0].ceiling.why if rows else "nothing was measured"
        return Verdict("bandwidth", "unknown", "unknown", f"no ceiling to compare with: {why}")
    low = [(row, row.ceiling.usual or 0.0) for row in known if row.busbw < _LOW * (row.ceiling.usual or 0.0)]
    short = [row for row, usual in low if row.bytes / (usual * 1e9) < _LONG_ENOUGH]
    findings = [
        find("low-bandwidth", op=row.op, busbw=row.busbw, usual=usual, why=row.ceiling.why)
        for row, usual in low
        if row not in short
    ]
    if findings:
        return Verdict("bandwidth", "low", "likely", findings[0].title, tuple(findings))
    best = max(known, key=lambda row: row.ratio or 0.0)
    if len(short) == len(known):
        return Verdict("bandwidth", "unknown", "unknown", "messages too short to fill the links: run without --quick")
    text = f"{best.op}: {best.ratio or 0:.0%} of the ceiling ({best.ceiling.why})"
    return Verdict("bandwidth", "within", "certain", text, seen=tuple(row.op for row in known))


def _floors(
    results: Mapping[str, Any], rows: List[CollectiveRow], floors: Mapping[str, Floor], nodes: int
) -> Optional[Verdict]:  # fmt: skip
    asked = [(row, floors[row.op]) for row in rows if row.op in floors and floors[row.op].nodes in (None, nodes)]
    if not asked:
        return None
    measured = tuple(row.op for row, _ in asked)
    variant, findings = "quick" if results["quick"] else "", []
    for row, floor in asked:
        if row.busbw < floor.busbw:
            about = {"op": row.op, "busbw": row.busbw, "floor": floor.busbw, "source": floor.source, "bytes": row.bytes}
            findings.append(find("below-floor", variant, **about))
    if findings:
        return Verdict("floor", "missed", "certain", findings[0].title, tuple(findings), measured)
    return Verdict("floor", "met", "certain", f"{len(asked)} of the site's floors are met", seen=measured)


def _stragglers(results: Mapping[str, Any], peers: Peers, emulated: bool) -> Verdict:
    gemm = results.get("gemm") or {}
    ranks = gemm.get("ranks") or []
    if len(ranks) < 2:
        return Verdict("stragglers", "unknown", "unknown", "fewer than two ranks to compare")
    on_cpu = results["device"] == "cpu"
    crowded = any(peer.ranks > len(peer.facts.cpus.allowed) for peer in peers.nodes)
    if on_cpu and (crowded or emulated):
        return Verdict("stragglers", "unknown", "unknown", "ranks that share one machine's cores slow each other")
    times = sorted(each["seconds"] for each in ranks)
    median = times[(len(times) - 1) // 2]
    limit = _SLOW_CPU if on_cpu else _SLOW_GPU
    findings = []
    for each in sorted(ranks, key=lambda one: -one["seconds"]):
        if each["seconds"] > limit * median:
            rank, times = each["rank"], each["seconds"] / median
            host = _rank(results, rank).get("host")
            findings.append(find("straggler", who=who(results, rank), times=times, host=host, rank=rank))
    if findings:
        return Verdict("stragglers", "straggler", "likely", findings[0].title, tuple(findings))
    spread = times[-1] / times[0] - 1
    text = f"the slowest of {len(ranks)} ranks is {spread:.0%} behind the fastest"
    return Verdict("stragglers", "even", "certain", text, seen=(f"the matrix product's time on {len(ranks)} ranks",))


def _rank(results: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    return next((each for each in results["ranks"] if each["rank"] == rank), {})


def who(results: Mapping[str, Any], rank: int) -> str:
    """Name a rank: `rank 3 (n2, GPU 1)`."""
    known = _rank(results, rank)
    device = f", GPU {known.get('local_rank')}" if known.get("gpu") else ""
    return f"rank {rank} ({known.get('host', 'host unknown')}{device})"


# Output of `drumbeat verify`.


_MARKS = {OK: "ok", "info": "ok"}


def table(results: Mapping[str, Any], judgement: Judgement) -> str:
    ranks, nodes = results["world_size"], len({each["node"] for each in results["ranks"]})
    device = results["ranks"][0]["gpu"] if results["ranks"] else None
    size = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {nodes} {'node' if nodes == 1 else 'nodes'}"
    lines = [
        f"{size}, {results['library']} on {device or 'the CPU'}, torch {results['torch']}, {results['seconds']:.1f} s"
        f"{', quick' if results['quick'] else ''}"
    ]
    head = f"{'':16}{'size':>9} {'time':>10} {'algbw':>9} {'busbw':>9} {'ceiling':>9} {'':>6} {'latency':>10}"
    lines += ["", head] if judgement.rows else []
    for row in judgement.rows:
        bound = f"{row.ceiling.bound:.4g}" if row.ceiling.bound else "unknown"
        part = f"{row.ratio:.0%}" if row.ratio is not None else ""
        lines.append(
            f"{row.op:16}{memory(row.bytes):>9} {step_time(row.seconds):>10} {row.algbw:>9.3f} {row.busbw:>9.3f} {bound:>9} "
            f"{part:>6} {step_time(row.latency):>10}"
        )
    if judgement.rows:
        lines.append(f"{'':16}{'':>9} {'':>10} {'GB/s':>9} {'GB/s':>9} {'GB/s':>9}")
    lines.append("")
    for verdict in judgement.verdicts:
        severity = worst(verdict.findings)
        mark = "unknown" if verdict.answer == "unknown" and severity == OK else _MARKS.get(severity, severity)
        summary = verdict.summary[:1].upper() + verdict.summary[1:]
        lines.append(f"{mark:<8} {verdict.check}: {verdict.answer}. {summary}")
        for finding in verdict.findings:
            lines += [f"         {finding.title}"] if finding.title != verdict.summary else []
            lines += [f"         {words}" for words in (finding.cause, finding.fix and f"fix: {finding.fix}") if words]
            if finding.severity == ERROR:
                lines += [f"           {evidence.text}" for evidence in finding.evidence]
    return "\n".join(lines)


# The MPI test's figures as text. Pure.


NOT_MEASURED = (
    "not measured: GPU memory, NCCL or RCCL, other collectives, single pairs (drumbeat verify measures NCCL's)"
)


def mpi_failed(results: Mapping[str, Any]) -> bool:
    return any(row["right"] != results["ranks"] for row in results["rows"])


def mpi_lines(results: Mapping[str, Any]) -> List[str]:
    ranks, hosts = results["ranks"], len(set(results["hosts"]))
    lines = [
        f"MPI_Allreduce of doubles in host memory, {ranks} ranks on {hosts} {'node' if hosts == 1 else 'nodes'}, "
        f"by {results['library']}",
        f"{'size':>10}  {'time':>10}  {'bus bandwidth':>14}  sums",
    ]
    for row in results["rows"]:
        wrong = ranks - row["right"]
        sums = f"right on all {ranks} ranks" if not wrong else f"WRONG on {wrong} of {ranks} ranks"
        rate = "-"  # for a few bytes it is pure latency
        if row["bytes"] >= 4096 and row["seconds"] > 0:
            rate = f"{2 * (ranks - 1) / ranks * row['bytes'] / row['seconds'] / 1e9:.3f} GB/s"
        lines.append(f"{memory(row['bytes']):>10}  {row['seconds'] * 1e6:>7.1f} us  {rate:>14}  {sums}")
    lines.append(NOT_MEASURED)
    if hosts == 1:
        lines.append("all ranks were on one node: nothing of this went over the network")
    return lines


def plot(results: Mapping[str, Any], judgement: Judgement) -> str:
    """Plot busbw over message size, one line per operation and one per ceiling, both axes logarithmic."""
    series: Dict[str, List[Tuple[float, float]]] = {}
    for one in results["collectives"]:
        if one["dtype"] == "float32" and one["busbw"] > 0:
            series.setdefault(one["op"], []).append((one["bytes"], one["busbw"]))
    sizes = sorted({size for points in series.values() for size, _ in points})
    ends = [sizes[0], sizes[-1]] if sizes else []
    bounds = {row.op: row.ceiling.bound for row in judgement.rows if row.ceiling.bound and row.op in series}
    ceilings = {f"{op} ceiling": [(size, bound) for size in ends] for op, bound in bounds.items()}
    lines = {**{op: sorted(points) for op, points in series.items()}, **ceilings}
    title = f"{results['world_size']} ranks, {results['library']}: bus bandwidth"
    title += " (dashed: ceiling)" if bounds else ""
    ticks = {size: memory(int(size)) for size in sizes[:: 1 if len(sizes) <= 8 else 2]}
    return standalone(line_chart(title, lines, "message size", "GB/s", Look(dots=True, log=True, ticks=ticks)))
