"""Talking to Run:ai through `runai`, and to its cluster through `kubectl` for the secret alone; each call with a deadline."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from drumbeat.backends.contract import FAILED, FINISHED, QUEUED, RUNNING, UNKNOWN, Status
from drumbeat.backends.runai.grammar import CLI_1, CLI_2, Cli
from drumbeat.base.printable import printable
from drumbeat.base.problem import Problem

_SECONDS = 60.0
_STATES = {
    "pending": QUEUED, "creating": QUEUED, "initializing": QUEUED, "resuming": QUEUED, "suspended": QUEUED, "preempted": QUEUED,
    "containercreating": QUEUED, "running": RUNNING, "degraded": RUNNING, "updating": RUNNING, "terminating": RUNNING,
    "deleting": RUNNING, "succeeded": FINISHED, "completed": FINISHED, "failed": FAILED, "error": FAILED, "timedout": FAILED,
    "stopped": FAILED,
}  # fmt: skip
_KEYS = ("phase", "status", "jobStatus", "workloadPhase", "state")


def call(
    argv: List[str], environ: Mapping[str, str], stdin: Optional[bytes] = None, seconds: float = _SECONDS
) -> subprocess.CompletedProcess[bytes]:
    source: Any = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    try:
        return subprocess.run(
            argv,
            env={**environ, "LC_ALL": "C"},
            capture_output=True,
            timeout=seconds,
            check=False,
            cwd=os.path.sep,
            **source,
        )
    except FileNotFoundError:
        fix = (
            "your Run:ai control plane has its installer (docs/runai.md)"
            if argv[0] == "runai"
            else "it is needed to make the run's secret"
        )
        raise Problem(f"there is no {argv[0]} here", fix) from None
    except subprocess.TimeoutExpired:
        raise Problem(
            f"{argv[0]} {argv[1]} has not answered for {seconds:g} s", "try again; runai login may be needed"
        ) from None


def find_cli(environ: Mapping[str, str]) -> Tuple[Cli, str]:
    """Which generation is installed, and the reason. Both use version numbers such as 2.18, so its commands decide."""
    version = _first_number(call(["runai", "version"], environ).stdout.decode("utf-8", "replace"))
    shown = call(["runai", "--help"], environ).stdout.decode("utf-8", "replace")
    if re.search(r"^\s+submit-dist\b", shown, re.MULTILINE):
        return CLI_1, f"runai {version} has submit-dist (CLI 1)"
    if re.search(r"^\s+(training|pytorch)\b", shown, re.MULTILINE):
        return CLI_2, f"runai {version} has training pytorch (CLI 2)"
    raise Problem(
        f"runai {version} knows neither submit-dist nor training pytorch", "multi-node jobs need runai 2.13 or newer"
    )


def with_flags(cli: Cli, environ: Mapping[str, str]) -> Cli:
    """The same, with the options that the help of its `submit` lists."""
    shown = call(["runai", *cli.submit, "--help"], environ).stdout.decode("utf-8", "replace")
    return dataclasses.replace(
        cli, flags=frozenset(re.findall(r"^\s+(?:-\w, )?(--[a-z][a-z0-9-]+)", shown, re.MULTILINE))
    )


def _first_number(text: str) -> str:
    found = re.search(r"\d+\.\d+[\w.+-]*", text)
    return found.group() if found else "of an unknown version"


def complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    text = (done.stderr or done.stdout).decode("utf-8", "replace").partition("\nUsage")[0]
    lines = [line.strip() for line in map(printable, text.splitlines()) if line.strip()]
    return "; ".join(dict.fromkeys(lines))[:400] or "it does not say why"


def refusal(done: subprocess.CompletedProcess[bytes], what: str) -> Problem:
    text = complaint(done)
    lowered = text.lower()
    for words, fix in (
        ("login", "runai login"),
        ("unauthorized", "runai login"),
        ("token", "runai login"),
        ("project", "runai project list shows yours; account: NAME in the job file, or --account"),
        ("unknown flag", "this runai does not know that option: leave it out of the profile or the job"),
    ):
        if words in lowered:
            return Problem(f"Run:ai {what}: {text}", fix)
    return Problem(f"Run:ai {what}: {text}", "drumbeat plan --render JOB.yaml shows the command")


def is_gone(done: subprocess.CompletedProcess[bytes]) -> bool:
    """Whether it says that there is no such job."""
    return bool(re.search(r"not found|does not exist|no such", complaint(done), re.IGNORECASE))


def read_status(handle: str, done: subprocess.CompletedProcess[bytes]) -> Status:
    """From `describe -o json`; its layout is not documented, so the first word that is a state counts."""
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        return Status(handle, UNKNOWN, "Run:ai no longer knows this job" if is_gone(done) else complaint(done))
    try:
        words = list(_words(json.loads(text)))
    except ValueError:
        words = re.findall(r"^\s*(?:STATUS|Status|Phase|Job Status)\s*[:|]?\s+(\w+)", text, re.MULTILINE)
    for word in words:
        state = _STATES.get(word.lower().replace(" ", ""))
        if state:
            return Status(handle, state, word.lower())
    return Status(
        handle, UNKNOWN, f"Run:ai answered without a state that is known here: {', '.join(words[:3]) or 'none'}"
    )


def _words(value: Any) -> Iterator[str]:
    """Values of the keys that may hold a state, the outermost first."""
    level = [value]
    while level:
        below: List[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in _KEYS:
                    if isinstance(item.get(key), str):
                        yield item[key]
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
