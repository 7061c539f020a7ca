"""A script that fails on one rank, to see what drumbeat makes of it."""

import os

rank = os.environ["RANK"]
print(f"rank {rank} is here", flush=True)
batch = {"inputs": 1} if rank == "2" else {"inputs": 1, "labels": 2}
print(f"rank {rank} has {batch['labels']} labels")
