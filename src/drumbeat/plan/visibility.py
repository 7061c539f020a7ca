"""Which GPUs a process sees, by the rules torch and the vendors' runtimes themselves follow."""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.findings.model import Evidence, Finding
from drumbeat.machine.model import Gpu

NAMES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def count_shown(environment: Mapping[str, str], total: int) -> int:
    """How many of `total` GPUs these variables leave, where nothing but the count is known."""
    for name in NAMES:
        value = environment.get(name)
        if value is not None:
            entries = value.split(",") if value.startswith(("GPU-", "MIG-")) else _numbers(value)
            total = min(total, len(entries)) if len(set(entries)) == len(entries) else 0
    return total


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Tuple[List[Gpu], List[Finding]]:
    """The GPUs in the order torch will count them, and what is wrong with the filters."""
    vendor = gpus[0].vendor if gpus else None
    if vendor == "amd":
        return _amd(gpus, environment)
    findings: List[Finding] = []
    seen = list(gpus)
    if vendor == "nvidia" and "CUDA_VISIBLE_DEVICES" in environment:
        seen = _pick(seen, "CUDA_VISIBLE_DEVICES", environment["CUDA_VISIBLE_DEVICES"], findings)
    return seen, findings


def _amd(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Tuple[List[Gpu], List[Finding]]:
    findings: List[Finding] = []
    rocr, hip, cuda = (environment.get(name) for name in NAMES[:3])
    seen = list(gpus)
    if rocr is not None:
        seen = _pick(seen, "ROCR_VISIBLE_DEVICES", rocr, findings)
    second, name = (hip, "HIP_VISIBLE_DEVICES") if hip is not None else (cuda, "CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        findings.append(
            Finding(
                "visibility-two-names",
                "warning",
                "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES differ",
                "on AMD both filter the same list, and torch takes HIP_VISIBLE_DEVICES",
                "unset CUDA_VISIBLE_DEVICES",
                (Evidence(f"HIP_VISIBLE_DEVICES={hip}"), Evidence(f"CUDA_VISIBLE_DEVICES={cuda}")),
            )
        )
    if second is None:
        return seen, findings
    if rocr is not None:
        evidence = (Evidence(f"ROCR_VISIBLE_DEVICES={rocr}"), Evidence(f"{name}={second}"))
        if name == "HIP_VISIBLE_DEVICES" and len(second.split(",")) > len(rocr.split(",")):
            findings.append(_double(name, "torch refuses a longer second list", evidence))
            return [], findings
        wanted = _numbers(second)
        if wanted and max(wanted) >= len(seen):
            words = f"it counts within the {len(seen)} devices ROCR_VISIBLE_DEVICES leaves, 0 to {len(seen) - 1}"
            findings.append(_double(name, words, evidence))
            return [], findings
    return _pick(seen, name, second, findings), findings


def _pick(gpus: List[Gpu], name: str, value: str, findings: List[Finding]) -> List[Gpu]:
    evidence = (Evidence(f"{name}={value}"),)
    if value.startswith(("GPU-", "MIG-")):
        uuids = value.split(",")
        if len(set(uuids)) != len(uuids):
            findings.append(_repeated(name, evidence))
            return []
        by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid}
        if value.startswith("MIG-") or not by_uuid:
            return gpus[: len(uuids)]  # parts of a GPU, or no identity to compare: only the count is known
        return [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]
    numbers = _numbers(value)
    if len(set(numbers)) != len(numbers):
        findings.append(_repeated(name, evidence))
        return []
    chosen: List[Gpu] = []
    for number in numbers:
        if number >= len(gpus):
            findings.append(
                Finding(
                    "visibility-out-of-range",
                    "error",
                    f"{name} names device {number}, this node has {len(gpus)} to choose from",
                    "the list ends there: later devices are hidden too",
                    f"use 0 to {len(gpus) - 1}" if gpus else "unset it",
                    evidence,
                )
            )
            break
        chosen.append(gpus[number])
    return chosen


def _repeated(name: str, evidence: Tuple[Evidence, ...]) -> Finding:
    title = f"{name} names a device twice, which hides all of them"
    return Finding("visibility-repeated", "error", title, fix="name each device once", evidence=evidence)


def _numbers(value: str) -> List[int]:
    """As torch reads it: digits at the start of each entry; a negative or other entry ends the list."""
    found: List[int] = []
    for entry in value.split(","):
        number = _leading(entry.strip())
        if number is None:
            break
        found.append(number)
    return found


def _leading(entry: str) -> Optional[int]:
    digits = ""
    for character in entry.lstrip("+"):
        if not ("0" <= character <= "9"):
            break
        digits += character
    return int(digits[:9]) if digits else None


def _double(name: str, words: str, evidence: Tuple[Evidence, ...]) -> Finding:
    return Finding(
        "visibility-double-filter",
        "error",
        f"{name} filters what ROCR_VISIBLE_DEVICES has already filtered, and no device is left",
        words,
        f"set only one of them, or count {name} from 0",
        evidence,
    )
