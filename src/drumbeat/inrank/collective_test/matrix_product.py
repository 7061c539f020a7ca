"""The same matrix product on every rank at the same time: wrong numbers, and slow ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .patterns import PERIOD
from .world import World


def run(world: World, quick: bool) -> None:
    """Compute the same product on every rank at the same time. Its numbers are whole, so every rank must get the same
    ones."""
    on_cpu = world.device.type == "cpu"
    side = (384 if quick else 1024) if on_cpu else (4096 if quick else 8192)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    place = torch.arange(side * side, device=world.device)
    a = ((place * 7 + place // side) % 3 - 1).view(side, side).to(dtype)
    product = a @ a
    times = []
    dist.barrier()
    for _ in range(12 if quick else 40):
        world.synchronize()
        began = time.perf_counter()
        product = a @ a
        world.synchronize()
        times.append(time.perf_counter() - began)
    check = float((product.double().flatten() * (place % PERIOD)).sum())
    median = sorted(times)[len(times) // 2]
    mine = {"rank": world.rank, "seconds": median, "tflops": round(2 * side**3 / median / 1e12, 4), "check": check}
    world.results["gemm"] = {"side": side, "dtype": str(a.dtype)[6:], "ranks": world.gather("gemm", mine)}
    world.write()
