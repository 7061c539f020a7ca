"""Every collective over swept sizes: its values checked cold and warm, its bandwidth measured. Then a matrix product."""

from __future__ import annotations

import sys
import time
from typing import Any, List, Tuple

import torch
import torch.distributed as dist

from .cases import OPS, PERIOD, Case
from .world import World

MISTAKES = 2  # mistakes per operation that a rank reports in full


def run(world: World, quick: bool) -> None:
    sizes = sweep_sizes(world, quick)
    budget = 0.15 if quick else 0.8  # seconds per measurement
    ops = [op for op in OPS if op != "send_recv" or world.size > 1]
    mistakes, checked, salt = [], 0, 0
    plans = [(torch.float32, op, size) for op in ops for size in sizes]
    plans += [(torch.bfloat16, op, sizes[-2:][0] if quick else sizes[-1]) for op in ops]
    for dtype, op, size in plans:
        case = Case(world, op, size, dtype)
        wrong = case.mistakes(salt + 1)
        seconds, iterations = measure(world, case, budget)
        wrong += case.mistakes(salt + 2)  # warm: other buffers and protocols may be in use by now
        salt, checked = salt + 2, checked + 2 * len(case.output)
        for each in wrong:
            print(f"verify: wrong values on rank {world.rank}: {each}", file=sys.stderr, flush=True)
        mistakes += wrong
        algbw = case.bytes / seconds / 1e9
        world.results["collectives"].append({
            "op": op, "dtype": str(case.output.dtype)[6:], "bytes": case.bytes, "seconds": seconds, "iterations": iterations,
            "algbw": round(algbw, 6), "busbw": round(algbw * case.factor(), 6),
        })  # fmt: skip
        if (dtype, size) == (torch.float32, sizes[-1]):
            rate = f"{algbw * case.factor():.3f} GB/s busbw" if world.size > 1 else "one rank moves nothing"
            world.say(f"{op}: {rate} at {case.bytes} bytes")
        world.write()
        del case
    shown = [one for op in ops for one in [each for each in mistakes if each["op"] == op][:MISTAKES]]
    told = world.gather("mistakes", {"shown": shown, "count": len(mistakes), "checked": checked})
    world.results["mistakes"] = [each for one in told for each in one["shown"]]
    world.results["mistake_count"] = sum(one["count"] for one in told)
    world.results["checked_elements"] = sum(one["checked"] for one in told)
    world.write()


def sweep_sizes(world: World, quick: bool) -> List[Any]:
    """Return increasing sizes in bytes; the largest leaves room on the smallest GPU for input, output, expected result and the
    rest."""
    if world.device.type == "cpu":
        return [1 << 10, 64 << 10, 512 << 10, 4 << 20] if quick else [1 << shift for shift in range(10, 27, 2)]
    sizes = [1 << 10, 1 << 20, 64 << 20, 512 << 20] if quick else [1 << shift for shift in range(10, 34, 2)]
    free = world.settle("memory", torch.cuda.mem_get_info(world.device)[0], min)
    return [size for size in sizes if 6 * size <= free]


def measure(world: World, case: Case, budget: float) -> Tuple[float, int]:
    """Return the seconds per call, averaged over the calls that fit into the budget, of the slowest rank."""
    case.input.zero_()  # sums of zeros stay zero, however often repeated
    world.synchronize()
    began = time.perf_counter()
    case.call()
    world.synchronize()
    once = world.slowest(time.perf_counter() - began)
    iterations = max(2, min(200, int(budget / max(once, 1e-6))))
    began = time.perf_counter()
    for _ in range(iterations):
        case.call()
    world.synchronize()
    return world.slowest(time.perf_counter() - began) / iterations, iterations


def compare_products(world: World, quick: bool) -> None:
    """Compute the same product on every rank at the same time, to find wrong results and slow ranks. The matrices hold
    integers, so every rank must get identical numbers."""
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
