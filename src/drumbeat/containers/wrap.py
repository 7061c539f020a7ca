"""How a runtime wraps a node's agent, as lines of POSIX shell that run on the compute node before the container.

The agent inside cannot see the host, so all that is looked up there happens here: which version of a host library is the
newest, whether a device exists. Variables enter a container in one way: by the runtime's own (all of them with apptainer,
singularity and podman, by name with docker), and search paths by a shell inside, because only there the image's are known.
"""

from __future__ import annotations

import shlex
from typing import Dict, List, Tuple

from drumbeat.order import Container, HostPath, Order

HOST_PATHS = "host-paths.tsv"  # in a node's folder: name, path, where it leads to, sha256 of a file

# What belongs to the host and would break an image.
_STAYS = "PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|HOSTNAME|PWD|OLDPWD|SHLVL|TMPDIR|_|BASH_*|XDG_*|MODULE*|LMOD*"
_INSIDE = "/opt/host"


def host_path_lines(order: Order) -> List[str]:
    """Looks up the site's patterns on this node, and notes what was found in the run folder."""
    paths = order.host_paths
    if not paths:
        return []
    lines = [
        'seen="$RUN/nodes/${SLURM_NODEID:-0}"; mkdir -p "$seen"',
        f': > "$seen/{HOST_PATHS}"',
        "newest() {  # NAME PATTERN: versions in these paths age, so the newest match counts",
        "  found=$(ls -d $2 2>/dev/null | sort -V | tail -n 1)",
        '  if [ -z "$found" ]; then',
        '    echo "drumbeat: $(uname -n): nothing matches $2 ($1); mend the site\'s profile: drumbeat site show" >&2',
        "    printf 'code=78\\nlost=\\n' > \"$RUN/verdict\"  # said here, because srun ends the other nodes with another code",
        "    sleep 2; exit 78  # srun ends the step at once, and with it words that are still on their way",
        "  fi",
        '  sum=-; [ -f "$found" ] && sum=$(sha256sum "$found" | cut -d " " -f 1)',
        f'  printf \'%s\\t%s\\t%s\\t%s\\n\' "$1" "$found" "$(readlink -f "$found")" "$sum" >> "$seen/{HOST_PATHS}"',
        "}",
    ]
    for path in paths:
        lines += [
            f"newest {shlex.quote(path.name)} {shlex.quote(path.pattern)}  # {' '.join(path.why.split())}",
            *_bind_lines(path),
        ]
    return lines


def _bind_lines(path: HostPath) -> List[str]:
    if path.target:
        return [f'bind "$found:"{shlex.quote(path.target)}']
    if path.prepend:
        inside = shlex.quote(f"{_INSIDE}/{path.name}")
        return [f'if [ -d "$found" ]; then bind "$found:"{inside}; else bind "$found:"{inside}"/${{found##*/}}"; fi']
    return ['bind "$found"']


def search_paths(order: Order) -> Dict[str, List[str]]:
    """Variable -> the folders of the host that stand first in it inside the container, in the site's order."""
    found: Dict[str, List[str]] = {}
    for path in order.host_paths:
        if path.prepend and not path.target:
            found.setdefault(path.prepend, []).append(f"{_INSIDE}/{path.name}")
        elif path.prepend:
            found.setdefault(path.prepend, []).append(path.target)
    return found


def inside_command(order: Order, agent: str) -> str:
    """What runs in the container: the search paths put in front of the image's own, then the agent."""
    puts = "".join(
        f"{name}={':'.join(folders)}${{{name}:+:${name}}}; export {name}; "
        for name, folders in search_paths(order).items()
    )
    return f"""sh -c '{puts}exec "$@"' sh {agent}""" if puts else agent


def node_lines(order: Order, agent: str) -> List[str]:
    """The body of what srun starts on each node: bind what is needed, then become the container with its agent."""
    used = order.container
    if used is None or used.runtime == "pyxis":
        return [f"exec {inside_command(order, agent) if used else agent}"]
    option = "-v" if used.runtime in ("docker", "podman") else "--bind"
    # docker and podman want both sides of a bind
    both = "case $1 in *:*) set_bind=$1;; *) set_bind=$1:$1;; esac" if option == "-v" else "set_bind=$1"
    lines = [
        "binds=",
        f'bind() {{ {both}; binds="$binds {option} $set_bind"; }}',
        f"bind {shlex.quote(order.folder)}  # the run folder",
        f"bind {shlex.quote(order.workdir)}  # the code",
        *(f"bind {shlex.quote(each)}" for each in used.binds),
        *host_path_lines(order),
    ]
    runners = {"apptainer": _apptainer, "singularity": _apptainer, "docker": _docker, "podman": _docker}
    return [*lines, *runners[used.runtime](used, order, inside_command(order, agent))]


def _apptainer(used: Container, order: Order, inside: str) -> List[str]:
    gpu, why = {"nvidia": ("--nv ", "  # --nv: the host's NVIDIA driver libraries"),
                "amd": ("--rocm ", "  # --rocm: /dev/kfd, /dev/dri and the host's ROCm")}.get(used.vendor, ("", ""))  # fmt: skip
    more = "".join(shlex.quote(option) + " " for option in used.options)
    return [
        f"# variables of this job reach the container by themselves: {used.runtime} hands the environment on",
        f"exec {used.runtime} exec {gpu}{more}$binds {shlex.quote(used.image)} {inside}{why}",
    ]


def _docker(used: Container, order: Order, inside: str) -> List[str]:
    program = used.runtime
    lines = [
        "# the host's network and shared memory: ranks meet by the node's own address, and NCCL uses /dev/shm",
        'flags="--rm --network host --ipc host --ulimit memlock=-1"',
        '[ -e /dev/infiniband ] && flags="$flags --device /dev/infiniband"  # RDMA',
    ]
    if used.vendor == "amd":
        lines.append(
            'flags="$flags --device /dev/kfd --device /dev/dri --group-add video --security-opt seccomp=unconfined"  # ROCm'
        )
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
        'name="drumbeat-$SLURM_JOB_ID-${SLURM_STEP_ID:-0}-${SLURM_PROCID:-0}"',
        f"trap '{program} rm -f \"$name\" >/dev/null 2>&1' EXIT  # only our own container, never another",
        "trap 'exit 143' TERM INT",
        f'{program} run --name "$name" $flags{more} $binds {shlex.quote(used.image)} {inside} &',
        "wait $!",
        "exit $?",
    ]


def pyxis_lines(order: Order) -> Tuple[List[str], str]:
    """pyxis starts the container before any command of ours, so paths are looked up on the batch node, for all nodes."""
    used = order.container
    assert used is not None and used.runtime == "pyxis"
    lines = [
        "binds=",
        'bind() { case $1 in *:*) set_bind=$1;; *) set_bind=$1:$1;; esac; binds="${binds:+$binds,}$set_bind"; }',
        f"bind {shlex.quote(order.folder)}",
        f"bind {shlex.quote(order.workdir)}",
        *(f"bind {shlex.quote(each)}" for each in used.binds),
        *host_path_lines(order),
    ]
    return lines, f'--container-image={shlex.quote(used.image)} --container-mounts="$binds" --no-container-mount-home'
