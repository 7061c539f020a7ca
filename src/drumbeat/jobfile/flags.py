"""The Job's fields as flags, made from the same descriptions. A flag wins over the file."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from argparse import SUPPRESS
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.data import names, read
from drumbeat.base.problem import Problem
from drumbeat.base.ranges import HostlistError, expand
from drumbeat.base.regex import regex
from drumbeat.jobfile.check import Checker, check_variable_name, default_words, keys_of, literal, near
from drumbeat.jobfile.check import expand as fill_in
from drumbeat.jobfile.job import Job, job_from_file, job_from_text, preset_file
from drumbeat.jobfile.yamlfile import Text, shown, shown_path

# Presets: job files that come along, for workloads that many run. What a job says itself wins, key by key.


PRESETS = "drumbeat.jobfile.presets"


def with_preset(job: Job) -> Job:
    if job.preset is None:
        return job
    known = names(PRESETS)
    if job.preset not in known:
        raise Problem(
            f"{job.where('preset')}: no preset {shown(job.preset)}{near(job.preset, known)}",
            f"known: {', '.join(known)}",
        )
    base = job_from_text(_text(job.preset), preset_file(job.preset))
    laid = laid_over(base, job, [field for field, _ in keys_of(Job).values()])
    return dataclasses.replace(laid, env={**base.env, **job.env})


def about_preset(job: Job) -> str:
    """Describe what the job's preset runs and needs, as in the comment at the top of its file, and the job's image."""
    assert job.preset
    lines = itertools.takewhile(lambda line: line.startswith("#"), _text(job.preset).splitlines())
    said = " ".join(line.lstrip("# ") for line in lines)
    return said + (f" Image: {job.container}." if job.container else "")


def _text(name: str) -> str:
    return read(PRESETS, f"{name}.yaml").decode()


def laid_over(base: Job, job: Job, fields: Iterable[str]) -> Job:
    """Return `job`, with those fields of `base` that it does not set itself."""
    changed: Dict[str, Any] = {
        field: getattr(base, field)
        for field in fields
        if field.replace("_", "-") in base.origins and field.replace("_", "-") not in job.origins
    }
    return dataclasses.replace(job, **changed, origins={**base.origins, **job.origins})


# A file with one host per line, as mpirun and deepspeed read it, laid into the job.


_LIMIT = 1 << 20
_MOST_SLOTS = 4096
_WORD = regex(r"(slots|max[_-]slots)\s*=\s*(\S+)\s*")


def with_hostfile(job: Job, environ: Mapping[str, str]) -> Job:
    """Return the job with the contents of its host file."""
    if job.hostfile is None:
        return job
    if job.hosts:
        raise Problem(f"{job.where('hostfile')}: {job.where('hosts')} names hosts too", "leave one of them out")
    path = fill_in(job.hostfile, environ, job.where("hostfile"))
    try:
        with open(path, encoding="utf-8-sig") as file:
            slots = read_hostfile(file.read(_LIMIT), shown_path(path))
    except OSError as error:
        raise Problem(f"{job.where('hostfile')}: {shown_path(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Problem(f"{job.where('hostfile')}: {shown_path(path)} is not text") from None
    ranks = job.ranks_per_node
    counts = set(slots.values()) - {0}
    if ranks is None and counts:
        if len(set(slots.values())) > 1:
            raise Problem(
                f"{shown_path(path)}: hosts with different numbers of slots",
                "each node has the same number of ranks: --ranks-per-node N",
            )
        ranks = counts.pop()
    origins = {**job.origins, "hosts": shown_path(path)}
    return dataclasses.replace(job, hosts=tuple(slots), hostfile=None, ranks_per_node=ranks, origins=origins)


def read_hostfile(text: str, path: str) -> Dict[str, int]:
    """Map each host to its slots, 0 if none are given."""
    slots: Dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}:{number}"
        name, *rest = line.partition("#")[0].split(None, 1)[:2] or [""]
        if not name:
            continue
        count = _slots_of(rest[0] if rest else "", where)
        if name.count(":") == 1:  # MPICH writes host:slots
            name, _, written = name.partition(":")
            count = _count(written, where)
        user, at, names = name.rpartition("@")
        try:
            # several colons: an IPv6 address, in brackets or not
            hosts: List[str] = [name.strip("[]")] if ":" in name else [user + at + host for host in expand(names)]
        except HostlistError as error:
            raise Problem(f"{where}: {error}") from None
        for host in hosts:
            if host in slots:
                raise Problem(f"{where}: {host} is named twice", "one line per host; slots=N says how many ranks")
            slots[host] = count
    if not slots:
        raise Problem(f"{path}: names no host", "write one host per line")
    return slots


def _slots_of(text: str, where: str) -> int:
    """Read slots from `slots=8 max_slots=8`, as Open MPI and DeepSpeed write it; 0 if nothing is given."""
    count = 0
    while text.strip():
        match = _WORD.match(text.strip())
        if not match:
            raise Problem(
                f"{where}: {shown(text.strip())} is not understood after the host's name",
                "one host per line: HOST slots=N",
            )
        if match.group(1) == "slots":
            count = _count(match.group(2), where)
        text = text.strip()[match.end() :]
    return count


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 0 < int(text) <= _MOST_SLOTS:
        raise Problem(f"{where}: {shown(text)} is not a number of slots", f"slots=N, from 1 to {_MOST_SLOTS}")
    return int(text)


# Flags in the short help, with their short texts. All others are shown by --help-all.
_COMMON = {
    "nodes": "number of nodes",
    "ranks-per-node": "ranks per node (default: one per GPU)",
    "gpus": "GPUs per node (default: all; with a scheduler: as the site says)",
    "site": "cluster profile (default: detected)",
    "env": "set a variable in every rank; NAME alone passes on yours",
    "container": "image that the ranks run in",
    "time": "time limit, such as 30m, 4h or 2d",
    "restarts": "restarts after a failure (default: 0)",
}
# Flags as torchrun spells them.
_ALIASES = {"nodes": ("--nnodes",), "ranks-per-node": ("--nproc-per-node", "--nproc_per_node")}
_JOINED = ("names", "hosts")  # the kinds of a list: --track a --track b is --track a,b
_EXPANDED = ("path", "variables")  # the kinds whose text resolve() expands; the user's shell has done it for a flag


def add_job_flags(parser: Any, leave_out: Sequence[str] = (), **also: str) -> None:
    """Add `[JOB.yaml]`, a flag for each field that has one, and `-- COMMAND...` (cli/__init__.py cuts that off first).
    `also`: other flags in the short help."""
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="job file; flags override it")
    group = parser.add_argument_group("job (each is also a key of the job file)")
    for name, (field, key) in keys_of(Job).items():
        if not key.flag or name in leave_out:
            continue
        words = f"{key.help} Default: {default_words(Job, field, key)}.".replace("`", "").replace("%", "%%")
        options: Dict[str, Any] = {"dest": f"job_{field}", "help": words}
        if key.kind == "switch":
            options.update(action="store_const", const="true")
        elif key.allowed:
            options["choices"] = key.allowed
        else:
            options["metavar"] = key.flag
        if key.kind in ("variables", "lists", *_JOINED):
            options["action"] = "append"
        action = group.add_argument(f"--{name}", **options)
        action.short = _COMMON.get(name) or also.get(name)
        action.rare = not action.short
        for alias in _ALIASES.get(name, ()):
            group.add_argument(alias, **{**options, "help": SUPPRESS})
    only_keys = [name for name, (_, key) in keys_of(Job).items() if not key.flag]
    parser.set_defaults(takes_command=True, after=None, only_keys=only_keys)
    parser.usage = f"{parser.prog} [JOB.yaml] [options] [-- COMMAND...]"


def load_job(path: Optional[str], args: Any) -> Job:
    """Load the job of the file, if there is one, with the flags of `args` laid over it."""
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
            given = ",".join(given) if key.kind in _JOINED else given
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
            problem.what, f"expected a job file here; put the command after '--': -- {shown_path(path)}"
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
