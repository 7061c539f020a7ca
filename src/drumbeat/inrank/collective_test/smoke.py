"""Smoke test of one GPU. `python smoke.py INDEX` prints one JSON object. It is run as a child that can be killed.

A wedged driver hangs whoever first touches it, often where no signal helps; so that is never the rank itself.
"""

import json
import sys
import time
from typing import Any, Dict

_MEMORY = 256 << 20  # bytes
_SIDE = 1024  # of the matrices


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
