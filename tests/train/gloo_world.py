"""Four processes that stay alive for a whole test module and form gloo worlds of any size up to four.

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
from typing import Any, Callable, List

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


def serve(rank: int, pipe: Connection, folder: str) -> None:
    import torch
    import torch.distributed as dist

    freeze_libraries()
    torch.set_num_threads(1)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    meeting = ""
    while True:
        order = pipe.recv()
        if order is None:
            break
        function, args, size, fresh = order
        try:
            if dist.is_initialized() and fresh != meeting:
                dist.destroy_process_group()
            os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})
            os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(min(2, size))})
            if size > 1 and not dist.is_initialized():
                dist.init_process_group("gloo", init_method=f"file://{folder}/{fresh}", rank=rank, world_size=size)
            meeting = fresh
            pipe.send((True, function(*args)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
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
    def __init__(self, ranks: int = 4) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOADED)
        self.folder = tempfile.mkdtemp(prefix="gloo-")
        self.ranks, self.size, self.worlds = ranks, 0, 0
        self.meets = 2  # more attempts to meet
        self.pipes: List[Connection] = []
        self.processes: List[Any] = []
        self._start()

    def _start(self) -> None:
        self.size = 0
        for rank in range(self.ranks):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=serve, args=(rank, theirs, self.folder), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, size: int = 4, seconds: float = 600) -> List[Any]:
        """`function(*args)` on ranks 0 to size - 1; their results in order. An error on any rank is raised here."""
        if size != self.size:
            if self.size:  # torch keeps groups of an earlier world in caches: fresh processes are cheap and clean
                self.close(0)
                self._start()
            self.worlds += 1
            self.size = size
        for pipe in self.pipes[:size]:
            pipe.send((function, args, size, f"world-{self.worlds}"))
        answers = {}
        end = time.monotonic() + seconds
        while len(answers) < size and all(fine for fine, _ in answers.values()):
            waiting = [pipe for i, pipe in enumerate(self.pipes[:size]) if i not in answers]
            ready = multiprocessing.connection.wait(waiting, end - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                answers[self.pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type]
        failed = {rank: value for rank, (fine, value) in answers.items() if not fine}
        if failed or len(answers) < size:
            self.close(0)
            self._start()
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

    def close(self, patience: float = 10) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            if patience:
                pipe.send(None)
                process.join(patience)
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
