"""Train a small byte-level transformer on text that every machine has: the source of Python's own standard library.

An ordinary torch script, one process per rank. It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which drumbeat,
torchrun and most schedulers set; without them it is a world of one. `drumbeat.metrics` is optional.

    drumbeat run --nodes 2 --ranks-per-node 2 -- python examples/train_bytes.py --steps 600
"""

import argparse
import glob
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from drumbeat.metrics import report
except ImportError:  # runs just as well where drumbeat is not installed

    def report(*_args, **_more):
        pass


REQUEUE = 75  # the exit code that says: I was stopped, my state is saved, start me again


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    def __init__(self, width=64, layers=2, heads=4, context=64):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.place.weight, std=0.1)  # which byte it is matters more than where it stands
        nn.init.normal_(self.head.weight, std=0.02)  # the first guess is then even over all bytes

    def forward(self, text):  # text: (batch, context + 1); returns the mean loss of guessing each next byte
        here, following = text[:, :-1], text[:, 1:]
        x = self.blocks(self.embed(here) + self.place.weight[: here.shape[1]])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def read_text(limit=4_000_000):
    """The standard library as one tensor of bytes, the same on every rank; the last 10 % are kept for validation."""
    folder = os.path.dirname(os.__file__)
    whole = bytearray()
    for path in sorted(glob.glob(os.path.join(folder, "*.py"))):
        if os.path.islink(path):
            continue  # Debian's sitecustomize.py leads to /etc, which is another one inside a container
        with open(path, "rb") as file:
            whole += file.read()
    text = torch.frombuffer(whole[:limit], dtype=torch.uint8).long()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def windows(text, count, context, generator):
    starts = torch.randint(len(text) - context - 1, (count,), generator=generator)
    return torch.stack([text[s : s + context + 1] for s in starts.tolist()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sequences", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument(
        "--checkpoint", help="file to save to when stopped (SIGTERM), and to resume from if it is there"
    )
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="save every N steps too")
    args = parser.parse_args()

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))  # from the first moment: a stop may come any time
    torch.set_num_threads(1)  # the ranks share the machine's cores
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(0)  # the same first weights everywhere
    model = ByteModel(context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), fused=True)
    trained = DistributedDataParallel(model) if world > 1 else model
    train, held_back = read_text()
    check = windows(held_back, 256, args.context, torch.Generator().manual_seed(1)).chunk(world)[rank]

    first = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(
            f"{size:,} parameters, {len(train):,} bytes of text, {world} ranks, steps {first} to {args.steps}",
            flush=True,
        )

    def mean_over_ranks(value):
        if world > 1:
            dist.all_reduce(value)
        return value.item() / world

    def validate(step):
        began = time.perf_counter()
        with torch.no_grad():
            loss = mean_over_ranks(model(check))
        if rank == 0:
            seconds = time.perf_counter() - began
            report(step, steps=args.steps, loss=loss, kind="validation", seconds=seconds)
            print(f"step {step:4d}  validation loss {loss:.3f}", flush=True)

    def save(step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.checkpoint + ".part")
        os.replace(args.checkpoint + ".part", args.checkpoint)  # whole or not at all
        report(step, kind="checkpoint", path=args.checkpoint)

    validate(first)
    since = time.perf_counter()
    for step in range(first, args.steps):
        # Each step has its own seed, so a resumed run sees exactly the text that it would have seen.
        batch = windows(train, args.sequences, args.context, torch.Generator().manual_seed(step * world + rank))
        for group in optimizer.param_groups:  # up over 20 steps, down over the last 30 %
            group["lr"] = 5e-3 * min((step + 1) / 20, 1, (args.steps - step) / (0.3 * args.steps))
        loss = trained(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step + 1, steps=args.steps, loss=loss.item(), tokens=args.sequences * args.context)
        if (step + 1) % 50 == 0 and rank == 0:
            rate = 50 * args.sequences * args.context * world / (time.perf_counter() - since)
            since = time.perf_counter()
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % 200 == 0 or step + 1 == args.steps:
            validate(step + 1)
        if args.checkpoint and args.save_every and (step + 1) % args.save_every == 0 and rank == 0:
            save(step + 1)
        # A signal reaches the ranks at different steps; they stop together or they would wait for each other for ever.
        if (step + 1) % 5 == 0 and mean_over_ranks(torch.tensor(float(bool(stop)))) > 0:
            if args.checkpoint and rank == 0:
                save(step + 1)
                print(f"step {step + 1:4d}  stopped by signal; saved {args.checkpoint}", flush=True)
            sys.exit(REQUEUE if args.checkpoint else 128 + signal.SIGTERM)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
