"""Which of a node's GPUs a job takes, and what its ranks must be told to see them in that order."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.findings.model import Evidence, Finding
from drumbeat.machine.model import Facts, Gpu
from drumbeat.plan.visibility import NAMES, visible


@dataclass(frozen=True)
class Chosen:
    gpus: Tuple[Gpu, ...]  # in the order torch counts them
    variables: Tuple[EnvVar, ...] = ()
    findings: Tuple[Finding, ...] = ()
    why: str = ""


def choose(order: Order, facts: Facts) -> Chosen:
    discrete = [gpu for gpu in facts.gpus if not gpu.integrated]
    if not discrete:
        return Chosen((), why="no GPU was found")
    vendor = discrete[0].vendor
    filters = visibility_filters(order, facts)
    exported = list(filters)
    seen, findings = visible([gpu for gpu in facts.gpus if gpu.vendor == vendor], filters)
    usable = [gpu for gpu in seen if not gpu.integrated]
    if exported and len(usable) < len(seen):
        hidden = ", ".join(f"{gpu.index} ({gpu.name or 'integrated'})" for gpu in seen if gpu.integrated)
        findings.append(
            Finding(
                "integrated-gpu-visible",
                "warning",
                f"the integrated GPU {hidden} is among the visible ones",
                "ranks that count it in get a GPU that cannot take part",
                f"leave it out of {exported[0]}",
                tuple(Evidence(f"{name}={filters[name]}") for name in exported),
            )
        )
    wanted = order.gpus if order.gpus is not None and not order.emulated else len(usable)
    if wanted > len(usable):
        findings.append(
            Finding(
                "fewer-gpus-than-asked",
                "error",
                f"the job asks for {wanted} GPUs per node, {len(usable)} can be seen here",
                fix="ask for fewer, or for another kind of node",
                evidence=tuple(Evidence(f"{name}={filters[name]}") for name in exported),
                host=facts.host,
            )
        )
    if wanted >= len(usable):
        picked, why = usable, "all of them"
    elif exported:
        picked, why = usable[:wanted], f"the first {wanted} of {exported[0]}"
    else:
        picked, why = closest(usable, wanted)
    variables: Tuple[EnvVar, ...] = ()
    hides = len(usable) < len(seen)
    if not exported and picked and (hides or picked != seen[: len(picked)]):
        variables = _show(vendor, picked, "hides the integrated GPU" if hides else why)
    return Chosen(tuple(picked), variables, tuple(findings), why)


def visibility_filters(order: Order, facts: Facts) -> Dict[str, str]:
    """The variables that hide GPUs from the ranks: what the job or site sets stands before what was exported."""
    settled = {**facts.environment, **{variable.name: variable.value for variable in order.env}}
    return {name: settled[name] for name in NAMES if name in settled}


def closest(gpus: Sequence[Gpu], wanted: int) -> Tuple[List[Gpu], str]:
    """So many GPUs behind one switch, else on one NUMA node, else the first ones; the tightest fit, then the lowest."""
    groups: Dict[Tuple[str, str], List[Gpu]] = {}
    for gpu in gpus:
        steps = (gpu.pci_path or "").strip("/").split("/")[:-1]
        for depth in range(3, len(steps) + 1):  # below host bridge and root port everything is a switch
            groups.setdefault(("one PCIe switch", "/".join(steps[:depth])), []).append(gpu)
        if gpu.module is not None:
            groups.setdefault(("one module", str(gpu.module)), []).append(gpu)
        if gpu.numa is not None and gpu.numa >= 0:
            groups.setdefault(("one NUMA node", str(gpu.numa)), []).append(gpu)
    fitting = [(kind, members) for (kind, _), members in groups.items() if len(members) >= wanted]
    if not fitting:
        return list(gpus[:wanted]), "the first ones: no switch or NUMA node holds so many"
    kind, members = min(fitting, key=lambda group: (len(group[1]), group[1][0].index))
    return members[:wanted], f"they share {kind}"


def own_variable(gpus: Sequence[Gpu], order: Order, facts: Facts) -> Optional[EnvVar]:
    """With `visibility: own`: what shows a rank its GPUs and no other."""
    if not gpus:
        return None
    if gpus[0].vendor == "amd":
        rocr = {k: v for k, v in visibility_filters(order, facts).items() if k == "ROCR_VISIBLE_DEVICES"}
        seen, _ = visible([gpu for gpu in facts.gpus if gpu.vendor == "amd"], rocr)
        places = [str(seen.index(gpu)) for gpu in gpus if gpu in seen]
        why = "the rank's own GPU, counted within ROCR_VISIBLE_DEVICES; peers stay reachable for DMA"
        return EnvVar("HIP_VISIBLE_DEVICES", ",".join(places), why, "user")
    if gpus[0].vendor == "nvidia":
        return EnvVar("CUDA_VISIBLE_DEVICES", _indices(gpus), "the rank's own GPU, as visibility: own asks", "user")
    return None


def _show(vendor: str, gpus: Sequence[Gpu], why: str) -> Tuple[EnvVar, ...]:
    words = f"{why}; device i of torch is the GPU of local rank i"
    if vendor == "amd":
        return (EnvVar("ROCR_VISIBLE_DEVICES", _indices(gpus), words, "detected"),)
    if vendor == "nvidia":
        order = EnvVar(
            "CUDA_DEVICE_ORDER", "PCI_BUS_ID", "CUDA counts as nvidia-smi does, not fastest first", "detected"
        )
        return (order, EnvVar("CUDA_VISIBLE_DEVICES", _indices(gpus), words, "detected"))
    return ()


def _indices(gpus: Sequence[Gpu]) -> str:
    return ",".join(str(gpu.index) for gpu in gpus)
