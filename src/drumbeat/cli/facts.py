"""drumbeat facts: what this node, a folder or a capture has."""

from __future__ import annotations

import argparse
import os
import sys

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="PLACE", help="another machine: a folder laid out like its /, or a capture")
    add_json(parser)
    parser.add_argument(
        "--capture", metavar="FILE.tar.gz", help="pack what was read, to use with --root elsewhere; no secrets"
    )


def run(args: argparse.Namespace) -> int:
    from drumbeat.machine.gather import gather
    from drumbeat.machine.replay import RecordingHost, open_host

    host = open_host(args.root)
    recording = RecordingHost(host) if args.capture else None
    facts = gather(recording or host)
    if recording:
        try:
            size = recording.write_capture(args.capture)
        except OSError as error:
            raise Problem(f"{args.capture}: {error.strerror}", f"choose a writable folder: {os.getcwd()}?") from None
        print(f"drumbeat facts: wrote {printable(args.capture)} ({size} bytes)", file=sys.stderr)
    if args.json:
        print_json(facts)
    elif not recording:
        from drumbeat.machine.table import table

        print(table(facts))
    return 0
