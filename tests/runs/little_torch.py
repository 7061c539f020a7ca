"""A package named torch that starts processes as torch.distributed.run does, in a tenth of the time: for what is about the
launcher and not about torch. The real one is used beside it, in test_scripts.py and test_wrapped_launchers.py."""

RUN = """
import argparse, os, subprocess, sys, time
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, Failure

def parse_args(words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nnodes", "node-rank", "rdzv-backend", "master-addr", "master-port", "nproc-per-node", "max-restarts",
                 "local-addr"):
        parser.add_argument("--" + name)
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("worker", nargs=argparse.REMAINDER)
    return parser.parse_args(words)

def those_that_failed(ranks, local):
    failed = {rank: each for rank, each in ranks.items() if each.poll()}
    return {rank: Failure(rank % local, each.pid, each.poll(), time.time()) for rank, each in failed.items()}

def run(args):
    local, node = int(args.nproc_per_node), int(args.node_rank)
    world = local * int(args.nnodes)
    worker = args.worker[args.worker[:1] == ["--"]:]
    ranks = {}
    for number in range(local):
        rank = node * local + number
        ranks[rank] = subprocess.Popen(worker, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world), "MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port})
    while any(each.poll() is None for each in ranks.values()):
        if any(each.poll() for each in ranks.values()):
            time.sleep(0.2)
            failed = those_that_failed(ranks, local)
            [each.kill() for each in ranks.values()]
            raise ChildFailedError(failed)
        time.sleep(0.05)
    failed = those_that_failed(ranks, local)
    if failed:
        raise ChildFailedError(failed)

if __name__ == "__main__":
    sys.exit("not by drumbeat")
"""
ERRORS = """
from collections import namedtuple
Failure = namedtuple("Failure", "local_rank pid exitcode timestamp")

class ChildFailedError(Exception):
    def __init__(self, failures):
        self.name, self.failures = "a shim", failures
        super().__init__(self.format_msg())

    def format_msg(self):
        return f"its own table: {self.name} FAILED"

    def get_first_failure(self):
        return next(iter(self.failures.items()))
"""


def install(folder, python):
    """Its package under lib and its programs under bin; what to put on PYTHONPATH and PATH."""
    package, programs = folder / "lib" / "torch", folder / "bin"
    multiprocessing = package / "distributed" / "elastic" / "multiprocessing"
    multiprocessing.mkdir(parents=True)
    programs.mkdir()
    for place in (package, package / "distributed", package / "distributed" / "elastic", multiprocessing):
        (place / "__init__.py").write_text("")
    (package / "distributed" / "run.py").write_text(RUN)
    (multiprocessing / "errors.py").write_text(ERRORS)
    (multiprocessing / "api.py").write_text("class SignalException(Exception):\n    sigval = 15\n")
    launcher = programs / "torchrun"
    launcher.write_text(f"#!{python}\nraise SystemExit('not by drumbeat')\n")
    launcher.chmod(0o755)
    return str(package.parent), str(programs)
