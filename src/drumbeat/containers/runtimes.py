"""The table of container runtimes: how each one is called, and what it takes. Adding one touches this file alone.

`lines` gives POSIX shell for the compute node. It is run after the binds have been collected in `$binds` (wrap.py), and
where the backend's script has set `$TASK`, a name that no other task on this machine has.
"""

from __future__ import annotations

import shlex
from typing import Callable, Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Container
from drumbeat.machine.container import OCI

# What belongs to the host and would break an image.
_STAYS = "PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|HOSTNAME|PWD|OLDPWD|SHLVL|TMPDIR|_|BASH_*|XDG_*|MODULE*|LMOD*"


@dataclass(frozen=True)
class Runtime:
    inside: Tuple[str, ...]  # what facts/container.py may call it from inside: these run the same images
    files: bool  # its images are files or folders; else names that a registry knows, unless they begin with /
    bind: str = ""  # the option before each bind
    both_sides: bool = False  # a bind must be HOST:INSIDE
    lines: Optional[Callable[[Container, str], List[str]]] = None  # none: the scheduler's own launcher starts it


def _apptainer(used: Container, inside: str) -> List[str]:
    gpu, why = {"nvidia": ("--nv ", "  # --nv: the host's NVIDIA driver libraries"),
                "amd": ("--rocm ", "  # --rocm: /dev/kfd, /dev/dri and the host's ROCm")}.get(used.vendor, ("", ""))  # fmt: skip
    more = "".join(shlex.quote(option) + " " for option in used.options)
    return [
        f"# variables of this job reach the container by themselves: {used.runtime} hands the environment on",
        f"exec {used.runtime} exec {gpu}{more}$binds {shlex.quote(used.image)} {inside}{why}",
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
    if used.vendor == "amd":
        lines += [
            'flags="$flags --device /dev/kfd --device /dev/dri --security-opt seccomp=unconfined"  # ROCm',
            "for device in /dev/kfd /dev/dri/renderD*; do  # by number: an image may call these groups otherwise, or not at all",
            '  [ -e "$device" ] && flags="$flags --group-add $(stat -c %g "$device")"',
            "done",
        ]
    if used.vendor == "nvidia":
        flag = "--gpus all" if program == "docker" else "--device nvidia.com/gpu=all"
        lines.append(f'flags="$flags {flag}"  # the NVIDIA container toolkit')
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
