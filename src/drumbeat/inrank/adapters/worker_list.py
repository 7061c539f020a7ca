"""TensorFlow and PaddlePaddle: the list of ranks that they need, set when a program asks for it.

Both need the addresses and ports of all ranks (TF_CONFIG, PADDLE_TRAINER_ENDPOINTS): the ranks meet once at
MASTER_ADDR:MASTER_PORT, which neither framework uses itself, and exchange them. Values set by the program or its user are
kept.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from typing import Any, Callable, List, Tuple

_PATIENCE = 300.0  # seconds; frameworks take long to load on a cold file system


def identity() -> Tuple[int, int]:
    """Return this process's number, and the number of processes: one per rank, or one per node."""
    environ = os.environ
    if "RANK" in environ:
        return int(environ["RANK"]), int(environ["WORLD_SIZE"])
    return int(environ.get("NODE_RANK", "0")), int(environ.get("NNODES", "1"))


def exchange(rank: int, world: int) -> List[str]:
    """Return host:port of every process; each port is free on its node."""
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    run = [os.environ.get("DRUMBEAT_RUN"), os.environ.get("DRUMBEAT_ATTEMPT")]
    with socket.socket() as own:
        own.bind(("", 0))
        port = own.getsockname()[1]
        if rank:
            with _dialled(master) as line, line.makefile("rw") as file:
                file.write(json.dumps([run, rank, f"{line.getsockname()[0]}:{port}"]) + "\n")
                file.flush()
                return list(json.loads(file.readline()))
        found = {0: f"{master[0]}:{port}"}
        lines = []
        with socket.create_server(master) as server:
            server.settimeout(_PATIENCE)
            while len(found) < world:
                line = server.accept()[0]
                line.settimeout(10)
                try:
                    theirs, number, address = json.loads(line.makefile().readline(4096))
                except (OSError, ValueError):
                    continue  # not one of our processes
                if theirs == run and 0 < number < world:
                    found[number] = address
                    lines.append(line)
            for line in lines:
                line.sendall((json.dumps([found[number] for number in range(world)]) + "\n").encode())
    return [found[number] for number in range(world)]


def _dialled(master: Tuple[str, int]) -> socket.socket:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection(master, timeout=_PATIENCE)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def before(function: Callable[..., Any], prepare: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*args: Any, **options: Any) -> Any:
        prepare()
        return function(*args, **options)

    return both


def for_tensorflow() -> None:
    rank, world = identity()
    if world > 1 and "TF_CONFIG" not in os.environ:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": exchange(rank, world)}, "task": task})


def for_paddle() -> None:
    rank, world = identity()
    if world > 1 and "PADDLE_TRAINER_ENDPOINTS" not in os.environ:
        workers = exchange(rank, world)
        os.environ["PADDLE_TRAINER_ENDPOINTS"] = ",".join(workers)
        os.environ["PADDLE_CURRENT_ENDPOINT"] = workers[rank]
        os.environ["PADDLE_TRAINER_ID"], os.environ["PADDLE_TRAINERS_NUM"] = str(rank), str(world)
        if not getattr(sys.modules["paddle"], "is_compiled_with_cuda", bool)():
            os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
        os.environ.setdefault("FLAGS_selected_gpus", os.environ.get("LOCAL_RANK", "0"))
        parallel: Any = sys.modules["paddle.distributed.parallel"]
        parallel._global_parallel_env = None  # paddle read it while it was loaded


def adapt(module: Any) -> None:
    if module.__name__ == "paddle.distributed.parallel":
        module.init_parallel_env = before(module.init_parallel_env, for_paddle)
    else:
        module._load_tf_config = before(module._load_tf_config, for_tensorflow)
