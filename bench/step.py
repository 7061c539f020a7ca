"""The script both sides run: gloo DDP on a small model. Rank 0 writes when its first step ended and how long steps took."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 256)
taken = []
first = 0.0
for _ in range(steps):
    begin = time.perf_counter()
    loss = (model(data) - data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    taken.append(time.perf_counter() - begin)
    first = first or time.time()
if dist.get_rank() == 0:
    with open(os.environ["BENCH_OUT"], "w") as file:
        json.dump({"first": first, "step": statistics.median(taken[steps // 10 :])}, file)
dist.destroy_process_group()
