"""This rank's GPU: which one it is, and whether it answers at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Dict, Optional

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
SMOKE_SECONDS = 60.0


def own_gpu() -> int:
    """Return the local rank's number among the GPUs it sees; the only one, if a launcher shows each rank its own."""
    shown = [os.environ.get(f"{vendor}_VISIBLE_DEVICES") for vendor in ("CUDA", "HIP", "ROCR")]
    alone = any(text and "," not in text for text in shown)
    return 0 if alone else int(os.environ.get("LOCAL_RANK", "0"))


class Smoke:
    """Starter of smoke.py for this rank's GPU, if the machine has any; waits no longer than it may."""

    def __init__(self, backend: str) -> None:
        self.index = str(own_gpu())
        self.child: Optional[subprocess.Popen[bytes]] = None
        if backend != "gloo" and any(map(os.path.exists, GPU_FILES)):
            script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "smoke.py")
            argv = [sys.executable, script, self.index]
            self.child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)

    def answer(self) -> Dict[str, Any]:
        if self.child is None:
            return {"ok": True, "gpu": None, "why": "there is no GPU here, or gloo was asked for"}
        try:
            said, _ = self.child.communicate(timeout=SMOKE_SECONDS)
            return dict(json.loads(said))
        except subprocess.TimeoutExpired:
            self.child.kill()  # whether that helps or not: we go
            return {"ok": False, "why": f"GPU {self.index} did not answer within {SMOKE_SECONDS:g} s: its driver hangs"}
        except ValueError:
            return {"ok": False, "why": f"the smoke test of GPU {self.index} ended with {self.child.returncode}"}
