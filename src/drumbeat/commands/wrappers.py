"""Programs that people put before their command, and that end in running it: env, uv run, numactl, nsys, …

`peel` takes one of them off. What stays before the launcher is kept: it wraps what drumbeat starts in its place.
"""

from __future__ import annotations

import os
from dataclasses import field
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex

_ASSIGNMENT = regex(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Wrapper:
    values: Mapping[str, int] = field(default_factory=dict)  # option -> how many words follow it; others: none
    every: int = 0  # how many words follow an option that is not in `values`
    subcommand: str = ""  # must stand before the command: run, profile
    words: int = 0  # of its own before the command: a duration, a mask
    other_python: bool = False  # the command sees another PATH than the one out here


class Peeled(NamedTuple):
    name: str
    prefix: Tuple[str, ...]
    inner: Tuple[str, ...]
    other_python: bool


def values(text: str, count: int = 1) -> Dict[str, int]:
    return dict.fromkeys(text.split(), count)


_UV = values(
    "--with -w --with-editable --with-requirements --extra --no-extra --group --no-group --only-group --env-file -p --python "
    "--project --directory --package --index --default-index -i --index-url --extra-index-url -f --find-links "
    "--index-strategy --keyring-provider --resolution --prerelease --fork-strategy --exclude-newer --link-mode "
    "--python-platform -P --upgrade-package --reinstall-package --refresh-package -C --config-setting "
    "--no-build-package --no-binary-package --no-build-isolation-package --cache-dir --color --config-file "
    "--allow-insecure-host --python-preference"
)
_CONDA = Wrapper(
    values("-n --name -p --prefix --cwd -r --root-prefix --attach -a"), subcommand="run", other_python=True
)
_PIXI = values(
    "-e --environment --manifest-path -m --color --concurrent-downloads --auth-file --platform -p -w --workspace"
)

WRAPPERS: Dict[str, Wrapper] = {
    "env": Wrapper(values("-u --unset -C --chdir -S --split-string -a --argv0")),
    "uv": Wrapper(_UV, subcommand="run", other_python=True),
    "poetry": Wrapper(values("-C --directory -P --project"), subcommand="run", other_python=True),
    "pdm": Wrapper(values("-p --project -s --site-packages"), subcommand="run", other_python=True),
    "hatch": Wrapper(values("-e --env -p --project"), subcommand="run", other_python=True),
    "pipenv": Wrapper(subcommand="run", other_python=True),
    "rye": Wrapper(subcommand="run", other_python=True),
    "conda": _CONDA,
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "pixi": Wrapper(_PIXI, subcommand="run", other_python=True),
    "nsys": Wrapper(every=1, subcommand="profile"),
    "ncu": Wrapper(
        values(
            "-o --export --set --section --metrics -k --kernel-name -c --launch-count -s --launch-skip --target-processes "
            "--kernel-id --replay-mode --clock-control --cache-control --devices --log-file --config-file --import"
        )
    ),
    "rocprof": Wrapper(values("-i -o -d -t --timestamp --basenames")),
    "rocprofv3": Wrapper(
        values("-i --input -o --output-file -d --output-directory --output-format -f --log-level --pmc")
    ),
    "rocprof-sys-run": Wrapper(values("-o -c --config")),
    "numactl": Wrapper(
        values(
            "-i --interleave -N --cpunodebind -m --membind -C --physcpubind -p --preferred -P --preferred-many "
            "-w --weighted-interleave --cpubind"
        )
    ),
    "taskset": Wrapper(words=1),
    "time": Wrapper(values("-f --format -o --output")),
    "timeout": Wrapper(values("-k --kill-after -s --signal"), words=1),
    "nice": Wrapper(values("-n --adjustment")),
    "ionice": Wrapper(values("-c --class -n --classdata")),
    "chrt": Wrapper(values("-T --sched-runtime -P --sched-period -D --sched-deadline"), words=1),
    "stdbuf": Wrapper(values("-i --input -o --output -e --error")),
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "unbuffer": Wrapper(),
    "tini": Wrapper(values("-p -e")),
    "dumb-init": Wrapper(values("--rewrite -r")),
    "likwid-pin": Wrapper(values("-c -s")),
}


def peel(command: Sequence[str]) -> Optional[Peeled]:
    """The outermost wrapper and the command behind it; None if the command starts with none, or with nothing behind."""
    name = os.path.basename(command[0]) if command else ""
    wrapper = WRAPPERS.get(name)
    if wrapper is None:
        return None
    index = skip_options(wrapper, command, 1, name == "env")
    if wrapper.subcommand:
        if index >= len(command) or command[index] != wrapper.subcommand:
            return None
        index += 1
        module = _module_flag(name, wrapper, command, index)
        if module:
            return Peeled(name, tuple(command[:module]), ("python", *command[module:]), True)
        index = skip_options(wrapper, command, index)
    index += wrapper.words
    if index >= len(command):
        return None
    other = wrapper.other_python or (name == "env" and any(word.startswith("PATH=") for word in command[:index]))
    return Peeled(name, tuple(command[:index]), tuple(command[index:]), other)


def environment_given(command: Sequence[str]) -> Tuple[Tuple[str, str], ...]:
    """Variables that `env NAME=VALUE` before the command sets, also behind other wrappers."""
    found: Dict[str, str] = {}
    inner = tuple(command)
    while True:
        peeled = peel(inner)
        if peeled is None:
            return tuple(found.items())
        if peeled.name == "env":
            found.update(word.partition("=")[::2] for word in peeled.prefix[1:] if _ASSIGNMENT.match(word))
        inner = peeled.inner


def skip_options(wrapper: Wrapper, command: Sequence[str], index: int, assignments: bool = False) -> int:
    """Where the options that start at `index` end; a `--` is passed over."""
    while index < len(command):
        word = command[index]
        if word == "--":
            return index + 1
        if assignments and _ASSIGNMENT.match(word):
            index += 1
        elif word.startswith("-") and len(word) > 1:
            index += 1 + (0 if "=" in word else wrapper.values.get(word, wrapper.every))
        else:
            break
    return index


def _module_flag(name: str, wrapper: Wrapper, command: Sequence[str], index: int) -> int:
    """`uv run -m pkg` stands for `python -m pkg`: the place of that -m, or 0."""
    end = skip_options(wrapper, command, index)
    places: List[int] = [place for place in range(index, end) if command[place] in ("-m", "--module")]
    return places[0] if name == "uv" and places else 0
