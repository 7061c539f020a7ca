"""Sets of CPUs as text: parse and format Slurm's `mask_cpu` form and core lists; check a user's own."""

from __future__ import annotations

import re
from typing import Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.ranges import ranges
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.parse import cpulist

find = Catalog("plan")
MOST_CPUS = 8192  # the kernel's own bound; a longer text is not a mask
_LIST = regex(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def mask(cpus: Iterable[int]) -> str:
    """Return the mask of these CPUs: bit n is CPU n."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


def parse(text: str) -> Optional[Tuple[int, ...]]:
    """Parse a mask (0xfe) or a list (1-7,9); None if it is neither."""
    text = text.strip()
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,2048}", text):
        bits = int(text, 16)
        return tuple(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
    if not _LIST.fullmatch(text):
        return None
    cpus = cpulist(text)
    return cpus if cpus and cpus[-1] < MOST_CPUS else None


def from_slurm(value: str) -> Tuple[str, ...]:
    """Return the masks or cores in SLURM_CPU_BIND ('quiet,mask_cpu:0xfe,0xfe00', 'map_cpu:49,57'), if any."""
    cores = re.search(r"map_cpu:(\d{1,4}(?:,\d{1,4})*)", value)
    if cores:
        return tuple(cores.group(1).split(","))
    found = re.search(r"mask_cpu:((?:0[xX])?[0-9a-fA-F]+(?:,(?:0[xX])?[0-9a-fA-F]+)*)", value)
    if not found:
        return ()
    return tuple(part if part[:2].lower() == "0x" else "0x" + part for part in found.group(1).split(","))


def bound_by_user(environment: Mapping[str, str]) -> bool:
    """Return true if the user told this job's launcher where to place its tasks."""
    return typed_by_user(environment.get("SLURM_CPU_BIND", ""))


def typed_by_user(value: str) -> bool:
    """Return true if SLURM_CPU_BIND holds masks or cores that a person wrote.

    Slurm also sets the variable for its own default, with masks of equal width, zero-padded, in capitals.
    """
    if "map_cpu:" in value:
        return True
    found = re.search(r"mask_cpu:([^\s]+)", value)
    if not found:
        return False
    entries = found.group(1).split(",")
    slurms_own = all(re.fullmatch(r"0x[0-9A-F]{8,}", entry) for entry in entries)
    return not slurms_own or len({len(entry) for entry in entries}) > 1


def check(entries: Sequence[str], ranks: int, allowed: Iterable[int]) -> Tuple[List[Tuple[int, ...]], List[Finding]]:
    """Parse a user's list, one entry per local rank, repeated if shorter; return the CPU sets and findings."""
    sets: List[Tuple[int, ...]] = []
    findings: List[Finding] = []
    for place, entry in enumerate(entries):
        cpus = parse(entry)
        if not cpus:
            findings.append(find("mask-unreadable", place=place, evidence=[entry]))
            return [], findings
        sets.append(cpus)
    everything = set(allowed)
    chosen = [sets[rank % len(sets)] for rank in range(ranks)]
    for rank, cpus in enumerate(chosen):
        outside = set(cpus) - everything if everything else set()
        if outside:
            entry, may = entries[rank % len(entries)], ranges(everything)
            findings.append(
                find("mask-outside", outside=ranges(outside), local_rank=rank, allowed=may, evidence=[entry])
            )
        for before in range(rank):
            both = set(cpus) & set(chosen[before])
            if both:
                kind = "the same mask" if set(cpus) == set(chosen[before]) else f"CPUs {ranges(both)} in common"
                masks = f"{entries[before % len(entries)]} and {entries[rank % len(entries)]}"
                findings.append(find("mask-overlap", first=before, second=rank, kind=kind, evidence=[masks]))
                break
    return chosen, findings
