"""What the measurements mean: results of the collective test + facts of all nodes + the site's floors -> verdicts. Pure."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Floor
from drumbeat.findings.model import ERROR, WARNING, Evidence, Finding, Verdict
from drumbeat.machine.model import Peers
from drumbeat.verify.ceiling import Ceiling, ceilings
from drumbeat.verify.pairs import judge_pairs

_LOW = 0.5  # of what a healthy ring comes near to
_LONG_ENOUGH = 0.004  # seconds at the ceiling: below, latency and ramp-up decide, not the links
_SLOW_GPU, _SLOW_CPU = 1.2, 1.5  # times the median of all ranks


@dataclass(frozen=True)
class Row:
    """One operation at its largest size, with the latency of its smallest."""

    op: str
    bytes: int
    seconds: float
    algbw: float
    busbw: float
    latency: float
    ceiling: Ceiling
    ratio: Optional[float]  # of the bound


@dataclass(frozen=True)
class Judgement:
    rows: Tuple[Row, ...]
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


def _rows(results: Mapping[str, Any], bounds: Mapping[str, Ceiling]) -> List[Row]:
    rows = []
    for op, ceiling in bounds.items():
        measured = [one for one in results["collectives"] if one["op"] == op and one["dtype"] == "float32"]
        if not measured:
            continue
        largest, smallest = max(measured, key=_bytes), min(measured, key=_bytes)
        ratio = largest["busbw"] / ceiling.bound if ceiling.bound else None
        rows.append(
            Row(
                op, largest["bytes"], largest["seconds"], largest["algbw"], largest["busbw"], smallest["seconds"], ceiling,
                ratio,
            )
        )  # fmt: skip
    return rows


def _bytes(measured: Mapping[str, Any]) -> int:
    return int(measured["bytes"])


def _values(results: Mapping[str, Any]) -> Verdict:
    """Wrong sums are the worst there is: a training run goes on and learns nothing, or something else."""
    findings = []
    mistakes = results["mistakes"]
    if mistakes:
        findings.append(_wrong(results, mistakes))
    for pair in results["pairs"]:
        if pair.get("wrong"):
            a, b = who(results, pair["a"]), who(results, pair["b"])
            title = f"wrong values between {a} and {b}: {pair['wrong']} elements"
            findings.append(Finding("wrong-values", ERROR, title, fix=_FIX, rank=pair["b"]))
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


_FIX = (
    "leave the named host out and verify again; on Slingshot with NCCL 2.27 or newer try NCCL_PROTO=^LL128; keep this run "
    "folder for the support desk"
)


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
    evidence = tuple(
        Evidence(
            f"{each['op']} {each['dtype']} {each['bytes']} bytes on rank {each['rank']}: element {each['element']} is "
            f"{each['got']}, must be {each['want']}; {each['count']} of {each['of']} wrong"
        )
        for each in mistakes[:4]
    )
    host = _rank(results, rank).get("host") if rank is not None else None
    return Finding("wrong-values", ERROR, f"wrong values in {ops}", blame, _FIX, evidence, host=host, rank=rank)


def _wrong_products(results: Mapping[str, Any]) -> List[Finding]:
    """The same whole numbers multiplied on like devices must give the same."""
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
                title = f"{who(results, each['rank'])} multiplies wrongly"
                cause = "the same matrices gave another product there than on the other ranks"
                fix = "take the device out of service; a wrong product without an error is a hardware fault"
                findings.append(Finding("wrong-product", ERROR, title, cause, fix, rank=each["rank"]))
    return findings


def _network(peers: Peers, emulated: bool) -> Optional[Verdict]:
    """Said only where nothing crossed a network: then no figure below is one of the network."""
    if len(peers.nodes) > 1 and not emulated:
        return None
    why = "the nodes are emulated on one machine" if len(peers.nodes) > 1 else "all ranks are on one node"
    words = f"not measured: {why}, so nothing crossed the network between nodes"
    return Verdict("network", "unknown", "unknown", words, unseen=("the network between nodes",))


def _bandwidth(rows: List[Row], alone: bool) -> Verdict:
    if alone:
        words = "not measured: one rank has nobody to send to"
        return Verdict("bandwidth", "unknown", "unknown", words, unseen=("every link",))
    known = [row for row in rows if row.ceiling.usual]
    if not known:
        why = rows[0].ceiling.why if rows else "nothing was measured"
        return Verdict("bandwidth", "unknown", "unknown", f"no ceiling to compare with: {why}")
    findings = []
    short = []
    for row in known:
        usual = row.ceiling.usual or 0.0
        if row.busbw >= _LOW * usual:
            continue
        if row.bytes / (usual * 1e9) < _LONG_ENOUGH:
            short.append(row.op)
            continue
        title = f"{row.op} reaches {row.busbw:.3g} GB/s; {usual:.4g} is what the links give ({row.ceiling.why})"
        fix = "look at the pairs below and at drumbeat doctor: a slow pair, a NIC that is not used, TCP instead of RDMA"
        findings.append(Finding("low-bandwidth", WARNING, title, fix=fix))
    if findings:
        return Verdict("bandwidth", "low", "likely", findings[0].title, tuple(findings))
    best = max(known, key=lambda row: row.ratio or 0.0)
    if len(short) == len(known):
        return Verdict("bandwidth", "unknown", "unknown", "messages too short to fill the links: run without --quick")
    text = f"{best.op}: {best.ratio or 0:.0%} of the ceiling ({best.ceiling.why})"
    return Verdict("bandwidth", "within", "certain", text, seen=tuple(row.op for row in known))


def _floors(
    results: Mapping[str, Any], rows: List[Row], floors: Mapping[str, Floor], nodes: int
) -> Optional[Verdict]:  # fmt: skip
    asked = [
        (row, floors[row.op]) for row in rows if row.op in floors and floors[row.op].nodes in (None, nodes)
    ]  # fmt: skip
    if not asked:
        return None
    measured = tuple(row.op for row, _ in asked)
    findings = []
    for row, floor in asked:
        if row.busbw < floor.busbw:
            title = f"{row.op}: {row.busbw:.3g} GB/s, below the site's floor of {floor.busbw:g}"
            said = f"the floor: {floor.source}" if floor.source else ""
            cause = f"measured with --quick, at {row.bytes} bytes only" if results["quick"] else said
            fix = "run without --quick" if results["quick"] else "verify halves of the nodes to find the slow one"
            findings.append(Finding("below-floor", WARNING if results["quick"] else ERROR, title, cause, fix))
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
            title = (
                f"{who(results, each['rank'])} takes {each['seconds'] / median:.2f} times as long for the same product"
            )
            cause = "lower clocks (heat, power cap), another process on the device, or a fault"
            fix = "compare clocks and power of that device with its neighbours; leave the host out if it stays"
            host = _rank(results, each["rank"]).get("host")
            findings.append(Finding("straggler", WARNING, title, cause, fix, host=host, rank=each["rank"]))
    if findings:
        return Verdict("stragglers", "straggler", "likely", findings[0].title, tuple(findings))
    spread = times[-1] / times[0] - 1
    text = f"the slowest of {len(ranks)} ranks is {spread:.0%} behind the fastest"
    return Verdict("stragglers", "even", "certain", text, seen=(f"the matrix product's time on {len(ranks)} ranks",))


def _rank(results: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    return next((each for each in results["ranks"] if each["rank"] == rank), {})


def who(results: Mapping[str, Any], rank: int) -> str:
    """`rank 3 (n2, GPU 1)`"""
    known = _rank(results, rank)
    device = f", GPU {known.get('local_rank')}" if known.get("gpu") else ""
    return f"rank {rank} ({known.get('host', 'host unknown')}{device})"
