"""Keys of a job: what runs, on how many nodes, ranks and GPUs, and where."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import CODES
from drumbeat.jobfile.fields import key


@dataclass(frozen=True)
class JobLaunch:
    name: Optional[str] = key(
        "name",
        "The job's name; its run id begins with it.",
        "llama3-8b",
        None,
        flag="X",
        default_text="the command's script: train.py gives train",
    )
    preset: Optional[str] = key(
        "text",
        "A workload that many run (docs/presets.md): its image, command and variables; what this file says wins.",
        "megatron-lm",
        None,
        flag="NAME",
    )
    command: Tuple[str, ...] = key(
        "command",
        "What every rank runs. A line is split into words as a shell would, but no shell ever sees it; a list is taken "
        "word by word. On the command line it stands after `--`.",
        "python train.py --epochs 3",
        (),
        default_text="none: it must be here or after `--`",
    )
    nodes: Optional[int] = key(
        "number", "How many nodes.", "2", None, minimum=1, flag="N", default_text="the site's, else 1"
    )
    ranks_per_node: Optional[int] = key(
        "number",
        "How many ranks on each node.",
        "4",
        None,
        minimum=1,
        flag="M",
        default_text="one per GPU where GPUs are known, else the site's, else 1",
    )
    gpus: Optional[int] = key(
        "number", "How many GPUs of each node to use.", "8", None, minimum=0, flag="N", default_text="all of them"
    )
    gpus_per_rank: int = key("number", "How many GPUs each rank drives.", "2", 1, minimum=1, flag="N")
    ranks_per_gpu: int = key(
        "number",
        "How many ranks share one GPU; more than one is rarely right, and drumbeat warns of it.",
        "2",
        1,
        minimum=1,
        flag="N",
    )
    visibility: str = key(
        "choice",
        "Which GPUs a rank sees: all that the job has on its node, or only its own, which is then number 0.",
        "own",
        "all",
        allowed=("all", "own"),
        flag="X",
    )
    cpu_bind: Tuple[str, ...] = key(
        "words",
        "Cores of the local ranks, one mask (0xfe) or list (1-7) each; [none] binds no rank.",
        '["0xfe", "0xfe00"]',
        (),
        default_text="the cores beside each rank's GPU",
    )
    caches: Optional[str] = key(
        "path",
        "The project's storage for downloads: HF_HOME and TORCH_HOME are set to folders in it.",
        "$SCRATCH/cache",
        None,
        flag="DIR",
        default_text="the site's, else left alone",
    )
    launcher: str = key(
        "choice",
        "Who starts the ranks: drumbeat itself (ranks), torch's launcher (torchrun), the scheduler with one task per rank "
        "(tasks), or one process per node, which starts its ranks itself (once). auto reads the command, and "
        "the choice is printed with its reason.",
        "ranks",
        "auto",
        allowed=("auto", "ranks", "torchrun", "tasks", "once"),
        flag="L",
    )
    site: Optional[str] = key(
        "text",
        "The cluster: the name of a profile, or the path of your own (./my.yaml).",
        "localhost",
        None,
        flag="S",
        default_text="detected from the cluster's or host's name, else localhost",
    )
    hosts: Tuple[str, ...] = key(
        "hosts",
        "Machines to run on, reached by ssh (docs/ssh.md): each is one node, the first is node 0. With `nodes` as many of them "
        "as that are taken.",
        "[gpu1, gpu2]",
        (),
        flag="A,B",
        default_text="the site's; else wherever you type, or what the scheduler gives",
    )
    hostfile: Optional[str] = key(
        "path",
        "A file with one host per line, as mpirun and deepspeed read it; `slots=N` is the number of ranks.",
        "./hostfile",
        None,
        flag="FILE",
    )
    setup: str = key(
        "shell",
        "Shell text that is run on the node before the command, in the same environment. `$NAME` in it is the shell's.",
        "source $VENV/bin/activate",
        "",
        flag="SHELL",
        default_text="none",
    )
    env: Dict[str, Optional[str]] = key(
        "variables",
        "Variables for the ranks, as text exactly as written. The value `pass` hands yours on by name without writing "
        "it anywhere; a variable that looks secret must be given that way. As a flag: `--env A=text` or, to hand "
        "it on, `--env A`; repeatable.",
        "{HF_HOME: $SCRATCH/hf, HF_TOKEN: pass}",
        {},
        flag="NAME=TEXT",
        default_text="none",
    )
    workdir: Optional[str] = key(
        "path",
        "Where the command is started; a relative path counts from where you type.",
        "$HOME/code",
        None,
        flag="DIR",
        default_text="where you type",
    )
    code: str = key(
        "choice",
        "How your code gets to the nodes: it is on storage that they share (shared), in the image (image), or sent with the job "
        "(sync): what git lists in the checkout around `workdir`, with uncommitted changes and new files, 200 MiB at most (a "
        "cluster may take less). The run folder keeps that copy and its SHA-256.",
        "sync",
        "shared",
        allowed=CODES,
        flag="X",
    )
    runs: Optional[str] = key(
        "path",
        "The folder in which each run gets its own.",
        "$SCRATCH/runs",
        None,
        flag="DIR",
        default_text="the site's, else ./runs",
    )
    textfile: Optional[str] = key(
        "path",
        "The folder of node-exporter's textfile collector: while the run goes on, the lead keeps a file with its numbers "
        "there for Prometheus (docs/watch.md).",
        "/var/lib/node_exporter/textfile",
        None,
        flag="DIR",
        default_text="the site's, else none",
    )
