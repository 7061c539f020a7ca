"""On PYTHONPATH of a program: one rank fails at its third backward pass or optimizer step, or soon after jax or mpi4py is loaded.

WORKLOAD_FAULT is exception, kill or oom; WORKLOAD_RANK names the rank. Without them nothing happens.
"""

import atexit
import os
import signal
import sys

_FAULT = os.environ.get("WORKLOAD_FAULT", "")
_SEEN = {"passes": 0, "steps": 0, "ticks": 0}
_OOM = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.21 GiB is free."


def _fail():
    signal.setitimer(signal.ITIMER_REAL, 0)
    if _FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if _FAULT == "oom" and "torch" in sys.modules:
        raise sys.modules["torch"].OutOfMemoryError("CUDA out of memory. " + _OOM)
    if _FAULT == "oom":
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.")
    raise RuntimeError("injected: this rank was told to fail")


def _count(backward):
    def counted(*args, **named):
        _SEEN["passes"] += 1
        if _SEEN["passes"] == 3:
            _fail()
        return backward(*args, **named)

    return counted


def _step(*_):
    _SEEN["steps"] += 1
    if _SEEN["steps"] == 3:
        _fail()


def _look(*_):
    torch = sys.modules.get("torch")
    if torch is not None:
        optimizer = sys.modules.get("torch.optim.optimizer")
        if (
            hasattr(torch, "Tensor")
            and hasattr(torch.Tensor, "backward")
            and hasattr(torch, "OutOfMemoryError")
            and hasattr(optimizer, "register_optimizer_step_pre_hook")
        ):
            torch.Tensor.backward = _count(torch.Tensor.backward)
            optimizer.register_optimizer_step_pre_hook(_step)
            signal.setitimer(signal.ITIMER_REAL, 0)
    elif "mpi4py.MPI" in sys.modules or "jax" in sys.modules:
        _SEEN["ticks"] += 1
        if _SEEN["ticks"] == 3:
            _fail()


class _FirstImport:
    """Starts the timer when the framework is imported: an interpreter that only starts another one has no timer to pass on."""

    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "jax", "mpi4py"):
            atexit.register(
                signal.setitimer, signal.ITIMER_REAL, 0
            )  # at its end the interpreter takes its handlers away
            signal.signal(signal.SIGALRM, _look)
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        return


if _FAULT and os.environ.get("RANK", "0") == os.environ.get("WORKLOAD_RANK", "0"):
    sys.meta_path.insert(0, _FirstImport())
