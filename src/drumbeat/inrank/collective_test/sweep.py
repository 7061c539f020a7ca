"""Every collective over swept sizes: its values checked cold and warm, its bandwidth measured. Then a matrix product."""

from __future__ import annotations

import datetime
import math
import sys
import time
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from .world import World

MISTAKES = 2  # mistakes per operation that a rank reports in full
PERIOD = 251  # length of the patterns; prime, so that data shifted by any power of two is noticed
EXACT = 256  # integers up to here are exact in bfloat16; sums stay below, so every partial sum is exact
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


class Case:
    """One collective of one size. `bytes` counts as in nccl-tests: one rank's buffer; for gather, scatter and all-to-all those
    of all ranks."""

    def __init__(self, world: World, op: str, size: int, dtype: Any) -> None:
        self.world, self.op = world, op
        item = torch.empty(0, dtype=dtype).element_size()
        self.whole = max(1, size // (item * world.size)) * world.size  # elements
        self.part = self.whole // world.size
        self.bytes = self.whole * item
        n_in = self.part if op == "all_gather" else self.whole
        n_out = self.part if op == "reduce_scatter" else self.whole
        self.input = torch.zeros(n_in, dtype=dtype, device=world.device)
        in_place = op in ("all_reduce", "broadcast")
        self.output = self.input if in_place else torch.zeros(n_out, dtype=dtype, device=world.device)

    def fill(self, salt: int) -> None:
        """Fill the inputs with values that depend on `salt`, and the outputs with values that no result can have."""
        me, size = self.world.rank, self.world.size
        if self.output is not self.input:
            self.output.fill_(-1)
        if self.op in ("all_reduce", "reduce_scatter"):
            self.input.copy_(tile(addend(me, size, salt), self.whole, self.input))
        elif self.op == "all_to_all":
            for target in range(size):
                here = slice(target * self.part, (target + 1) * self.part)
                self.input[here] = tile(payload(me, target, salt), self.part, self.input)
        elif self.op == "broadcast" and me != salt % size:
            self.input.fill_(-1)
        else:
            target = (me + 1) % size if self.op == "send_recv" else 0
            self.input.copy_(tile(payload(me, target, salt), len(self.input), self.input))

    def call(self, salt: int = 0) -> None:
        if self.op == "all_reduce":
            dist.all_reduce(self.input)
        elif self.op == "all_gather":
            (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(self.output, self.input)
        elif self.op == "reduce_scatter":
            (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(self.output, self.input)
        elif self.op == "all_to_all":
            dist.all_to_all_single(self.output, self.input)
        elif self.op == "broadcast":
            dist.broadcast(self.input, salt % self.world.size)
        else:
            after, before = (self.world.rank + 1) % self.world.size, (self.world.rank - 1) % self.world.size
            send_and_receive([("send", self.input, after), ("receive", self.output, before)])

    def expected(self, salt: int) -> List[Any]:
        """Return (source rank or None, elements) in the order of the output."""
        me, size, out = self.world.rank, self.world.size, self.output
        if self.op == "all_reduce":
            return [(None, tile(total(size, salt), self.whole, out))]
        if self.op == "reduce_scatter":
            return [(None, tile(total(size, salt), self.part, out, me * self.part))]
        if self.op == "broadcast":
            return [(salt % size, tile(payload(salt % size, 0, salt), self.whole, out))]
        if self.op == "send_recv":
            before = (me - 1) % size
            return [(before, tile(payload(before, me, salt), self.whole, out))]
        target = me if self.op == "all_to_all" else 0
        return [(source, tile(payload(source, target, salt), self.part, out)) for source in range(size)]

    def mistakes(self, salt: int) -> List[Any]:
        """Run one call and compare every element of its output with the expected one; return one entry per source."""
        self.fill(salt)
        self.call(salt)
        self.world.synchronize()
        found, start = [], 0
        for source, want in self.expected(salt):
            got = self.output[start : start + len(want)]
            wrong = got != want
            count = int(wrong.sum())
            if count:
                first = int(wrong.nonzero()[0])
                found.append({
                    "op": self.op, "dtype": str(want.dtype)[6:], "bytes": self.bytes, "rank": self.world.rank,
                    "source": source, "element": start + first, "count": count, "of": len(want),
                    "got": f"{float(got[first]):g}", "want": f"{float(want[first]):g}",
                })  # fmt: skip
            start += len(want)
        return found

    def factor(self) -> float:
        """Return busbw / algbw, as nccl-tests defines it."""
        size = self.world.size
        if self.op == "all_reduce":
            return 2 * (size - 1) / size
        return 1.0 if self.op in ("broadcast", "send_recv") else (size - 1) / size


def send_and_receive(moves: List[Any], seconds: Optional[float] = None) -> None:
    """Send and receive at once; given `seconds`, raise an error if they are not done by then."""
    act = {"send": dist.isend, "receive": dist.irecv}
    works = dist.batch_isend_irecv([dist.P2POp(act[word], tensor, peer) for word, tensor, peer in moves])
    on_cpu = moves[0][1].device.type == "cpu"
    for work in works:
        work.wait(*([datetime.timedelta(seconds=seconds)] if seconds and on_cpu else []))
    if seconds and not on_cpu:  # on GPUs `wait` only orders streams
        done, end = torch.cuda.Event(), time.monotonic() + seconds
        done.record()
        while not done.query():
            if time.monotonic() > end:
                raise TimeoutError(f"not done after {seconds:g} s")
            time.sleep(0)


# Values that ranks send and must receive: integers chosen so that any mistake shows.


def addend(rank: int, size: int, salt: int) -> Any:
    """Return the summand of `rank` at each place of the period: 1 to 3, or nothing if the sum of all ranks would exceed EXACT."""
    place = torch.arange(PERIOD)
    mixed = ((place + 1) * (1 + 2 * rank % (PERIOD - 1)) * (1 + salt % (PERIOD - 1))) % PERIOD
    every = math.ceil(3 * size / (EXACT - 3))
    return (1 + mixed % 3) * ((place + rank + salt) % every == 0)


def total(size: int, salt: int) -> Any:
    return sum(addend(rank, size, salt) for rank in range(size))


def payload(source: int, target: int, salt: int) -> Any:
    """Return what `source` sends to `target`: 0 to 250."""
    place = torch.arange(PERIOD)
    mixed = (place + 1) * (1 + 2 * source % (PERIOD - 1)) * (1 + salt % (PERIOD - 1))
    return (mixed + 17 * source + 29 * target) % PERIOD


def tile(table: Any, count: int, like: Any, start: int = 0) -> Any:
    """Return `count` elements of the repeated table, starting at `start`, with the type and device of `like`."""
    table = table.roll(-(start % PERIOD)).to(like.device, like.dtype)
    return table.repeat(math.ceil(count / PERIOD))[:count]


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
