"""This rank's GPU: its index, and whether it works at all.

`python gpu.py INDEX` is the smoke test of one GPU, and prints one JSON object. It runs as a child that can be killed: a wedged
driver hangs the first process that touches it, often beyond the reach of signals, so that must not be the rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, Optional

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
SMOKE_SECONDS = 60.0
_MEMORY = 256 << 20  # bytes
_SIDE = 1024  # of the matrices


def own_gpu() -> int:
    """Return the index of this rank's GPU among the visible ones: the local rank, or 0 if the launcher shows each rank only
    its own."""
    shown = [os.environ.get(f"{vendor}_VISIBLE_DEVICES") for vendor in ("CUDA", "HIP", "ROCR")]
    alone = any(text and "," not in text for text in shown)
    return 0 if alone else int(os.environ.get("LOCAL_RANK", "0"))


class Smoke:
    """Starts the smoke test of this rank's GPU, if the machine has any, and waits for it until its deadline."""

    def __init__(self, backend: str) -> None:
        self.index = str(own_gpu())
        self.child: Optional[subprocess.Popen[bytes]] = None
        if backend != "gloo" and any(map(os.path.exists, GPU_FILES)):
            argv = [sys.executable, os.path.abspath(__file__), self.index]
            self.child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)

    def answer(self) -> Dict[str, Any]:
        if self.child is None:
            return {"ok": True, "gpu": None, "why": "there is no GPU here, or gloo was asked for"}
        try:
            said, _ = self.child.communicate(timeout=SMOKE_SECONDS)
            return dict(json.loads(said))
        except subprocess.TimeoutExpired:
            self.child.kill()  # it may survive in the driver; we do not wait
            return {"ok": False, "why": f"GPU {self.index} did not answer within {SMOKE_SECONDS:g} s: its driver hangs"}
        except ValueError:
            return {"ok": False, "why": f"the smoke test of GPU {self.index} ended with {self.child.returncode}"}


def try_gpu(index: int) -> Dict[str, Any]:
    started = time.monotonic()
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        why = f"torch {torch.__version__} is built for {build or 'the CPU alone'}"
        return {"ok": False, "why": f"torch sees no GPU ({why})"}
    count = torch.cuda.device_count()
    if index >= count:
        return {"ok": False, "why": f"local rank {index} has no GPU of its own: torch sees {count}"}
    device = torch.device("cuda", index)
    torch.empty(_MEMORY, dtype=torch.uint8, device=device).fill_(1)
    ones = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
    right = bool(((ones @ ones) == _SIDE).all())
    torch.cuda.synchronize(device)
    answer = {"ok": right, "gpu": torch.cuda.get_device_name(device), "seconds": round(time.monotonic() - started, 2)}
    return answer if right else {**answer, "why": "a product of ones came out wrong"}


if __name__ == "__main__":
    try:
        said = try_gpu(int(sys.argv[1]))
    except Exception as error:
        said = {"ok": False, "why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps(said))
    sys.exit(0 if said["ok"] else 1)
