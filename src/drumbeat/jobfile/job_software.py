"""Keys of a job: modules, interpreter and container on the nodes."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.containers.runtimes import RUNTIMES
from drumbeat.jobfile.fields import key


@dataclass(frozen=True)
class JobSoftware:
    modules: Tuple[str, ...] = key(
        "words", "Environment modules, loaded on the node before anything else.", "[NRIS/GPU, NCCL]", ()
    )
    python: Optional[str] = key(
        "text",
        "The agent's interpreter, 3.9 or newer, where `python3` on the nodes or in the image is older or missing. A pattern "
        "(`*`) is looked up on the node, and the newest match is taken. Your command's own Python is not changed by it.",
        "python3.11",
        None,
        default_text="the site's, else python3",
    )
    before_agent: Optional[str] = key(
        "text",
        "A line of shell that runs on each node before the agent, inside the container where there is one: for images whose "
        "python3 is there only after it. Use `setup` for what only your command needs.",
        "$WITH_CONDA",
        None,
        flag="SHELL",
        default_text="none",
    )
    container: Optional[str] = key(
        "path",
        "The image that the ranks run in: a file, or a name that docker, podman or pyxis knows. It needs python3, 3.9 "
        "or newer; nothing of drumbeat has to be in it. `none` leaves it out, for a laptop.",
        "$PROJ/pytorch.sif",
        None,
        flag="IMAGE",
        default_text="none",
    )
    container_runtime: Optional[str] = key(
        "choice",
        "What runs the image.",
        "apptainer",
        None,
        allowed=tuple(RUNTIMES),
        flag="NAME",
        default_text="the site's",
    )
    binds: Tuple[str, ...] = key(
        "words",
        "Folders that the container sees besides the work and run folders: HOST or HOST:INSIDE.",
        "[/scratch, $DATA:/data]",
        (),
    )
