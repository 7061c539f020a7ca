"""drumbeat logs: what the ranks of a run printed."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="its id, the start of it, its folder, or its job's number; default: the newest",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="of this rank only")
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt only; default: the last one")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")


def run(args: Any) -> int:
    from drumbeat.desk.runs import Run, find_run, status
    from drumbeat.problem import Problem
    from drumbeat.runfolder.read import Tail

    found = find_run(args.run, os.environ)
    tails: Dict[str, Tail] = {}

    def show(each: Run, final: bool) -> bool:
        seen = False
        for path, prefix in _files(each, args.rank, args.attempt):
            seen = True
            for line in tails.setdefault(path, Tail(path)).lines(final):
                print(f"{prefix}{line}")
        for path in _merged(each, args.attempt):
            for line in tails.setdefault(path, Tail(path)).lines(final):
                rank, _, text = (line.split(" ", 2) + ["", ""])[:3]
                if args.rank is None or rank == str(args.rank):
                    seen = True
                    print(text if args.rank is not None else f"[{rank}] {text}")
        return seen

    while args.follow and status(found).state in ("queued", "running"):
        show(found, False)
        time.sleep(0.3)
    if not show(found, True):
        who = "" if args.rank is None else f" of rank {args.rank}"
        raise Problem(f"{found.run_id} has no log{who}", f"look into {found.folder.path}/nodes")
    return 0


def _merged(found: Any, attempt: int | None) -> List[str]:
    """One file a node, where the job is large."""
    paths = []
    for node in found.folder.nodes():
        attempts = node.attempts()
        paths += [node.merged(each) for each in (attempts[-1:] if attempt is None else [attempt])]
    return [path for path in paths if os.path.exists(path)]


def _files(found: Any, rank: int | None, attempt: int | None) -> List[tuple[str, str]]:
    """Paths with the prefix of their lines; both streams of a rank, standard output first."""
    files = []
    for node in found.folder.nodes():
        attempts = node.attempts()
        for number in attempts[-1:] if attempt is None else [attempt]:
            for each, stem in sorted(node.ranks(number).items()):
                if rank is None or rank == each:
                    prefix = f"[{each}] " if rank is None else ""
                    files += [(f"{stem}.{stream}", prefix) for stream in ("out", "err")]
    return files
