"""Job: what the user asks. Each field's metadata is its only documentation (docs/job.md, --help and errors use it)."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import CHECK_LEVELS, CODES, TRANSPORTS
from drumbeat.containers import RUNTIMES
from drumbeat.jobfile.check import REQUIRED, check, key, origins_field
from drumbeat.jobfile.yamlfile import load_file, load_text, shown_path

# The tables inside a job: `wrap`, `expect` and `checks`, documented like the job's own keys.


@dataclass(frozen=True)
class JobWrap:
    ranks: Tuple[int, ...] = key(
        "numbers", "The ranks, counted over all nodes, whose command gets the prefix.", "[0, 3]", REQUIRED
    )
    command: Tuple[str, ...] = key(
        "command",
        "The prefix; `{rank}` and `{node}` are filled in on the node.",
        "rocprofv3 --hip-trace --stats -o prof-{rank} --",
        REQUIRED,
    )


@dataclass(frozen=True)
class JobExpect:
    transport: str = key(
        TRANSPORTS,
        "The network: rdma (InfiniBand, RoCE, or libfabric over such a NIC), one of its kinds (ib, roce, ofi), tcp, "
        "or any.",
        "ofi",
        "any",
    )
    gdr: Optional[bool] = key(
        "switch",
        "NICs must read GPU memory directly (true), or must not (false).",
        "true",
        default_text="either is fine",
    )


@dataclass(frozen=True)
class JobChecks:
    preflight: str = key(
        CHECK_LEVELS, "Action if a node would fail this job; checked on every node before ranks start.", "warn", "stop"
    )
    affinity: str = key(
        CHECK_LEVELS,
        "Action if ranks do not run on the cores, or do not see the devices, that the plan gave them.",
        "stop",
        "warn",
    )
    hang: str = key(
        CHECK_LEVELS,
        "Action if steps stop coming and one or all ranks are seen to hang. stop keeps the ranks' stacks, "
        "then ends the attempt as failed. Programs that report no steps are never stopped.",
        "stop",
        "warn",
    )
    transport: Optional[str] = key(
        CHECK_LEVELS,
        "Action if another network carries the traffic than `expect` or the variables name. off also "
        "leaves NCCL's log alone.",
        "warn",
        default_text="stop if the job sets `expect`, else warn",
    )
    world: Optional[str] = key(
        CHECK_LEVELS,
        "Action if the running ranks do not form one world: every rank is seen twice, or each node trains alone.",
        "warn",
        default_text="stop; warn if drumbeat joins a job",
    )
    loss: str = key(
        CHECK_LEVELS,
        "Action if the loss is not a number, or stays far above its usual course (ten median deviations of its last 64 "
        "reports), three reports in a row. Reported or printed losses count.",
        "warn",
        "off",
    )


# Keys of a job: how long it runs, how it stops and comes back, and what is checked meanwhile.


@dataclass(frozen=True)
class JobCourse:
    time: Optional[int] = key(
        "duration",
        "When to end the job, with its unit: 90s, 30m, 1h, 2d6h30m, hours:minutes:seconds, or "
        "days-hours:minutes:seconds. It counts from the start of node 0's agent; the ranks then have `stop-grace` to save.",
        "1h30m",
        minimum=1,
        default_text="no limit of drumbeat's own",
    )
    restarts: int = key("number", "Number of times the whole job is restarted after a failure.", "2", 0, minimum=0)
    spares: int = key(
        "number",
        "Spare nodes: more than `nodes`, waiting without ranks. One replaces a node that is lost or bad: the job goes on from "
        "its checkpoint, without waiting in a queue (docs page comeback). The last of `hosts` are the spares.",
        "1",
        0,
        minimum=0,
    )
    doubtful: str = key(
        ("fail", "ok"),
        "Exit code of a run whose command ended with 0 although a failure was seen (its last words, a rank that left early): "
        "`fail` gives 65, so that `afterok` and CI stop there; `ok` gives 0.",
        "ok",
        "fail",
        flag="",
    )
    stop_grace: int = key(
        "duration",
        "Time for ranks to save after a stop signal, before they are killed.",
        "2m",
        60,
        minimum=1,
        default_text="60s",
    )
    on_start: str = key(
        "shell",
        "Shell text that is run once before the ranks start: by a batch job on its first node, outside its container, or by "
        "`drumbeat run` where it is typed. What it exports reaches the ranks; if it fails or exits, the job ends.",
        "mkdir -p $SCRATCH/out && tar xf data.tar -C $SCRATCH",
        flag="",
    )
    on_end: Tuple[str, ...] = key(
        "command",
        "A command that the lead runs once on its node when the run has ended for good, for example to send a "
        "message. Split into words, no shell; `{run_id}`, `{outcome}`, `{exit_code}`, `{seconds}` and `{folder}` are"
        " filled in, and also set as DRUMBEAT_RUN_ID and so on. It has 15 s, writes to on-end.log in the run folder,"
        " and changes no exit code.",
        "ntfy publish my-topic '{run_id} {outcome}'",
        (),
        default_text="nothing",
    )
    wrap: Optional[JobWrap] = key(
        JobWrap,
        "A prefix (a profiler, a debugger) before the command of chosen ranks.",
        '{ranks: [2], command: "nsys profile -o prof-{rank}"}',
    )
    trace: bool = key(
        "switch", "Turn on the logs of NCCL/RCCL, MIOpen and libfabric, one file per rank.", "true", False
    )
    expect: Optional[JobExpect] = key(
        JobExpect,
        "Network that must carry the traffic between nodes. It is read from NCCL's own log and the NICs' counters at "
        "the first collective.",
        "{transport: ofi, gdr: true}",
        default_text="the site's, else any",
    )
    checks: JobChecks = key(
        JobChecks,
        "Action of each check of a running job: off, warn or stop.",
        "{transport: stop}",
        JobChecks(),
        default_text="each check's own",
    )
    oversubscribe: int = key(
        "number", "Ranks per core allowed if nodes are emulated on one machine.", "8", 4, minimum=1
    )
    stop_signal: str = key(
        ("TERM", "INT", "USR1", "USR2"),
        "Signal that tells each rank's main process to save and end: on a cancel, before a time limit, on a "
        "preemption. A rank that saves and then ends with 75 is started again by the scheduler.",
        "USR2",
        "TERM",
    )


# Keys of a job: what runs, on how many nodes, ranks and GPUs, and where.


@dataclass(frozen=True)
class JobLaunch:
    name: Optional[str] = key(
        "name",
        "The job's name; its run id begins with it.",
        "llama3-8b",
        default_text="the command's script: train.py gives train",
    )
    preset: Optional[str] = key(
        "text",
        "A workload that many run (docs page presets): its image, command and variables; what this file says wins.",
        "megatron-lm",
    )
    command: Tuple[str, ...] = key(
        "command",
        "Command that every rank runs. A line is split into words as in a shell, but no shell runs it; a list is "
        "taken word by word. On the command line, put it after `--`.",
        "python train.py --epochs 3",
        (),
        default_text="none: it must be here or after `--`",
    )
    nodes: Optional[int] = key(
        "count",
        "Number of nodes. With a range the job starts when the least is there, goes on with fewer after a loss, and uses "
        "those that return in its next attempt (docs page comeback).",
        "4-8",
        minimum=1,
        default_text="the site's, else 1",
    )
    ranks_per_node: Optional[int] = key(
        "number",
        "Ranks per node.",
        "4",
        minimum=1,
        default_text="one per GPU if GPUs are known, else the site's, else 1",
    )
    gpus: Optional[int] = key(
        "number",
        "GPUs per node to use.",
        "8",
        minimum=0,
        default_text="all of them; a scheduler is asked for the number in the site's profile, and for none if that has no number",
    )
    gpus_per_rank: int = key("number", "GPUs per rank.", "2", 1, minimum=1)
    ranks_per_gpu: int = key(
        "number",
        "Ranks that share one GPU; more than one is rarely right, and drumbeat warns about it.",
        "2",
        1,
        minimum=1,
    )
    visibility: str = key(
        ("all", "own"),
        "GPUs that a rank sees: all that the job has on its node, or only its own, which is then number 0.",
        "own",
        "all",
    )
    cpu_bind: Tuple[str, ...] = key(
        "words",
        "Cores of the local ranks, one mask (0xfe) or list (1-7) each; [none] binds no rank.",
        '["0xfe", "0xfe00"]',
        default_text="the cores beside each rank's GPU",
    )
    caches: Optional[str] = key(
        "path",
        "The project's storage for downloads: HF_HOME and TORCH_HOME are set to folders in it.",
        "$SCRATCH/cache",
        default_text="the site's, else left alone",
    )
    launcher: str = key(
        ("auto", "ranks", "torchrun", "tasks", "once"),
        "The launcher of the ranks: drumbeat itself (ranks), torch's (torchrun), the scheduler with one task per "
        "rank (tasks), or one process per node that starts its ranks itself (once). auto reads the command, and "
        "the choice is printed with its reason.",
        "ranks",
        "auto",
    )
    site: Optional[str] = key(
        "text",
        "The cluster: the name of a profile, or the path of your own (./my.yaml).",
        "localhost",
        default_text="detected from the cluster's or host's name, else localhost",
    )
    hosts: Tuple[str, ...] = key(
        "hosts",
        "Machines to run on, reached by ssh (docs page ssh): each is one node, the first is node 0. With `nodes`, only"
        " that many are used.",
        "[gpu1, gpu2]",
        default_text="the site's; else this machine, or the nodes that the scheduler gives",
    )
    hostfile: Optional[str] = key(
        "path",
        "A file with one host per line, as mpirun and deepspeed read it; `slots=N` is the number of ranks.",
        "./hostfile",
    )
    setup: str = key(
        "shell",
        "Shell text that is run on the node before the command, in the same environment. `$NAME` in it is the shell's.",
        "source $VENV/bin/activate",
    )
    env: Dict[str, Optional[str]] = key(
        "variables",
        "Variables for the ranks, as text exactly as written. The value `pass` passes your exported value on without"
        " writing it anywhere; a variable that looks secret needs it. As a flag: `--env A=text` or, to pass it on, "
        "`--env A`; repeatable.",
        "{HF_HOME: $SCRATCH/hf, HF_TOKEN: pass}",
    )
    workdir: Optional[str] = key(
        "path",
        "Working directory of the command; a relative path starts at the current directory.",
        "$HOME/code",
        default_text="where you type",
    )
    code: str = key(
        CODES,
        "How your code gets to the nodes: it is on storage that they share (shared), in the image (image), or sent with the job "
        "(sync): what git lists in the checkout around `workdir`, with uncommitted changes and new files, 200 MiB at most (a "
        "cluster may take less). The run folder keeps that copy and its SHA-256.",
        "sync",
        "shared",
    )
    runs: Optional[str] = key(
        "path", "Parent folder of the run folders.", "$SCRATCH/runs", default_text="the site's, else ./runs"
    )
    textfile: Optional[str] = key(
        "path",
        "The folder of node-exporter's textfile collector: during the run, the lead keeps its numbers in a file "
        "there for Prometheus (docs page watch).",
        "/var/lib/node_exporter/textfile",
        default_text="the site's, else none",
    )
    track: Tuple[str, ...] = key(
        "names",
        "Trackers that get the metrics while the job runs (docs page metrics): tensorboard, wandb, mlflow; after `=` the "
        "folder, project or experiment. One process on node 0 sends what ranks report or print.",
        "[tensorboard, wandb=my-project]",
    )


# Keys of a job that its scheduler reads.

_OWN = "the scheduler's own variable, else ~/.config/drumbeat/defaults.yaml"


@dataclass(frozen=True)
class JobScheduler:
    account: Optional[str] = key(
        "text",
        "The account to charge.",
        "project_465000001",
        default_text=_OWN,
    )
    partition: Optional[str] = key(
        "text",
        "The scheduler's partition or queue.",
        "accel",
        default_text=f"{_OWN}, else the site's",
    )
    qos: Optional[str] = key(
        "text",
        "The quality of service.",
        "devel",
        default_text=_OWN,
    )
    memory: Optional[str] = key("size", "Memory per node.", "440G", default_text="the site's, else the scheduler's")
    cpus: Optional[int] = key(
        "number", "Cores per node.", "288", minimum=1, default_text="the site's, in proportion to the GPUs requested"
    )
    exclusive: bool = key("switch", "No other job on these nodes.", "true", False)
    constraint: Optional[str] = key("text", "Features that nodes must have.", "h200", flag="TEXT")
    reservation: Optional[str] = key("text", "A reservation to use.", "course")
    mail: Optional[str] = key("text", "Mail address to notify when the job ends or fails.", "me@example.org", flag="TO")
    dependency: Optional[str] = key("text", "Jobs to wait for, in the scheduler's words.", "afterok:1234", flag="TEXT")
    array: Optional[str] = key(
        "array",
        "Several jobs from one file. Each has a run folder of its own, RUN/array/NUMBER, and the scheduler's variable with "
        "its number.",
        "0-3%2",
    )
    sweep: Dict[str, Tuple[str, ...]] = key(
        "lists",
        "Values to try: one job for each combination, as an array of the scheduler or as single runs in this machine's queue; "
        "`{NAME}` in the command is the value. With `array: '%2'` two run at a time. As a flag: `--sweep lr=1e-3,1e-4`, "
        "repeatable.",
        "{lr: [1e-3, 1e-4], seed: [1, 2]}",
    )
    requeues: int = key(
        "number",
        "Number of times drumbeat queues the job again: without the lost node after a node was lost, or when a rank "
        "ends with 75 without being asked to stop. Requeues by the scheduler or by you do not count. 0: never, not even after "
        "a preemption or at the time limit.",
        "1",
        3,
        minimum=0,
    )
    bad_nodes: str = key(
        ("avoid", "use"),
        "Nodes on the exclude list of `drumbeat nodes`: the scheduler is asked to leave them out (avoid), or not (use).",
        "use",
        "avoid",
    )
    submit_options: Tuple[str, ...] = key(
        "words", "Other options of the scheduler's submit command, word by word.", '["--licenses=scratch"]'
    )


# Keys of a job: modules, interpreter and container on the nodes.


@dataclass(frozen=True)
class JobSoftware:
    modules: Tuple[str, ...] = key(
        "words",
        "Environment modules, loaded once by the batch script, before `on-start`; the ranks get what they set. `purge` and "
        "`reset` in the list do just that.",
        "[purge, NRIS/GPU, NCCL]",
    )
    python: Optional[str] = key(
        "text",
        "The agent's interpreter, 3.9 or newer, if `python3` on the nodes or in the image is older or missing. A pattern "
        "(`*`) is looked up on the node, and the newest match is taken. It does not change your command's own Python.",
        "python3.11",
        default_text="the site's, else python3",
        flag="",
    )
    before_agent: str = key(
        "shell",
        "A line of shell that runs on each node before the agent, inside the container if there is one: for images "
        "that need it to find python3. Use `setup` for what only your command needs.",
        "$WITH_CONDA",
    )
    container: Optional[str] = key(
        "path",
        "The image that the ranks run in: a file, or a name that docker, podman or pyxis knows. It needs python3, 3.9 "
        "or newer; nothing of drumbeat has to be in it. `none` leaves it out, for a laptop.",
        "$PROJ/pytorch.sif",
    )
    container_runtime: Optional[str] = key(
        tuple(RUNTIMES), "The container runtime.", "apptainer", default_text="the site's"
    )
    binds: Tuple[str, ...] = key(
        "words",
        "Folders that the container sees besides the work and run folders: HOST or HOST:INSIDE. `$${NAME}` is filled in when "
        "the job runs: a variable of the scheduler, or what on-start exports.",
        "[/scratch, $DATA:/data]",
    )


@dataclass(frozen=True)
class Job(JobSoftware, JobScheduler, JobCourse, JobLaunch):
    """A job. Its keys are those of its four parts; fields of the last part come first, in docs/job.md as well."""

    brings: Tuple[str, ...] = ()  # drumbeat's own modules and packages that the command runs; no key of a file
    origins: Dict[str, str] = origins_field()

    @property
    def for_scheduler(self) -> str:
        """Name the keys that only mean something where a scheduler starts the job; '' if there are none."""
        names = ("account", "partition", "qos", "constraint", "reservation", "modules")
        return ", ".join(name for name in names if getattr(self, name))

    def where(self, path: str) -> str:
        """Return the beginning of a message about a value: `job.yaml:3: nodes`, `--nodes`, or its bare name."""
        return self.origins.get(path, path)

    def asks(self, path: str) -> str:
        """Name the source of a value: the job's preset, or the job itself."""
        preset = self.preset is not None and self.where(path).startswith(preset_file(self.preset) + ":")
        return f"preset {self.preset}" if preset else "as the job asks"


def preset_file(name: str) -> str:
    """Return the name of a preset's file for messages."""
    return f"presets/{name}.yaml"


def job_from_file(path: str) -> Job:
    return check(Job, load_file(path, "a job file"), shown_path(path), "the job")


def job_from_text(text: str, file: str = "job.yaml") -> Job:
    return check(Job, load_text(text, file, "a job file"), file, "the job")
