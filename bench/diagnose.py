"""How long `drumbeat diagnose` takes on a large log, and how much memory. Prints seconds, MB/s and peak memory.

    python bench/diagnose.py [--megabytes 300] [--kind mixed|nccl|calls|random|tracebacks|giant]

mixed: NCCL's start-up of 64 ranks, then progress lines of all ranks, then a failure. nccl: Channel and tuning lines.
calls: NCCL's lines of every collective call, with addresses. random: every line of another shape, so that no cache helps.
tracebacks: exceptions that were caught and printed. giant: one line.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time


def head(ranks):
    for rank in range(ranks):
        at = f"node{rank // 8:03d}:{4000 + rank}:{5000 + rank} [{rank % 8}] NCCL INFO"
        yield f"{at} NCCL version 2.21.5+cuda12.4"
        yield f"{at} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.{rank}<0>"
        yield f"{at} Using network IB"
        comm = f"comm 0x5{rank:04x} rank {rank} nranks {ranks} cudaDev {rank % 8} busId 1a000 commId 0x77"
        yield f"{at} {comm} - Init START"
        for channel in range(16):
            peer = (rank + 1) % ranks
            via = "via NET/IB/0/GDRDMA" if peer // 8 != rank // 8 else "via P2P/CUMEM/read"
            side = "[send] " if "NET" in via else ""
            yield f"{at} Channel {channel:02d}/0 : {rank}[{rank % 8}] -> {peer}[{peer % 8}] {side}{via}"
        yield f"{at} {comm} - Init COMPLETE"


def mixed(size, rng):
    ranks = 64
    yield from head(ranks)
    written, step = 0, 0
    while written < size:
        step += 1
        for rank in range(ranks):
            line = (
                f"[rank{rank}]: 2026-01-02 03:{step // 60 % 60:02d}:{step % 60:02d},{rng.randrange(1000):03d} INFO train "
                f"step {step} loss {rng.uniform(1, 9):.4f} lr 3.0e-04 tokens/s {rng.randrange(9000, 12000)} mem 61.3 GiB"
            )
            written += len(line) + 1
            yield line
        if step % 1000 == 0:
            yield f"[rank0]: UserWarning: failed to reach the tracking server, retrying in {step % 7} s"
    yield "[rank9]: Traceback (most recent call last):"
    yield '[rank9]:   File "/home/u/train.py", line 12, in <module>'
    yield "[rank9]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def nccl(total, rng):
    yield from head(64)
    written = 0
    while written < total:
        rank = rng.randrange(64)
        at = f"node{rank // 8:03d}:{4000 + rank}:{5000 + rank} [{rank % 8}] NCCL INFO"
        if rng.random() < 0.3:
            line = (
                f"{at} Channel {rng.randrange(32):02d}/0 : {rank}[1] -> {(rank + 8) % 64}[1] [send] via NET/IB/0/GDRDMA"
            )
        else:
            cost = f"Algo {rng.randrange(6)} proto {rng.randrange(3)} time {rng.random():f}"
            line = f"{at} {rng.randrange(1 << 30)} Bytes -> {cost}"
        written += len(line) + 1
        yield line


def noise(size, rng):
    letters = "abcdefghijklmnopqrstuvwxyz     0123456789"
    written = 0
    while written < size:
        line = "".join(rng.choices(letters, k=rng.randrange(60, 160)))
        written += len(line) + 1
        yield line


def calls(size, rng):
    yield from head(64)
    written, count = 0, 0
    while written < size:
        count += 1
        rank = rng.randrange(64)
        call = rng.choice(("AllReduce", "AllGather", "ReduceScatter", "Broadcast"))
        line = (
            f"node{rank // 8:03d}:{4000 + rank}:{5000 + rank} [{rank % 8}] NCCL INFO {call}: opCount {count:x} "
            f"sendbuff {rng.getrandbits(47):#x} recvbuff {rng.getrandbits(47):#x} acc (nil) count {rng.randrange(1 << 24)} "
            f"datatype 9 op 0 root 0 comm {rng.getrandbits(44):#x} [nranks=64] stream {rng.getrandbits(44):#x}"
        )
        written += len(line) + 1
        yield line


def tracebacks(size, rng):
    written, step = 0, 0
    while written < size:
        step += 1
        for line in (
            f"step {step} loss {rng.uniform(1, 9):.4f}",
            "Traceback (most recent call last):",
            f'  File "/home/u/data/{rng.randrange(99)}.py", line {rng.randrange(900)}, in fetch',
            f"    return self.shards[{rng.randrange(9999)}]",
            '  File "/home/u/data/store.py", line 44, in read',
            "    return self.connection.get(key)",
            f"acme.errors.FetchError: could not fetch shard {rng.randrange(9999)} of {rng.getrandbits(60):x}",
            "falling back to the copy",
        ):
            written += len(line) + 1
            yield line


def giant(size, rng):
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     0123456789", k=4096))
    yield letters * (size // 4096)


KINDS = {
    "mixed": mixed, "nccl": nccl, "calls": calls, "random": noise, "tracebacks": tracebacks, "giant": giant,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--kind", choices=tuple(KINDS), default="mixed")
    args = parser.parse_args()
    lines = KINDS[args.kind](args.megabytes * 10**6, random.Random(1))
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        count = 0
        for line in lines:
            count += 1
            log.write(line + "\n")
        log.flush()
        size = os.path.getsize(log.name)
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "drumbeat", "diagnose", log.name], check=True)
        seconds = time.monotonic() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak, cpu = used.ru_maxrss / 1024, used.ru_utime + used.ru_stime
    rate = size / 1e6 / seconds
    print(
        f"\n{args.kind}: {size / 1e6:.0f} MB, {count:,} lines: {seconds:.1f} s ({cpu:.1f} s CPU, "
        f"{rate:.0f} MB/s), peak {peak:.0f} MB"
    )


if __name__ == "__main__":
    main()
