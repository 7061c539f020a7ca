"""Who is slow: from rates of pairs, each way, to a host, a rank's GPU and NIC, or the link between two. Pure.

Each rank met several partners. Where one side is slow with all of them and they are not slow with others, it is that
side; where only one meeting was slow, it is the link between the two; where there was only one meeting, it is either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from drumbeat.finding import ERROR, WARNING, Finding, Verdict

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
        return Verdict("pairs", "broken", "certain", findings[0].title, findings)
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
    return Verdict(
        "pairs", "even", "certain", f"{len(pairs)} pairs, {min(rates):.3g} to {max(rates):.3g} GB/s each way"
    )


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
    slow = [way for way in ways if way.slow]
    if not slow:
        return []
    hosts = {each["rank"]: f"node {each['node']} ({each['host']})" for each in results["ranks"]}
    usual = sorted(way.rate for way in ways)[len(ways) // 2]
    named: List[Tuple[str, Optional[int], List[Way]]] = []
    left = list(slow)
    by_host = kind == "between"
    for end, verb in (("sender", "sends"), ("receiver", "receives")):
        for group, single in ((hosts, False), ({rank: rank for rank in hosts}, True)):
            if not single and not by_host:
                continue  # inside a node only its ranks can differ
            for side in sorted({str(group[getattr(way, end)]) for way in left}):
                mine = [way for way in ways if str(group[getattr(way, end)]) == side]
                if _all_its_fault(mine, ways, end, hosts if by_host else {rank: str(rank) for rank in hosts}):
                    words = f"rank {side} on {hosts[int(side)]}" if single else side
                    what = ": its GPU, NIC or cable" if single else ": its NIC, cable or switch port"
                    named.append((f"{words} {verb} slowly{what}", int(side) if single else None, mine))
                    left = [way for way in left if way not in mine]
    findings = [_finding(results, words, rank, mine, usual) for words, rank, mine in named]
    for way in left:
        a, b = (f"rank {rank} on {hosts[rank]}" for rank in (way.sender, way.receiver))
        findings.append(_finding(results, f"{a} to {b} is slow: one of both, or the way between", None, [way], usual))
    return findings


def _all_its_fault(mine: List[Way], ways: List[Way], end: str, place: Mapping[int, str]) -> bool:
    """All its ways are slow, with several partners, and each partner has a way like it that is not."""
    other = "receiver" if end == "sender" else "sender"
    partners: Set[str] = {place[getattr(way, other)] for way in mine}
    if len(partners) < 2 or not all(way.slow for way in mine):
        return False
    own = {place[getattr(way, end)] for way in mine}
    fine: Dict[str, bool] = dict.fromkeys(partners, False)
    for way in ways:
        partner = place[getattr(way, other)]
        if partner in fine and place[getattr(way, end)] not in own and not way.slow:
            fine[partner] = True
    return all(fine.values())


def _finding(results: Mapping[str, Any], words: str, rank: Optional[int], ways: List[Way], usual: float) -> Finding:
    rates = ", ".join(f"{way.sender} to {way.receiver}: {way.rate:.3g}" for way in ways[:6])
    cause = f"{rates} GB/s, where {usual:.3g} is usual"
    fix = "look at that link's speed and errors (ethtool, ibstat); leave the host out until it is mended"
    wanted = ways[0].sender if rank is None else rank
    host = next((each["host"] for each in results["ranks"] if each["rank"] == wanted), None)
    return Finding("slow-pair", WARNING, words, cause, fix, rank=rank, host=host)


def _broken(results: Mapping[str, Any], pairs: List[Mapping[str, Any]], pair: Mapping[str, Any]) -> Finding:
    hosts = {each["rank"]: f"node {each['node']} ({each['host']})" for each in results["ranks"]}
    a, b = pair["a"], pair["b"]
    works = [
        rank for rank in (a, b) if any(rank in (one["a"], one["b"]) and "error" not in one for one in pairs)
    ]  # fmt: skip
    title = f"rank {a} on {hosts.get(a)} and rank {b} on {hosts.get(b)} cannot talk"
    cause = str(pair["error"])
    if works:
        cause += f"; {', '.join(f'rank {rank}' for rank in works)} could with another"
    fix = "check routes, firewall and the interface between these two hosts; leave one out and verify again"
    return Finding("broken-pair", ERROR, title, cause, fix, rank=a)
