"""After the ranks are up: do they sit where the plan put them and see what it meant them to see?"""

from __future__ import annotations

from typing import Any, Iterable, List, Mapping, Optional, Sequence

from drumbeat.finding import Evidence, Finding, Verdict
from drumbeat.order import EnvVar
from drumbeat.plan.binding import Binding, Slot
from drumbeat.plan.masks import mask, ranges

# What was seen of a rank: `cpus` its affinity, `visible` the devices it is shown (text, as the variable says),
# `env` its environment, `pci` the PCI address of the device it selected. Each may be missing: then it is unknown.
Seen = Mapping[int, Mapping[str, Any]]


def check(binding: Binding, seen: Seen, expected: Sequence[EnvVar] = (), first_rank: int = 0) -> Verdict:
    """Answers 'as planned', 'mismatch' or 'unknown'. Ranks are global; `first_rank` is this node's lowest one."""
    findings: List[Finding] = []
    missing = []
    for slot in binding.slots:
        rank = first_rank + slot.local_rank
        about = seen.get(rank)
        if about is None or about.get("cpus") is None:
            missing.append(rank)
        if about is not None:
            findings += _rank(rank, slot, about, expected)
    findings += _together(binding, seen, first_rank)
    total = len(binding.slots)
    looked_at = tuple(f"rank {rank}: {', '.join(sorted(about))}" for rank, about in sorted(seen.items()) if about)
    unseen = tuple(f"rank {rank}: its cores" for rank in missing)
    if any(finding.severity in ("warning", "error") for finding in findings):
        wrong = len({finding.rank for finding in findings if finding.rank is not None})
        return Verdict(
            "affinity",
            "mismatch",
            "certain",
            f"{wrong} of {total} ranks are not as planned",
            tuple(findings),
            looked_at,
            unseen,
        )
    if missing:
        text = f"{len(missing)} of {total} ranks could not be looked at: {', '.join(map(str, missing[:8]))}"
        return Verdict("affinity", "unknown", "unknown", text, tuple(findings), looked_at, unseen)
    bound = sum(1 for slot in binding.slots if slot.cpus)
    beside = "beside their GPU" if any(slot.gpu is not None for slot in binding.slots) else "on their cores"
    text = f"{bound}/{total} ranks {beside}" if bound else f"not pinned: {binding.threads_why}"
    return Verdict("affinity", "as planned", "certain", text, tuple(findings), looked_at)


def table(binding: Binding, seen: Seen, first_rank: int = 0) -> List[str]:
    """One line a rank: rank, the GPUs it is shown, its mask and cores, the GPU and NIC it was given, a word."""
    rows = [("rank", "visible", "mask", "cores", "GPU", "NUMA", "NIC", "")]
    for slot in binding.slots:
        rank = first_rank + slot.local_rank
        about = seen.get(rank, {})
        cpus = about.get("cpus")
        word = "unknown" if cpus is None else "ok" if _fits(slot, cpus) else f"planned {slot.cores}"
        rows.append(
            (
                str(rank),
                str(about["visible"]) if about.get("visible") is not None else "all",
                mask(cpus)[2:] if cpus else "unknown",
                ranges(cpus) if cpus else "unknown",
                ",".join(map(str, slot.gpus)) or "-",
                "-" if slot.numa is None else str(slot.numa),
                slot.nic or "-",
                word,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _fits(slot: Slot, cpus: Iterable[int]) -> bool:
    return not slot.cpus or set(cpus) == set(slot.cpus)


def _rank(rank: int, slot: Slot, about: Mapping[str, Any], expected: Sequence[EnvVar]) -> List[Finding]:
    findings = []
    cpus: Optional[Iterable[int]] = about.get("cpus")
    if cpus is not None and not _fits(slot, cpus):
        inside = set(cpus) < set(slot.cpus)
        findings.append(
            Finding(
                "affinity-mismatch",
                "warning",
                f"rank {rank} may use cores {ranges(cpus)}, planned were {slot.cores}",
                "a launcher or library bound it again, to fewer cores" if inside else "something bound it elsewhere",
                "look for --cpu-bind, torchrun --numa-binding, OMP_PROC_BIND or a runtime that pins threads",
                (Evidence(f"seen {mask(cpus)}"), Evidence(f"planned {slot.mask}")),
                rank=rank,
            )
        )
    env: Optional[Mapping[str, str]] = about.get("env")
    if env is not None:
        for variable in (*expected, *slot.env):
            own = next((each for each in slot.env if each.name == variable.name), variable)
            if env.get(variable.name) != own.value:
                findings.append(
                    Finding(
                        "environment-mismatch",
                        "warning",
                        f"rank {rank} has {variable.name}={env.get(variable.name, 'unset')}, planned was {own.value}",
                        "the command, its setup or its container changed it",
                        "set it in the job's env, which wins over a site and over what is detected",
                        rank=rank,
                    )
                )
    return findings


def _together(binding: Binding, seen: Seen, first_rank: int) -> List[Finding]:
    """What only shows across the ranks of a node: all on one core; per-task device groups."""
    ranks = [first_rank + slot.local_rank for slot in binding.slots]
    masks = [frozenset(seen[rank]["cpus"]) for rank in ranks if rank in seen and seen[rank].get("cpus")]
    findings = []
    if len(masks) > 1 and len(set(masks)) == 1 and len(masks[0]) < len(masks):
        findings.append(
            Finding(
                "all-ranks-on-few-cores",
                "warning",
                f"all {len(masks)} ranks share core{'s' if len(masks[0]) > 1 else ''} {ranges(masks[0])}",
                "the task that started them was given so few",
                "ask for all cores of the node: srun --cpus-per-task, or --exclusive",
                rank=ranks[0],
            )
        )
    pci = [seen[rank].get("pci") for rank in ranks if rank in seen]
    shown = {str(seen[rank].get("visible")) for rank in ranks if rank in seen}
    one_device_each = len(shown) == 1 and all(text.isdigit() for text in shown)
    if len(pci) > 1 and all(pci) and len(set(pci)) == len(pci) and one_device_each:
        findings.append(
            Finding(
                "per-task-device-group",
                "warning",
                "all ranks are shown one device of the same number, yet each is another GPU",
                "the scheduler fenced them off: GPUs of the node cannot reach each other, and RCCL falls back or fails",
                "drop --gpus-per-task and --gpu-bind, or add --gres-flags=allow-task-sharing",
                tuple(Evidence(str(each)) for each in pci),
                rank=ranks[0],
            )
        )
    return findings
