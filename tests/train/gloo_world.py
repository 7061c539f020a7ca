"""Processes that stay alive for all tests, in one gloo world for each number of ranks.

A fresh world costs seconds (importing torch, meeting); in a standing one a test costs a tenth of a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

# Slow to import: once, in the process that all others are forked from.
_PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "numpy", "transformers.models.llama.modeling_llama"),
    *(f"drumbeat.train.recipes.{name}" for name in ("llama", "bert", "resnet", "wide_resnet")),
    *("drumbeat.train.prepare", "drumbeat.train.verify_resume"),
]


def freeze_libraries() -> None:
    """Keep what the libraries hold (400,000 objects) out of every collection of garbage, which would take 0.2 s each; a short
    run makes three. The training loop freezes and unfreezes as well: that would bring them back, so it must not here."""
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def serve(rank: int, size: int, pipe: Connection, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    from drumbeat import metrics

    freeze_libraries()
    torch.set_num_threads(1)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})
    os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(min(2, size))})
    while True:
        order = pipe.recv()
        if order is None:
            break
        function, args = order
        environ = dict(os.environ)
        metrics._fd = None  # a process reports to one file for life; this one lives through many tests
        try:
            if size > 1 and not dist.is_initialized():
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
            pipe.send((True, function(*args)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os.environ.clear()
        os.environ.update(environ)
    if dist.is_initialized():
        dist.destroy_process_group()


def alone(output: str, function: Callable[..., int], args: Any) -> None:
    import torch

    freeze_libraries()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        code = function(*args)
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    os._exit(code)


class GlooWorld:
    """Worlds that stay: one for each size that was asked for, as torch keeps groups of an earlier world in caches."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOADED)
        self.folder = tempfile.mkdtemp(prefix="gloo-")
        self.worlds = 0
        self.meets = 2  # more attempts to meet
        self.ranks: Dict[int, List[Tuple[Connection, Any]]] = {}

    def _world(self, size: int) -> List[Tuple[Connection, Any]]:
        if size not in self.ranks:
            self.worlds += 1
            self.ranks[size] = []
            for rank in range(size):
                ours, theirs = self.context.Pipe()
                args = (rank, size, theirs, f"{self.folder}/world-{self.worlds}")
                process = self.context.Process(target=serve, args=args, daemon=True)
                process.start()
                self.ranks[size].append((ours, process))
        return self.ranks[size]

    def run(self, function: Callable[..., Any], *args: Any, size: int = 4, seconds: float = 600) -> List[Any]:
        """`function(*args)` on ranks 0 to size - 1; their results in order. An error on any rank is raised here."""
        pipes = [pipe for pipe, _ in self._world(size)]
        for pipe in pipes:
            pipe.send((function, args))
        answers = {}
        end = time.monotonic() + seconds
        while len(answers) < size and all(fine for fine, _ in answers.values()):
            waiting = [pipe for i, pipe in enumerate(pipes) if i not in answers]
            ready = multiprocessing.connection.wait(waiting, end - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                answers[pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type,union-attr]
        failed = {rank: value for rank, (fine, value) in answers.items() if not fine}
        if failed or len(answers) < size:
            self._end(size, 0)
            unmet = any("in serve\n    dist.init_process_group" in value for value in failed.values())
            if unmet and self.meets:  # no rank has begun: a stranger's connection can spoil gloo's first meeting
                self.meets -= 1
                return self.run(function, *args, size=size, seconds=seconds)
            raise AssertionError(failed or f"after {seconds} s only ranks {sorted(answers)} had answered")
        return [answers[rank][1] for rank in range(size)]

    def start(self, output: Path, function: Callable[..., int], *args: Any) -> multiprocessing.process.BaseProcess:
        """A process of its own in which torch is imported already. What it prints goes to a file, and its exit code is what
        `function` returns."""
        output.unlink(missing_ok=True)
        process = self.context.Process(target=alone, args=(str(output), function, args))
        process.start()
        return process

    def _end(self, size: int, patience: float) -> None:
        for pipe, process in self.ranks.pop(size):
            if patience:
                pipe.send(None)
                process.join(patience)
            process.kill()
            process.join()

    def close(self) -> None:
        for size in [*self.ranks]:
            self._end(size, 10)
