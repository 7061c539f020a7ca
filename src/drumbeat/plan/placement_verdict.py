"""What a placement table says as a whole: one line, how sure it is, and what to do about it."""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.findings.model import Evidence, Finding, Verdict
from drumbeat.machine.model import Facts
from drumbeat.plan.binding import Binding
from drumbeat.plan.masks import mask, ranges
from drumbeat.plan.placement import NO_GPU, RIGHT, SHARED, UNKNOWN, WRONG, Row

_SHOWN = 8  # ranks that a finding names


def verdict(table: Sequence[Row], facts: Facts, bound: Binding, more: Sequence[Finding] = ()) -> Verdict:
    """Answers 'as planned', 'not pinned', 'mismatch' or 'unknown'; `more` are findings about the same ranks."""
    findings = (*_findings(table, facts, bound), *more)
    gpus = any(not gpu.integrated for gpu in facts.gpus)
    seen = tuple(_looked_at(row, gpus) for row in table if row.cpus is not None)
    unseen = tuple(f"{_name(row)}: {row.note}" for row in table if row.verdict == UNKNOWN)
    unseen += tuple(f"{_name(row)}: which GPU it uses" for row in table if row.gpus and not row.gpu_read)
    answer, text = _answer(table, bound, findings, gpus)
    confidence = "likely" if any(row.gpus and not row.gpu_read for row in table) else "certain"
    return Verdict("affinity", answer, confidence, text, findings, seen, unseen)


def _answer(table: Sequence[Row], bound: Binding, findings: Sequence[Finding], gpus: bool) -> Tuple[str, str]:
    beside = "beside their GPU" if gpus else "on their cores"
    good = f"{_count(table, RIGHT)}/{len(table)} ranks {beside}"
    if any(finding.severity in ("warning", "error") for finding in findings):
        first = next(finding for finding in findings if finding.severity in ("warning", "error"))
        return "mismatch", good if first.code == "placement-wrong" else f"{good}; {first.title}"
    unknown = [row for row in table if row.verdict == UNKNOWN]
    if unknown or not table:
        reasons = sorted({row.note for row in unknown}) or ["no rank was found"]
        names = ", ".join(_name(row) for row in unknown[:_SHOWN])
        return "unknown", f"{good}; {names}: {'; '.join(reasons[:2])}" if unknown else reasons[0]
    if _count(table, RIGHT) < len(table):
        return "not pinned", bound.threads_why
    return "as planned", good


def text_table(table: Sequence[Row], used: Optional[Mapping[str, Sequence[str]]] = None) -> List[str]:
    """The table for a person; a GPU in brackets was taken from the plan, not seen.

    `used`: the cards that NCCL's log shows for each rank, beside the one that is nearest to its GPU.
    """
    head = ("rank", "GPU", "cores", "NUMA", "NIC", "verdict")
    cells = [head if used is None else (*head[:-1], "NIC used", head[-1])]
    for row in table:
        gpu = (ranges(row.gpus) if row.gpus else "-") + (f" {'+'.join(row.instances)}" if row.instances else "")
        words = row.verdict + (f", right: {ranges(row.right)}" if row.right else "")
        cells.append(
            (
                "-" if row.rank is None else str(row.rank),
                gpu if row.gpu_read or not row.gpus else f"({gpu})",
                "unknown" if row.cpus is None else ranges(row.cpus),
                ranges(row.numa) or "-",
                row.nic or "-",
                *(() if used is None else (_used(row, used.get(str(row.rank), ())),)),
                f"{words} ({row.note})" if row.note else words,
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]


def _used(row: Row, names: Sequence[str]) -> str:
    if not names:
        return "not seen"
    away = row.nic is not None and row.nic not in names and not any("/" in name for name in names)
    return ", ".join(names) + (" (not the nearest)" if away else "")


def _findings(table: Sequence[Row], facts: Facts, bound: Binding) -> List[Finding]:
    found = [_wrong(table, bound), _shared(table), _without(table), _few_cores(table, facts), _idle(table, facts)]
    return [finding for finding in found if finding is not None]


def _wrong(table: Sequence[Row], bound: Binding) -> Optional[Finding]:
    wrong = [row for row in table if row.verdict == WRONG]
    if not wrong:
        return None
    place = "beside their GPU" if any(row.gpus for row in wrong) else "on the cores that were planned"
    planned = {slot.cpus for slot in bound.slots}
    ours = all(row.cpus in planned for row in wrong)
    cause = bound.bound_by if ours else "something bound them again after the start: taskset, numactl, a launcher"
    right = [row.right or row.cpus or () for row in table if row.rank is not None]
    fix = "ask for whole nodes, or for cores beside the GPUs (Slurm: --exclusive)"
    if all(row.right for row in wrong) and all(right):
        fix = f"drop it, and drumbeat binds them; or use --cpu-bind=mask_cpu:{','.join(map(mask, right))}"
    return Finding(
        "placement-wrong",
        "warning",
        f"{len(wrong)} of {len(table)} ranks are not {place}",
        cause,
        fix,
        tuple(_evidence(row) for row in wrong[:_SHOWN]),
        rank=wrong[0].rank,
    )


def _shared(table: Sequence[Row]) -> Optional[Finding]:
    shared = [row for row in table if row.verdict == SHARED]
    if not shared:
        return None
    return Finding(
        "gpu-shared",
        "warning",
        f"{len(shared)} ranks use GPU{'s' if len({row.gpus for row in shared}) > 1 else ''} "
        f"{ranges(gpu for row in shared for gpu in row.gpus)} together",
        "the script does not choose its device by LOCAL_RANK, or there are more ranks than GPUs; NCCL refuses two ranks of "
        "one group on one GPU",
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and one rank per GPU",
        tuple(_evidence(row) for row in shared[:_SHOWN]),
        rank=shared[0].rank,
    )


def _without(table: Sequence[Row]) -> Optional[Finding]:
    without = [row for row in table if row.verdict == NO_GPU]
    if not without:
        return None
    return Finding(
        "rank-without-gpu",
        "warning",
        f"{len(without)} of {len(table)} ranks have no GPU open",
        "the script computes on the CPU there, or the rank is shown no GPU",
        "look at torch.cuda.is_available() and the *_VISIBLE_DEVICES variables of these ranks",
        tuple(_evidence(row) for row in without[:_SHOWN]),
        rank=without[0].rank,
    )


def _few_cores(table: Sequence[Row], facts: Facts) -> Optional[Finding]:
    """All ranks in one small set of cores, while the machine has more: the task that started them was given too few."""
    masks = {row.cpus for row in table}
    only = next(iter(masks)) if len(masks) == 1 else None
    if not only or len(table) < 2 or len(only) >= len(table) or len(only) >= len(facts.cpus.online):
        return None
    slurm = facts.identity.scheduler == "slurm"
    return Finding(
        "all-ranks-on-few-cores",
        "warning",
        f"all {len(table)} ranks share core{'s' if len(only) > 1 else ''} {ranges(only)} of {len(facts.cpus.online)}",
        "the task, container or shell that started them was given so few",
        "srun --cpus-per-task, or --exclusive" if slurm else "start them with all cores of the machine",
        rank=table[0].rank,
    )


def _idle(table: Sequence[Row], facts: Facts) -> Optional[Finding]:
    """GPUs that nobody uses, where the GPU of every rank was read."""
    mine = {gpu.index for gpu in facts.gpus if not gpu.integrated}
    used = {gpu for row in table for gpu in row.gpus}
    if not used or any(not row.gpu_read for row in table) or not mine - used or _count(table, SHARED):
        return None
    return Finding(
        "gpus-unused",
        "info",
        f"GPU{'s' if len(mine - used) > 1 else ''} {ranges(mine - used)} of {len(mine)} are used by no rank",
        evidence=tuple(_evidence(row) for row in table[:_SHOWN]),
    )


def _count(table: Sequence[Row], word: str) -> int:
    return sum(1 for row in table if row.verdict == word)


def _looked_at(row: Row, gpus: bool) -> str:
    what = "mask and GPU" if row.gpu_read or row.verdict == NO_GPU else "mask"
    return f"{_name(row)}: {what if gpus else 'mask'} of pid {row.pid}"


def _name(row: Row) -> str:
    return f"pid {row.pid}" if row.rank is None else f"rank {row.rank}"


def _evidence(row: Row) -> Evidence:
    gpu = f"GPU {ranges(row.gpus)}" if row.gpus else "no GPU"
    right = f", right are {ranges(row.right)}" if row.right else ""
    return Evidence(f"{_name(row)}: {gpu}, cores {ranges(row.cpus or ())}{right}")
