"""Entry point of drumbeat.pyz: the commands a person types, and those that only drumbeat calls."""

from __future__ import annotations

from typing import List


def main(arguments: List[str]) -> int:
    from drumbeat.cli.node_entry import COMMANDS
    from drumbeat.cli.streams import open_streams

    open_streams()
    word = arguments[0] if arguments else ""
    if word in COMMANDS:
        return COMMANDS[word](arguments[1:])
    if word == "_host":
        from drumbeat.desk.start.hosted_node import run_host

        return run_host()
    if word in ("_queued", "_now"):
        from drumbeat.desk.start.run import run_queued

        return run_queued(arguments[1:], waits=word == "_queued")
    if word == "_tune":
        from drumbeat.bundle.pinned import removed_after
        from drumbeat.cli.tune import run_submitted

        with removed_after(arguments[2:]):
            return run_submitted(arguments[1])
    from drumbeat import cli

    return cli.main(arguments)
