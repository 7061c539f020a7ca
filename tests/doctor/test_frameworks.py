"""doctor --framework: what each framework's own report means. Reports are real, or made as the tool's source makes them."""

import json
import os
import subprocess
import sys
import time

import pytest

from drumbeat.doctor.software import examine_framework
from drumbeat.machine.host import LiveHost
from drumbeat.machine.software import FRAMEWORKS, FrameworkAnswers, _stale_locks, ask_framework

# ds_report of deepspeed 0.19.8 with DS_ACCELERATOR=cpu, shortened.
DS_REPORT = """
JIT compiled ops requires ninja
ninja .................. \x1b[92m[OKAY]\x1b[0m
op name ................ installed .. compatible
deepspeed_not_implemented  \x1b[93m[NO]\x1b[0m ....... \x1b[92m[OKAY]\x1b[0m
\x1b[93m [WARNING] \x1b[0m async_io requires the dev libaio .so object and headers but these were not found.
async_io ............... \x1b[93m[NO]\x1b[0m ....... \x1b[93m[NO]\x1b[0m
cpu_adam ............... \x1b[93m[NO]\x1b[0m ....... \x1b[92m[OKAY]\x1b[0m
fused_adam ............. \x1b[92m[YES]\x1b[0m ...... \x1b[92m[OKAY]\x1b[0m
torch version .................... 2.13.0+cpu
deepspeed wheel compiled w. ...... torch 2.11
"""
# As horovod/runner/launch.py (horovod/horovod 2626dc87) prints it.
CHECK_BUILD = """Horovod v0.28.1:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [{mpi}] MPI
    [{gloo}] Gloo

Available Tensor Operations:
    [{nccl}] NCCL
    [ ] DDL
    [ ] CCL
    [{mpi}] MPI
    [{gloo}] Gloo
"""
OMPI = 'ompi:version:full:{version}\noptions:mpi_ext:affinity, cuda, pcollreq{more}\nmca:pml:ucx:version:"mca:2.1.0"\n'
MPICH = "MPICH Version:    \t4.0.2\nMPICH Device:    \tch4:ucx\nMPICH configure: \t--prefix=/usr {more}\n"
TORCH = {"torch": {"version": "2.13.0"}}


def probe(modules=(), **more):
    return {"python": "3.12.1", "executable": "/v/bin/python", "modules": {**TORCH, **dict(modules)},
            "torch": {"cuda": None, "hip": None, "gpus": 0}, **more}  # fmt: skip


def examined(framework, **answers):
    findings = examine_framework(FrameworkAnswers(framework, "python3", **answers))
    assert all(finding.seen for finding in findings)
    return {finding.code: finding for finding in findings}


def test_ds_report_is_read():
    seen = examined("deepspeed", probe=probe({"deepspeed": {"version": "0.19.8"}}), tools={"ds_report": DS_REPORT})
    assert seen["deepspeed"].title == "deepspeed 0.19.8: 1 of 3 operators built"
    assert seen["deepspeed-jit"].title == "compiled at first use: cpu_adam"
    assert seen["deepspeed-operators"].severity == "warning" and "libaio" in seen["deepspeed-operators"].fix
    assert "torch 2.11, but torch 2.13" in seen["deepspeed-torch"].title


def test_deepspeed_that_cannot_be_looked_at_is_never_fine():
    assert examined("deepspeed")["framework-python"].severity == "error"
    there = probe({"deepspeed": {"version": "0.19.8"}})
    assert examined("deepspeed", probe=there)["ds-report-missing"].severity == "warning"
    assert examined("deepspeed", probe=there, tools={"ds_report": None})["ds-report-silent"].severity == "error"
    assert examined("deepspeed", probe=there, tools={"ds_report": "hello"})["ds-report-unread"].severity == "warning"


def test_the_recipe_is_for_the_gpus_of_this_node():
    missing = probe({"deepspeed": {"error": "ModuleNotFoundError: No module named 'deepspeed'"}})
    seen = examined("deepspeed", probe=missing, gpus=("amd",) * 8)
    assert "DS_BUILD_EVOFORMER_ATTN=0" in seen["framework-module"].fix
    assert "No module named" in seen["framework-module"].evidence[0].text
    assert "sees 0 GPUs" in seen["framework-torch"].title and seen["framework-torch"].severity == "error"
    horovod = {"horovod": {"error": "ModuleNotFoundError: x"}}
    assert "HOROVOD_GPU=ROCM" in examined("horovod", probe=probe(horovod), gpus=("amd",))["framework-module"].fix
    assert (
        "HOROVOD_GPU_OPERATIONS=NCCL"
        in examined("horovod", probe=probe(horovod), gpus=("nvidia",))["framework-module"].fix
    )


@pytest.mark.parametrize(
    "marks, gpus, code, severity",
    [
        ({"mpi": "X", "gloo": " ", "nccl": "X"}, ("amd",), "horovod", "ok"),
        ({"mpi": "X", "gloo": "X", "nccl": " "}, ("amd",), "horovod-nccl", "error"),
        ({"mpi": "X", "gloo": "X", "nccl": " "}, (), "horovod", "ok"),
        ({"mpi": " ", "gloo": " ", "nccl": " "}, (), "horovod-controller", "error"),
    ],
)
def test_check_build_is_read(marks, gpus, code, severity):
    there = probe({"horovod": {"version": "0.28.1"}}, torch={"hip": "6.2", "gpus": len(gpus)})
    seen = examined("horovod", probe=there, tools={"horovodrun": CHECK_BUILD.format(**marks)}, gpus=gpus)
    assert seen[code].severity == severity


@pytest.mark.parametrize(
    "tools, aware",
    [
        ({"ompi_info": OMPI.format(version="4.1.4", more="")}, ""),
        ({"ompi_info": OMPI.format(version="5.0.7", more=", rocm")}, "built with ROCm"),
        ({"ompi_info": OMPI.format(version="4.1.4", more="\nmca:mpi:base:param:mpi_built_with_cuda_support:value:true")},
         "built with CUDA"),
        ({"ompi_info": OMPI.format(version="4.1.4", more=""), "ucx_info": "# Configured with: --with-rocm=/opt/rocm"},
         "UCX built with ROCm"),
        ({"mpichversion": MPICH.format(more="")}, ""),
        ({"mpichversion": MPICH.format(more="--with-hip=/opt/rocm")}, "built with HIP"),
    ],
)  # fmt: skip
def test_whether_mpi_takes_gpu_memory(tools, aware):
    seen = examined("mpi", probe=probe({"mpi4py": {"error": "x"}}), tools=tools, gpus=("amd",))
    if aware:
        assert seen["mpi-gpu-aware"].evidence[0].text == aware and "mpi-host-memory" not in seen
    else:
        assert seen["mpi-host-memory"].severity == "warning" and "--with-rocm" in seen["mpi-host-memory"].fix


def test_cray_mpich_by_its_modules():
    half = {"CRAY_MPICH_VERSION": "8.1.29", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    seen = examined("mpi", probe=probe({"mpi4py": {"error": "x"}}), variables=half, gpus=("amd",))
    assert (
        "craype-accel" in seen["cray-mpich-gpu"].fix and "MPICH_GPU_SUPPORT_ENABLED=1" not in seen["cray-mpich-gpu"].fix
    )
    whole = {**half, "CRAY_ACCEL_TARGET": "amd_gfx90a"}
    assert "mpi-gpu-aware" in examined("mpi", probe=probe(), variables=whole, gpus=("amd",))


def test_mpi4py_of_another_mpi_than_mpirun():
    there = probe({"mpi4py": {"version": "4.1.2"}}, mpi_library="MPICH Version: 4.0.2")
    tools = {"ompi_info": OMPI.format(version="4.1.4", more=""), "mpirun": "mpirun (Open MPI) 4.1.4"}
    assert (
        "mpirun is Open MPI, mpi4py uses MPICH" in examined("mpi", probe=there, tools=tools)["mpi4py-other-mpi"].title
    )


def test_megatron_and_maxtext():
    titles = [
        finding.title
        for finding in examine_framework(FrameworkAnswers("megatron", "p", probe({"apex": {"error": "x"}})))
    ]
    assert "apex cannot be imported" in titles
    modules = {"jax": {"version": "0.5"}, "maxtext": {"error": "x"}, "MaxText": {"version": ""}}
    legacy = examined("maxtext", probe=probe(modules, jax=["cpu"]), gpus=("nvidia",))
    assert "maxtext-legacy" in legacy and legacy["jax-devices"].severity == "error"


def test_locks_of_killed_builds(tmp_path, monkeypatch):
    for name, age in (("old", 4000), ("new", 0)):
        (tmp_path / "py311_cpu" / name).mkdir(parents=True)
        lock = tmp_path / "py311_cpu" / name / "lock"
        lock.touch()
        os.utime(lock, (time.time() - age,) * 2)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert _stale_locks(LiveHost()) == (str(tmp_path / "py311_cpu" / "old" / "lock"),)


def test_children_that_are_not_there_or_say_odd_things(tmp_path, monkeypatch):
    for name, text in (
        ("python3", "#!/bin/sh\necho noise; echo 'drumbeat:{not json'\n"),
        ("ds_report", "#!/bin/sh\nexit 3\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answers = ask_framework(LiveHost(), "deepspeed", "python3")
    assert answers.probe == {} and answers.tools == {"ds_report": None}
    assert all(
        examine_framework(ask_framework(LiveHost(), each, "/no/such/python")) for each in FRAMEWORKS if each != "mpi"
    )


def test_the_command(tmp_path):
    environ = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    argv = [
        sys.executable,
        "-m",
        "drumbeat",
        "doctor",
        "--framework",
        "megatron",
        "--json",
        "--python",
        "/no/such/python",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=120)
    (answer,) = json.loads(done.stdout)
    assert done.returncode == 1 and answer["of"] == "megatron"
    assert answer["findings"][0]["code"] == "framework-python"
