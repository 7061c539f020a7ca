"""Findings on a framework's own build, from its own report. Pure: answers in, findings out."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from drumbeat.base import data
from drumbeat.base.regex import regex
from drumbeat.doctor.case import seen, worst_first
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.software import FrameworkAnswers

# Findings on the MPI of this node: its implementation, its support for GPU memory, and a mismatch between mpi4py and mpirun.


find = Catalog("software")
_KINDS = (("Open MPI", ("open mpi", "open-mpi", "openrte")), ("MPICH", ("mpich", "hydra", "mvapich", "intel(r) mpi")))


def _mpi(answers: FrameworkAnswers) -> Iterator[Finding]:
    how = recipe("mpi", answers)
    found = [*_open_mpi(answers), *_mpich(answers), *_cray(answers)]
    if not found:
        yield find("mpi-missing", recipe=how)
    yield from found
    if found and not any(finding.code == "mpi-gpu-aware" for finding in found):
        yield find("mpi-host-memory", "" if answers.gpus else "no-gpu", recipe=recipe("gpu-aware-mpi", answers))
    yield from _mpi4py(answers, how, _kind(answers.tools.get("mpirun") or ""))


def _open_mpi(answers: FrameworkAnswers) -> List[Finding]:
    text = answers.tools.get("ompi_info")
    if text is None:
        return []
    version = re.search(r"^ompi:version:full:(\S+)", text, re.MULTILINE)
    name = f"Open MPI {version.group(1)}" if version else "Open MPI"
    ucx = answers.tools.get("ucx_info") or "" if re.search(r"^mca:pml:ucx:", text, re.MULTILINE) else ""
    ways = {
        "built with CUDA": "mpi_built_with_cuda_support:value:true" in text,
        "built with ROCm": re.search(r"^options:mpi_ext:.*rocm", text, re.MULTILINE),
        "UCX built with CUDA": "--with-cuda" in ucx,
        "UCX built with ROCm": "--with-rocm" in ucx,
    }
    return _of(name, [way for way, found in ways.items() if found])


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
        return [find("mpi-gpu-aware", mpi=name, evidence=[", ".join(ways)])]
    return [find("mpi", mpi=name, evidence=["its configuration names neither CUDA nor ROCm"])]


def _cray(answers: FrameworkAnswers) -> List[Finding]:
    """Judge Cray MPICH by its modules' variables, since it has no report tool."""
    version = answers.variables.get("CRAY_MPICH_VERSION")
    if version is None:
        return []
    target = answers.variables.get("CRAY_ACCEL_TARGET")
    enabled = answers.variables.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    seen = f"CRAY_ACCEL_TARGET={target or ''} MPICH_GPU_SUPPORT_ENABLED={answers.variables.get('MPICH_GPU_SUPPORT_ENABLED', '')}"
    if target and enabled:
        return [find("mpi-gpu-aware", mpi=f"Cray MPICH {version}", evidence=[seen])]
    load = "module load craype-accel-amd-gfx90a (or your GPU's)"
    fixes = [load] * (not target) + ["export MPICH_GPU_SUPPORT_ENABLED=1"] * (not enabled)
    severity = WARNING if answers.gpus else INFO
    return [find("cray-mpich-gpu", version=version, fixes=", then ".join(fixes), severity=severity, evidence=[seen])]


def _mpi4py(answers: FrameworkAnswers, recipe: str, launcher: Optional[str]) -> Iterator[Finding]:
    if not answers.probe:
        yield find("framework-python", "mpi4py", python=answers.python)
        return
    found = (answers.probe.get("modules") or {}).get("mpi4py") or {}
    if "error" in found:
        yield _missing("mpi4py", str(found["error"]), recipe, INFO, "drumbeat verify --mpi needs it")
        return
    library = answers.probe.get("mpi_library")
    if not library:
        reason = str(answers.probe.get("error", ""))
        yield find("mpi4py-library", version=found.get("version", ""), recipe=recipe, evidence=[reason])
        return
    kind = _kind(str(library))
    if launcher and kind and launcher != kind:
        yield find("mpi4py-other-mpi", launcher=launcher, kind=kind, recipe=recipe, evidence=[str(library)])
    else:
        yield find("mpi4py", version=found.get("version", ""), library=library)


def _kind(text: str) -> Optional[str]:
    low = text.lower()
    return next((name for name, marks in _KINDS if any(mark in low for mark in marks)), None)


_COLOUR = regex(r"\x1b\[[0-9;]*m")
_OPERATOR = regex(r"^(\w+) \.*\s*\[(YES|NO)\] \.*\s*\[(OKAY|NO|FAIL)\]", re.MULTILINE)
_BOX = regex(r"\[([X ])\] (\w+)")
# Operators used by almost everybody, on each kind of GPU; the others are needed by a few configurations.
_IMPORTANT = ("fused_adam", "cpu_adam", "async_io")


def examine_framework(answers: FrameworkAnswers) -> List[Finding]:
    if answers.framework != "mpi" and not answers.probe:  # MPI's programs answer even without Python
        return [find("framework-python", python=answers.python, seen=(f"the start of {answers.python}",))]
    tools = "".join(f", {name}" for name in sorted(answers.tools))
    return worst_first(list(seen(f"what {answers.python}{tools} answered", _CHECKS[answers.framework](answers))))


def recipe(name: str, answers: FrameworkAnswers) -> str:
    """Return how to install a package for the GPUs of this node."""
    kinds: Mapping[str, str] = data.load("drumbeat.doctor", "recipes")[name]
    vendor = answers.gpus[0] if answers.gpus else ""
    return kinds.get(vendor) or kinds.get("any") or " | ".join(kinds.values())


def _module(answers: FrameworkAnswers, name: str) -> Tuple[Optional[str], str]:
    """Return a module's version, or why it cannot be imported."""
    found = (answers.probe.get("modules") or {}).get(name) or {}
    return (None, str(found["error"])) if "error" in found else (found.get("version") or "", "")


def _missing(name: str, error: str, fix: str, severity: str = ERROR, why: str = "") -> Finding:
    return find("framework-module", "missing", name=name, why=why, how=fix, severity=severity, evidence=[error])


def _imported(answers: FrameworkAnswers, name: str, severity: str, why: str, fix: str) -> Finding:
    version, error = _module(answers, name)
    if version is None:
        return _missing(name, error, fix, severity, why)
    return find("framework-module", name=name, version=version, evidence=[str(answers.probe.get("executable", ""))])


def _torch(answers: FrameworkAnswers) -> Iterator[Finding]:
    version, error = _module(answers, "torch")
    if version is None:
        yield _missing("torch", error, "install torch for your GPUs first")
        return
    torch: Mapping[str, Any] = answers.probe.get("torch") or {}
    built = f"CUDA {torch['cuda']}" if torch.get("cuda") else f"ROCm {torch['hip']}" if torch.get("hip") else "CPU only"
    unseen = bool(answers.gpus and not torch.get("gpus"))
    yield find(
        "framework-torch", "unseen" if unseen else "", version=version, built=built, gpus=torch.get("gpus", 0),
        count=len(answers.gpus), kinds=", ".join(sorted(set(answers.gpus))),
    )  # fmt: skip


def _deepspeed(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from _torch(answers)
    version, error = _module(answers, "deepspeed")
    if version is None:
        yield _missing("deepspeed", error, recipe("deepspeed", answers))
        return
    if "ds_report" not in answers.tools:
        yield find("ds-report-missing")
        return
    text = answers.tools["ds_report"]
    if text is None:
        yield find("ds-report-silent")
        return
    if not operators(answers):
        yield find("ds-report-unread", evidence=[text[-200:]])
    yield from check_report(answers)
    for path in answers.stale_locks:
        yield find("extension-lock", path=path, evidence=[path])


def operators(answers: FrameworkAnswers) -> Dict[str, Tuple[bool, bool]]:
    """Return operator -> (built, can be built), from ds_report."""
    found = _OPERATOR.findall(_COLOUR.sub("", answers.tools.get("ds_report") or ""))
    rows = {name: (built == "YES", fits == "OKAY") for name, built, fits in found}
    return {name: row for name, row in rows.items() if name != "deepspeed_not_implemented"}


def check_report(answers: FrameworkAnswers) -> Iterator[Finding]:
    """Judge the output of ds_report, from this node or a pasted text."""
    text, version = _COLOUR.sub("", answers.tools.get("ds_report") or ""), _module(answers, "deepspeed")[0]
    rows = operators(answers)
    yield from _toolkit(text)
    if not rows:
        return
    built = sorted(name for name, (there, _) in rows.items() if there)
    later = sorted(name for name, (there, fits) in rows.items() if fits and not there)
    never = sorted(name for name, (there, fits) in rows.items() if not fits and not there)
    yield find("deepspeed", version=version, built=len(built), all=len(rows), evidence=[", ".join(built)])
    if later:
        yield find("deepspeed-jit", later=", ".join(later), recipe=recipe("deepspeed", answers))
    if never:
        severity = WARNING if any(name in _IMPORTANT for name in never) else INFO
        reasons = [line.split("]", 1)[-1].strip() for line in text.splitlines() if "[WARNING]" in line]
        variant = "async-io" if "async_io" in never else ""
        yield find("deepspeed-operators", variant, never=", ".join(never), severity=severity, evidence=reasons[:3])
    ninja = re.search(r"^ninja \.*\s*\[(\w+)\]", text, re.MULTILINE)
    if later and ninja and ninja.group(1) != "OKAY":
        yield find("ninja-missing")
    compiled = re.search(r"deepspeed wheel compiled w\. \.+ torch (\d+\.\d+)", text)
    torch = re.match(r"\d+\.\d+", _module(answers, "torch")[0] or "")
    if built and compiled and torch and compiled.group(1) not in ("0.0", torch.group()):
        fix = recipe("deepspeed", answers)
        yield find("deepspeed-torch", built=compiled.group(1), here=torch.group(), recipe=fix)


def _toolkit(text: str) -> Iterator[Finding]:
    """Check that the compiler for operators has the CUDA version of torch: they are compiled at first use."""
    version = r" version \.+ (\d+)([.\d]*)"
    torch, nvcc = (re.search(f"^{name}{version}", text, re.MULTILINE) for name in ("torch cuda", "nvcc"))
    if torch and nvcc and torch.groups() != nvcc.groups():
        mine, theirs = "".join(torch.groups()), "".join(nvcc.groups())
        severity = WARNING if torch[1] != nvcc[1] else INFO
        yield find("cuda-versions-differ", torch=mine, nvcc=theirs, severity=severity)


def _horovod(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from _torch(answers)
    (version, error), how = _module(answers, "horovod"), recipe("horovod", answers)
    if version is None:
        yield _missing("horovod", error, how)
        return
    text = answers.tools.get("horovodrun")
    if text is None:
        what = "horovodrun is not on PATH" if "horovodrun" not in answers.tools else "horovodrun --check-build failed"
        yield find("horovod-unseen", what=what, recipe=how)
        return
    parts = [part.split(":", 1) for part in text.split("Available ")[1:]]
    built = {name.strip(): {tool for mark, tool in _BOX.findall(rest) if mark == "X"} for name, rest in parts}
    words = "; ".join(f"{name.lower()}: {', '.join(sorted(tools)) or 'none'}" for name, tools in built.items())
    if "PyTorch" not in built.get("Frameworks", set()) and "TensorFlow" not in built.get("Frameworks", set()):
        yield find("horovod-framework", built=words, recipe=how)
    if not built.get("Controllers"):
        yield find("horovod-controller", built=words, recipe=how)
    elif answers.gpus and "NCCL" not in built.get("Tensor Operations", set()):
        yield find("horovod-nccl", built=words, recipe=how)
    else:
        yield find("horovod", version=version, evidence=[words])


def _megatron(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from _torch(answers)
    yield _imported(answers, "megatron.core", ERROR, "", recipe("megatron", answers))
    missing = "without it: --transformer-impl local, and no FP8"
    yield _imported(answers, "transformer_engine", WARNING, missing, recipe("transformer-engine", answers))
    fused = "without it: --no-gradient-accumulation-fusion, --no-persist-layer-norm and --no-masked-softmax-fusion"
    yield _imported(answers, "apex", INFO, fused, recipe("apex", answers))
    own = "Transformer Engine then uses its own attention"
    yield _imported(answers, "flash_attn", INFO, own, "pip install flash-attn")


def _plain(answers: FrameworkAnswers) -> Iterator[Finding]:
    name = answers.framework
    yield _imported(answers, name, ERROR, "", f"pip install {'paddlepaddle' if name == 'paddle' else name}")


def _jax(answers: FrameworkAnswers) -> Iterator[Finding]:
    how = recipe("maxtext", answers)
    yield _imported(answers, "jax", ERROR, "", how)
    platforms = answers.probe.get("jax")
    if platforms is None:
        if _module(answers, "jax")[0] is not None:
            reason = str(answers.probe.get("error", "it did not say"))
            yield find("jax-devices", "unlisted", recipe=how, evidence=[reason])
    else:
        kinds = sorted(set(platforms))
        unseen = bool(answers.gpus and kinds == ["cpu"])
        yield find(
            "jax-devices", "unseen" if unseen else "",
            count=len(platforms), kinds=", ".join(kinds), gpus=len(answers.gpus), recipe=how,
        )  # fmt: skip


def _maxtext(answers: FrameworkAnswers) -> Iterator[Finding]:
    python, how = str(answers.probe.get("python", "")), recipe("maxtext", answers)
    version, error = _module(answers, "maxtext")
    if tuple(int(part) for part in re.findall(r"\d+", python)[:2]) < (3, 12):
        yield find("maxtext-python", python=python, recipe=how)
    yield from _jax(answers)
    if version is not None:
        yield find("maxtext", version=version, evidence=["python3 -m maxtext.trainers.pre_train.train"])
    elif _module(answers, "MaxText")[0] is not None:
        yield find("maxtext-legacy", recipe=how)
    else:
        yield _missing("maxtext", error, how)


_CHECKS: Dict[str, Callable[[FrameworkAnswers], Iterator[Finding]]] = {
    "deepspeed": _deepspeed,
    "horovod": _horovod,
    "jax": _jax,
    "maxtext": _maxtext,
    **dict.fromkeys(("keras", "paddle", "ray", "tensorflow"), _plain),
    "megatron": _megatron,
    "mpi": _mpi,
}
