"""Versions that are known to be broken together, as data."""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple

from drumbeat.doctor.case import Case, bad, seen
from drumbeat.findings.model import Finding
from drumbeat.plan.scene import matches


class Combination(NamedTuple):
    code: str
    severity: str
    when: Dict[str, str]  # as in plan.scene.matches
    unless: Dict[str, str]  # exported variables that fix it
    title: str
    fix: str
    reference: str


COMBINATIONS = (
    Combination(
        "rccl-kernel-gdr",
        "warning",
        {"vendor": "amd", "rccl": "<=2.20.5", "kernel": ">=6.8", "nodes": "many"},
        {},
        "RCCL 2.20.5 does not use GPU-direct RDMA on kernels from 6.8",
        "a newer RCCL (ROCm 6.3 or later)",
        "RCCL change log",
    ),
    Combination(
        "nccl-roce-gid",
        "info",
        {"fabric": "roce", "nodes": "many", "nccl": "<2.21"},
        {},
        "NCCL before 2.21 takes GID index 0, which is RoCE v1, unless it is told better",
        "nothing: drumbeat sets NCCL_IB_GID_INDEX on each node; a newer NCCL finds it itself",
        "NCCL environment page",
    ),
    Combination(
        "rccl-cumem-thor",
        "warning",
        {"vendor": "amd", "nic-driver": "bnxt_re", "rocm": ">=7.1", "nodes": "many"},
        {"NCCL_CUMEM_ENABLE": "1"},
        "ROCm 7.1 and later with Broadcom Thor fails at the first registration unless NCCL_CUMEM_ENABLE=1",
        "unset your own NCCL_CUMEM_ENABLE: drumbeat sets it to 1",
        "ROCm cluster validation suite",
    ),
)


def check(case: Case) -> Iterator[Finding]:
    return seen("versions of the kernel, drivers and libraries, and what is exported here", _check(case))


def _check(case: Case) -> Iterator[Finding]:
    for entry in COMBINATIONS:
        if not matches(entry.when, case.here, case.facts):
            continue
        exported = case.facts.environment
        if entry.unless and all(exported.get(name, value) == value for name, value in entry.unless.items()):
            continue  # the exported value is the right one, or it is unset and the plan sets it
        yield bad(entry.code, entry.severity, entry.title, entry.reference, entry.fix, *_versions(case))


def _versions(case: Case) -> list[str]:
    known = {**case.facts.versions, "kernel": case.facts.kernel.release or "unknown"}
    return [f"{name} {known[name]}" for name in ("rocm", "rccl", "nccl", "kernel") if name in known]
