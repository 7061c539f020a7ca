"""Options of sbatch, each with its reason, and the checks for parts of an order that they cannot express."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Callable, List, Mapping, Optional, Set, Tuple

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.ranges import HostlistError, expand
from drumbeat.base.regex import regex
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.program import script_of
from drumbeat.containers import started_by_launcher
from drumbeat.jobfile.resources import flag_of

SPECIFIC = ("qos", "constraint", "reservation", "dependency", "mail", "gpus-as")
_GPUS_AS = ("gpus-per-node", "gres")
_MARGIN = 30  # seconds between the end of the grace and Slurm's own end
_EARLY = 60  # seconds: Slurm may send its signal this much earlier (sbatch(1), --signal)

# Each value becomes one word of an #SBATCH line, which has its own simple quoting: values that need quotes are refused.
_WORD = regex(r"[^\s'\"\\`$]{1,500}")
_GPUS = regex(r"--gpus-per-node=|--gres=(?:\S*,)?gpu\b")  # the job's own request for GPUs, which may name a type
_ASKS_GPUS = regex(r"--gpus|-G|--gres=\S*gpu|--tres-per-\w+=\S*gpu")
_TIME = regex(r"(?:--(time|time-min)=|-t)(\S+)")
_LOCAL = regex(r"/(?:tmp|var/tmp|dev/shm)(?:/|$)")
_BAD_PATH = regex(r"[\s'\"\\`$:,]")


def check(order: Order, where: Callable[[str], str]) -> None:
    request = order.resources
    words = {"account": request.account, "partition": request.partition, "memory": request.memory,
             "array": request.array, **request.specific}  # fmt: skip
    for key, text in words.items():
        if text:
            _check_word(text, where(key))
    if request.specific.get("gpus-as", _GPUS_AS[0]) not in _GPUS_AS:
        raise Problem(f"{where('gpus-as')}: {request.specific['gpus-as']!r} is not one of {', '.join(_GPUS_AS)}")
    before = ""
    for option in request.options:
        place = option.place or where("submit-options")
        if not option.text.startswith("-"):
            flag = f"--{place.rpartition('.')[2]}" if option.place else before
            raise Problem(
                f"{place}: {option.text!r} is not an option of sbatch",
                f"write it as one word: {flag or '--licenses'}={option.text.rpartition('=')[2]}",
            )
        before = option.text
        _check_word(option.text, place)
    for module in order.modules:
        if not module.isprintable():
            raise Problem(f"{where('modules')}: {module[:80]!r} cannot be the name of a module")
    _check_time(order, where("time"))
    if order.launcher == "tasks" and not order.ranks_per_node:
        raise Problem("one task per rank, but the number of ranks per node is not known", "add ranks-per-node: M")


def _check_time(order: Order, place: str) -> None:
    """Refuse a limit that leaves no time, whoever gives it: the job, or an option, which comes last and wins."""
    limits = {"time": (order.time_limit or 0.0, place)}
    for option in order.resources.options:
        found = _TIME.fullmatch(option.text)
        if found:
            limits[found[1] or "time"] = (seconds_of(found[2]), f"{option.place or place}: {option.text}")
    for limit, said in limits.values():  # with --time-min, Slurm may lower the limit to that
        problem = too_short(limit, order.stop_grace, said)
        if problem:
            raise problem


def seconds_of(text: str) -> float:
    """Return a time of Slurm's in seconds, 0 for one without an end."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(each.isdigit() for each in [days or "0", *parts]) or len(parts) > 3:
        return 0.0
    hours, minutes, seconds = [*map(int, parts), 0, 0][:3] if days or len(parts) == 3 else [0, *map(int, parts), 0][:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def too_short(time_limit: float, stop_grace: float, place: str) -> Optional[Problem]:
    """Return the problem of a limit under which Slurm may tell the ranks to stop as soon as they start."""
    limit = -(-time_limit // 60) * 60  # Slurm counts whole minutes
    told = int(stop_grace) + _MARGIN
    if not limit or limit > told + _EARLY:
        return None
    shorter = int(limit - _MARGIN - _EARLY - 1) // 10 * 10
    other = f", or stop-grace: {shorter}s" if shorter > 0 else ""
    rounded = f" (Slurm counts {limit:g})" if limit != time_limit else ""
    return Problem(
        f"{place}: {time_limit:g} s{rounded} leave no time to train: Slurm tells the ranks to stop {told} s before the end "
        f"(stop-grace and {_MARGIN} s), and may do so {_EARLY} s earlier",
        f"ask for more than {clock(told + _EARLY)} (hours:minutes:seconds){other}",
    )


def _check_word(text: str, place: str) -> None:
    if not _WORD.fullmatch(text):
        raise Problem(f"{place}: {text[:80]!r} cannot be one word of an sbatch line (blanks, quotes, $)")


def check_paths(order: Order) -> None:
    """Check paths: #SBATCH lines have no reliable quoting, and a container's binds are split at blanks."""
    image = order.container.image if order.container else ""
    image = image.replace("://", "").replace(":", "", 1)  # of a registry
    for what, path, text in (
        ("the run folder", order.folder, order.folder),
        ("workdir", order.workdir, order.workdir),
        ("the image", order.container.image if order.container else "", image),
    ):
        if _BAD_PATH.search(text):
            raise Problem(
                f"{what} {path!r} cannot be written into a batch script (blanks, quotes, $, ':')", "choose another path"
            )


def notice(order: Order) -> int:
    """Return how many seconds before its end Slurm tells the batch script."""
    return int(order.stop_grace) + _MARGIN


def notes(order: Order) -> List[str]:
    """List settings that Slurm would accept but that are probably mistakes."""
    request, said = order.resources, []
    whole = request.exclusive or any(option.text.startswith("--exclusive") for option in request.options)
    if request.gpus and request.gpus > 1 and not request.cpus and not whole:
        said.append(
            f"{request.gpus} GPUs per node, and no number of cores: most clusters then give 1 core for all ranks; "
            "add cpus: N, or exclusive: true"
        )
    used = order.container
    if request.gpus and used and not used.vendor and not started_by_launcher(order):
        said.append(
            f"{used.runtime} is started without the GPUs (--nv, --rocm), as site profile {order.site} names no vendor of theirs: "
            "container: {runtime: ..., vendor: nvidia} in a profile of your own does (drumbeat site new)"
        )
    local = next((path for path in (order.workdir, order.folder) if _LOCAL.match(path)), "")
    if local and order.nodes > 1:
        said.append(
            f"{local} is usually local to each node, and this job has {order.nodes}: submit from a shared folder"
        )
    return said


def no_gpus(order: Order) -> List[str]:
    """Warn about a job that seems to train but requests no GPU, unless it says that it needs none."""
    request = order.resources
    if order.gpus is not None or request.gpus or any(_ASKS_GPUS.match(option.text) for option in request.options):
        return []
    own = order.command[:1] and os.path.basename(order.command[0]) == "drumbeat" and "train" in order.command[1:2]
    if not (own or find_launcher(order.command) or script_of(order).trains):
        return []
    ranks = "1 rank per node" if order.ranks_per_node == 1 else f"{order.ranks_per_node or 'its'} ranks per node"
    return [
        f"this job asks for no GPU ({ranks}): neither it nor the site profile {order.site} names a number; "
        "add gpus: N per node, or gpus: 0 if it trains on CPUs"
    ]


def missing(order: Order, environ: Mapping[str, str], exported: Mapping[str, str]) -> List[str]:
    """List options that the site requires of every job and that neither this job nor an exported variable sets."""
    said = []
    for name in order.missing:
        variable = exported.get(name, "")
        if not environ.get(variable):
            way = f"{name}: ... in the job file, or --{name}" + (f", or export {variable}" if variable else "")
            said.append(f"{order.site} requires {name} for every job, and this one does not set it: {way}")
    return said


def header(order: Order, requeue: bool = True) -> List[str]:
    lines = []
    for text, why in directives(order, requeue):
        why = " ".join(why.split())  # a reason must stay on its line
        lines.append(f"#SBATCH {text:<40} # {why}" if why else f"#SBATCH {text}")
    return lines + [
        f"# {order.site} requires --{name} for every job, and nothing here sets it" for name in order.missing
    ]


def directives(order: Order, requeue: bool = True) -> List[Tuple[str, str]]:
    """Return sbatch's options with their reasons; a site's own come last, unless one is there already."""
    request = order.resources
    job = "%A_%a" if request.array else "%j"
    specific = request.specific
    nodes = f"{(order.fewest_nodes or 0) + order.spares}-{order.members}" if order.has_range else order.members
    made = [
        (f"--job-name={order.name}", ""),
        *((f"--{name}={value}", "") for name, value in (
            ("account", request.account), ("partition", request.partition), ("qos", specific.get("qos")),
            ("constraint", specific.get("constraint")), ("reservation", specific.get("reservation")),
            ("dependency", specific.get("dependency")), ("array", request.array),
        ) if value),
        (f"--chdir={order.workdir}", ""),
        (f"--nodes={nodes}", f"{order.nodes}, and {order.spares} spare" if order.spares else ""),
        *_tasks(order),
    ]  # fmt: skip
    if order.survives_loss:
        made.append(("--no-kill", f"the job goes on when a node is lost: {without_it(order)}"))
    if request.memory:
        made.append((f"--mem={request.memory}", "of each node"))
    if request.exclusive:
        made.append(("--exclusive", "no other job on these nodes"))
    if order.time_limit:
        made.append((f"--time={clock(order.time_limit)}", "days-hours:minutes:seconds"))
    made.append(
        (
            f"--signal=B:USR2@{notice(order)}",
            f"{notice(order)} s before the end; B: to this script alone, or every process would get it",
        )
    )
    if requeue and request.requeues:
        made.append(("--requeue", "after a preemption or a lost node the job comes back; each start has its own logs"))
    else:
        made.append(("--no-requeue", "requeues: 0" if requeue else "started again it would begin with its first run"))
    made += [
        ("--open-mode=append", "a job that comes back must not overwrite what it wrote"),
        (f"--output={order.folder}/slurm-{job}.out", ""),
    ]
    if specific.get("mail"):
        made += [(f"--mail-user={specific['mail']}", ""), ("--mail-type=END,FAIL", "")]
    made += _exclude(order)
    given = {flag_of(text) for text, _ in made}
    return made + [(option.text, option.why) for option in request.options if flag_of(option.text) not in given]


def without_it(order: Order) -> str:
    """Say how the job goes on without a lost node."""
    return "a spare takes its place" if order.spares else f"the job needs at least {order.fewest_nodes}"


def _exclude(order: Order) -> List[Tuple[str, str]]:
    """Return the nodes to avoid, beside those that the job itself excludes."""
    request = order.resources
    if not request.avoided:
        return []
    own = [each.text.partition("=")[2] for each in request.options if flag_of(each.text) == "--exclude"]
    named: Set[str] = set()
    with suppress(HostlistError):  # for example, the name of a file
        named = {name for text in own for name in expand(text)}
    hosts = [*filter(None, own), *(node.host for node in request.avoided if node.host not in named)]
    why = ", ".join(f"{node.host}: {node.why}" for node in request.avoided[:4])
    return [(f"--exclude={','.join(hosts)}", f"drumbeat nodes: {why[:300]}")]


def _tasks(order: Order) -> List[Tuple[str, str]]:
    request = order.resources
    tasks = order.ranks_per_node if order.launcher == "tasks" else 1
    why = "one task per rank" if tasks > 1 else "one agent per node; it starts the node's ranks"
    made = [(f"--ntasks-per-node={tasks}", why)]
    if order.has_range:  # given a number of tasks, Slurm would choose the fewest nodes that hold them
        made = [(f"--mincpus={request.cpus or tasks}", "cores of each node, for all its ranks")]
    elif request.cpus:
        cpus = max(1, request.cpus // tasks)
        made.append(
            (f"--cpus-per-task={cpus}", "cores of the node, for all its ranks" if tasks == 1 else "a rank's share")
        )
    if request.gpus and not any(_GPUS.match(option.text) for option in request.options):
        per_node = request.specific.get("gpus-as", _GPUS_AS[0]) == "gpus-per-node"
        text = f"--gpus-per-node={request.gpus}" if per_node else f"--gres=gpu:{request.gpus}"
        made.append((text, "all ranks see all GPUs of their node: --gpus-per-task would hide peers"))
    return made


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}" if days else f"{hours:02d}:{minutes:02d}:{rest:02d}"
