"""Findings on the MPI of this node: which one, whether it takes GPU memory, and whether mpi4py uses the same one as mpirun."""

from __future__ import annotations

import re
from typing import Iterator, List, Optional

from drumbeat.doctor.case import bad, ok
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.framework_answers import FrameworkAnswers

_KINDS = (("Open MPI", ("open mpi", "open-mpi", "openrte")), ("MPICH", ("mpich", "hydra", "mvapich", "intel(r) mpi")))


def mpi_findings(answers: FrameworkAnswers, recipe: str, gpu_recipe: str) -> Iterator[Finding]:
    tools = answers.tools
    found = [*_open_mpi(answers), *_mpich(answers), *_cray(answers)]
    if not found:
        yield bad(
            "mpi-missing",
            ERROR,
            "no MPI was found on PATH",
            "neither ompi_info nor mpichversion, and no Cray MPICH",
            recipe,
        )
    yield from found
    gpu_aware = any(finding.code == "mpi-gpu-aware" for finding in found)
    if found and not gpu_aware:
        if answers.gpus:
            yield bad(
                "mpi-host-memory",
                WARNING,
                "no MPI here takes GPU memory",
                "a program that hands it GPU buffers crashes or copies through the host; NCCL and RCCL are not affected",
                gpu_recipe,
            )
        else:
            yield bad(
                "mpi-host-memory",
                INFO,
                "no MPI here takes GPU memory, and this node shows no GPU",
                "",
                "ask on a node with GPUs: modules may differ there",
            )
    yield from _mpi4py(answers, recipe, _kind(tools.get("mpirun") or ""))


def _open_mpi(answers: FrameworkAnswers) -> List[Finding]:
    text = answers.tools.get("ompi_info")
    if text is None:
        return []
    version = re.search(r"^ompi:version:full:(\S+)", text, re.MULTILINE)
    name = f"Open MPI {version.group(1)}" if version else "Open MPI"
    ways = []
    if re.search(r"mpi_built_with_cuda_support:value:true", text):
        ways.append("built with CUDA")
    extensions = re.search(r"^options:mpi_ext:(.*)$", text, re.MULTILINE)
    if extensions and "rocm" in extensions.group(1):
        ways.append("built with ROCm")
    ucx = answers.tools.get("ucx_info") or ""
    if re.search(r"^mca:pml:ucx:", text, re.MULTILINE):
        ways += [
            f"UCX built with {kind}" for kind, flag in (("CUDA", "--with-cuda"), ("ROCm", "--with-rocm")) if flag in ucx
        ]
    return _of(name, ways)


def _mpich(answers: FrameworkAnswers) -> List[Finding]:
    text = answers.tools.get("mpichversion")
    if text is None:
        return []
    version = re.search(r"MPICH Version:\s*(\S+)", text)
    device = re.search(r"MPICH Device:\s*(\S+)", text)
    name = f"MPICH {version.group(1) if version else ''}".strip() + (f" ({device.group(1)})" if device else "")
    ways = [f"built with {kind}" for kind, flag in (("CUDA", "--with-cuda"), ("HIP", "--with-hip")) if flag in text]
    return _of(name, ways)


def _of(name: str, ways: List[str]) -> List[Finding]:
    if ways:
        return [ok("mpi-gpu-aware", f"{name} takes GPU memory", ", ".join(ways))]
    return [ok("mpi", name, "its configuration names neither CUDA nor ROCm")]


def _cray(answers: FrameworkAnswers) -> List[Finding]:
    """Cray MPICH has no report tool: its modules' variables tell."""
    version = answers.variables.get("CRAY_MPICH_VERSION")
    if version is None:
        return []
    target = answers.variables.get("CRAY_ACCEL_TARGET")
    enabled = answers.variables.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    seen = f"CRAY_ACCEL_TARGET={target or ''} MPICH_GPU_SUPPORT_ENABLED={answers.variables.get('MPICH_GPU_SUPPORT_ENABLED', '')}"
    if target and enabled:
        return [ok("mpi-gpu-aware", f"Cray MPICH {version} takes GPU memory", seen)]
    fixes = ([] if target else ["module load craype-accel-amd-gfx90a (or your GPU's)"]) + (
        [] if enabled else ["export MPICH_GPU_SUPPORT_ENABLED=1"]
    )
    cause = "programs linked without the accelerator module lack its GPU transport library"
    severity = WARNING if answers.gpus else INFO
    return [
        bad(
            "cray-mpich-gpu",
            severity,
            f"Cray MPICH {version} does not take GPU memory",
            cause,
            ", then ".join(fixes),
            seen,
        )
    ]


def _mpi4py(answers: FrameworkAnswers, recipe: str, launcher: Optional[str]) -> Iterator[Finding]:
    if not answers.probe:
        yield bad(
            "framework-python",
            WARNING,
            f"{answers.python} did not answer: mpi4py was not looked at",
            "",
            "--python PATH",
        )
        return
    found = (answers.probe.get("modules") or {}).get("mpi4py") or {}
    if "error" in found:
        yield bad(
            "mpi4py-missing",
            INFO,
            "mpi4py cannot be imported",
            "drumbeat verify --mpi needs it",
            recipe,
            str(found["error"]),
        )
        return
    library = answers.probe.get("mpi_library")
    if not library:
        reason = str(answers.probe.get("error", ""))
        yield bad(
            "mpi4py-library", ERROR, f"mpi4py {found.get('version', '')} finds no MPI library", "", recipe, reason
        )
        return
    kind = _kind(str(library))
    if launcher and kind and launcher != kind:
        yield bad(
            "mpi4py-other-mpi",
            ERROR,
            f"mpirun is {launcher}, mpi4py uses {kind}",
            "each rank would be alone in a world of one",
            f"start with {kind}'s own mpirun, or: {recipe}",
            str(library),
        )
    else:
        yield ok("mpi4py", f"mpi4py {found.get('version', '')} on {library}")


def _kind(text: str) -> Optional[str]:
    low = text.lower()
    return next((name for name, marks in _KINDS if any(mark in low for mark in marks)), None)
