"""Where drumbeat.pyz begins: the commands a person types, and eight that only drumbeat calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, List

if TYPE_CHECKING:
    from drumbeat.watch.prometheus import TextFile


def main(arguments: List[str]) -> int:
    from drumbeat.cli.streams import open_streams

    open_streams()
    if arguments[:1] == ["_agent"]:
        from drumbeat.agent.main import run_agent

        return run_agent(arguments[1:], _open_textfile)
    if arguments[:1] == ["_node"]:
        from drumbeat.base.signals import heed_interrupts

        heed_interrupts()
        from drumbeat.bundle.pinned import removed_after
        from drumbeat.desk.start.scheduled_node import run_node

        with removed_after(arguments[2:]):
            return run_node(arguments[1])
    if arguments[:1] == ["_host"]:
        from drumbeat.desk.start.hosted_node import run_host

        return run_host()
    if arguments[:1] == ["_files"]:
        import sys

        from drumbeat.runfolder.mirror import serve

        return serve(arguments[1], sys.stdin.buffer, sys.stdout.buffer)
    if arguments[:1] == ["_code"]:
        from drumbeat.desk.start.code_sync import receive

        return receive(arguments[1], arguments[2], arguments[3:])
    if arguments[:1] == ["_shim"]:
        from drumbeat.agent.ranks.shim import run_shim

        return run_shim(arguments[1:])
    if arguments[:1] == ["_stand_in"]:
        from drumbeat.agent.ranks.stand_ins import run_stand_in

        return run_stand_in(arguments[1:])
    if arguments[:1] == ["_tune"]:
        from drumbeat.bundle.pinned import removed_after
        from drumbeat.cli.tune import run_submitted

        with removed_after(arguments[2:]):
            return run_submitted(arguments[1])
    from drumbeat import cli

    return cli.main(arguments)


def _open_textfile(folder: str, run_path: str) -> TextFile:
    from drumbeat.watch.prometheus import TextFile

    return TextFile(folder, run_path)
