"""Options of a site or a job for pods: `--pvc scratch:/scratch`. Each becomes a line of the manifest.

Options that may stand several times are written with a blank, and a job's adds to the site's unless it has the same name
(`--annotation NAME=VALUE`). Options that have one value are written with `=`, and a job's wins over the site's (`--kind=job`).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import field
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Option, Order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.jobfile.check import parse_duration

KINDS = ("jobset", "trainjob", "pytorchjob", "job", "jobs")
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_VOLCANO = "volcano"

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_NAME = regex(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAMESPACE = regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VALUE = regex(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")  # of a label
_LARGEST_ID = 2**31 - 1
_OWN = ("drumbeat/", "app.kubernetes.io/managed-by")  # names by which a run's objects are found again
_KEY = regex(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_QUANTITY = regex(r"\d+(\.\d+)?([kMGTPE]|[KMGTPE]i|m)?")
_MEMORY = regex(r"(\d+)\s*([KMGTkmgt]?)(i?)([bB]?)")

ONCE = {
    "context": "the context of your kubeconfig",
    "kind": "which kind of object starts the pods: " + ", ".join(KINDS),
    "runtime": "the training runtime that a TrainJob refers to",
    "shm": "the size of /dev/shm",
    "user": "UID or UID:GID that pods run as",
    "service-account": "the service account of the pods",
    "scheduler": "the scheduler that places the pods",
    "runtime-class": "the runtime class of the pods",
    "run-folder": "where the run folder is in the pods; on a claim, it outlives them",
    "linger": "how long the lead's pod waits to be fetched",
    "keep": "how long the finished job stays in the cluster",
    "muster": "how long pods wait for each other",
}
SEVERAL = {
    "annotation": "NAME=VALUE on every pod (networks)",
    "label": "NAME=VALUE on the object that starts the pods (queues)",
    "node-selector": "NAME=VALUE that nodes must have (pools)",
    "toleration": "KEY[=VALUE][:EFFECT] of nodes that are tainted",
    "resource": "NAME=COUNT besides GPUs, cores and memory (RDMA devices)",
    "pvc": "CLAIM:PATH[:ro], a volume claim",
    "capability": "a capability of the container (IPC_LOCK)",
    "pull-secret": "the secret by which the image is pulled",
}


@dataclass(frozen=True)
class Claim:
    name: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Toleration:
    key: str
    value: Optional[str] = None
    effect: str = ""


@dataclass(frozen=True)
class Settings:
    context: str = ""
    namespace: str = ""
    kind: str = ""  # one of KINDS; empty: what the cluster offers
    runtime: str = "torch-distributed"
    shm: str = ""  # empty: as much as the pod's memory
    user: Optional[int] = None
    group: Optional[int] = None
    service_account: str = ""
    scheduler: str = ""
    runtime_class: str = ""
    priority: str = ""
    run_folder: str = ""
    linger: int = 600  # seconds
    keep: int = 24 * 3600
    muster: int = 900  # images may have to be pulled first
    annotations: Dict[str, str] = field(default_factory=dict)
    labels: Dict[str, str] = field(default_factory=dict)
    queue: str = ""  # of Volcano; Kueue's is a label
    node_selector: Dict[str, str] = field(default_factory=dict)
    tolerations: Tuple[Toleration, ...] = ()
    resources: Dict[str, str] = field(default_factory=dict)
    claims: Tuple[Claim, ...] = ()
    capabilities: Tuple[str, ...] = ()
    pull_secrets: Tuple[str, ...] = ()

    @property
    def gang(self) -> bool:
        """Return true if the scheduler is Volcano, which starts all pods of a PodGroup or none."""
        return self.scheduler == _VOLCANO

    def claim_of(self, path: str) -> Optional[Claim]:
        """Return the claim on which a path lies: the one with the innermost mount point."""
        inside = [claim for claim in self.claims if (path + "/").startswith(claim.path.rstrip("/") + "/")]
        return max(inside, key=lambda claim: len(claim.path), default=None)


def settings_of(order: Order) -> Settings:
    """Parse the options. A Problem names the option that cannot be understood."""
    request = order.resources
    once, several = _sorted(request.options)
    values = {name.replace("-", "_"): _READERS[name](text, whole) for name, (text, whole) in once.items()}
    values["user"], values["group"] = values.get("user", (None, None))
    priority, volcano = request.specific.get("qos", ""), values.get("scheduler") == _VOLCANO
    amounts = _pairs(several["resource"])
    for name, amount in amounts.items():
        if not _QUANTITY.fullmatch(amount):
            raise Problem(f"{amount[:40]!r} is not a number of {name}", f"--resource {name}=1")
    if priority and not _NAME.fullmatch(priority):
        raise Problem(
            f"qos: {priority[:80]!r} cannot be the name of a priority class", "kubectl get priorityclasses lists them"
        )
    return Settings(
        **values,
        namespace=check_namespace(request.account),
        priority=priority,
        annotations=_pairs(several["annotation"]),
        labels=_labels(several["label"], "" if volcano else request.partition),
        queue=_checked(request.partition, f"partition: {request.partition}", _NAME.pattern, "a queue of Volcano")
        if volcano and request.partition
        else "",
        node_selector=_with_values(_pairs(several["node-selector"]), "node selector"),
        tolerations=tuple(_toleration(*each) for each in several["toleration"]),
        resources=amounts,
        claims=tuple(_claim(*each) for each in several["pvc"]),
        capabilities=tuple(_checked(*each, r"[A-Z_]{1,40}", "--capability IPC_LOCK") for each in several["capability"]),
        pull_secrets=tuple(_checked(*each, _NAME.pattern, "--pull-secret NAME") for each in several["pull-secret"]),
    )


_Words = List[Tuple[str, str]]  # the value, and the whole option for messages


def _sorted(options: Sequence[Option]) -> Tuple[Dict[str, Tuple[str, str]], Mapping[str, _Words]]:
    once: Dict[str, Tuple[str, str]] = {}
    several: Dict[str, _Words] = {name: [] for name in SEVERAL}
    for option in options:
        if not option.text.isprintable():
            raise Problem(f"{option.text[:80]!r} has control characters", "one option per entry, on one line")
        match = re.fullmatch(r"--([a-z-]+)(?:[ =]+(.*))?", option.text.strip())
        name, text = (match.group(1), (match.group(2) or "").strip()) if match else ("", "")
        if name not in ONCE and name not in SEVERAL:
            close = difflib.get_close_matches(name, [*ONCE, *SEVERAL], 1)
            hint = f"did you mean --{close[0]}? " if close else ""
            raise Problem(
                f"{f'{option.place}: ' if option.place else ''}{option.text[:80]!r} is not an option of pods",
                f"{hint}known: {', '.join('--' + each for each in sorted((*ONCE, *SEVERAL)))}",
            )
        if not text:
            raise Problem(f"{option.text!r} has no value", f"--{name} is {ONCE.get(name) or SEVERAL[name]}")
        if name in SEVERAL:
            several[name].append((text, option.text))
        elif name not in once:  # the job's own come first
            once[name] = (text, option.text)
    return once, several


def _labels(given: _Words, queue: str) -> Dict[str, str]:
    labels = _pairs(given)
    if queue:
        labels.setdefault(QUEUE_LABEL, queue)
    return _with_values(labels, "label")


def _with_values(pairs: Dict[str, str], what: str) -> Dict[str, str]:
    for name, value in pairs.items():
        if not _VALUE.fullmatch(value):
            raise Problem(
                f"{value[:80]!r} cannot be the value of the {what} {name}", "letters, digits, . _ and -; at most 63"
            )
    return pairs


def check_namespace(name: str) -> str:
    """Check the namespace, which becomes part of a handle and of kubectl's options."""
    if name and not _NAMESPACE.fullmatch(name):
        raise Problem(
            f"account: {name[:80]!r} cannot be the name of a namespace", "small letters, digits and -; at most 63"
        )
    return name


def _pairs(given: _Words) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for text, whole in given:
        name, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(name):
            _wrong(whole, f"{whole.split('=')[0].split(' ')[0]} NAME=VALUE")
        if name.startswith(_OWN):
            raise Problem(f"{whole[:120]!r}: {name} is drumbeat's own", "a run is found by it: take another name")
        found.setdefault(name, value)
    return found


def _toleration(text: str, whole: str) -> Toleration:
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (effect and effect not in _EFFECTS):
        _wrong(whole, f"--toleration KEY[=VALUE][:EFFECT], EFFECT one of {', '.join(_EFFECTS)}")
    return Toleration(key, value if equals else None, effect)


def _claim(text: str, whole: str) -> Claim:
    name, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not _NAME.fullmatch(name) or not path or mode not in ("", "ro"):
        _wrong(whole, "--pvc CLAIM:/PATH, with :ro at the end where it is only read")
    return Claim(name, _path(path, whole), mode == "ro")


def _path(text: str, whole: str) -> str:
    if not re.fullmatch(r"/[\w./+@%-]*", text) or ".." in text.split("/"):
        _wrong(whole, "an absolute path without blanks")
    return text.rstrip("/") or "/"


def quantity(text: str, whole: str) -> str:
    """Format memory as Kubernetes writes it: 440G and 440GB are 440G, 64Gi stays."""
    match = _MEMORY.fullmatch(text.strip())
    if not match:
        _wrong(whole, "a size such as 64Gi or 440G")
    number, unit, binary, _ = match.groups()
    unit = unit.upper()
    return f"{number}{'k' if unit == 'K' and not binary else unit}{binary if unit else ''}"


def _name(text: str, whole: str) -> str:
    return _checked(text, whole, _NAME.pattern, f"{re.split('[ =]', whole)[0]}=NAME: small letters, digits, - and .")


def _context(text: str, whole: str) -> str:
    return _checked(text, whole, r"[^\x00-\x1f\x7f]{1,250}", "--context=NAME, as kubectl config get-contexts says")


def _kind(text: str, whole: str) -> str:
    return text if text in KINDS else _wrong(whole, f"one of {', '.join(KINDS)}")


def _user(text: str, whole: str) -> Tuple[int, Optional[int]]:
    user, _, group = text.partition(":")
    if not re.fullmatch(r"[0-9]{1,10}(:[0-9]{1,10})?", text) or max(map(int, text.split(":"))) > _LARGEST_ID:
        _wrong(whole, "--user=1000 or --user=1000:100")
    return int(user), int(group) if group else None


def _seconds(text: str, whole: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise Problem(f"{whole[:120]!r}: {error}") from None


def _muster(text: str, whole: str) -> int:
    return _seconds(text, whole) or _wrong(whole, "a time above zero: pods need some to find each other")


def _checked(text: str, whole: str, pattern: str, right: str) -> str:
    if not re.fullmatch(pattern, text):
        _wrong(whole, right)
    return text


def _wrong(whole: str, right: str) -> NoReturn:
    raise Problem(f"{whole[:120]!r} cannot be understood", f"write {right}")


# Option of ONCE -> what reads its value.
_READERS: Dict[str, Callable[[str, str], Any]] = {
    "context": _context, "kind": _kind, "runtime": _name, "shm": quantity, "user": _user, "service-account": _name,
    "scheduler": _name, "runtime-class": _name, "run-folder": _path, "linger": _seconds, "keep": _seconds, "muster": _muster,
}  # fmt: skip
