"""Site: description of a cluster. A profile is a YAML file with these fields; its file name is the site's name."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.data import names, read
from drumbeat.base.folders import config_folder
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import HostPath
from drumbeat.base.problem import Problem
from drumbeat.base.ranges import HostlistError
from drumbeat.base.ranges import expand as expand_hosts
from drumbeat.containers import RUNTIMES
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.jobfile.check import REQUIRED, check, key, keys_of, near, origins_field
from drumbeat.jobfile.job import JobExpect
from drumbeat.jobfile.yamlfile import Table, load_text, read_file, shown, shown_path
from drumbeat.machine.model import Facts, Pool
from drumbeat.machine.vendors import job_vendors
from drumbeat.plan.network import candidates, slingshot_interfaces

find = Catalog("machine")
_ANY_TEXT, _ANY_LETTER = "..any..", "..one.."  # in place of `*` and `?` while a host list is expanded
_VENDORS = tuple(vendor.name for vendor in job_vendors())


@dataclass(frozen=True)
class SiteVariable:
    value: str = key("text", "The value; `$NAME` is filled in from the user's environment.", "hsn0,hsn1", REQUIRED)
    why: str = key(
        "text", "Why ranks here need it; shown wherever the variable is.", "the only routed interfaces", REQUIRED
    )
    source: Optional[str] = key("text", "Where that is documented.", "https://docs.example.org/nccl")


@dataclass(frozen=True)
class SiteCpus:
    why: str = key("text", "Why, in words.", "the first core of each L3 group serves the system", REQUIRED)
    reserved: str = key("text", "Cores kept for the system, as a list; no rank is bound to them.", "0,8,16-17", "")
    threads: Optional[int] = key(
        "number", "Hardware threads per core that a rank is bound to.", "1", minimum=1, default_text="all it may use"
    )
    source: Optional[str] = key("text", "Where that is documented.", "https://docs.example.org/cpus")


@dataclass(frozen=True)
class SiteStorage:
    why: str = key("text", "Why, in words.", "nodes have no disk", REQUIRED)
    local: str = key("path", "Node-local storage, for caches that many processes lock.", "/tmp", "/tmp")  # noqa: S108
    cache: Optional[str] = key(
        "path",
        "The project's storage, for models and data that are downloaded once.",
        "$SCRATCH/cache",
        default_text="not known: HF_HOME and TORCH_HOME are left alone",
    )
    source: Optional[str] = key("text", "Where that is documented.", "https://docs.example.org/storage")


@dataclass(frozen=True)
class SitePath:
    pattern: str = key(
        "path",
        "The folder or file; `*` stands for a version, and the newest match is taken.",
        "/opt/ofi/*/lib",
        REQUIRED,
    )
    why: str = key("text", "What needs it.", "the libfabric that drives this network", REQUIRED)
    source: Optional[str] = key("text", "Where that is documented.", "https://docs.example.org/ofi")
    prepend: Optional[str] = key(
        "name",
        "In a container: the variable that gets this folder in front, in the order of this file. It is then mounted "
        "as /opt/host/NAME, so that nothing of the image is hidden.",
        "LD_LIBRARY_PATH",
    )
    target: Optional[str] = key(
        "path",
        "In a container: its path there.",
        "/etc/libibverbs.d/bnxt_re.driver",
        default_text="/opt/host/NAME with `prepend`, else where it is on the host",
    )


@dataclass(frozen=True)
class SiteContainer:
    runtime: str = key(tuple(RUNTIMES), "The container runtime.", "apptainer", REQUIRED)
    vendor: str = key(("", *_VENDORS), "Vendor of the GPUs in containers.", "amd", "")
    image: Optional[str] = key(
        "text",
        "Default image; `container: none` in a job runs it without one.",
        "registry.example.org/team/train:1",
        default_text="none: only jobs that name an image run in one",
    )
    binds: Tuple[str, ...] = key("words", "Folders that every container sees.", "[/scratch, /project]")
    options: Tuple[str, ...] = key("words", "The runtime's own options.", '["--shm-size=64g"]')


@dataclass(frozen=True)
class SiteFloor:
    busbw: int = key("number", "The least bus bandwidth of a healthy machine, in GB/s.", "340", REQUIRED, minimum=1)
    nodes: Optional[int] = key(
        "number", "The number of nodes it was measured with.", "2", minimum=1, default_text="any number"
    )
    source: Optional[str] = key("text", "Where that number is from.", "measured after the upgrade in May")


@dataclass(frozen=True)
class Detect:
    cluster: Tuple[str, ...] = key("words", "Names that the scheduler may have for this cluster.", "[lumi]")
    hosts: Tuple[str, ...] = key(
        "words", "Patterns of host names: `*`, `?`, and ranges as in `gpu[01-24]`.", '["uan*", "nid??????"]'
    )
    variables: Tuple[str, ...] = key(
        "words",
        "Variables that only jobs there have: NAME, or NAME=PATTERN. All of them must match. A profile of yours "
        "wins over a built-in one.",
        "[RUNAI_NUM_OF_GPUS, PET_NNODES]",
    )


@dataclass(frozen=True)
class Site:
    name: str  # of its file
    summary: str = key("text", "The cluster in one line.", "4 MI250X per node, Slingshot 11", REQUIRED)
    backend: str = key(
        "name", "Backend that jobs are submitted to, built in or from an installed package.", "slurm", "local"
    )
    hosts: Tuple[str, ...] = key(
        "hosts",
        "The machines, if jobs are started by ssh; a job uses as many as it has nodes, from the first on.",
        "gpu[1-8]",
        default_text="the job names them",
    )
    emulated: bool = key(
        "switch", "Nodes are processes of one machine, each with its own loopback address.", "true", False
    )
    nodes: Optional[int] = key("number", "Default number of nodes.", "1", minimum=1)
    ranks_per_node: Optional[int] = key(
        "number", "Default number of ranks per node, if the GPUs are not known.", "8", minimum=1
    )
    gpus: Optional[int] = key("number", "GPUs per node, as torch counts them.", "8", minimum=1)
    gpus_as: Optional[str] = key(
        "text",
        "Way to request GPUs, if the scheduler has several (docs pages slurm, kubernetes).",
        "gres",
        default_text="the backend's",
    )
    cores: Optional[int] = key(
        "number", "Cores per node that a job can have.", "56", minimum=1, default_text="the scheduler's"
    )
    memory: Optional[str] = key(
        "size", "Memory per node that a job can have, and gets by default.", "480G", default_text="not said"
    )
    needs: Tuple[str, ...] = key(
        "words",
        "Settings that every job there must have (account, time, partition, qos); checked before a job is sent.",
        "[account, time]",
        default_text="nothing",
    )
    python: Optional[str] = key(
        "text",
        "The agent's interpreter outside containers, where the nodes' python3 is older than 3.9; `*` stands for a version.",
        "/opt/cray/pe/python/*/bin/python3",
        default_text="python3",
    )
    vendor: Optional[str] = key(_VENDORS, "Vendor of the nodes' GPUs.", "amd", default_text="not known")
    arch: Optional[str] = key(
        ("x86_64", "aarch64", "ppc64le"),
        "The architecture of the nodes that jobs run on; an image must have it, and login nodes may differ.",
        "aarch64",
        default_text="not known: images are not checked",
    )
    container: Optional[SiteContainer] = key(
        SiteContainer,
        "Settings for containers.",
        "{runtime: apptainer, vendor: nvidia}",
        default_text="the job must say it",
    )
    textfile: Optional[str] = key(
        "path",
        "The folder of node-exporter's textfile collector on the nodes, if users may write there.",
        "/var/lib/node_exporter/textfile",
    )
    runs: Optional[str] = key(
        "path",
        "The folder in which run folders are made, on storage that all nodes share.",
        "$SCRATCH/drumbeat/runs",
        default_text="./runs",
    )
    env: Dict[str, SiteVariable] = key(
        "tables",
        "Variables that every rank gets here, each with its reason. A job's own value wins.",
        "{GLOO_SOCKET_IFNAME: {value: lo, why: nodes share one machine}}",
        inner=SiteVariable,
    )
    submit: Dict[str, SiteVariable] = key(
        "tables",
        "Options that every job here is submitted with, each with its reason.",
        "{network: {value: --network=disable_rdzv_get, why: the alternative rendezvous needs it}}",
        inner=SiteVariable,
    )
    cpus: Optional[SiteCpus] = key(
        SiteCpus,
        "Properties of the cores that a node does not report itself.",
        '{reserved: "0,8", why: kept for the system}',
        default_text="as the node reports",
    )
    storage: Optional[SiteStorage] = key(
        SiteStorage,
        "Storage for caches.",
        "{local: /scratch/local, why: each node has its own disk}",
        default_text="temporary files of each node, and no project storage",
    )
    paths: Dict[str, SitePath] = key(
        "tables",
        "Folders of the host that jobs need, as patterns: versions in them age. They are looked up on the node.",
        "{libfabric: {pattern: /opt/cray/libfabric/*/lib64, why: drives this network}}",
        inner=SitePath,
    )
    expect: Optional[JobExpect] = key(
        JobExpect,
        "Network that carries the traffic between nodes here. A job without its own `expect` is warned, never stopped.",
        "{transport: ofi, gdr: true}",
        default_text="any",
    )
    floors: Dict[str, SiteFloor] = key(
        "tables",
        "Minimum that `drumbeat verify` must measure here at its largest size, by operation: all_reduce, all_gather, "
        "reduce_scatter, all_to_all, broadcast, send_recv.",
        "{all_reduce: {busbw: 340, nodes: 2}}",
        inner=SiteFloor,
    )
    detect: Detect = key(
        Detect,
        "Ways to detect this cluster: by its name first, then by the host's, then by variables.",
        '{cluster: [lumi], hosts: ["uan*"]}',
        Detect(),
        default_text="never detected, only named",
    )
    origins: Dict[str, str] = origins_field()

    def where(self, path: str) -> str:
        return self.origins.get(path, path)


def site_from_text(text: str, name: str, file: str) -> Site:
    return checked_site(load_text(text, file, "a site profile"), name, file)


def checked_site(table: Table, name: str, file: str) -> Site:
    site = check(Site, table, file, "the site", name=name)
    for pattern in site.detect.hosts:
        host_patterns(pattern, site.where("detect.hosts"))
    return site


def host_patterns(text: str, place: str) -> List[str]:
    """Expand `gpu[01-24]` to the names that it stands for; `*` and `?` stay."""
    try:
        plain = text.replace("*", _ANY_TEXT).replace("?", _ANY_LETTER)
        return [name.replace(_ANY_TEXT, "*").replace(_ANY_LETTER, "?") for name in expand_hosts(plain)]
    except HostlistError as error:
        raise Problem(
            f"{place}: {shown(text)} is not a pattern of host names: {error}", "write gpu[01-24] or gpu*"
        ) from None


# Finds a site's profile: the user's own wins over the built-in one of the same name; a cluster is data.


DEFAULT = "localhost"
BUILT_IN = "sites/"  # where messages place the profiles that drumbeat brings


def find_site(
    wanted: Optional[str],
    environ: Mapping[str, str],
    hostname: str,
    cluster: Optional[str] = None,
    place: str = "--site",
) -> Site:
    """Find the requested site (a name, or the path of a profile), else the one detected, else localhost.

    `place` says who asked, in a message about an unknown name: `job.where("site")`.
    """
    if wanted is None:
        return detect(environ, hostname, cluster)
    if os.sep in wanted or wanted.endswith((".yaml", ".yml")):
        return site_from_path(wanted, place)
    return load_site(wanted, environ, place)


def load_site(name: str, environ: Mapping[str, str], place: str = "--site") -> Site:
    own = user_profiles(environ)
    if name in own:
        return site_from_path(own[name])
    if name in built_in():
        return site_from_text(built_in_text(name), name, f"{BUILT_IN}{name}.yaml")
    known = site_names(environ)
    raise Problem(
        f"{place}: no site {shown(name)}{near(name, known)}",
        f"known sites: {', '.join(known)}; your own goes to {config_folder(environ, 'sites')}/NAME.yaml, or give its path",
    )


def site_from_path(path: str, place: str = "--site") -> Site:
    if not os.path.exists(path):
        raise Problem(f"{place}: no profile {shown_path(path)}")
    name = os.path.splitext(os.path.basename(path))[0]
    return site_from_text(read_file(path, "a site profile"), name, shown_path(path))


def site_names(environ: Mapping[str, str]) -> List[str]:
    return sorted({*built_in(), *user_profiles(environ)})


def detect(environ: Mapping[str, str], hostname: str, cluster: Optional[str]) -> Site:
    """Detect the site by the cluster's name, then by the host's, then by variables. Two sites that match are a Problem,
    not a guess."""
    own, signs = user_profiles(environ), signs_of_sites(environ)
    by_cluster = [name for name, each in signs.items() if cluster and cluster in each.cluster]
    by_host = [name for name, each in signs.items() if _fits(hostname, each.hosts)]
    by_variables = [name for name, each in signs.items() if each.variables and _all_set(each.variables, environ)]
    by_variables = [name for name in by_variables if name in own] or by_variables
    for found, what in ((by_cluster, f"cluster {cluster}"), (by_host, f"host {hostname}"), (by_variables, "this job")):
        if len(found) > 1:
            raise SeveralSites(what, sorted(found))
        if found:
            return load_site(found[0], environ)
    return load_site(DEFAULT, environ)


class SeveralSites(Problem):
    """A machine or job that several profiles claim."""

    def __init__(self, what: str, names: Sequence[str]) -> None:
        super().__init__(f"{what} belongs to several sites: {', '.join(names)}", "choose one with --site")
        self.names = names


def signs_of_sites(environ: Mapping[str, str]) -> Dict[str, Detect]:
    """Return the signs of every site; a profile of the user replaces a built-in one of that name."""
    signs = {name: detect_of(name) for name in built_in()}
    return {**signs, **{name: site_from_path(path).detect for name, path in user_profiles(environ).items()}}


def claimed_too(site: Site, environ: Mapping[str, str]) -> List[str]:
    """Return the other sites that claim a cluster or hosts of this one, with what both of them name."""
    own = {*site.detect.cluster, *site.detect.hosts}
    others = {name: own & {*each.cluster, *each.hosts} for name, each in signs_of_sites(environ).items()}
    return [f"{name} ({', '.join(sorted(both))})" for name, both in others.items() if both and name != site.name]


def _fits(hostname: str, hosts: Sequence[str]) -> bool:
    patterns = (pattern for each in hosts for pattern in host_patterns(each, "detect.hosts"))
    return any(fnmatch.fnmatchcase(hostname, pattern) for pattern in patterns)


def _all_set(variables: Iterable[str], environ: Mapping[str, str]) -> bool:
    for variable in variables:
        name, equals, pattern = variable.partition("=")
        if not environ.get(name) or (equals and not fnmatch.fnmatchcase(environ[name], pattern)):
            return False
    return True


def detect_of(name: str) -> Detect:
    """Read the `detect` key of a built-in profile, and no other: every `drumbeat run` asks all of them."""
    found = re.search(r"^detect:.*(?:\n[ \t].*)*", built_in_text(name), re.MULTILINE)
    return (
        site_from_text(f"summary: x\n{found.group()}\n", name, f"{BUILT_IN}{name}.yaml").detect if found else Detect()
    )


_SITES = "drumbeat.jobfile.sites"


def built_in_text(name: str) -> str:
    return read(_SITES, f"{name}.yaml").decode()


def built_in() -> Tuple[str, ...]:
    return names(_SITES)


def user_profiles(environ: Mapping[str, str]) -> Dict[str, str]:
    folder = config_folder(environ, "sites")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    return {name[: -len(".yaml")]: os.path.join(folder, name) for name in names if name.endswith(".yaml")}


# A site's paths, looked up on a machine. Versions age: a profile holds patterns, and the newest match is taken.


Lister = Callable[[str], List[str]]  # Host.list: the names in a folder


def find_paths(paths: Sequence[HostPath], names_in: Lister, host: str) -> Tuple[Dict[str, str], List[Finding]]:
    """Locate each path on this host; a missing one is an error that says what was looked for and why."""
    found: Dict[str, str] = {}
    missing: List[Finding] = []
    for path in paths:
        matching = expand_pattern(names_in, path.pattern)
        if matching:
            found[path.name] = matching[0]
            continue
        looked = [f"looked for {path.pattern}"]
        missing.append(find("site-path-missing", name=path.name, why=path.why, evidence=looked, host=host))
    return found, missing


def expand_pattern(names_in: Lister, pattern: str) -> List[str]:
    """Return all matches, the newest version first."""
    places = ["/"]
    for part in pattern.strip("/").split("/"):
        places = [
            place.rstrip("/") + "/" + name
            for place in places
            for name in names_in(place)
            if fnmatch.fnmatchcase(name, part)
        ]
    return sorted(places, key=_by_version, reverse=True)


def _by_version(path: str) -> List[Tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d{1,9})", path)]


# A site as text: for a person to read, and as a new profile made from a machine's facts.


_UNSET: Tuple[Any, ...] = (None, "", (), {}, False, Detect())


def site_lines(site: Site, without: Sequence[str] = ()) -> List[str]:
    """Return every key that the profile sets, as it is spelled there, each with its reason."""
    lines = [f"{site.name}: {site.summary}"]
    for name, (attribute, spec) in keys_of(Site).items():
        value = getattr(site, attribute)
        if name in ("summary", *without) or value in _UNSET:
            continue
        if spec.kind == "tables":
            lines += ["", f"{name}:"]
            for entry, table in value.items():
                lines += _table(f"  {entry}", table)
        else:
            lines += ["", *_table(name, value)] if spec.kind == "table" else [f"{name}: {_words(value)}"]
    return (
        lines if site.detect != Detect() or "detect" in without else [*lines, "", "never detected: name it with --site"]
    )


def _table(title: str, table: Any) -> List[str]:
    values = {name: getattr(table, field) for name, (field, _) in keys_of(type(table)).items()}
    why, source = values.pop("why", ""), values.pop("source", None)
    told = [(name, _words(value)) for name, value in values.items() if value not in _UNSET]
    alone = len(told) == 1 and told[0][0] in ("value", "pattern")
    shown = f" = {told[0][1]}" if alone else f": {', '.join(f'{name} {words}' for name, words in told)}"
    reason = f"{why} ({source})" if source else why
    return [title + shown] + ([f"      {reason}"] if reason else [])


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else "true" if value is True else str(value)


def new_site(facts: Facts, backend: str, pools: Sequence[Pool] = (), cluster: str = "", runtime: str = "") -> str:
    """Write a profile to start from. Values that differ between nodes are left to the node; observed ones are stated. `pools`:
    given on a login node, whose own devices are not those of the nodes. `runtime`: a container runtime that was found."""
    lines = [
        f"# Made on {_plain(facts.host)} by: drumbeat site new. Check each line, then save it as NAME.yaml in",
        "# ~/.config/drumbeat/sites; drumbeat site check NAME.yaml says whether it is valid.",
    ]
    lines += _of_pools(pools, backend) if pools else _of_node(facts, backend)
    lines += _of_containers(runtime, "" if pools else next((g.vendor for g in facts.gpus if not g.integrated), ""))
    cluster = cluster or facts.identity.cluster or ""
    lines.append(f"detect: {{{'cluster' if cluster else 'hosts'}: [{json.dumps(cluster or facts.host)}]}}")
    return "\n".join(lines) + "\n"


def _of_pools(pools: Sequence[Pool], backend: str) -> List[str]:
    """Describe the nodes that most jobs should get: those with GPUs, of these the largest group."""
    best = max(pools, key=lambda pool: (pool.gpus > 0, pool.nodes, pool.usual))
    named = f"partition {best.name}: {best.nodes} nodes with {best.gpus or 'no'} GPUs, {best.cores} cores"
    lines = [
        *(
            f"# {backend} has {_plain(f'{p.name}: {p.nodes} nodes, {p.cores} cores, {p.gpus} GPUs')}"
            for p in pools[:16]
        ),
        f"summary: {json.dumps(named)}",
        f"backend: {backend}",
        *([f"gpus: {best.gpus}  # as the scheduler counts them"] if best.gpus else []),
        *([f"cores: {best.cores}"] if best.cores else []),
        *([f"memory: {best.memory}M"] if best.memory else []),
        "# Interfaces and NICs are looked up on each node. Where run folders go, and what every job must say:",
        "# runs: $SCRATCH/drumbeat/runs",
        "# needs: [account, time]",
    ]
    if not best.usual and any(pool.name != best.name for pool in pools):
        why = "its nodes have the GPUs" if best.gpus else "jobs that name no partition get none"
        lines += ["submit:", "  partition:", f"    value: {json.dumps('--partition=' + best.name)}", f"    why: {why}"]
        lines.append("    source: sinfo, asked by drumbeat site new")
    return lines


def _of_containers(runtime: str, vendor: str) -> List[str]:
    """Name the runtime for jobs with an image. A login node does not show the vendor of the nodes' GPUs: left to the reader."""
    seen = f"{runtime} is installed here" if runtime else f"one of {', '.join(RUNTIMES)}; none of them was found here"
    if runtime and vendor in _VENDORS:
        return [f"container: {{runtime: {runtime}, vendor: {vendor}}}  # {seen}"]
    named = f"container: {{runtime: {runtime or 'apptainer'}, vendor: {vendor or 'nvidia'}}}"
    return [f"# For jobs with an image: {seen}. vendor: of the nodes' GPUs.", f"# {named}"]


def _of_node(facts: Facts, backend: str) -> List[str]:
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    names = sorted({gpu.name or f"unknown {gpu.vendor} GPU" for gpu in gpus})
    nics = [device.name for device in (facts.cxi or facts.rdma)]
    parts = [f"{len(gpus)} {' and '.join(names)} per node" if gpus else "no GPU seen"]
    parts.append(f"{len(nics)} NICs: {', '.join(nics)}" if nics else "no RDMA device seen")
    lines = [f"summary: {json.dumps('; '.join(parts))}", f"backend: {backend}"]
    if gpus:
        lines.append(f"gpus: {len(gpus)}")
    fast = slingshot_interfaces(facts)
    if fast:
        value, why = ",".join(one.name for one in fast), "the Slingshot interfaces that were up"
    elif len(candidates(facts)) == 1:
        value, why = "=" + candidates(facts)[0].name, "the only interface that was up with an address others can reach"
    else:
        seen = ", ".join(one.name for one in candidates(facts)) or "none"
        return [*lines, f"# Interfaces that were up: {_plain(seen)}. Each node chooses, by the nodes' subnets."]
    lines += ["env:", "  NCCL_SOCKET_IFNAME:", f"    value: {json.dumps(value)}", f"    why: {json.dumps(why)}"]
    return [*lines, f"    source: {json.dumps('seen on ' + facts.host)}"]


def _plain(text: str) -> str:
    """Remove everything that could end a comment line."""
    return "".join(character for character in text if character.isprintable())[:200]
