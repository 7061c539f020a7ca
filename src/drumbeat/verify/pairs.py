"""Slow parts: from rates of pairs, each way, to a host, a rank's GPU and NIC, or the link between two. Pure.

Each rank met several partners. Where one side is slow with all of them and they are not slow with others, it is that
side; where only one meeting was slow, it is the link between the two; where there was only one meeting, it is either.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Set

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding, Verdict

find = Catalog("verify")
_SLOW = 0.5  # of the upper median of all like it


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
    findings = ()
    for kind in ("between", "inside"):
        findings += tuple(_slow(results, ways_of(pairs, kind), kind))
    if findings:
        return Verdict("pairs", "slow", "likely", findings[0].title, findings)
    rates = [pair[way] for pair in pairs for way in ("a_to_b", "b_to_a")]
    text = f"{len(pairs)} pairs, {min(rates):.3g} to {max(rates):.3g} GB/s each way"
    return Verdict("pairs", "even", "certain", text, seen=(f"{len(pairs)} pairs, both ways",))


def ways_of(pairs: List[Mapping[str, Any]], kind: str) -> List[Way]:
    ways = []
    for pair in pairs:
        if pair["kind"] == kind:
            ways += [Way(pair["a"], pair["b"], pair["a_to_b"]), Way(pair["b"], pair["a"], pair["b_to_a"])]
    if not ways:
        return []
    rates = sorted(way.rate for way in ways)
    usual = rates[len(rates) // 2]
    return [Way(way.sender, way.receiver, way.rate, way.rate < _SLOW * usual) for way in ways]


def _slow(results: Mapping[str, Any], ways: List[Way], kind: str) -> List[Finding]:
    """Suspect whole hosts first, then single ranks; what nobody alone explains is a link between two."""
    left = [way for way in ways if way.slow]
    if not left:
        return []
    host_of = {each["rank"]: f"node {each['node']} ({each['host']})" for each in results["ranks"]}
    rank_of = {rank: f"rank {rank} on {host}" for rank, host in host_of.items()}
    usual = sorted(way.rate for way in ways)[len(ways) // 2]
    findings = []
    # Inside a node only its ranks can differ; between nodes, partners are hosts.
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
    """Name what may be at fault, as far as the names are known."""
    if rank is None:
        return "its NIC, cable or switch port"
    known: Mapping[str, Any] = next((each for each in results["ranks"] if each["rank"] == rank), {})
    gpu = f"GPU {known.get('local_rank')}" if known.get("gpu") else "its device"
    if kind == "inside":
        return f"{gpu} or its links"
    return f"{gpu}, {known.get('nic') or 'its NIC'} or the cable"


def _all_its_fault(mine: List[Way], ways: List[Way], end: str, place: Mapping[int, str]) -> bool:
    """Return true if all its ways are slow, with several partners, and each partner has a similar way that is not, or is
    far faster: on a busy network others are slow too, but not as slow."""
    other = "receiver" if end == "sender" else "sender"
    partners: Set[str] = {place[getattr(way, other)] for way in mine}
    if len(partners) < 2 or not all(way.slow for way in mine):
        return False
    own = {place[getattr(way, end)] for way in mine}
    fastest: Dict[str, float] = {}
    for way in mine:
        partner = place[getattr(way, other)]
        fastest[partner] = max(fastest.get(partner, 0.0), way.rate)
    fine: Dict[str, bool] = dict.fromkeys(partners, False)
    for way in ways:
        partner = place[getattr(way, other)]
        if partner in fine and place[getattr(way, end)] not in own:
            fine[partner] = fine[partner] or not way.slow or fastest[partner] < _SLOW * way.rate
    return all(fine.values())


def _finding(
    results: Mapping[str, Any], words: str, rank: Optional[int], ways: List[Way], end: str, usual: float
) -> Finding:
    rates = ", ".join(f"{way.sender} to {way.receiver}: {way.rate:.3g}" for way in ways[:6])
    host = next((each["host"] for each in results["ranks"] if each["rank"] == getattr(ways[0], end)), None)
    return find("slow-pair", what=words, rates=rates, usual=usual, rank=rank, host=host)


def _broken(results: Mapping[str, Any], pairs: List[Mapping[str, Any]], pair: Mapping[str, Any]) -> Finding:
    hosts = {each["rank"]: f"node {each['node']} ({each['host']})" for each in results["ranks"]}
    a, b = pair["a"], pair["b"]
    works = [
        rank for rank in (a, b) if any(rank in (one["a"], one["b"]) and "error" not in one for one in pairs)
    ]  # fmt: skip
    return find(
        "broken-pair", a=a, b=b, here=hosts.get(a), there=hosts.get(b), error=pair["error"],
        works=", ".join(f"rank {rank}" for rank in works), rank=a,
    )  # fmt: skip
