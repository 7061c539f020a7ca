"""Launchers that drumbeat does not take the place of: they must stand before it, or the command is refused.

Also here: programs that start their own ranks, and so are started once per node.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Dict, Optional, Sequence, Tuple

from drumbeat.base.regex import regex
from drumbeat.commands.wrappers import Wrapper, peel, skip_options, values

_MPI = Wrapper(
    {
        **values(
            "-n -np --np -c -N --npernode -npernode -H --host -host --hostfile -hostfile -machinefile --machinefile -f -x "
            "--map-by -map-by --bind-to -bind-to --rank-by -wdir --wdir -wd -prefix --prefix -ppn -perhost -hosts "
            "--output-filename --timeout --cpu-bind --display --tune --app -app --path --report-uri --depth -d"
        ),
        **values("-mca --mca -gmca --gmca -genv --genv -env --pmca --prtemca", 2),
    }
)
_SRUN = Wrapper(
    values(
        "-A --account -c --cpus-per-task -C --constraint -d --dependency -D --chdir -e --error -G --gpus -i --input "
        "-J --job-name -m --distribution -n --ntasks -N --nodes -o --output -p --partition -q --qos -t --time "
        "-w --nodelist -x --exclude --gres --ntasks-per-node --gpus-per-node --gpus-per-task --cpu-bind --gpu-bind "
        "--mem --mem-per-cpu --mem-bind --mpi --export --container-image --container-mounts --network --jobid"
    )
)
_HOROVOD = Wrapper(
    values(
        "-np --num-proc -H --hosts -hostfile --hostfile -p --ssh-port -i --ssh-identity-file --network-interface "
        "--network-interfaces --nics --output-filename --start-timeout --config-file --min-np --max-np --slots-per-host "
        "--host-discovery-script --mpi-args --fusion-threshold-mb --cycle-time-ms --log-level --timeline-filename"
    )
)
OUTSIDE: Dict[str, Wrapper] = {
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "orterun": _MPI,
    "prun": _MPI,
    "prterun": _MPI,
    "mpiexec.hydra": _MPI,
    "aprun": _MPI,
    "srun": _SRUN,
    "horovodrun": _HOROVOD,
    "jsrun": Wrapper(every=1),
}
_CONTAINERS = ("apptainer", "singularity", "docker", "podman", "enroot", "shifter")

SELF_SPAWNING = {
    "llamafactory-cli": "LLaMA-Factory starts torchrun itself, by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT",
    "axolotl": "axolotl starts its own launcher",
    "swift": "ms-swift starts torchrun itself when NPROC_PER_NODE is set",
    "colossalai": "colossalai run starts torchrun itself",
}

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_LAUNCHER_WORD = regex(
    r"(?:^|[\s;&|(/])(torchrun|accelerate(?:-|\s+)launch|deepspeed|torch\.distributed\.(?:run|launch)|composer|fabric\s+run)"
    r"(?=\s)"
)


def refusal(command: Sequence[str]) -> Optional[Tuple[str, str]]:
    """What is wrong with a launcher that cannot stand inside the command, and the line to type instead."""
    outer = without_wrappers(command)
    name = os.path.basename(outer[0]) if outer else ""
    wrapper = OUTSIDE.get(name)
    if wrapper is not None:
        index = skip_options(wrapper, outer, 1)
        inner = shlex.join(outer[index:]) or "COMMAND"
        before = shlex.join(outer[:index])
        what = f"{name} stands inside the command: every node would start a {name} of its own"
        if name == "horovodrun":
            before = re.sub(r"^\S+", "mpirun", before)
        return what, f"put it before drumbeat, which then joins its tasks: {before} drumbeat run -- {inner}"
    if name == "torchx":
        return (
            "torchx stands inside the command: it starts a job of its own",
            "write what its component runs: torchrun --nnodes N --nproc-per-node M SCRIPT",
        )
    if name in _CONTAINERS:
        launcher = _LAUNCHER_WORD.search(" ".join(outer[1:]))
        if launcher:
            return (
                f"{launcher.group(1)} stands behind {name}, where drumbeat cannot give it its nodes",
                f"name the image (container: IMAGE, or --container IMAGE) and write the command without {name}: "
                f"{launcher.group(1)} …",
            )
    return None


def starts_its_own_ranks(command: Sequence[str]) -> str:
    """Why this program is started once per node although no launcher stands at its front; '' if it is not."""
    inner = without_wrappers(command)
    return SELF_SPAWNING.get(os.path.basename(inner[0]), "") if inner else ""


def runs_text(word: str) -> bool:
    """Whether this option of a shell makes the next word its script: -c, -lc, -xec."""
    return bool(re.fullmatch(r"-[a-z]*c", word))


def without_wrappers(command: Sequence[str]) -> Tuple[str, ...]:
    inner = tuple(command)
    while True:
        peeled = peel(inner)
        if peeled is None:
            return inner
        inner = peeled.inner
