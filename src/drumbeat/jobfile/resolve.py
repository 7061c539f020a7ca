"""Job + Site + where we are -> Order. Pure: nothing is read, started or asked here."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os.path
import re
import signal
import time
from dataclasses import replace
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.order import COLLECTIVES, Expect, Floor, HostPath, Order, Wrap, swept_name
from drumbeat.base.problem import Problem
from drumbeat.base.text import count
from drumbeat.commands import launchers
from drumbeat.commands.launch import Found, find_launcher
from drumbeat.jobfile.check import check_limits, expand, keys_of, least_of, near, refuse_assignment, refuse_shell
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resources import Here, container, environment, flag_of, image_of, places, resources
from drumbeat.jobfile.site import Site
from drumbeat.jobfile.yamlfile import shown
from drumbeat.machine.vendors import count_shown
from drumbeat.metrics.trackers import MODULES as TRACKERS
from drumbeat.plan.argv import choose_launcher
from drumbeat.plan.binding import parse_mask
from drumbeat.plan.scene import DEFAULT_EPHEMERAL, ports

# Default name of a job: that of its script.


_SCRIPT = (".py", ".sh", ".jl", ".R")


def default_name(command: Sequence[str]) -> str:
    """Derive a name: train.py and `python -m pkg.train` give train, `drumbeat train llama` its last plain word, llama; else
    the program's name."""
    plain = itertools.takewhile(re.compile(r"[A-Za-z][\w-]*").fullmatch, command[1:])
    found = [command[0], *plain][-1]
    for index, word in enumerate(command):
        if word.endswith(_SCRIPT):
            found = os.path.splitext(word)[0]
            break
        if word == "-m" and index + 1 < len(command):
            found = command[index + 1].rsplit(".", 1)[-1]
            break
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(found)).strip("-._")
    return safe[:64] or "job"


# `sweep`: several jobs from one file, one for each combination of values, as an array of the scheduler.


_MOST = 1000


def combinations(sweep: Mapping[str, Sequence[str]]) -> Tuple[Dict[str, str], ...]:
    """List all combinations; the last name's values change fastest."""
    if not sweep:
        return ()
    return tuple(dict(zip(sweep, values)) for values in itertools.product(*sweep.values()))


def with_array(job: Job) -> Job:
    """Turn a job with a sweep into an array: its numbers count the combinations."""
    if not job.sweep:
        return job
    where = job.where("sweep")
    limit = job.array or ""
    if limit and not re.fullmatch(r"%\d{1,4}", limit):
        raise Problem(
            f"{job.where('array')}: a sweep makes its own array", "leave it out; array: '%2' runs two at a time"
        )
    for name in job.sweep:
        if not any("{" + name + "}" in word for word in job.command):
            raise Problem(f"{where}: the command has no {{{name}}}", f"write {{{name}}} where its values belong")
    count = len(combinations(job.sweep))
    if count > _MOST:
        raise Problem(f"{where}: {count:,} jobs; at most {_MOST:,}", "fewer values, or several sweeps")
    return dataclasses.replace(job, array=(f"0-{count - 1}" if count > 1 else "0") + limit)


def separate(job: Job) -> List[Job]:
    """Return one job for each combination of a sweep's values, named by them: for a queue without arrays."""
    with_array(job)  # refuses what is no sweep
    found = []
    for values in combinations(job.sweep):
        command = job.command
        for name, value in values.items():
            command = tuple(word.replace("{" + name + "}", value) for word in command)
        name = swept_name(job.name or default_name(job.command), values)
        found.append(dataclasses.replace(job, command=command, name=name, sweep={}, array=None))
    return found


# The meeting point of a run's nodes: their hosts, node 0 among them, and the identity that tells this run from another.


def find_hosts(
    job: Job, site: Site, here: Here, nodes: int, emulated: bool
) -> Tuple[Tuple[str, ...], str, Optional[int]]:
    """Return the hosts, node 0 among them, and the port, if one was given. `nodes` counts the spares too."""
    if emulated:
        hosts = tuple(f"127.0.{number >> 8}.{number & 255}" for number in range(1, nodes + 1))
        return hosts, hosts[0], None
    if here.hosts and len(here.hosts) != nodes:
        with_spares = f" ({job.spares} of them spares)" if job.spares else ""
        raise Problem(
            f"{job.where('nodes')}: {nodes} nodes requested{with_spares}, but the scheduler gave {len(here.hosts)}",
            f"leave it out, or say {max(1, len(here.hosts) - job.spares)}",
        )
    master, port = _split_port(here.master)
    master = master or (here.hosts[0] if here.hosts else "")
    if nodes > 1 and (master == "localhost" or master.startswith("127.") or master == "::1"):
        raise Problem(
            f"{master} cannot be the master of {nodes} nodes: each of them would dial itself",
            "name node 0 as the others see it: --master HOST",
        )
    if nodes > 1 and not master and site.backend == "local":
        raise Problem(
            f"{nodes} nodes, but node 0's host is not known",
            "on each of them add --master HOST --node-rank K, or --site localhost to emulate them on this one",
        )
    # Where a scheduler chooses the nodes, nobody knows node 0 before it has.
    return here.hosts, master or (here.hostname if site.backend == "local" else ""), port


def _split_port(master: str) -> Tuple[str, Optional[int]]:
    """Split HOST, HOST:PORT or [ADDRESS]:PORT; a bare IPv6 address has no port."""
    if master.startswith("["):
        host, _, port = master[1:].partition("]")
        port = port[1:] if port.startswith(":") else port
    elif master.count(":") == 1:
        host, port = master.split(":")
    else:
        host, port = master, ""
        if "]" in master:
            raise Problem(f"{master!r} is not HOST or HOST:PORT")
    if master and not host:
        raise Problem(f"{master!r} names no host", "write HOST or HOST:PORT")
    if port == "" and not master.endswith(":"):
        return host, None
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        raise Problem(f"{master!r}: {port!r} is not a port (1 to 65535)", "write HOST or HOST:PORT")
    return host, int(port)


def port_seed(run_id: str, name: str, master: str, here: Here) -> str:
    """Return the seed of the candidate ports, the same on every node. A job typed by hand on each machine has no shared id: then
    user, name and master are the seed."""
    if here.job_id:
        return f"{here.job_id}.{here.step_id or ''}"
    return f"{here.user}/{name}/{master}" if here.master else run_id


def run_identity(order: Order, here: Here) -> str:
    """Return an identity that the nodes of one run share if each makes an order of its own. By hand it includes the command
    itself: two runs with the same name may start on the same machines at once."""
    if here.job_id:
        return f"{here.job_id}.{here.step_id or ''}"
    return f"{here.user}/{order.name}/{order.master}/{order.digest()}" if here.master else ""


_TUNED = {"batch": "batch", "accumulate": "batch", "hook": "hooks"}  # a place in a command -> what tunes it


def resolve(job: Job, site: Site, here: Here) -> Order:
    job = with_array(job)
    for field, key in keys_of(Job).values():
        check_limits(key, getattr(job, field), job.where(field.replace("_", "-")))
    # Machines that are named are real ones, also on a site that would emulate them.
    emulated = site.emulated and not here.hosts and not here.master
    command = _command(job, here)
    name = job.name or default_name(command)
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime(here.now))
    run_id = f"{name}-{started}-{hashlib.sha256(here.entropy.encode()).hexdigest()[:4]}"
    workdir = _absolute(_path(job.workdir, job.where("workdir"), here) or ".", here)
    script = here.script(command, workdir)
    exported = {**here.environ, **_plain_env(job)}
    launcher, launcher_why = choose_launcher(command, job.launcher, script, exported, job.ranks_per_node)
    if job.launcher != "auto":
        launcher_why = job.asks("launcher")
    launch = _existing_launch(command, here)  # a launch command that exists already says how large it is meant to be
    if launch and launch.config:
        named = " ".join(f"{flag}={value}" for flag, value in launch.config.items())
        launcher_why += f"; drumbeat sets itself what its configuration file says: {named}"
    if here.hosts and job.spares >= len(here.hosts):
        raise Problem(
            f"{job.where('spares')}: {job.spares}, but there are {len(here.hosts)} hosts in all",
            "ask for fewer spares, or give more hosts: the training needs at least one host",
        )
    given, least = len(here.hosts) - job.spares if here.hosts else 0, least_of(job.nodes)
    nodes = int(job.nodes or given or (launch and launch.nodes) or site.nodes or 1)
    if nodes > 1 and job.launcher == "auto" and script.spawns.endswith("(Ray)"):
        raise Problem(
            f"{nodes} nodes, but the program starts its own workers (Ray): each node would be a Ray cluster of its own",
            "nodes: 1; or launcher: once and a script that starts Ray's head on node 0 and joins it from the others "
            "(docs page run)",
        )
    wanted = nodes if least and least <= given < nodes else None
    nodes = given if wanted else nodes  # so many the scheduler could give
    inside = script.ranks_per_node(exported) if launcher == "once" and not job.ranks_per_node else None
    of_launch = launch and not job.ranks_per_node and (here.cpus if launch.rank_per_core else launch.ranks_per_node)
    ranks = of_launch or inside or _ranks_per_node(job, site, here)
    smallest, largest = (launch and launch.node_range) or (nodes, nodes)
    if not smallest <= nodes <= largest:
        raise Problem(
            f"{nodes} nodes, but the command asks for {smallest} to {largest} (--nnodes={smallest}:{largest})",
            "change the one or the other",
        )
    if launch and launch.kind == "accelerate":
        launchers.refuse_cpu_ranks(launch.flags, launch.script, nodes, ranks)
    _check_gpus(job, site, here)
    if emulated:
        _check_room(job, nodes, ranks, here)
    expect = job.expect or site.expect
    alike = ("setup", "trace", "spares", "on_start", "gpus", "gpus_per_rank", "ranks_per_gpu", "visibility", "modules",
             "before_agent", "brings")  # fmt: skip
    hosts, master, port = find_hosts(job, site, here, nodes + job.spares, emulated)
    env, passed = environment(job, site, here, emulated)
    runs = _path(job.runs, job.where("runs"), here) or _path(site.runs, site.where("runs"), here) or "runs"
    textfile = _path(job.textfile, job.where("textfile"), here) or _path(site.textfile, site.where("textfile"), here)
    order = Order(
        run_id=run_id,
        name=name,
        created=here.now,
        command=command,
        nodes=nodes,
        ranks_per_node=ranks,
        ranks_asked=bool(job.ranks_per_node),
        launcher=launcher,
        launcher_why=launcher_why,
        workdir=workdir,
        folder=_absolute(os.path.join(runs, run_id), here),
        site=site.name,
        backend=site.backend,
        emulated=emulated,
        hosts=hosts,
        master=master,
        muster_ports=(port,)
        if port
        else ports("muster/" + port_seed(run_id, name, master, here), DEFAULT_EPHEMERAL)[0],
        env=env,
        agreed_command=launch.agreed if launch else (),
        passed=passed,
        wrap=_wrap(job, here, nodes * ranks),
        restarts=job.restarts or (launch and launch.restarts) or 0,
        fewest_nodes=least or (launch.node_range[0] if launch and launch.node_range else None),
        wanted_nodes=wanted,
        on_end=tuple(expand(word, here.environ, job.where("on-end")) for word in job.on_end),
        textfile=_absolute(textfile, here) if textfile else "",
        track=tuple(_track(job, here, name)),
        doubtful_ok=job.doubtful == "ok",
        stop_grace=float(job.stop_grace),
        time_limit=None if job.time is None else float(job.time),
        user=here.user,
        cpu_bind=_cpu_bind(job),
        reserved_cpus=_reserved(site),
        threads_per_core=site.cpus.threads if site.cpus else None,
        local_dir=_path(site.storage.local if site.storage else None, site.where("storage.local"), here)
        or Order.local_dir,
        host_paths=tuple(
            HostPath(name, path.pattern, path.why, path.prepend or "", path.target or "")
            for name, path in site.paths.items()
        ),
        stop_signal=int(getattr(signal, "SIG" + job.stop_signal)),
        arch=site.arch or "",
        python=_python(job, site),
        vendor=site.vendor or (site.container.vendor if site.container else ""),
        missing=_missing(job, site),
        container=container(job, site, here),
        resources=resources(job, site, here.environ),
        cache_dir=_cache_dir(job, site, here),
        expect=Expect(expect.transport, expect.gdr) if expect else Expect(),
        floors=_floors(site),
        sweep=combinations(job.sweep),
        **{name: getattr(job, name) for name in alike},
        checks={
            "preflight": job.checks.preflight,
            "affinity": job.checks.affinity,
            "hang": job.checks.hang,
            "transport": job.checks.transport or ("stop" if job.expect else "warn"),
            "world": job.checks.world or "stop",
            **({"loss": job.checks.loss} if job.checks.loss != "off" else {}),
        },
    )
    return replace(order, meeting=run_identity(order, here))


def _cpu_bind(job: Job) -> Tuple[str, ...]:
    for entry in job.cpu_bind:
        if job.cpu_bind != ("none",) and parse_mask(entry) is None:
            raise Problem(
                f"{job.where('cpu-bind')}: {shown(entry)} is neither a mask nor a list of cores",
                "write 0xfe or 1-7,9 for each local rank, or [none]",
            )
    return job.cpu_bind


def _reserved(site: Site) -> Tuple[int, ...]:
    text = site.cpus.reserved if site.cpus else ""
    cpus = parse_mask(text) if text else ()
    if cpus is None:
        raise Problem(f"{site.where('cpus.reserved')}: {shown(text)} is not a list of cores", "write 0,8,16-17")
    return cpus


def _cache_dir(job: Job, site: Site, here: Here) -> str:
    cache = _path(job.caches, job.where("caches"), here)
    if cache is None and site.storage:
        cache = _path(site.storage.cache, site.where("storage.cache"), here)
    return _absolute(cache, here) if cache else ""


def _command(job: Job, here: Here) -> Tuple[str, ...]:
    if not job.command:
        raise Problem(
            "the job has no command",
            "write 'command: python train.py' in the job file, or '-- python train.py' at the end",
        )
    for word in job.command:
        if word in ("&&", "||"):
            refuse_shell(word, job.where("command"))
    refuse_assignment(job.command, job.where("command"))
    open_places = [name for name in places(job.command) if name not in job.sweep]
    if open_places:
        raise Problem(
            f"{job.where('command')}: {{{open_places[0]}}} is a placeholder that has no value yet",
            f"write the value there; drumbeat tune {_TUNED.get(open_places[0], 'layout')} tries several",
        )
    return tuple(expand(word, here.environ, job.where("command")) for word in job.command)


def _existing_launch(command: Tuple[str, ...], here: Here) -> Optional[Found]:
    found = find_launcher(command)
    if found is None or found.kind != "accelerate":
        return found
    path = launchers.config_path(found.flags, here.environ)
    return find_launcher(command, launchers.from_config(here.read_config(path)) if path else {})


def _python(job: Job, site: Site) -> str:
    """Return the job's own Python, else the site's; an image has an interpreter of its own."""
    text = job.python or ("" if image_of(job, site)[0] else site.python or "")
    if text and not re.fullmatch(r"[\w./*?+][\w./*?+-]{0,299}", text):
        raise Problem(f"{job.where('python')}: {shown(text)} is not the name or path of a program")
    return text


def _missing(job: Job, site: Site) -> Tuple[str, ...]:
    known = {name for name, _ in keys_of(Job).items()}
    for name in site.needs:
        if name not in known:
            raise Problem(f"{site.where('needs')}: {shown(name)} is not a key of a job file{near(name, known)}")
    submit = {flag_of(option.value) for option in site.submit.values()} | {flag_of(text) for text in job.submit_options}
    return tuple(name for name in site.needs if not getattr(job, name, None) and f"--{name}" not in submit)


def _plain_env(job: Job) -> Dict[str, str]:
    """Return the job's own variables that have a value."""
    return {name: text for name, text in job.env.items() if text is not None and text != "pass"}


def _ranks_per_node(job: Job, site: Site, here: Here) -> int:
    if job.ranks_per_node:
        return job.ranks_per_node
    if job.launcher == "once":
        return 1
    # On a login node the site says what a node has.
    gpus = (here.gpus or site.gpus) if job.gpus is None else job.gpus
    gpus = count_shown(_plain_env(job), gpus or 0)
    if gpus:
        if gpus * job.ranks_per_gpu < job.gpus_per_rank:
            raise Problem(f"{job.where('gpus-per-rank')}: {job.gpus_per_rank}, but a node of this job has {gpus} GPUs")
        return gpus * job.ranks_per_gpu // job.gpus_per_rank
    return site.ranks_per_node or 1


_ELSEWHERE = "written for a scheduler ({keys}): drumbeat submit on the cluster; here: drumbeat plan --site NAME JOB"


def _check_gpus(job: Job, site: Site, here: Here) -> None:
    if site.backend == "local" and job.gpus and here.gpus is not None and job.gpus > here.gpus:
        fix = _ELSEWHERE.format(keys=job.for_scheduler) if job.for_scheduler else ""
        raise Problem(
            f"{job.where('gpus')}: {job.gpus} GPUs per node requested, but {here.hostname} has {here.gpus}", fix
        )


def _check_room(job: Job, nodes: int, ranks: int, here: Here) -> None:
    asked, room = nodes * ranks + job.spares, job.oversubscribe * here.cpus
    if asked > room:
        spares = f" and {count(job.spares, 'spare node')}" if job.spares else ""
        raise Problem(
            f"{count(nodes, 'node')} x {count(ranks, 'rank')} = {count(nodes * ranks, 'rank')}{spares} on this one machine; "
            f"its {count(here.cpus, 'core')} take {room}, {job.oversubscribe} per core",
            _ELSEWHERE.format(keys=job.for_scheduler)
            if job.for_scheduler
            else f"ask for fewer, or allow more with --oversubscribe {-(-asked // here.cpus)}",
        )


def _track(job: Job, here: Here, name: str) -> Iterator[str]:
    """Yield each tracker with its place; TensorBoard's own default is in the run folder, which each job of an array has."""
    for text in job.track:
        tracker, _, place = text.partition("=")
        if tracker not in TRACKERS:
            raise Problem(f"{job.where('track')}: no tracker {shown(tracker)}", f"known: {', '.join(TRACKERS)}")
        place = _path(place, job.where("track"), here) or ""
        if tracker == "tensorboard":
            yield f"{tracker}={_absolute(place, here) if place else ''}"
        else:
            yield f"{tracker}={place or name}"


def _wrap(job: Job, here: Here, world: int) -> Optional[Wrap]:
    if job.wrap is None:
        return None
    for rank in job.wrap.ranks:
        if rank >= world:
            raise Problem(f"{job.where('wrap.ranks')}: there is no rank {rank} among {world}, counted from 0")
    place = job.where("wrap.command")
    return Wrap(job.wrap.ranks, tuple(expand(word, here.environ, place) for word in job.wrap.command))


def _floors(site: Site) -> Dict[str, Floor]:
    for op in site.floors:
        if op not in COLLECTIVES:
            raise Problem(
                f"{site.where('floors.' + op)}: there is no such operation", f"known: {', '.join(COLLECTIVES)}"
            )
    return {op: Floor(float(floor.busbw), floor.nodes, floor.source or "") for op, floor in site.floors.items()}


def _path(text: Optional[str], place: str, here: Here) -> Optional[str]:
    if text is None:
        return None
    if text.startswith("~"):
        raise Problem(f"{place}: '~' is not expanded here", "write $HOME")
    return expand(text, here.environ, place)


def _absolute(path: str, here: Here) -> str:
    return os.path.normpath(os.path.join(here.cwd, path))
