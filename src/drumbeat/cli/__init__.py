"""The command line: one small file per command, imported only when it is asked for.

A command's module has `add_arguments(parser)` and `run(args) -> int`. It parses, calls and prints; logic lives in the
rooms. `drumbeat --help` and a wrong name answer without importing argparse: starting must be cheap.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, List, NoReturn, Optional

from drumbeat.base.signals import EXIT_STORAGE
from drumbeat.cli.streams import OutputError, end, open_streams

# A command is listed here only if it works.
COMMANDS = {
    "run": "start a job here, or join the job, pod or MPI task that you are in",
    "submit": "hand a job to the cluster's scheduler, or to this machine's queue",
    "plan": "show what would happen: variables with reasons, where ranks run",
    "lint": "check a batch script or launch command",
    "init": "write a job file for the training script in a folder",
    "convert": "turn a batch script into a job file; lists what was left out",
    "doctor": "check this node and say what is wrong and how to fix it",
    "facts": "show this node's hardware and software; --capture packs it for support",
    "predict": "predict memory, speed and cost; find the best layout",
    "verify": "test collectives across ranks: values, bandwidth, slow pairs",
    "diagnose": "read logs of any run: what failed first, why, the fix, the network",
    "list": "list your runs, from every folder",
    "watch": "watch a run live: progress, speed, nodes and GPUs",
    "report": "report on a run: speed, time, energy; several runs: scaling",
    "compare": "compare runs side by side: the same as report RUN RUN ...",
    "status": "show the state of a run, or how it ended",
    "logs": "show what the ranks of a run printed",
    "cancel": "end a run; its ranks get time to save",
    "shell": "open a shell on a node of a running job",
    "nodes": "show each node's record; keep jobs off bad nodes",
    "site": "list, show, create and check cluster profiles",
    "demo": "train on 2 emulated nodes here; needs nothing but Python",
    "completion": "print shell completion for bash, zsh or fish",
    "tune": "find the fastest batch, hook or layout with short runs",
    "train": "train a built-in recipe, or fine-tune a model",
}


# These only show something: if their reader has seen enough, that is no error.
VIEWS = (
    "list", "status", "watch", "logs", "report", "compare", "plan", "facts", "nodes", "predict", "site", "completion",
    "-h", "--help", "help", "-V", "--version",
)  # fmt: skip


def main(argv: Optional[List[str]] = None) -> int:
    open_streams()
    words = sys.argv[1:] if argv is None else argv
    code = 128 + 13  # of a command that a broken pipe (SIGPIPE) cut short
    try:
        code = _main(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `drumbeat logs | head`
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0 if not words or words[0] in VIEWS else code
    except OutputError as error:
        print(f"drumbeat {words[0] if words else ''}: cannot write the output: {error.strerror}", file=sys.stderr)
        return EXIT_STORAGE
    except KeyboardInterrupt:
        return 130


def program() -> NoReturn:
    """Run one command as this process, and end the process."""
    gc.set_threshold(50_000)  # a start makes many objects that stay: looking for garbage among them is a tenth of it
    end(main())


def _main(argv: List[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        from drumbeat import __version__

        print(f"drumbeat {__version__}")
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        from drumbeat.base.redact import printable

        near = "".join(f" (did you mean {each}?)" for each in get_close_matches(name, COMMANDS, 1))
        print(f"drumbeat: no command '{printable(name)}'{near}; drumbeat --help lists them", file=sys.stderr)
        return 2
    return _call(name, argv[1:])


def overview() -> str:
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    about = "Starts, proves, watches and explains multi-node training jobs."
    more = "drumbeat COMMAND --help says more. Pages that messages name (docs/...) are in the source tree."
    return "\n".join(["usage: drumbeat COMMAND [options]", "", about, "", *lines, "", more])


def parser_for(name: str):  # type: ignore[no-untyped-def]
    """Build the argparse parser of one command; completion and the docs use it too."""
    import importlib

    from drumbeat.cli.parser import Parser

    module = importlib.import_module("drumbeat.cli." + name.replace("compare", "report"))
    parser = Parser(prog=f"drumbeat {name}", description=COMMANDS[name])
    parser.set_defaults(called=name)
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, module


def _call(name: str, rest: List[str]) -> int:
    from drumbeat.base.problem import Problem
    from drumbeat.base.signals import heed_interrupts

    heed_interrupts()
    parser, module = parser_for(name)
    if "--json-schema" in rest[: rest.index("--") if "--" in rest else None]:
        import importlib  # by name: what travels to pods follows the imports of this file

        schemas = importlib.import_module("drumbeat.cli.schemas")
        if name in schemas.SHAPES:
            importlib.import_module("drumbeat.cli.output").print_json(schemas.schema_of(name))
            return 0
    # Cut here, because argparse would take the first word after `--` for the job file.
    own, after = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, None)
    args = parser.parse_args(own)
    if after is not None:
        if not getattr(args, "takes_command", False):
            parser.error("takes no command after '--'")
        args.after = after
    try:
        return int(module.run(args) or 0)
    except Problem as problem:
        if args.debug:
            raise
        print(f"drumbeat {name}: {problem}", file=sys.stderr)
        return problem.exit_code
    except ModuleNotFoundError as error:
        if args.debug or not error.name:
            raise
        if error.name.startswith("drumbeat."):
            print(f"drumbeat {name}: not part of this drumbeat.pyz; an installed drumbeat has it", file=sys.stderr)
            return 2
        if error.name != "yaml":
            raise
        fix = "pip install PyYAML, or use drumbeat.pyz, which brings it along"
        print(f"drumbeat {name}: PyYAML is not installed for {sys.executable}: {fix}", file=sys.stderr)
        return 2


# Arguments that several commands share, so that they are called and described alike.


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text; --json-schema describes it")
    add_json_schema(parser)


def add_json_schema(parser: Any) -> None:
    """Add --json-schema, which needs no other argument, like --help; the help of --json names it."""
    from argparse import SUPPRESS

    parser.add_argument("--json-schema", action="store_true", help=SUPPRESS)


def add_run(parser: Any, default: str) -> None:
    """Add the RUN argument. `default` says which run is meant if none is named."""
    words = f"name, run id or the start of one, run folder, or scheduler job; {default}"
    parser.add_argument("run", nargs="?", metavar="RUN", help=words)
