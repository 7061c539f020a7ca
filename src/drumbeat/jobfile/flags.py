"""The Job's fields as flags, made from the same descriptions. A flag wins over the file."""

from __future__ import annotations

import dataclasses
import os
from argparse import SUPPRESS
from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import Checker, check_variable_name
from drumbeat.jobfile.expand import literal
from drumbeat.jobfile.fields import Key, default_words, keys_of
from drumbeat.jobfile.hostfile import with_hostfile
from drumbeat.jobfile.job import Job, job_from_file
from drumbeat.jobfile.preset_files import with_preset
from drumbeat.jobfile.yamlfile import Text, shown_path

# What most people need, in the short help, with its short words there. All others are shown by --help-all.
_COMMON = {
    "nodes": "number of nodes",
    "ranks-per-node": "ranks per node (default: one per GPU)",
    "gpus": "GPUs per node (default: all)",
    "site": "cluster profile (default: detected)",
    "env": "set a variable in every rank, or pass yours on by NAME",
    "container": "image that the ranks run in",
    "time": "time limit, such as 30m, 4h or 2d",
    "restarts": "restarts after a failure (default: 0)",
}
# What fingers know from torchrun.
_ALIASES = {"nodes": ("--nnodes",), "ranks-per-node": ("--nproc-per-node", "--nproc_per_node")}
_EXPANDED = ("path", "variables")  # the kinds whose text resolve() expands; the user's shell has done it for a flag


def add_job_flags(parser: Any, leave_out: Sequence[str] = ()) -> None:
    """`[JOB.yaml]`, a flag for each field that has one, and `-- COMMAND...` (cli/__init__.py cuts that off first)."""
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="job file; flags win over what it says")
    group = parser.add_argument_group("job (each is also a key of the job file)")
    for name, (field, key) in keys_of(Job).items():
        if not key.flag or name in leave_out:
            continue
        options: Dict[str, Any] = {"dest": f"job_{field}", "help": _help(key, field)}
        if key.kind == "switch":
            options.update(action="store_const", const="true")
        elif key.allowed:
            options["choices"] = key.allowed
        else:
            options["metavar"] = key.flag
        if key.kind in ("variables", "lists"):
            options["action"] = "append"
        action = group.add_argument(f"--{name}", **options)
        action.rare, action.short = name not in _COMMON, _COMMON.get(name)
        for alias in _ALIASES.get(name, ()):
            group.add_argument(alias, **{**options, "help": SUPPRESS})
    parser.set_defaults(takes_command=True, after=None)
    parser.usage = f"{parser.prog} [JOB.yaml] [options] [-- COMMAND...]"


def load_job(path: Optional[str], args: Any) -> Job:
    """The job of the file, if there is one, with the flags of `args` laid over it."""
    return with_hostfile(with_preset(merge(_from_file(path) if path else Job(), args)), os.environ)


def merge(job: Job, args: Any) -> Job:
    checker = Checker()
    changed: Dict[str, Any] = {}
    for name, (field, key) in keys_of(Job).items():
        given = getattr(args, f"job_{field}", None)
        if given is None:
            continue
        if key.kind == "variables":
            changed[field] = {**getattr(job, field), **_variables(checker, name, given)}
        elif key.kind == "lists":
            changed[field] = {**getattr(job, field), **dict(_values(name, each) for each in given)}
            checker.origins[name] = f"--{name}"
        else:
            text = literal(given) if key.kind in _EXPANDED else given
            changed[field] = checker.value(key, Text(text, quoted=True), f"--{name}", name)
    after = getattr(args, "after", None)
    if after is not None:
        if not after or not after[0]:
            raise Problem("no command after '--'", "write -- python train.py")
        changed["command"] = tuple(literal(word) for word in after)
        checker.origins["command"] = "the command after '--'"
    return dataclasses.replace(job, **changed, origins={**job.origins, **checker.origins})


def _from_file(path: str) -> Job:
    try:
        return job_from_file(path)
    except Problem as problem:
        if path.endswith((".yaml", ".yml")):
            raise
        raise Problem(
            problem.what, f"a job file is expected here; a command stands after '--': -- {shown_path(path)}"
        ) from None


def _variables(checker: Checker, flag: str, given: List[str]) -> Dict[str, Optional[str]]:
    made = {}
    for each in given:
        name, equals, text = each.partition("=")
        node = Text(literal(text), quoted=text != "pass") if equals else Text("pass")
        made[name] = checker.variable(name, node, f"--{flag} {name}", f"{flag}.{name}")
    return made


def _values(flag: str, text: str) -> Tuple[str, Tuple[str, ...]]:
    name, equals, values = text.partition("=")
    check_variable_name(name, f"--{flag} {text}")
    if not equals or not values:
        raise Problem(f"--{flag} {text}: has no values", f"write --{flag} {name}=1e-3,1e-4")
    return name, tuple(values.split(","))


def _help(key: Key, field: str) -> str:
    return f"{key.help} Default: {default_words(Job, field, key)}.".replace("`", "").replace("%", "%%")
