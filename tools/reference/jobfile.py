"""docs/job.md and docs/site.md, from the help of each field."""

from __future__ import annotations

from typing import Any, Iterator

from drumbeat.jobfile.fields import KINDS, Key, default_words, keys_of, required_keys
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site

_JOB = """\
# The job file

What you want to run, in YAML. Only the command is needed, and it can be given on the command line instead:
`drumbeat run job.yaml`, or `drumbeat run -- python train.py` without any file. Most keys are also flags (`--nodes 2`), which win
over the file; `drumbeat run --help-all` lists them.

```yaml
{example}```

Values are read as they are written: `off` in `env` is the text off, `012` stays `012`, and a bare number is not a
time: write `90s`, `30m`, `2d6h`, or `12:30:00` for hours, minutes and seconds. An unknown key, a wrong type, a key given
twice, aliases, tags and files over 256 KiB are refused with file, line and key.

`$NAME` and `${{NAME}}` are filled in once, from your environment, when the order is made: in `command`, `env`,
`workdir`, `runs` and `wrap`. An undefined name is an error; `$$` is a plain `$`. `setup` is shell, and its `$` are the
shell's. What comes from flags or after `--` has been through your shell already and is taken as it is.
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

What a cluster is, in YAML. The file's name is the site's name. Built-in profiles are in `src/drumbeat/jobfile/sites/`; your own
goes to `~/.config/drumbeat/sites/NAME.yaml` (or under `$XDG_CONFIG_HOME`) and wins over a built-in one of that name; or
give its path: `--site ./my.yaml`. Without `--site` the cluster's name, then the host's, is looked up in every profile's
`detect`; where none fits, the site is `localhost`. A host that two profiles claim is an error.

Tables such as `env` need a `why`, which is shown wherever the value is; `source` says where that is documented.

On `localhost` several nodes are emulated on one machine, each with its own agent and loopback address.

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
detect: {hosts: [stairs*]}
"""


def page(which: str) -> str:
    intro, cls = {"job": (_JOB.format(example=_EXAMPLE), Job), "site": (_SITE.format(example=_SITE_EXAMPLE), Site)}[
        which
    ]
    made = "<!-- Made by: python -m tools.reference. The words are next to each field's definition. -->\n"
    return "\n".join([made + intro, *_sections(cls, "")]) + "\n"


def _sections(cls: Any, prefix: str) -> Iterator[str]:
    for name, (field, key) in keys_of(cls).items():
        if prefix and name in ("why", "source"):
            continue  # the introduction explains them
        yield f"## `{prefix}{name}`\n"
        yield key.help + "\n"
        facts = (f"`{name}: {key.example}`", _kind(key), _default(cls, name, field, key))
        yield " ".join(f"{fact}." for fact in facts if fact) + "\n"
        if key.inner is not None:
            yield from _sections(key.inner, prefix + name + "." + ("NAME." if key.kind == "tables" else ""))


def _default(cls: Any, name: str, field: str, key: Key) -> str:
    words = "Required" if name in required_keys(cls) else f"Default: {default_words(cls, field, key)}"
    return "" if words == "Default: none" else words


_PLAIN = ("text", "path", "shell", "number", "switch", "table", "words", "duration")  # the example shows it


def _kind(key: Key) -> str:
    if key.kind in _PLAIN and not key.allowed:
        return ""
    words = "one of " + ", ".join(f"`{word}`" for word in key.allowed) if key.allowed else KINDS[key.kind]
    return words[0].upper() + words[1:]
