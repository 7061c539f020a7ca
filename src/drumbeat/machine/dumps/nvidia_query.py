"""nvidia-smi -q: errors of memory, rows to be remapped, MIG, power limits, throttling, PCIe links that are too narrow."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Tuple

from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$", re.MULTILINE)
_BUS = re.compile(r"^\s+Bus Id\s*: ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$", re.MULTILINE)
_XML_GPU = re.compile(r'<gpu id="([0-9A-Fa-f:.]+)">(.*?)(?=<gpu id=|\Z)', re.DOTALL)
_LINE = re.compile(r"^( +)(.+?)\s*(?:: (.*?))?\s*$")


def read(text: str) -> Optional[Content]:
    if "<nvidia_smi_log>" in text:
        return _xml(text)
    parts = _GPU.split(text)[1:]
    if not parts:
        named = _BUS.search(text)  # cut off at the top
        if named is None or text.count("GPU UUID") != 1:
            return None
        parts = [named[1], text]
    facts: List[str] = []
    findings: List[Finding] = []
    for bus, body in zip(parts[::2], parts[1::2]):
        fields = _fields(body)
        name = fields.get("Product Name", "unknown")
        mig = fields.get("MIG Mode/Current", "")
        facts.append(f"{bus}: {name}" + (", MIG on" if mig == "Enabled" else ""))
        findings += _of_gpu(bus, fields, mig)
    driver = re.search(r"^Driver Version\s*: (\S+)", text, re.MULTILINE)
    if driver:
        facts.insert(0, f"driver {driver[1]}, {_gpus(len(parts) // 2)}")
    return Content("nvidia-smi -q", tuple(facts), tuple(findings), {"gpus": len(parts) // 2})


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _xml(text: str) -> Optional[Content]:
    """The XML form (-x): names only; what else it holds is not read, and that is said."""
    driver = re.search(r"<driver_version>([^<]{1,40})<", text)
    found = [(bus, re.search(r"<product_name>([^<]{1,80})<", body)) for bus, body in _XML_GPU.findall(text)]
    if not found:
        return None
    facts = [f"driver {driver[1] if driver else 'unknown'}, {_gpus(len(found))}"]
    facts += [f"{bus}: {name[1] if name else 'unknown'}" for bus, name in found]
    facts.append("errors, throttling and links are read from nvidia-smi -q without -x")
    return Content("nvidia-smi -q -x", tuple(facts), (), {"gpus": len(found)})


def _fields(body: str) -> Dict[str, str]:
    """`Section/Key` -> value; sections are told by their indentation."""
    path: List[Tuple[int, str]] = []
    fields: Dict[str, str] = {}
    for line in body.splitlines()[:2000]:
        match = _LINE.match(line)
        if not match:
            continue
        indent = len(match[1])
        while path and path[-1][0] >= indent:
            path.pop()
        if match[3] is None:
            path.append((indent, match[2]))
        else:
            fields["/".join([name for _, name in path] + [match[2]])] = match[3]
    return fields


def _of_gpu(bus: str, fields: Dict[str, str], mig: str) -> List[Finding]:
    found = []
    uncorrectable = sum(
        int(value)
        for name, value in fields.items()
        if "ECC Errors/Volatile" in name and "Uncorrectable" in name and value.isdigit()
    )
    if uncorrectable:
        found.append(
            Finding(
                "gpu-ecc",
                ERROR,
                f"GPU {bus}: {uncorrectable} uncorrectable memory errors since the last reset",
                "the memory is failing; a job on this GPU can die or compute wrong values",
                "leave the host out and tell the support desk",
            )
        )
    if fields.get("Remapped Rows/Pending") == "Yes" or fields.get("Remapped Rows/Remapping Failure Occurred") == "Yes":
        found.append(
            Finding(
                "gpu-rows-remapped",
                WARNING,
                f"GPU {bus}: memory rows wait to be remapped, or could not be",
                "they are replaced at the next reset of the GPU",
                "reset the GPU (or reboot) before the next long job; replace it if remapping failed",
            )
        )
    active = [
        name.split("/")[-1]
        for name, value in fields.items()
        if value == "Active" and ("Throttle Reasons" in name or "Event Reasons" in name) and "Idle" not in name
    ]
    slow = [name for name in active if "Slowdown" in name or "Power" in name or "Thermal" in name]
    if slow:
        found.append(
            Finding(
                "gpu-throttled",
                WARNING,
                f"GPU {bus} runs slower than it could: {', '.join(slow)}",
                "heat, a power cap or the power supply",
                "compare with its neighbours; tell the support desk if only this one does",
            )
        )
    if mig == "Enabled":
        found.append(
            Finding(
                "gpu-mig",
                WARNING,
                f"GPU {bus} is cut into MIG instances",
                "NCCL cannot join MIG instances of one GPU, and each has a part of the memory only",
                "ask for whole GPUs for training on several",
            )
        )
    width = [fields.get(f"PCI/GPU Link Info/Link Width/{which}", "") for which in ("Current", "Max")]
    if all(text.rstrip("x").isdigit() for text in width) and int(width[0][:-1]) < int(width[1][:-1]):
        found.append(
            Finding(
                "gpu-pcie-narrow",
                INFO,
                f"GPU {bus}: PCIe {width[0]} of {width[1]} lanes",
                "a bad slot, riser or contact",
                "",
            )
        )
    return found
