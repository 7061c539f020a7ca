"""Pairs of ranks: the rate in each direction, the latency, and which pair is broken."""

from __future__ import annotations

import functools
import itertools
import math
import time
from typing import Any, Dict, List

import torch

from .sweep import payload, send_and_receive, tile
from .world import World

PAIR_SECONDS = 30.0  # after which a pair counts as broken
PAIR_REPEATS = 4


def matchings(count: int) -> List[Any]:
    """Return rounds of disjoint pairs of 0..count-1: all of them up to four, then about log2(count), each with new
    partners."""
    places = list(range(count)) + ([-1] if count % 2 else [])
    rounds = []
    wanted = len(places) - 1 if count <= 4 else math.ceil(math.log2(count)) + count % 2
    for _ in range(wanted if count > 1 else 0):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]))
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def pair_rounds(nodes: List[int]) -> List[Any]:
    """Return (kind, {rank: partner}): first within nodes, all nodes at once; then between nodes, equal local ranks together."""
    members = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    deep = [matchings(len(ranks)) for ranks in members]
    rounds = []
    for step in itertools.zip_longest(*deep, fillvalue=()):
        rounds.append(("inside", [(here[a], here[b]) for here, pairs in zip(members, step) for a, b in pairs]))
    for found in matchings(len(members)):
        rounds.append(("between", [pair for a, b in found for pair in zip(members[a], members[b])]))
    return [(kind, {a: b for pair in pairs for a, b in (pair, pair[::-1])}) for kind, pairs in rounds]


def run(world: World, quick: bool) -> None:
    small = world.device.type == "cpu"
    size = (2 << 20 if quick else 16 << 20) if small else (64 << 20 if quick else 256 << 20)
    for step, (kind, partners) in enumerate(pair_rounds(world.nodes)):
        said: Dict[str, Any] = {}
        if world.rank in partners:
            try:
                said = with_partner(world, partners[world.rank], size, step)
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        world.broken = world.settle(f"pairs-{step}", said, functools.partial(note_pairs, world, kind, partners, size))
        world.write()
        if world.broken:
            return  # later rounds would hang at the same place


def note_pairs(world: World, kind: str, partners: Dict[int, int], size: int, told: List[Any]) -> bool:
    """Record what both sides of each pair reported; return true if one is broken."""
    broken = False
    for a, b in ((a, b) for a, b in sorted(partners.items()) if a < b):
        pair: Dict[str, Any] = {"a": a, "b": b, "kind": kind, "bytes": size}
        errors = [told[rank]["error"] for rank in (a, b) if "error" in told[rank]]
        if errors:
            pair["error"], broken = errors[0], True
        else:
            pair.update(a_to_b=told[a]["rate"], b_to_a=told[b]["rate"], latency=told[a]["latency"])
            pair["wrong"] = told[a]["wrong"] + told[b]["wrong"]
        world.results["pairs"].append(pair)
    return broken


def with_partner(world: World, partner: int, size: int, step: int) -> Dict[str, Any]:
    """Return the rate of sending to the partner, in this direction alone, and the time of a small message."""
    low = world.rank < partner
    data = torch.empty(size // 4, dtype=torch.float32, device=world.device)
    word = torch.zeros(1, dtype=torch.float32, device=world.device)
    result: Dict[str, Any] = {"wrong": 0}

    def move(do: str, tensor: Any) -> None:
        send_and_receive([(do, tensor, partner)], PAIR_SECONDS)

    def trips(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            for do in ("send", "receive") if low else ("receive", "send"):
                move(do, word)
        return (time.perf_counter() - began) / (2 * count)

    trips(2)
    result["latency"] = trips(20)
    for sender in (True, False) if low else (False, True):
        if sender:
            data.copy_(tile(payload(world.rank, partner, step), len(data), data))
            move("send", data)  # the first transfer may have to connect
            world.synchronize()
            began = time.perf_counter()
            for _ in range(PAIR_REPEATS):
                move("send", data)
            move("receive", word)  # all data has arrived
            world.synchronize()
            result["rate"] = size * PAIR_REPEATS / (time.perf_counter() - began) / 1e9
        else:
            want = tile(payload(partner, world.rank, step), len(data), data)
            data.fill_(-1)
            for _ in range(PAIR_REPEATS + 1):
                move("receive", data)
            move("send", word)
            world.synchronize()
            result["wrong"] = int((data != want).sum())
    return result
