"""The commands that only drumbeat calls, on nodes. Pods receive what these can reach, and nothing else."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

from drumbeat.base.signals import EXIT_USAGE, heed_interrupts

if TYPE_CHECKING:
    from drumbeat.watch.prometheus import Publisher


def main(arguments: List[str]) -> int:
    """Start a pod's drumbeat.pyz, which has no other command."""
    from drumbeat.cli.streams import open_streams

    open_streams()
    word = arguments[0] if arguments else ""
    if word not in COMMANDS:
        sys.stderr.write(
            f"drumbeat: this file holds what runs on nodes; type `drumbeat {word}` where you submit jobs\n"
        )
        return EXIT_USAGE
    return COMMANDS[word](arguments[1:])


def _agent(arguments: List[str]) -> int:
    from drumbeat.agent.loop import run_agent

    return run_agent(arguments, _open_textfile)


def _node(arguments: List[str]) -> int:
    heed_interrupts()
    from drumbeat.bundle.pinned import removed_after
    from drumbeat.desk.foreground import run_node

    with removed_after(arguments[1:]):
        return run_node(arguments[0])


def _files(arguments: List[str]) -> int:
    from drumbeat.runfolder.mirror import serve

    return serve(arguments[0], sys.stdin.buffer, sys.stdout.buffer)


def _code(arguments: List[str]) -> int:
    from drumbeat.desk.start.code_sync import receive

    return receive(arguments[0], arguments[1], arguments[2:])


def _shim(arguments: List[str]) -> int:
    from drumbeat.agent.ranks.shim import run_shim

    return run_shim(arguments)


def _stand_in(arguments: List[str]) -> int:
    from drumbeat.agent.ranks.stand_ins import run_stand_in

    return run_stand_in(arguments)


def _track(arguments: List[str]) -> int:
    from drumbeat.runfolder.tracker import track

    return track(*arguments)


def _open_textfile(folder: str, run_path: str) -> Optional[Publisher]:
    if not folder and "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ:  # of a TrainJob
        return None
    from drumbeat.watch.prometheus import Publisher

    return Publisher(folder, run_path, os.environ)


COMMANDS: Dict[str, Callable[[List[str]], int]] = {
    "_agent": _agent,
    "_code": _code,
    "_files": _files,
    "_node": _node,
    "_shim": _shim,
    "_stand_in": _stand_in,
    "_track": _track,
}
