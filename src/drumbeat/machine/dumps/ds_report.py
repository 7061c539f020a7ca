"""ds_report: versions that do not fit together, ops that cannot be built, a small /dev/shm."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

from drumbeat.findings.model import INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

_FIELD = re.compile(r"^(torch version|torch cuda version|torch hip version|nvcc version|deepspeed info|"
                    r"deepspeed wheel compiled w\.|shared memory \(/dev/shm\) size) \.+ (.+?)\s*$", re.MULTILINE)  # fmt: skip
_OP = re.compile(r"^(\w+) \.+ \S*\[(YES|NO)\]\S* \.+ \S*\[(OKAY|NO)\]\S*", re.MULTILINE)


def read(text: str) -> Optional[Content]:
    fields: Dict[str, str] = dict(_FIELD.findall(text))
    ops = _OP.findall(text)
    if not fields and not ops:
        return None
    facts = [f"{name}: {value}" for name, value in fields.items()]
    built = [name for name, installed, _ in ops if installed == "YES"]
    broken = [name for name, _, fits in ops if fits == "NO"]
    if ops:
        facts.append(f"ops built ahead: {', '.join(built) if built else 'none (built at first use, in every rank)'}")
    findings: List[Finding] = []
    torch_cuda, nvcc = fields.get("torch cuda version", ""), fields.get("nvcc version", "")
    if torch_cuda and re.match(r"\d", nvcc) and nvcc.split(".")[0] != torch_cuda.split(".")[0]:
        findings.append(_mismatch(torch_cuda, nvcc, WARNING))
    elif torch_cuda and re.match(r"\d", nvcc) and nvcc != torch_cuda:
        findings.append(_mismatch(torch_cuda, nvcc, INFO))
    wheel = re.search(r"torch (\d+\.\d+)", fields.get("deepspeed wheel compiled w.", ""))
    torch = re.match(r"\d+\.\d+", fields.get("torch version", ""))
    if wheel and torch and built and wheel[1] != torch[0]:
        findings.append(
            Finding(
                "deepspeed-other-torch",
                WARNING,
                f"DeepSpeed's ops were built for torch {wheel[1]}, installed is {torch[0]}",
                "they may fail to load with an undefined symbol",
                "build DeepSpeed again in this environment",
            )
        )
    if broken:
        findings.append(
            Finding(
                "deepspeed-ops",
                INFO,
                f"cannot be built here: {', '.join(broken[:8])}",
                "only matters if they are used",
                "",
            )
        )
    size = re.match(r"(\d+(?:\.\d+)?) GB", fields.get("shared memory (/dev/shm) size", ""))
    if size and float(size[1]) < 2:
        findings.append(
            Finding(
                "shm-small",
                WARNING,
                f"only {size[1]} GB of shared memory (/dev/shm)",
                "NCCL and loader workers hand data over there",
                "docker --shm-size or --ipc=host; in a pod mount an emptyDir with medium Memory on /dev/shm",
            )
        )
    return Content("ds_report", tuple(facts), tuple(findings), {"broken_ops": broken, "built_ops": built})


def _mismatch(torch_cuda: str, nvcc: str, severity: str) -> Finding:
    return Finding(
        "cuda-versions-differ",
        severity,
        f"torch was built with CUDA {torch_cuda}, nvcc is {nvcc}",
        "DeepSpeed refuses to build its ops with another major version",
        f"load the toolkit {torch_cuda}, or install ops that are already built",
    )
