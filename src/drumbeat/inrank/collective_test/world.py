"""This rank and the others: their ranks, their reports, and the results that rank 0 gathers."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import sys
import time
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist

from .gpu import own_gpu

GATHER = datetime.timedelta(seconds=300)


class World:
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
        stores: Any = dist  # of which torch exports no types
        self.store = stores.TCPStore(address, port, self.size, is_master=self.rank == 0, timeout=GATHER)
        named: Dict[str, Any] = {"device_id": self.device} if gpu else {}
        dist.init_process_group(
            self.backend, store=stores.PrefixStore("group", self.store), rank=self.rank, world_size=self.size, **named
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
        """Gather every rank's report on rank 0; the others get nothing."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        if self.rank:
            return []
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)], GATHER)
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def settle(self, name: str, value: Any, rule: Callable[[List[Any]], Any]) -> Any:
        """Send every rank the value that rank 0 computes from all reports; keep it small, since thousands may ask for it."""
        told = self.gather(name, value)
        if self.rank == 0:
            self.store.set(f"{name}/settled", json.dumps(rule(told)))
        return json.loads(self.store.get(f"{name}/settled"))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"verify: {text}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Replace the results atomically: a reader sees the old ones or the new ones."""
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
        """Leave the group, rank 0 last because it hosts the store. After a failure, a clean shutdown of the group could hang."""
        self.write()
        if sys.exc_info()[0] is not None:
            return
        self.gather("bye", 0)
        if self.broken:
            sys.stderr.flush()
            os._exit(0)
        dist.destroy_process_group()
