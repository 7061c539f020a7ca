"""Run a launcher in the user's interpreter, not in the agent's: `python -c <this file> SETTINGS MODULE <the launcher's
arguments>`.

Launchers exit with 1 whatever happened, so the driver writes a report, as JSON: which rank failed, with which exit code or
signal, or why no rank was started; for a stage of a script also that all ranks ended well, or how the launcher itself ended.
While a stage runs, a file lies beside its report: if it is left behind, the launcher was killed, or its script did not wait
for it. A rank that ends while the launcher goes on is recorded at once, in a file of lines. Ranks write to their own logs; if
a script has redirected the launcher's output, say to a pipe into tee, their lines are copied there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any, Callable, ClassVar, Dict, List, Set


class Copier(threading.Thread):
    """Copies the ranks' output to our own, with the rank before each line."""

    def __init__(self, folder: str, streams: Dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.folder, self.streams = folder, streams
        self.places: Dict[str, int] = {}
        self.rest: Dict[str, bytes] = {}
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.2):
            self.copy()

    def finish(self) -> None:
        self.done.set()
        if self.is_alive():
            self.join(10)
        self.copy()

    def copy(self) -> None:
        for name in sorted(os.listdir(self.folder)):
            found = re.match(r"rank-(\d+)\.(out|err)$", name)
            if found and found.group(2) in self.streams:
                self.copy_one(name, found.group(1), self.streams[found.group(2)])

    def copy_one(self, name: str, rank: str, target: int) -> None:
        with open(os.path.join(self.folder, name), "rb") as file:
            file.seek(self.places.get(name, 0))
            data = self.rest.pop(name, b"") + file.read(1 << 22)
            self.places[name] = file.tell()
        whole, _, self.rest[name] = data.rpartition(b"\n")
        if whole:
            mark = b"[rank %s] " % rank.encode()
            lines = [mark + line for line in whole.split(b"\n")]
            os.write(target, b"\n".join(lines) + b"\n")

    def skip(self) -> Copier:
        """Skip the output of earlier launchers of the same script."""
        for name in os.listdir(self.folder):
            self.places[name] = os.path.getsize(os.path.join(self.folder, name))
        return self


def redirected(settings: Dict[str, Any]) -> Dict[str, int]:
    """Return our streams that no longer go to the log that the agent opened for us."""
    streams = {}
    for stream, fd in (("out", 1), ("err", 2)):
        try:
            same = os.path.sameopenfile(fd, os.open(settings["log"] + "." + stream, os.O_RDONLY))
        except OSError:
            same = True
        if not same and os.fstat(fd).st_rdev != os.stat(os.devnull).st_rdev:
            streams[stream] = fd
    return streams


class Rank(subprocess.Popen):  # type: ignore[type-arg]
    """A process started by a launcher. `gone` lists the ranks among them, in the order in which they were seen to have ended."""

    log = ""  # the file in which their ends are recorded
    running: ClassVar[List[Rank]] = []
    gone: ClassVar[List[Rank]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        env = options.get("env") or {}
        super().__init__(*args, **options)
        self.rank, self.ended = -1, 0.0
        if str(env.get("RANK", "")).isdigit() and "LOCAL_RANK" in env:
            self.rank = int(env["RANK"])
            Rank.running.append(self)

    def poll(self) -> Any:
        code = super().poll()
        if code is not None and self in Rank.running:
            Rank.note()
        return code

    @staticmethod
    def note() -> None:
        """Record the same time for all ranks that have ended by now: a launcher checks one after another, which must not make
        one look first."""
        now = time.time()
        gone = [rank for rank in Rank.running if super(Rank, rank).poll() is not None]
        for rank in gone:
            rank.ended = now
            Rank.running.remove(rank)
        Rank.gone += gone
        if Rank.log:
            lines = [json.dumps({"rank": rank.rank, "exit_code": rank.returncode, "t": now}) + "\n" for rank in gone]
            with contextlib.suppress(OSError), open(Rank.log, "a") as file:
                file.write("".join(lines))


def write(settings: Dict[str, Any], failures: List[Dict[str, Any]], refused: str = "", exit_code: int = 0) -> None:
    """Write the ends. `exit_code`: of a launcher that failed although none of its ranks did, or before it had any."""
    with open(settings["report"] + ".tmp", "w") as file:
        json.dump({"failures": failures, "refused": refused, "exit_code": exit_code}, file)
    os.replace(settings["report"] + ".tmp", settings["report"])


def ended(code: int) -> int:
    return 128 - code if code < 0 else code


def code_of(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(bool(end.code))


def worker_of(shim: List[str], words: List[str]) -> List[str]:
    """Return the worker's part of a launcher's command line, which follows our shim."""
    for place in range(len(words) - len(shim)):
        if shim and words[place : place + len(shim)] == shim:
            return words[place + len(shim) :]
    return []


def program(shim: List[str], words: List[str]) -> str:
    """Return the user's program in a launcher's command line, which follows our shim and the interpreter."""
    worker = worker_of(shim, words)
    if not worker:
        return ""
    if os.path.basename(worker[0]).startswith("python"):
        return next((word for word in worker[1:] if not word.startswith("-")), worker[0])
    return worker[0]


def by_torch(settings: Dict[str, Any], launch: Callable[[], Any], arguments: List[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    signalled: Set[int] = set()  # processes that torchrun ends because another one failed: it logs each of them

    def note(record: logging.LogRecord) -> bool:
        signalled.update(map(int, re.findall(r"process (\d+) closing signal", record.getMessage())))
        return True

    logging.getLogger(SignalException.__module__).addFilter(note)
    try:
        launch()
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        ended_at = {rank.pid: rank.ended for rank in Rank.gone}  # torchrun's own times are whole seconds
        failures = [{
            "rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode,
            "t": ended_at.get(failure.pid, failure.timestamp), "by_launcher": failure.pid in signalled,
        } for rank, failure in error.failures.items()]  # fmt: skip
        write(settings, failures)
        if settings["redirected"]:  # the table would go to the script's own log
            error.name = program(settings.get("shim", []), arguments) or error.name  # not the shim's
            print(error.format_msg(), file=sys.stderr)  # type: ignore[no-untyped-call]  # its text was made with the old name
        return ended(error.get_first_failure()[1].exitcode)
    except subprocess.CalledProcessError as error:  # accelerate starts a single rank without torchrun
        write(settings, [{"rank": settings["first"], "exit_code": error.returncode, "t": time.time()}])
        return ended(error.returncode)
    return 0


def torchrun(settings: Dict[str, Any], arguments: List[str]) -> int:
    # Agents of a later attempt must not use the store of an earlier one.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from torch.distributed import run

    return by_torch(settings, lambda: run.run(run.parse_args(arguments)), arguments)  # type: ignore[no-untyped-call]


def accelerate(settings: Dict[str, Any], arguments: List[str]) -> int:
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    from accelerate.commands import launch

    simple_launcher = launch.simple_launcher

    def one_process(args: Any) -> None:
        """Start one process without a rank, as accelerate does with --cpu, and without GPUs."""
        processes, nodes = args.num_processes or 1, args.num_machines or 1
        if max(processes, nodes) > 1:
            worker = worker_of(settings.get("shim", []), arguments)
            cpu = bool(args.cpu or args.use_cpu) or not has_gpu()
            raise Refused(several_wanted(processes, nodes, cpu, worker))
        args.quiet = False  # with --quiet it would not say how the process failed
        simple_launcher(args)

    launch.simple_launcher = one_process
    sys.argv = ["accelerate-launch", *arguments]
    try:
        return by_torch(settings, launch.main, arguments)
    except Refused as why:
        write(settings, [], refused=str(why))
        if settings["redirected"]:  # otherwise drumbeat reports it at the run's end
            print(f"drumbeat: {why}", file=sys.stderr)
        return 2


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() or any(
        hasattr(torch, kind) and getattr(torch, kind).is_available() for kind in ("xpu", "npu", "mlu", "musa")
    )


class Refused(Exception):
    """Raised with the reason why no rank is started, and in the next line what to type."""


def several_wanted(processes: int, nodes: int, cpu: bool, worker: List[str]) -> str:
    """Explain why accelerate cannot start these ranks, and give the line to type instead."""
    why = "on CPUs" if cpu else "without --multi_gpu, where it finds no second GPU by itself,"
    other = "" if cpu else "add --multi_gpu; on CPUs: "
    line = f"drumbeat run --nodes {nodes} --ranks-per-node {max(1, processes // nodes)} -- env ACCELERATE_USE_CPU=true"
    return (
        f"{why} accelerate launch starts one process per node that knows no rank, not {processes} ranks\n"
        f"  {other}{line} {' '.join(worker)}"
    )


def deepspeed(settings: Dict[str, Any], arguments: List[str]) -> int:
    from deepspeed.launcher import launch

    sys.argv = ["deepspeed", *arguments]
    try:
        launch.main()
    except SystemExit as end:
        first = next((rank for rank in Rank.gone if rank.returncode), None)
        if first:  # the launcher itself has ended the others
            write(settings, [{"rank": first.rank, "exit_code": first.returncode, "t": first.ended}])
            return ended(first.returncode)
        return code_of(end)
    return 0


def fabric(settings: Dict[str, Any], arguments: List[str]) -> int:
    from torch.distributed import run

    try:
        from lightning.fabric import cli
    except ImportError:
        from lightning_fabric import cli

    def main(words: List[str]) -> None:
        """Call torchrun as Fabric does, with our shim before each rank."""
        place = next(number for number, word in enumerate(words) if not word.startswith("-"))
        worker = ["--no-python", *settings["shim"], sys.executable, "-u", *words[place:]]
        run.run(run.parse_args([*words[:place], *worker]))  # type: ignore[no-untyped-call]

    run.main = main  # type: ignore[assignment]
    sys.argv = ["fabric", "run", *arguments]
    try:
        scripts = [word for word in arguments if word.endswith(".py")]
        return by_torch(settings, cli._main, [*settings["shim"], *scripts])
    except SystemExit as end:
        return code_of(end)


MODULES: Dict[str, Callable[[Dict[str, Any], List[str]], int]] = {
    "torch.distributed.run": torchrun,
    "accelerate.commands.launch": accelerate,
    "deepspeed.launcher.launch": deepspeed,
    "lightning.fabric.cli": fabric,
}


def main() -> int:
    settings, module, arguments = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
    streams = redirected(settings)
    settings["redirected"] = bool(streams)
    Rank.log = settings.get("ended", "")
    subprocess.Popen = Rank  # type: ignore[misc]  # before any launcher is imported
    copier = Copier(settings["folder"], streams).skip()
    if streams:
        copier.start()
    if settings.get("stage"):
        with contextlib.suppress(OSError):
            open(settings["report"] + ".running", "w").close()
    code = 1
    try:
        code = MODULES[module](settings, arguments)
        return code
    except SystemExit as end:
        code = code_of(end)
        raise
    except ImportError as error:
        name = module.split(".")[0]
        if (error.name or "").split(".")[0] != name:
            raise
        print(f"drumbeat: the launcher needs {name} in {sys.executable}: {error}", file=sys.stderr)
        code = 127
        return code
    finally:
        try:
            if streams:
                copier.finish()
        finally:
            with contextlib.suppress(OSError):  # a full disk must not make a successful training fail
                if settings.get("stage") and not os.path.exists(settings["report"]):  # others in the script may fail
                    write(settings, [], exit_code=code)
            with contextlib.suppress(OSError):
                os.unlink(settings["report"] + ".running")


if __name__ == "__main__":
    sys.exit(main())
