"""The parser of every command: short help by default, `--help-all` for every option, hints for near misses."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any, List, NoReturn, Optional, Sequence

from drumbeat.base.redact import printable

_JOB_FILES = (".yaml", ".yml")


class Parser(argparse.ArgumentParser):
    """Parser of one command. An action's attribute `rare` leaves it to --help-all; `short` is its text in the short help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, words: Optional[Sequence[str]] = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if words is None else words
        if "--help-all" in words:
            print(super().format_help(), end="")
            self.exit()
        args, unknown = self.parse_known_args(words, namespace)
        if unknown and getattr(args, "job", "") is None and unknown[0].endswith(_JOB_FILES):
            args.job = unknown.pop(0)  # argparse takes it for the job file only right after the word before it
        if unknown:
            self._refuse(args, unknown)
        return args

    def exit(self, status: int = 0, message: Optional[str] = None) -> NoReturn:
        sys.stdout.flush()  # here, where an output that cannot be written is still noticed
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print like argparse, but let errors of the output through."""
        (file or sys.stderr).write(message or "")

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def format_help(self) -> str:
        """Format the short help: only the options that most people need, in a few words."""
        rare = sum(1 for action in self._actions if getattr(action, "rare", False))
        if not rare:
            return super().format_help()
        whole = {action: action.help for action in self._actions}
        for action in self._actions:
            action.help = argparse.SUPPRESS if getattr(action, "rare", False) else getattr(action, "short", action.help)
        try:
            text = super().format_help()
        finally:
            for action, words in whole.items():
                action.help = words
        return f"{text.rstrip()}\n\n{rare} more options: {self.prog} --help-all\n"

    def _refuse(self, args: Any, unknown: List[str]) -> NoReturn:
        first = unknown[0]
        if first.startswith("-"):
            name = first.partition("=")[0]
            if name[2:] in getattr(args, "only_keys", ()):
                self.error(f"{name[2:]} is a key of the job file, and not an option")
            known = [option for action in self._actions for option in action.option_strings]
            near = [option for option in known if option.startswith(name)]
            if name == "-n" and "--ranks-per-node" in known:  # of mpirun and its like
                near = ["--ranks-per-node, or --nodes"]
            near = near or difflib.get_close_matches(name.replace("_", "-"), known, 1)
            self.error(f"unknown option {name}" + (f" (did you mean {near[0]}?)" if near else ""))
        if getattr(args, "takes_command", False):
            before = getattr(args, "job", None)
            if before and before.endswith(_JOB_FILES) and first.endswith(_JOB_FILES):
                self.error(f"unexpected {first}: {before} is the job file already")
            part = getattr(args, "what", "")  # of tune
            start = f"{self.prog} {part}".strip()
            command = " ".join([before] if before and not before.endswith((*_JOB_FILES, ".json")) else [])
            words = f"{command} {' '.join(unknown)}".strip()
            self.error(f"unexpected {first}; put the command after '--': {start} -- {words}")
        self.error(f"unexpected {first}")
