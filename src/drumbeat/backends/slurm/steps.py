"""The srun line that starts one agent per node, or with `launcher: tasks` one task per rank."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

from drumbeat.base.order import Order

# What sbatch or salloc exported about tasks is about their own, and srun would take it for ours.
_NOT_OURS = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND",
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_MEM_BIND",
    "SLURM_DISTRIBUTION", "SLURM_HINT", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_STEP_ID", "SLURM_STEPID",
)  # fmt: skip


def srun_options(order: Order) -> List[tuple[str, str]]:
    """Each option with its reason."""
    tasks = order.ranks_per_node if order.launcher == "tasks" else 1
    each = "one task per rank: local id 0 is the node's agent, the others guard one rank each"
    return [
        (f"--nodes={order.members}", "all nodes of the job" + (", spares too" if order.spares else "")),
        (f"--ntasks-per-node={tasks}", each if tasks > 1 else "one agent per node; it starts the node's ranks"),
        (f"--ntasks={order.members * tasks}", "given, or the allocation's own value would count"),
        *_cores(order, tasks),
        ("--overlap", "two runs may share an allocation; without it the second would wait for the first"),
        ("--cpu-bind=none", "the agent binds each rank to the cores beside its GPU"),
        *_when_one_ends(order),
    ]


def _when_one_ends(order: Order) -> List[tuple[str, str]]:
    if order.spares:
        return [
            ("--no-kill", "the step goes on when a node is lost: a spare takes its place"),
            ("--kill-on-bad-exit=0", "the same for an agent that dies; the lead ends the others when the run ends"),
            ("--wait=0", "no limit for the others after the first agent has ended"),
        ]
    return [
        ("--kill-on-bad-exit=1", "an agent that dies must not leave the others waiting"),
        ("--wait=60", "seconds after the first agent has ended until the rest is ended too"),
    ]


def _cores(order: Order, tasks: int) -> List[tuple[str, str]]:
    cpus = order.resources.cpus
    why = "since Slurm 22.05 srun does not take it over from sbatch"
    return [(f"--cpus-per-task={max(1, cpus // tasks)}", why)] if cpus else []


def srun_argv(order: Order, environ: Mapping[str, str], command: Sequence[str]) -> List[str]:
    options = [option for option, _ in srun_options(order)]
    per_task = environ.get("SLURM_GPUS_PER_TASK") or environ.get("SLURM_NTASKS_PER_GPU")
    if per_task and environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        # the allocation counts GPUs by task: one agent per node would get the GPUs of one task
        options.append(f"--gpus-per-node={environ['SLURM_GPUS_ON_NODE']}")
    return ["srun", *options, *command]


def srun_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _NOT_OURS}
