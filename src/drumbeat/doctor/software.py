"""Findings on a framework's own build, from what it says of itself. Pure: answers in, findings out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from drumbeat.base import data
from drumbeat.base.regex import regex
from drumbeat.doctor.case import bad, ok, seen, worst_first
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.framework_answers import FrameworkAnswers

# Findings on the MPI of this node: which one, whether it takes GPU memory, and whether mpi4py uses the same one as
# mpirun.


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


_COLOUR = regex(r"\x1b\[[0-9;]*m")
_OPERATOR = regex(r"^(\w+) \.*\s*\[(YES|NO)\] \.*\s*\[(OKAY|NO|FAIL)\]", re.MULTILINE)
_BOX = regex(r"\[([X ])\] (\w+)")
# Used by almost everybody, on each kind of GPU; the others are needed by a few configurations.
_IMPORTANT = ("fused_adam", "cpu_adam", "async_io")


def examine_framework(answers: FrameworkAnswers) -> List[Finding]:
    if answers.framework != "mpi" and not answers.probe:  # MPI's programs answer without Python
        return [_silent(answers)]
    tools = "".join(f", {name}" for name in sorted(answers.tools))
    return worst_first(list(seen(f"what {answers.python}{tools} answered", _CHECKS[answers.framework](answers))))


def recipe(name: str, answers: FrameworkAnswers) -> str:
    """How to get it, for the GPUs of this node."""
    kinds: Mapping[str, str] = data.load("drumbeat.doctor", "recipes")[name]
    vendor = answers.gpus[0] if answers.gpus else ""
    return kinds.get(vendor) or kinds.get("any") or " | ".join(kinds.values())


def _module(answers: FrameworkAnswers, name: str) -> Tuple[Optional[str], str]:
    """Its version, or why it cannot be imported."""
    found = (answers.probe.get("modules") or {}).get(name) or {}
    return (None, str(found["error"])) if "error" in found else (found.get("version") or "", "")


def _silent(answers: FrameworkAnswers) -> Finding:
    fix = "name the interpreter of your environment: --python PATH; inside a container run doctor there"
    cause = "it is not there, or importing took too long"
    found = bad("framework-python", ERROR, f"{answers.python} did not answer", cause, fix)
    return replace(found, seen=(f"the start of {answers.python}",))


def _imported(answers: FrameworkAnswers, name: str, severity: str, why: str, fix: str) -> Finding:
    version, error = _module(answers, name)
    if version is None:
        return bad("framework-module", severity, f"{name} cannot be imported", why, fix, error)
    return ok("framework-module", f"{name} {version}".strip(), str(answers.probe.get("executable", "")))


def _torch(answers: FrameworkAnswers) -> Iterator[Finding]:
    version, error = _module(answers, "torch")
    if version is None:
        yield bad("framework-torch", ERROR, "torch cannot be imported", "", "install torch for your GPUs first", error)
        return
    torch: Mapping[str, Any] = answers.probe.get("torch") or {}
    built = f"CUDA {torch['cuda']}" if torch.get("cuda") else f"ROCm {torch['hip']}" if torch.get("hip") else "CPU only"
    gpus = torch.get("gpus", 0)
    title = f"torch {version}, built for {built}, sees {gpus} GPU{'s' * (gpus != 1)}"
    if answers.gpus and not torch.get("gpus"):
        cause = f"this node has {len(answers.gpus)} ({', '.join(sorted(set(answers.gpus)))})"
        yield bad("framework-torch", ERROR, title, cause, "install the torch build for this node's GPUs and driver")
    else:
        yield ok("framework-torch", title)


def _deepspeed(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from _torch(answers)
    version, error = _module(answers, "deepspeed")
    if version is None:
        yield bad("deepspeed-missing", ERROR, "deepspeed cannot be imported", "", recipe("deepspeed", answers), error)
        return
    if "ds_report" not in answers.tools:
        yield bad(
            "ds-report-missing",
            WARNING,
            "ds_report is not on PATH",
            "its operators were not looked at",
            "activate the environment in which deepspeed is installed",
        )
        return
    text = answers.tools["ds_report"]
    if text is None:
        yield bad(
            "ds-report-silent",
            ERROR,
            "ds_report failed or did not answer",
            "",
            "run it by hand: its last lines say why",
        )
        return
    if not operators(answers):
        yield bad("ds-report-unread", WARNING, "ds_report's table was not recognised", "", "", text[-200:])
    yield from check_report(answers)
    for path in answers.stale_locks:
        yield bad(
            "extension-lock",
            ERROR,
            "a killed build left its lock: every later start waits for it for ever",
            "",
            f"when nothing is building: rm {path}",
            path,
        )


def operators(answers: FrameworkAnswers) -> Dict[str, Tuple[bool, bool]]:
    """Operator -> is it built, can it be; from ds_report."""
    found = _OPERATOR.findall(_COLOUR.sub("", answers.tools.get("ds_report") or ""))
    return {
        name: (built == "YES", fits == "OKAY") for name, built, fits in found if name != "deepspeed_not_implemented"
    }


def check_report(answers: FrameworkAnswers) -> Iterator[Finding]:
    """Findings on what ds_report printed, here or in a pasted text."""
    text, version = _COLOUR.sub("", answers.tools.get("ds_report") or ""), _module(answers, "deepspeed")[0]
    rows = operators(answers)
    yield from _toolkit(text)
    if not rows:
        return
    built = sorted(name for name, (there, _) in rows.items() if there)
    later = sorted(name for name, (there, fits) in rows.items() if fits and not there)
    never = sorted(name for name, (there, fits) in rows.items() if not fits and not there)
    yield ok("deepspeed", f"deepspeed {version}: {len(built)} of {len(rows)} operators built", ", ".join(built))
    if later:
        cause = (
            "each is compiled when a job first needs it, on each node that does not share ~/.cache: minutes of waiting"
        )
        yield bad(
            "deepspeed-jit", INFO, f"compiled at first use: {', '.join(later)}", cause, recipe("deepspeed", answers)
        )
    if never:
        severity = WARNING if any(name in _IMPORTANT for name in never) else INFO
        reasons = [line.split("]", 1)[-1].strip() for line in text.splitlines() if "[WARNING]" in line]
        fix = "async_io: install libaio's headers (libaio-dev, libaio-devel)" if "async_io" in never else ""
        yield bad(
            "deepspeed-operators",
            severity,
            f"cannot be built here: {', '.join(never)}",
            "a configuration that needs one of these fails",
            fix,
            *reasons[:3],
        )
    ninja = re.search(r"^ninja \.*\s*\[(\w+)\]", text, re.MULTILINE)
    if later and ninja and ninja.group(1) != "OKAY":
        yield bad(
            "ninja-missing",
            ERROR,
            "ninja is missing: no operator can be compiled at first use",
            "",
            "pip install ninja",
        )
    compiled = re.search(r"deepspeed wheel compiled w\. \.+ torch (\d+\.\d+)", text)
    torch = re.match(r"\d+\.\d+", _module(answers, "torch")[0] or "")
    if built and compiled and torch and compiled.group(1) not in ("0.0", torch.group()):
        yield bad(
            "deepspeed-torch",
            WARNING,
            f"its operators were compiled for torch {compiled.group(1)}, here is {torch.group()}",
            "they may not load",
            recipe("deepspeed", answers),
        )


def _toolkit(text: str) -> Iterator[Finding]:
    """The compiler that builds operators at first use must be of torch's own CUDA."""
    torch, nvcc = (
        re.search(rf"^{name} version \.+ (\d+)([.\d]*)", text, re.MULTILINE) for name in ("torch cuda", "nvcc")
    )
    if torch and nvcc and torch.groups() != nvcc.groups():
        mine, theirs = "".join(torch.groups()), "".join(nvcc.groups())
        yield bad(
            "cuda-versions-differ",
            WARNING if torch[1] != nvcc[1] else INFO,
            f"torch was built with CUDA {mine}, nvcc is {theirs}",
            "DeepSpeed refuses to build its ops with another major version",
            f"load the toolkit {mine}, or install ops that are already built",
        )


def _horovod(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from _torch(answers)
    version, error = _module(answers, "horovod")
    if version is None:
        yield bad("horovod-missing", ERROR, "horovod cannot be imported", "", recipe("horovod", answers), error)
        return
    text = answers.tools.get("horovodrun")
    if text is None:
        what = "horovodrun is not on PATH" if "horovodrun" not in answers.tools else "horovodrun --check-build failed"
        yield bad("horovod-unseen", ERROR, what, "how it was built was not looked at", recipe("horovod", answers))
        return
    parts = [part.split(":", 1) for part in text.split("Available ")[1:]]
    built = {name.strip(): {tool for mark, tool in _BOX.findall(rest) if mark == "X"} for name, rest in parts}
    words = "; ".join(f"{name.lower()}: {', '.join(sorted(tools)) or 'none'}" for name, tools in built.items())
    if "PyTorch" not in built.get("Frameworks", set()) and "TensorFlow" not in built.get("Frameworks", set()):
        yield bad(
            "horovod-framework",
            ERROR,
            "Horovod was built for neither PyTorch nor TensorFlow",
            words,
            recipe("horovod", answers),
        )
    if not built.get("Controllers"):
        yield bad(
            "horovod-controller",
            ERROR,
            "Horovod has neither MPI nor Gloo: ranks cannot find each other",
            words,
            recipe("horovod", answers),
        )
    elif answers.gpus and "NCCL" not in built.get("Tensor Operations", set()):
        yield bad(
            "horovod-nccl",
            ERROR,
            "Horovod was built without NCCL (or RCCL): every all-reduce goes through host memory",
            words,
            recipe("horovod", answers),
        )
    else:
        yield ok("horovod", f"horovod {version}", words)


def _megatron(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from _torch(answers)
    yield _imported(answers, "megatron.core", ERROR, "", recipe("megatron", answers))
    missing = "without it: --transformer-impl local, and no FP8"
    yield _imported(answers, "transformer_engine", WARNING, missing, recipe("transformer-engine", answers))
    fused = "without it: --no-gradient-accumulation-fusion, --no-persist-layer-norm and --no-masked-softmax-fusion"
    yield _imported(answers, "apex", INFO, fused, recipe("apex", answers))
    yield _imported(
        answers, "flash_attn", INFO, "Transformer Engine then uses its own attention", "pip install flash-attn"
    )


def _jax(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield _imported(answers, "jax", ERROR, "", recipe("maxtext", answers))
    platforms = answers.probe.get("jax")
    if platforms is None:
        if _module(answers, "jax")[0] is not None:
            reason = str(answers.probe.get("error", "it did not say"))
            yield bad("jax-devices", ERROR, "jax cannot list its devices", "", recipe("maxtext", answers), reason)
    else:
        kinds = sorted(set(platforms))
        title = f"jax sees {len(platforms)} devices: {', '.join(kinds)}"
        if answers.gpus and kinds == ["cpu"]:
            yield bad(
                "jax-devices", ERROR, title, f"this node has {len(answers.gpus)} GPUs", recipe("maxtext", answers)
            )
        else:
            yield ok("jax-devices", title)


def _plain(answers: FrameworkAnswers) -> Iterator[Finding]:
    name = answers.framework
    yield _imported(answers, name, ERROR, "", f"pip install {'paddlepaddle' if name == 'paddle' else name}")


def _maxtext(answers: FrameworkAnswers) -> Iterator[Finding]:
    python = str(answers.probe.get("python", ""))
    if tuple(int(part) for part in re.findall(r"\d+", python)[:2]) < (3, 12):
        yield bad(
            "maxtext-python", WARNING, f"Python {python}: MaxText's releases need 3.12", "", recipe("maxtext", answers)
        )
    yield from _jax(answers)
    if _module(answers, "maxtext")[0] is not None:
        yield ok(
            "maxtext",
            f"maxtext {_module(answers, 'maxtext')[0]}".strip(),
            "python3 -m maxtext.trainers.pre_train.train",
        )
    elif _module(answers, "MaxText")[0] is not None:
        yield bad(
            "maxtext-legacy",
            WARNING,
            "an older MaxText (module MaxText)",
            "the preset starts maxtext.trainers.pre_train.train",
            recipe("maxtext", answers),
        )
    else:
        yield bad(
            "maxtext-missing",
            ERROR,
            "maxtext cannot be imported",
            "",
            recipe("maxtext", answers),
            _module(answers, "maxtext")[1],
        )


def _mpi(answers: FrameworkAnswers) -> Iterator[Finding]:
    yield from mpi_findings(answers, recipe("mpi", answers), recipe("gpu-aware-mpi", answers))


_CHECKS: Dict[str, Callable[[FrameworkAnswers], Iterator[Finding]]] = {
    "deepspeed": _deepspeed,
    "horovod": _horovod,
    "jax": _jax,
    "maxtext": _maxtext,
    **dict.fromkeys(("keras", "paddle", "ray", "tensorflow"), _plain),
    "megatron": _megatron,
    "mpi": _mpi,
}
