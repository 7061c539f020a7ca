"""docs/job.md and docs/site.md, from the help of each field."""

from __future__ import annotations

from typing import Any, Dict, Iterator

from drumbeat.jobfile.check import KINDS, Key, default_words, keys_of, required_keys
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site

_JOB = """\
# The job file

What you want to run, in YAML: `drumbeat run job.yaml`. Only the command is required, and `drumbeat run -- python train.py`
needs no file at all. Most keys are also flags (`--nodes 2`), which win over the file; `drumbeat run --help-all` lists them.

```yaml
{example}```

Values are read as they are written: `off` in `env` is the text off, `012` stays `012`, and a [time](#time) needs its unit. An
unknown key, a wrong type, a key given twice, aliases, tags and files over 256 KiB are refused with file, line and key.

`$NAME` and `${{NAME}}` are filled in once, from your environment, when the order is made: in `command`, `env`,
`workdir`, `runs` and `wrap`. An undefined name is an error; `$$` is a plain `$`. In `setup` the shell expands `$NAME`.
Flags and the command after `--` are taken as your shell passes them.
"""

_EXAMPLE = """\
name: llama3-8b
nodes: 2
ranks-per-node: 4
command: python train.py --epochs 3
setup: source $VENV/bin/activate
time: 1h30m
env: {HF_HOME: $SCRATCH/hf, HF_TOKEN: pass}
restarts: 2
wrap: {ranks: [2], command: "rocprofv3 --hip-trace --stats -o prof-{rank} --"}
"""

_SITE = """\
# A site's profile

All keys of a cluster's YAML file ([how to write one](sites/own.md)). The file's name is the site's name. Built-in profiles are in
`src/drumbeat/jobfile/sites/`; your own goes to `~/.config/drumbeat/sites/NAME.yaml` (or under `$XDG_CONFIG_HOME`) and wins over
a built-in one of that name; or give its path: `--site ./my.yaml`. Without `--site` the cluster's name, then the host's, is looked
up in every profile's `detect`; if none matches, the site is `localhost`. A host that two profiles claim is an error.

Tables such as `env` need a `why`, which is shown wherever the value is; `source` says where that is documented.

```yaml
{example}```
"""

_SITE_EXAMPLE = """\
summary: "our four nodes under the stairs"
nodes: 2
runs: $HOME/runs
env:
  NCCL_SOCKET_IFNAME:
    value: eno1
    why: the other interface is the management network
detect: {hosts: ["stairs*"]}
"""


def page(which: str) -> str:
    intro, cls = {"job": (_JOB.format(example=_EXAMPLE), Job), "site": (_SITE.format(example=_SITE_EXAMPLE), Site)}[
        which
    ]
    made = "<!-- Made by: python -m tools.reference. The words are next to each field's definition. -->\n"
    of_jobs = {key.inner: f"job.md#{name}" for name, (_, key) in keys_of(Job).items() if key.inner}
    return "\n".join([made + intro, *_sections(cls, "", of_jobs if which == "site" else {})]) + "\n"


def _sections(cls: Any, prefix: str, described: Dict[Any, str]) -> Iterator[str]:
    """Yield a section per key. Keys of a table that is `described` elsewhere are a link to that place."""
    choices = {key.allowed for _, key in keys_of(cls).values()}
    for name, (field, key) in keys_of(cls).items():
        if prefix and name in ("why", "source"):
            continue  # the introduction explains them
        yield f"## `{prefix}{name}`\n"
        yield key.help + "\n"
        kind = "" if key.allowed and len(choices) == 1 else _kind(key)  # the table's own help lists them once
        facts = [f"`{name}: {key.example}`", kind, _default(cls, name, field, key)]
        if key.inner in described:
            facts.append(f"Keys: as in [`{described[key.inner].partition('#')[2]}`]({described[key.inner]})")
        yield " ".join(f"{fact}." for fact in facts if fact) + "\n"
        if key.inner is not None and key.inner not in described:
            described[key.inner] = f"#{name}"
            yield from _sections(key.inner, prefix + name + "." + ("NAME." if key.kind == "tables" else ""), described)


def _default(cls: Any, name: str, field: str, key: Key) -> str:
    words = "Required" if name in required_keys(cls) else f"Default: {default_words(cls, field, key)}"
    return "" if words == "Default: none" else words


# The example shows it.
_PLAIN = ("text", "path", "shell", "number", "switch", "words", "duration", "table", "tables", "variables", "lists")


def _kind(key: Key) -> str:
    if key.kind in _PLAIN and not key.allowed:
        return ""
    words = "one of " + ", ".join(f"`{word}`" for word in key.allowed if word) if key.allowed else KINDS[key.kind]
    return words[0].upper() + words[1:]
