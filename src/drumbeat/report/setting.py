"""Setting of a run, and its hardware: the part of a report by which runs are compared."""

from __future__ import annotations

import os
import shlex
from typing import Any, Dict, Mapping, Optional, Sequence

from drumbeat.base.order import Order
from drumbeat.base.regex import regex
from drumbeat.machine.model import Facts
from drumbeat.report.figures import Setting
from drumbeat.runfolder.lines import code_words
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import gpus_of_run, gpus_used

_PRECISION = regex(r"(?:--)?(?:precision|mixed[-_]precision|dtype|torch[-_]dtype)[= ]+([\w.-]+)")
_SWITCH = regex(r"(?:^|\s)--(bf16|fp16|fp8|tf32|amp|fp32)(?=\s|$)")
_TARGET = regex(r"--?target[-_](?:accuracy|acc)[= ]+([0-9.]+)")


def setting_of(run: Run, order: Optional[Order], facts: Optional[Facts], setup: Mapping[str, Any]) -> Setting:
    command = shlex.join(order.command) if order else ""
    packages = run.packages().get("packages")
    named = {str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    return Setting(
        command=command,
        precision=str(setup.get("precision") or precision_in(command)),
        layout=str(setup.get("layout") or ""),
        code=code_words(run),
        image=_image(run.code(), order),
        software={**(facts.versions if facts else {}), **named, "drumbeat": run.record.version},
        hardware=_hardware(facts),
        site=order.site if order else "",
    )


def precision_in(command: str) -> str:
    """Read the precision from the command's options; empty: they do not say."""
    named = _PRECISION.search(command)
    switch = _SWITCH.search(command)
    return named.group(1) if named else switch.group(1) if switch else ""


def target_of(command: Sequence[str]) -> Optional[float]:
    """Return the target accuracy in the command; None: it has none."""
    found = _TARGET.search(" ".join(command))
    try:
        return float(found.group(1)) if found else None
    except ValueError:
        return None


def gpus_of(order: Optional[Order], facts: Mapping[int, Optional[Facts]], nodes: int) -> Optional[int]:
    """Count the GPUs of all nodes that the job used; None if a node's facts are missing, or if only some nodes' were read
    and these differ."""
    if order is None or not facts:
        return None
    known = [gpus_used(order, each) for each in facts.values() if each]
    if len(known) < len(facts) or (len(facts) < nodes and len(set(known)) > 1):
        return None
    return gpus_of_run(order, known if len(facts) == nodes else known[:1] * nodes)


def _image(code: Mapping[str, Any], order: Optional[Order]) -> str:
    if order is None or order.container is None:
        return ""
    image = os.path.basename(order.container.image.rstrip("/"))
    digest = code.get("image_digest")
    return f"{image} ({str(digest)[:19]})" if digest else image


def _hardware(facts: Optional[Facts]) -> Dict[str, str]:
    if facts is None:
        return {}
    gpus = sorted({gpu.name or gpu.vendor for gpu in facts.gpus if not gpu.integrated})
    links = sorted({device.driver or "rdma" for device in facts.rdma} | ({"cxi"} if facts.cxi else set()))
    found = {
        "GPU": ", ".join(gpus) or "none",
        "CPU": facts.cpus.model or "",
        "cores": str(len(facts.cpus.allowed) or ""),
        "network": ", ".join(links) or "ethernet",
        "architecture": facts.arch or "",
    }
    return {name: value for name, value in found.items() if value}
