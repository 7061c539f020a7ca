"""The table of container runtimes: how each one is called, and what it takes. Adding one touches this file alone.

`lines` gives POSIX shell for the compute node. It is run after the binds have been collected in `$binds`, and
where the backend's script has set `$TASK`, a name that no other task on this machine has.
"""

from __future__ import annotations

import re
import shlex
from typing import Callable, Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Container, HostPath, Order
from drumbeat.machine.identity import OCI
from drumbeat.machine.vendors import vendor_named

# Variables of the host that would break an image.
_STAYS = "PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|HOSTNAME|PWD|OLDPWD|SHLVL|TMPDIR|_|BASH_*|XDG_*|MODULE*|LMOD*"


@dataclass(frozen=True)
class Runtime:
    inside: Tuple[str, ...]  # what machine/gather.py may call it from inside: these run the same images
    files: bool  # its images are files or folders; else names that a registry knows, unless they begin with /
    bind: str = ""  # the option before each bind
    both_sides: bool = False  # a bind must be HOST:INSIDE
    lines: Optional[Callable[[Container, str], List[str]]] = None  # none: the scheduler's own launcher starts it


def _apptainer(used: Container, inside: str) -> List[str]:
    gpus = vendor_named(used.vendor).container_flags(used.runtime)
    flags, why = (f"{gpus.words} ", f"  # {gpus.why}") if gpus.words else ("", "")
    more = "".join(shlex.quote(option) + " " for option in used.options)
    return [
        f"# variables of this job reach the container by themselves: {used.runtime} hands the environment on",
        f"exec {used.runtime} exec {flags}{more}$binds {shlex.quote(used.image)} {inside}{why}",
    ]


def _docker(used: Container, inside: str) -> List[str]:
    program = used.runtime
    # docker's daemon may lift the limit; podman runs with the user's own limits and cannot
    limits = "--ulimit memlock=-1" if program == "docker" else "--ulimit host"
    lines = [
        "# the host's network and shared memory: ranks meet by the node's own address, and NCCL uses /dev/shm",
        f'flags="--rm --network host --ipc host {limits}"',
        '[ -e /dev/infiniband ] && flags="$flags --device /dev/infiniband"  # RDMA',
    ]
    gpus = vendor_named(used.vendor).container_flags(program)
    if gpus.words:
        lines.append(f'flags="$flags {gpus.words}"  # {gpus.why}')
    if gpus.groups:
        lines += [
            f"for device in {gpus.groups}; do  # by number: an image may call these groups otherwise, or not at all",
            '  [ -e "$device" ] && flags="$flags --group-add $(stat -c %g "$device")"',
            "done",
        ]
    if program == "docker":
        lines += [
            "for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do  # by name",
            f'  case $name in {_STAYS}) ;; *) flags="$flags -e $name";; esac',
            "done",
            'flags="$flags --user $(id -u):$(id -g)"  # files in the run folder stay yours',
        ]
    else:
        lines.append('flags="$flags --env-host --unsetenv LD_LIBRARY_PATH --unsetenv PYTHONPATH"')
    more = "".join(" " + shlex.quote(option) for option in used.options)
    return [
        *lines,
        'name="drumbeat-$TASK"',
        f"trap '{program} rm -f \"$name\" >/dev/null 2>&1' EXIT  # only our own container, never another",
        "trap 'exit 143' TERM INT",
        f'{program} run --name "$name" $flags{more} $binds {shlex.quote(used.image)} {inside} &',
        "wait $!",
        "exit $?",
    ]


_SIF = ("apptainer", "singularity")

RUNTIMES: Dict[str, Runtime] = {
    "apptainer": Runtime(_SIF, True, "--bind", False, _apptainer),
    "singularity": Runtime(_SIF, True, "--bind", False, _apptainer),
    "docker": Runtime(OCI, False, "-v", True, _docker),
    "podman": Runtime(OCI, False, "-v", True, _docker),
    "pyxis": Runtime(("enroot",), False, ",", True),
    "pod": Runtime(OCI, False, "", True),  # the cluster starts each pod from the image itself
}


# The container around a node's agent, as lines of POSIX shell that run on the compute node before it. The
# agent inside cannot see the host, so all that is looked up there happens here: which version of a host library is
# the newest, whether a device exists. Variables enter a container in one way: by the runtime's own (all of them with
# apptainer, singularity and podman, by name with docker), and search paths by a shell inside, because only there the
# image's are known. The backend's script sets, before these lines: `$RUN`, the run folder; `$NODE`, this node's
# number; `$TASK`, a name that no other task on this machine has; and `refuse`, a function that ends this node with
# exit code 78.


HOST_PATHS = "host-paths.tsv"  # in a node's folder: name, path, where it leads to, sha256 of a file
_INSIDE = "/opt/host"


def node_lines(order: Order, agent: str) -> List[str]:
    """Return the lines that each node starts: bind what is needed, then become the container with its agent."""
    used = order.container
    if used is None:
        return [f"exec {before(order)}{agent}"]
    runtime = RUNTIMES[used.runtime]
    if runtime.lines is None:  # we are inside already
        return [f"exec {inside_command(order, agent)}"]
    return [*bind_lines(order), *runtime.lines(used, inside_command(order, agent))]


def started_by_launcher(order: Order) -> bool:
    """Return true if the scheduler's own launcher starts the container, before any line of ours."""
    return order.container is not None and RUNTIMES[order.container.runtime].lines is None


def bind_lines(order: Order) -> List[str]:
    """Collect the binds in `$binds`: one option each, or one list if the launcher wants that."""
    used = order.container
    assert used is not None
    runtime = RUNTIMES[used.runtime]
    both = "case $1 in *:*) set_bind=$1;; *) set_bind=$1:$1;; esac" if runtime.both_sides else "set_bind=$1"
    joined = '"${binds:+$binds,}$set_bind"' if runtime.bind == "," else f'"$binds {runtime.bind} $set_bind"'
    return [
        "binds=",
        f"bind() {{ {both}; binds={joined}; }}",
        f"bind {shlex.quote(order.folder)}  # the run folder",
        *([] if order.code == "image" else [f"bind {shlex.quote(order.workdir)}  # the code"]),
        *(f"bind {_filled_in(bind)}" for bind in used.binds),
        *_host_path_lines(order),
    ]


def _filled_in(path: str) -> str:
    """Quote a path for the shell, which fills in `${NAME}`."""
    parts = re.split(r"(\$\{\w+\})", path)
    return "".join(f'"{part}"' if part.startswith("${") else shlex.quote(part) for part in parts if part)


def _host_path_lines(order: Order) -> List[str]:
    """Look up the site's patterns on this node, and note in the run folder what was found."""
    paths = order.host_paths
    if not paths:
        return []
    lines = [
        'seen="$RUN/nodes/$NODE"; mkdir -p "$seen"',
        f': > "$seen/{HOST_PATHS}"',
        "newest() {  # NAME PATTERN: versions in these paths age, so the newest match counts",
        "  found=$(ls -d $2 2>/dev/null | sort -V | tail -n 1)",
        '  if [ -z "$found" ]; then',
        '    echo "drumbeat: $(uname -n): nothing matches $2 ($1); correct the site\'s profile: drumbeat site show" >&2',
        "    refuse",
        "  fi",
        '  sum=-; [ -f "$found" ] && sum=$(sha256sum "$found" | cut -d " " -f 1)',
        f'  printf \'%s\\t%s\\t%s\\t%s\\n\' "$1" "$found" "$(readlink -f "$found")" "$sum" >> "$seen/{HOST_PATHS}"',
        "}",
    ]
    for path in paths:
        lines += [
            f"newest {shlex.quote(path.name)} {shlex.quote(path.pattern)}  # {' '.join(path.why.split())}",
            *_bind_path(path),
        ]
    return lines


def _bind_path(path: HostPath) -> List[str]:
    if path.target:
        return [f'bind "$found:"{shlex.quote(path.target)}']
    if path.prepend:
        inside = shlex.quote(f"{_INSIDE}/{path.name}")
        return [f'if [ -d "$found" ]; then bind "$found:"{inside}; else bind "$found:"{inside}"/${{found##*/}}"; fi']
    return ['bind "$found"']


def search_paths(order: Order) -> Dict[str, List[str]]:
    """Map each variable to the folders of the host that come first in it inside the container, in the site's order."""
    folders: Dict[str, List[str]] = {}
    for path in order.host_paths:
        if path.prepend:
            folders.setdefault(path.prepend, []).append(path.target or f"{_INSIDE}/{path.name}")
    return folders


def inside_command(order: Order, agent: str) -> str:
    """Return the command inside the container: the search paths put in front of the image's own, then the agent."""
    puts = "".join(
        f"{name}={':'.join(folders)}${{{name}:+:${name}}}; export {name}; "
        for name, folders in search_paths(order).items()
    )
    return f"""{before(order, puts)}{agent}"""


def before(order: Order, puts: str = "") -> str:
    """Return the words before the agent's own if something must happen in the same shell first."""
    if order.before_agent:  # bash: such lines are often `source ...`
        return f"""bash -c {shlex.quote(f'{puts}{order.before_agent}; exec "$@"')} bash """
    return f"""sh -c '{puts}exec "$@"' sh """ if puts else ""
