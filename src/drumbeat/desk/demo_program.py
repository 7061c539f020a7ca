"""A training that needs nothing but Python: ranks fit a line together and average their gradients over TCP.

drumbeat demo
"""

import os
import random
import socket
import struct
import time
from typing import List, Sequence, Tuple

STEPS, BATCH = 200, 256
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ADDRESS = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 29500)))
SENT = struct.Struct("ddd")


def connect() -> List[socket.socket]:
    """Connect the ranks: rank 0 to all others, each of the others to rank 0 only."""
    if RANK == 0:
        with socket.create_server(ADDRESS) as server:
            return [server.accept()[0] for _ in range(WORLD - 1)]
    for _ in range(300):
        try:
            return [socket.create_connection(ADDRESS, timeout=60)]
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise SystemExit("rank 0 does not answer")


def receive(connection: socket.socket) -> Tuple[float, ...]:
    data = b""
    while len(data) < SENT.size:
        part = connection.recv(SENT.size - len(data))
        if not part:
            raise SystemExit("another rank is gone")
        data += part
    return SENT.unpack(data)


def mean(values: Sequence[float], others: List[socket.socket]) -> Sequence[float]:
    """Average over all ranks."""
    if RANK:
        others[0].sendall(SENT.pack(*values))
        return receive(others[0])
    total = [sum(column) / WORLD for column in zip(values, *map(receive, others))]
    for other in others:
        other.sendall(SENT.pack(*total))
    return total


def main() -> None:
    others, draw = connect(), random.Random(RANK)
    slope, offset = 0.0, 0.0  # to be learned: 2 and -1
    for step in range(1, STEPS + 1):
        xs = [draw.uniform(-1, 1) for _ in range(BATCH)]
        wrong = [slope * x + offset - (2 * x - 1 + draw.gauss(0, 0.1)) for x in xs]
        mine = (sum(e * e for e in wrong), sum(2 * e * x for e, x in zip(wrong, xs)), sum(2 * e for e in wrong))
        loss, to_slope, to_offset = (each / BATCH for each in mean(mine, others))
        slope, offset = slope - 0.1 * to_slope, offset - 0.1 * to_offset
        if RANK == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step}/{STEPS} loss {loss:.4f}", flush=True)
        time.sleep(0.01)
    print(f"rank {RANK} of {WORLD}: y = {slope:.2f} x {offset:+.2f}", flush=True)


if __name__ == "__main__":
    main()
