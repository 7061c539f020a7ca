"""The collective test: one plain torch script that every rank runs, from a copy in the run folder.

It needs torch and the standard library, nothing of drumbeat. In this order: a smoke test of the rank's GPU in a child
that can be killed; rendezvous; pair tests; every collective over swept sizes with every element of every result
checked; the same matrix product on every rank. Reports of the ranks travel over the rendezvous store, not over what is
being tested, and rank 0 writes after each part, so that a run that dies in the middle still tells how far it came.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
PERIOD = 251  # of the patterns; prime, so that data shifted by any power of two shows
EXACT = 256  # whole numbers up to here are exact in bfloat16: sums stay below, so every partial sum is exact too
MISTAKES = 2  # of one operation that a rank tells in full
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
SMOKE_SECONDS = 60.0
PAIR_SECONDS = 30.0  # after which a pair counts as broken
PAIR_REPEATS = 4
GATHER = datetime.timedelta(seconds=300)

torch: Any = None
dist: Any = None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="where rank 0 writes its results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    args = parser.parse_args()
    smoke = Smoke(args.backend)  # the child imports torch while we do
    try:
        load_torch()
    except ImportError as error:
        print(f"verify: {sys.executable} cannot import torch ({error}); name one that can: --python", file=sys.stderr)
        return 2
    smoked = smoke.answer()
    if not smoked.get("ok"):
        print(f"verify: {smoked['why']}; --backend gloo tests the CPUs and their network alone", file=sys.stderr)
        return 3
    world = World(args, smoked)
    try:
        for part in (pair_tests, sweep, matrix_product):
            if not world.broken:
                part(world, args.quick)
        world.results["complete"] = not world.broken
    finally:
        world.leave()
    return 0


def own_gpu() -> int:
    """The local rank's number among the GPUs it sees; the only one, where a launcher shows each rank its own."""
    shown = [os.environ.get(f"{vendor}_VISIBLE_DEVICES") for vendor in ("CUDA", "HIP", "ROCR")]
    alone = any(text and "," not in text for text in shown)
    return 0 if alone else int(os.environ.get("LOCAL_RANK", "0"))


def load_torch() -> None:
    """Only after the smoke test has been started, which imports torch as well."""
    global torch, dist
    import torch
    import torch.distributed as dist


class Smoke:
    """Starts smoke.py for this rank's GPU, if the machine has any, and waits no longer than it may."""

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


class World:
    """This rank and the others: who they are, how they report, and what rank 0 has gathered."""

    def __init__(self, args: argparse.Namespace, smoked: Dict[str, Any]) -> None:
        env = os.environ
        self.rank, self.size, self.local = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
        self.broken = False
        self.began = time.monotonic()
        gpu = smoked["gpu"] is not None and args.backend != "gloo"
        self.backend = args.backend if args.backend != "auto" else ("nccl" if gpu else "gloo")
        self.device = torch.device("cuda", own_gpu()) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(self.device)
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, self.size, is_master=self.rank == 0, timeout=GATHER)
        named = {"device_id": self.device} if gpu else {}
        dist.init_process_group(
            self.backend, store=dist.PrefixStore("group", self.store), rank=self.rank, world_size=self.size, **named
        )
        library = self.backend
        if library == "nccl":
            library = f"{'rccl' if torch.version.hip else 'nccl'} {'.'.join(map(str, torch.cuda.nccl.version()))}"
        self.out = args.out
        self.results: Dict[str, Any] = {
            "schema": "1.0", "torch": torch.__version__, "backend": self.backend, "library": library,
            "device": self.device.type, "world_size": self.size, "quick": args.quick, "complete": False,
            "interfaces": {name: env[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in env},
            "ranks": [], "pairs": [], "collectives": [], "mistakes": [], "gemm": None,
        }  # fmt: skip
        me = {
            "rank": self.rank, "node": int(env.get("NODE_RANK", env.get("GROUP_RANK", "0"))), "local_rank": self.local,
            "host": socket.gethostname(), "gpu": smoked["gpu"], "smoke": smoked,
        }  # fmt: skip
        self.results["ranks"] = self.gather("ranks", me)
        self.nodes = self.settle("nodes", me["node"], list)
        count = f"{self.size} rank{'' if self.size == 1 else 's'}"
        self.say(f"{count}, {self.backend} on {smoked['gpu'] or 'the CPU'}, torch {torch.__version__}")
        self.write()

    def gather(self, name: str, value: Any) -> List[Any]:
        """Rank 0 gets what every rank says; the others get nothing."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        if self.rank:
            return []
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)], GATHER)
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def settle(self, name: str, value: Any, rule: Callable[[List[Any]], Any]) -> Any:
        """Every rank gets what rank 0 makes of all that was said; little, since thousands may ask for it."""
        told = self.gather(name, value)
        if self.rank == 0:
            self.store.set(f"{name}/settled", json.dumps(rule(told)))
        return json.loads(self.store.get(f"{name}/settled"))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"verify: {text}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Replaced at once: a reader sees the old results or the new ones."""
        if self.rank == 0:
            self.results["seconds"] = round(time.monotonic() - self.began, 3)
            with open(self.out + ".tmp", "w", encoding="utf-8") as file:
                json.dump(self.results, file)
            os.replace(self.out + ".tmp", self.out)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float32, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value.item())

    def leave(self) -> None:
        """Rank 0 holds the store, so it goes last. Where something broke, a clean end of the group could hang."""
        self.write()
        if sys.exc_info()[0] is not None:
            return
        self.gather("bye", 0)
        if self.broken:
            sys.stderr.flush()
            os._exit(0)
        dist.destroy_process_group()


def addend(rank: int, size: int, salt: int) -> Any:
    """What `rank` adds at each place of the period: 1 to 3, or nothing where too many ranks would pass EXACT."""
    place = torch.arange(PERIOD)
    mixed = ((place + 1) * (1 + 2 * rank % (PERIOD - 1)) * (1 + salt % (PERIOD - 1))) % PERIOD
    every = math.ceil(3 * size / (EXACT - 3))
    return (1 + mixed % 3) * ((place + rank + salt) % every == 0)


def total(size: int, salt: int) -> Any:
    return sum(addend(rank, size, salt) for rank in range(size))


def payload(source: int, target: int, salt: int) -> Any:
    """What `source` sends to `target`: 0 to 250."""
    place = torch.arange(PERIOD)
    mixed = (place + 1) * (1 + 2 * source % (PERIOD - 1)) * (1 + salt % (PERIOD - 1))
    return (mixed + 17 * source + 29 * target) % PERIOD


def tile(table: Any, count: int, like: Any, start: int = 0) -> Any:
    """`count` elements of the repeated table, from place `start` on, with the type and device of `like`."""
    table = table.roll(-(start % PERIOD)).to(like.device, like.dtype)
    return table.repeat(math.ceil(count / PERIOD))[:count]


class Case:
    """`bytes` counts as in nccl-tests: one rank's buffer; for gather, scatter and all-to-all that of all ranks."""

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
        """Inputs of this salt; outputs hold what no result can be."""
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
            exchange([("send", self.input, after), ("receive", self.output, before)])

    def expected(self, salt: int) -> List[Any]:
        """(source rank or none, elements) in the order of the output."""
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
        """One call, and every element of its output against what it must be; one entry a source."""
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
        """busbw / algbw, as nccl-tests defines it."""
        size = self.world.size
        if self.op == "all_reduce":
            return 2 * (size - 1) / size
        return 1.0 if self.op in ("broadcast", "send_recv") else (size - 1) / size


def exchange(moves: List[Any], seconds: Optional[float] = None) -> None:
    """Sends and receives at once; with `seconds`, an error when they are not through by then."""
    act = {"send": dist.isend, "receive": dist.irecv}
    works = dist.batch_isend_irecv([dist.P2POp(act[word], tensor, peer) for word, tensor, peer in moves])
    on_cpu = moves[0][1].device.type == "cpu"
    for work in works:
        work.wait(*([datetime.timedelta(seconds=seconds)] if seconds and on_cpu else []))
    if seconds and not on_cpu:  # there `wait` only orders streams
        done, end = torch.cuda.Event(), time.monotonic() + seconds
        done.record()
        while not done.query():
            if time.monotonic() > end:
                raise TimeoutError(f"not through after {seconds:g} s")
            time.sleep(0)


def sweep(world: World, quick: bool) -> None:
    sizes = sweep_sizes(world, quick)
    budget = 0.15 if quick else 0.8  # seconds of one measurement
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
    """Bytes, rising; the largest leave room on the smallest GPU for input, output, what is expected, and the rest."""
    if world.device.type == "cpu":
        return [1 << 10, 64 << 10, 512 << 10, 4 << 20] if quick else [1 << shift for shift in range(10, 27, 2)]
    sizes = [1 << 10, 1 << 20, 64 << 20, 512 << 20] if quick else [1 << shift for shift in range(10, 34, 2)]
    free = world.settle("memory", torch.cuda.mem_get_info(world.device)[0], min)
    return [size for size in sizes if 6 * size <= free]


def measure(world: World, case: Case, budget: float) -> Tuple[float, int]:
    """Seconds of one call, over as many as fit into the budget; the slowest rank counts."""
    case.input.zero_()  # sums of zeros stay zero, however often
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


def matchings(count: int) -> List[Any]:
    """Rounds of disjoint pairs of 0..count-1: all of them up to four, then about log2(count), each with new partners."""
    places = list(range(count)) + ([-1] if count % 2 else [])
    rounds = []
    wanted = len(places) - 1 if count <= 4 else math.ceil(math.log2(count)) + count % 2
    for _ in range(wanted if count > 1 else 0):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]))
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def pair_rounds(nodes: List[int]) -> List[Any]:
    """(kind, {rank: partner}): first inside the nodes, all nodes at once; then between nodes, like with like."""
    members = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    deep = [matchings(len(ranks)) for ranks in members]
    rounds = []
    for step in itertools.zip_longest(*deep, fillvalue=()):
        rounds.append(("inside", [(here[a], here[b]) for here, pairs in zip(members, step) for a, b in pairs]))
    for found in matchings(len(members)):
        rounds.append(("between", [pair for a, b in found for pair in zip(members[a], members[b])]))
    return [(kind, {a: b for pair in pairs for a, b in (pair, pair[::-1])}) for kind, pairs in rounds]


def pair_tests(world: World, quick: bool) -> None:
    small = world.device.type == "cpu"
    size = (2 << 20 if quick else 16 << 20) if small else (64 << 20 if quick else 256 << 20)
    for step, (kind, partners) in enumerate(pair_rounds(world.nodes)):
        said: Dict[str, Any] = {}
        if world.rank in partners:
            try:
                said = with_partner(world, partners[world.rank], size, step)
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        world.broken = world.settle(f"pairs-{step}", said, functools.partial(note_pairs, world, kind, partners, size))
        world.write()
        if world.broken:
            return  # what comes next would hang in the same place


def note_pairs(world: World, kind: str, partners: Dict[int, int], size: int, told: List[Any]) -> bool:
    """Keep what both sides of each pair said; whether one is broken."""
    broken = False
    for a, b in ((a, b) for a, b in sorted(partners.items()) if a < b):
        pair: Dict[str, Any] = {"a": a, "b": b, "kind": kind, "bytes": size}
        errors = [told[rank]["error"] for rank in (a, b) if "error" in told[rank]]
        if errors:
            pair["error"], broken = errors[0], True
        else:
            pair.update(a_to_b=told[a]["rate"], b_to_a=told[b]["rate"], latency=told[a]["latency"])
            pair["wrong"] = told[a]["wrong"] + told[b]["wrong"]
        world.results["pairs"].append(pair)
    return broken


def with_partner(world: World, partner: int, size: int, step: int) -> Dict[str, Any]:
    """The rate at which we send to the partner, alone in our direction, and the time of a small message."""
    low = world.rank < partner
    data = torch.empty(size // 4, dtype=torch.float32, device=world.device)
    word = torch.zeros(1, dtype=torch.float32, device=world.device)
    result: Dict[str, Any] = {"wrong": 0}

    def move(do: str, tensor: Any) -> None:
        exchange([(do, tensor, partner)], PAIR_SECONDS)

    def trips(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            for do in ("send", "receive") if low else ("receive", "send"):
                move(do, word)
        return (time.perf_counter() - began) / (2 * count)

    trips(2)
    result["latency"] = trips(20)
    for sender in (True, False) if low else (False, True):
        if sender:
            data.copy_(tile(payload(world.rank, partner, step), len(data), data))
            move("send", data)  # the first one may have to connect
            world.synchronize()
            began = time.perf_counter()
            for _ in range(PAIR_REPEATS):
                move("send", data)
            move("receive", word)  # all of it has come
            world.synchronize()
            result["rate"] = size * PAIR_REPEATS / (time.perf_counter() - began) / 1e9
        else:
            want = tile(payload(partner, world.rank, step), len(data), data)
            data.fill_(-1)
            for _ in range(PAIR_REPEATS + 1):
                move("receive", data)
            move("send", word)
            world.synchronize()
            result["wrong"] = int((data != want).sum())
    return result


def matrix_product(world: World, quick: bool) -> None:
    """The same product on every rank at the same time. Its numbers are whole, so every rank must get the same ones."""
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


if __name__ == "__main__":
    sys.exit(main())
