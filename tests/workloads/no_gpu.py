"""`no_gpu.py cuda|cpu PROGRAM ...` (or `-m MODULE`): runs a program that insists on a GPU, unchanged, on the CPU.

`cuda`: the names of torch.cuda exist, and everything that is asked for on `cuda` is made on the CPU, with gloo for NCCL.
`cpu`: torch names the CPU when it is asked for the accelerator, and torch.cpu answers what torch.cuda would.
No memory, stream, event or time of a GPU that such a run prints means anything.
"""

import contextlib
import runpy
import sys
import types
import typing

import torch
from torch.overrides import TorchFunctionMode

_MEMORY = 1 << 34


class _Nothing:
    """A stream or an event: whatever is asked of it has happened."""

    def __init__(self, *_args, **_named):
        self.device, self.cuda_stream = torch.device("cpu"), 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_named: 0.0 if name == "elapsed_time" else True


class _OnCpu(TorchFunctionMode):
    """Tensors on the CPU for those that are asked for on a GPU; they say that they are on one where they are asked."""

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.is_cuda.__get__:
            return True
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), int) or _is_gpu(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if name in ("to", "type", "full", "empty", "zeros", "ones", "tensor"):
            args = tuple(torch.device("cpu") if _is_gpu(each) else each for each in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_gpu(value):
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )


def _cuda():
    cuda = torch.cuda
    properties = types.SimpleNamespace(name="no GPU", total_memory=_MEMORY, major=8, minor=0, multi_processor_count=1)
    for name, value in {
        "is_available": True, "is_initialized": True, "device_count": 8, "current_device": 0, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "get_device_capability": (8, 0),
        "get_device_properties": properties, "get_device_name": "no GPU", "mem_get_info": (_MEMORY, _MEMORY),
        "is_current_stream_capturing": False, "current_stream": _Nothing(), "default_stream": _Nothing(),
        "memory_stats": {}, "get_arch_list": [], "initial_seed": 0,
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_args, _value=value, **_named: _value)
    for name in (
        "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_stream", "_lazy_init", "init",
        "ipc_collect", "reset_max_memory_allocated", "set_per_process_memory_fraction",
    ):  # fmt: skip
        setattr(cuda, name, lambda *_args, **_named: None)
    for name in ("stream", "device"):
        setattr(cuda, name, lambda *_args, **_named: contextlib.nullcontext())
    cuda.Stream = cuda.Event = _Nothing
    cuda._lazy_call = lambda call, **_named: call()
    cuda.default_generators = (torch.default_generator,) * 8
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_args, **_named: torch.get_rng_state()
        module.set_rng_state = lambda state, *_args, **_named: torch.set_rng_state(state)
        module.manual_seed = module.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed) and None
    for kind in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    nvtx = cuda.nvtx
    nvtx.range_push = nvtx.range_pop = nvtx.mark = lambda *_args, **_named: None
    _gloo_for_nccl()
    _OnCpu().__enter__()


def _gloo_for_nccl():
    import torch.distributed as dist

    def with_gloo(function):
        def started(*args, **named):
            args = tuple("gloo" if each == "nccl" else each for each in args)
            if named.get("backend") is not None or "backend" in named:
                named["backend"] = "gloo"
            named.pop("device_id", None)
            named.pop("pg_options", None)
            return function(*args, **named)

        return started

    for name in ("init_process_group", "new_group"):
        both = with_gloo(getattr(dist, name))
        setattr(dist, name, both)
        setattr(dist.distributed_c10d, name, both)


def _cpu():
    import torch.nn.attention.flex_attention as flex

    torch._utils._get_available_device_type = lambda: "cpu"
    flex._validate_device = lambda *_args: None  # its plain form has a backward pass on the CPU
    properties = types.SimpleNamespace(name="no GPU", total_memory=_MEMORY)
    for name, value in {
        "get_device_name": "no GPU", "get_device_properties": properties, "memory_stats": {}, "empty_cache": None,
        "reset_peak_memory_stats": None, "current_device": 0,
    }.items():  # fmt: skip
        setattr(torch.cpu, name, lambda *_args, _value=value, **_named: _value)


def _newer_names():
    """What the newest checkouts use and an older Python or torch does not have."""
    import torch.distributed as dist

    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = lambda method: method
    if not hasattr(dist, "set_timeout"):  # after torch 2.13
        dist.set_timeout = lambda *_args, **_named: None


def main():
    _newer_names()
    {"cuda": _cuda, "cpu": _cpu}[sys.argv.pop(1)]()
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        del sys.argv[0]
        sys.path[0] = sys.argv[0].rpartition("/")[0]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
