"""An all-reduce over MPI_COMM_WORLD by mpi4py, from and to host memory: every sum is checked, and the time is taken."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from array import array
from typing import Any, Dict, List

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes; doubles
QUICK = (8, 64 << 10, 1 << 20)
TIMES = 10
PATTERN = 7  # element i holds (rank + 1) * (i % PATTERN + 1): an error in order, size or sum shows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = f"cannot load mpi4py and its MPI ({error})"
        print(f"verify: {sys.executable} {why}; name one that can: --python", file=sys.stderr)
        return 2
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    planned = int(os.environ.get("WORLD_SIZE", size))
    library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    if size != planned:
        print(
            f"verify: MPI_COMM_WORLD has {size} ranks, the launcher started {planned}: mpi4py uses {library}, which the "
            "mpirun that started this does not belong to; drumbeat doctor --framework mpi tells more",
            file=sys.stderr,
        )
        return 3
    hosts = world.gather(socket.gethostname(), root=0)
    rows: List[Dict[str, Any]] = [_measure(MPI, world, rank, size, each) for each in (QUICK if args.quick else SIZES)]
    if rank == 0:
        results = {"library": library, "ranks": size, "hosts": hosts, "rows": rows, "python": sys.version.split()[0]}
        with open(args.out + ".part", "w", encoding="utf-8") as file:
            json.dump(results, file)
        os.replace(args.out + ".part", args.out)
    return 0 if all(row["right"] == size for row in rows) else 1


def _measure(MPI: Any, world: Any, rank: int, size: int, length: int) -> Dict[str, Any]:
    count = length // 8
    mine = array("d", [(rank + 1.0) * (i % PATTERN + 1) for i in range(count)])
    total = size * (size + 1) / 2
    times = []
    right = True
    for _ in range(TIMES):
        summed = array("d", bytes(length))
        world.Barrier()
        begin = MPI.Wtime()
        world.Allreduce([mine, MPI.DOUBLE], [summed, MPI.DOUBLE], op=MPI.SUM)
        times.append(world.allreduce(MPI.Wtime() - begin, op=MPI.MAX))
        right = right and all(summed[i] == total * (i % PATTERN + 1) for i in range(count))
    return {"bytes": length, "seconds": sorted(times)[TIMES // 2], "right": world.allreduce(int(right), op=MPI.SUM)}


if __name__ == "__main__":
    sys.exit(main())
