"""#SBATCH options as keys of a job file."""

from __future__ import annotations

import re
import signal
from typing import Dict, Mapping, Optional, Sequence, Tuple

from drumbeat.commands.script import Directive
from drumbeat.convert.draft import Draft, Notice
from drumbeat.jobfile.check import parse_duration

_SAME = {
    "account": "account", "partition": "partition", "qos": "qos", "constraint": "constraint",
    "reservation": "reservation", "array": "array", "dependency": "dependency", "chdir": "workdir",
}  # fmt: skip
_DROPPED = {
    "output": "drumbeat keeps every rank's output in the run folder, and Slurm's own beside it",
    "error": "drumbeat keeps every rank's output in the run folder, and Slurm's own beside it",
    "open-mode": "logs of a requeued job are kept apart by attempt",
    "requeue": "drumbeat decides what is requeued (requeues)",
    "ntasks": "drumbeat starts one agent per node",
    "ntasks-per-node": "drumbeat starts one agent per node",
    "tasks-per-node": "drumbeat starts one agent per node",
    "cpu-bind": "worked out on each node from its GPUs, cores and NICs (cpu-bind overrides it)",
    "gpu-bind": "which GPU a rank has is worked out on each node (visibility: own hides the others)",
    "ntasks-per-gpu": "drumbeat starts one agent per node",
    "distribution": "drumbeat numbers the ranks itself",
    "overcommit": "cores are bound by the plan",
    "parsable": "only changes what sbatch prints",
    "quiet": "only changes what sbatch prints",
    "verbose": "only changes what sbatch prints",
}
STOP_SIGNALS = ("TERM", "INT", "USR1", "USR2")
_NUMBERS = {int(each) for each in signal.Signals}
_FULL = {"err": "error", "out": "output", "part": "partition", "job": "job-name"}  # sbatch takes the start of a name
_MEMORY_PER = {"mem-per-gpu": "gpus", "mem-per-cpu": "cpus"}


def read_directives(draft: Draft, directives: Sequence[Directive]) -> None:
    given = {each.name: each for each in directives}
    whole, part = (given.get(name) for name in ("ntasks", "ntasks-per-node"))
    if "nodes" not in given and whole and part and whole.value.isdigit() and part.value.isdigit() and int(part.value):
        draft.set("nodes", -(-int(whole.value) // int(part.value)), whole.line)  # as many as Slurm takes for them
    for each in sorted(given.values(), key=lambda each: each.name != "nodes"):  # --gpus is of all nodes
        _one(draft, each)
    for each in directives:
        if each is not given[each.name] and each.name != "mail-type":
            draft.drop(
                each.line, each.text, f"line {given[each.name].line} sets it again, and sbatch takes the last one"
            )
    _mail(draft, given.get("mail-user"), [each for each in directives if each.name == "mail-type"])
    if "gpus-per-task" in given:
        _gpus_each(draft, given["gpus-per-task"], tasks_per_node(directives) or 1)
    if "gpus-per-socket" in given:
        sockets = given["sockets-per-node"].value if "sockets-per-node" in given else ""
        _gpus_each(draft, given["gpus-per-socket"], int(sockets) if sockets.isdigit() else 0)
    _cores(draft, given, tasks_per_node(directives, draft.keys.get("gpus")))
    for name, key in _MEMORY_PER.items():
        if name in given:
            _memory(draft, given[name], draft.keys.get(key, 0))
    if whole and "nodes" not in draft.keys and not tasks_per_node(directives, draft.keys.get("gpus")):
        draft.question(whole.line, whole.text, "Slurm takes as many nodes as these tasks need: write nodes")


def tasks_per_node(directives: Sequence[Directive], gpus: Optional[int] = None) -> Optional[int]:
    """Return the number of tasks that Slurm starts per node; None if it is not known, as for more tasks than a node has GPUs, on
    as many nodes as Slurm takes. `gpus`: GPUs per node, if known."""
    given = {each.name: each.value for each in directives}
    for name in ("ntasks-per-node", "tasks-per-node"):
        if given.get(name, "").isdigit():
            return int(given[name])
    total, nodes = given.get("ntasks", ""), given.get("nodes", "1")
    if "nodes" not in given and gpus and total.isdigit() and int(total) > gpus:
        return None
    if total.isdigit() and nodes.isdigit() and int(nodes) and int(total) % int(nodes) == 0:
        return int(total) // int(nodes)
    return gpus * int(given["ntasks-per-gpu"]) if gpus and given.get("ntasks-per-gpu", "").isdigit() else None


def _one(draft: Draft, each: Directive) -> None:
    name, value = _FULL.get(each.name, each.name), each.value
    if "$" in value:
        draft.drop(each.line, each.text, "sbatch expands no variable in these lines: write its value")
    elif re.search(r"[{}<>]", value) and name not in _DROPPED:
        draft.question(each.line, each.text, "was never filled in: write its value")
    elif name == "job-name":
        clean = re.sub(r"[^A-Za-z0-9._-]", "-", value)[:64].lstrip("-._")
        if clean:
            draft.set("name", clean, each.line)
    elif name == "nodes" and re.fullmatch(r"\d+", value):
        draft.set("nodes", int(value), each.line)
    elif name == "nodes":
        least = re.match(r"\d+", value)
        if least:
            draft.set("nodes", int(least[0]), each.line)
        draft.question(each.line, each.text, "a job file has one number of nodes: write yours")
    elif name == "time":
        _time(draft, each)
    elif name in ("gpus-per-node", "gres", "gpus"):
        _gpus(draft, each)
    elif name == "mem":
        _memory(draft, each, 1)
    elif re.search(r"=[\"']*(?:\s|$)", each.text) and not value:
        draft.drop(each.line, each.text, "has no value")
    elif name in _SAME and value and not re.search(r"[\s$'\"]", value):
        draft.set(_SAME[name], value, each.line)
    elif name == "exclusive" and value in ("", "exclusive"):
        draft.set("exclusive", True, each.line)
    elif name == "signal":
        _notice(draft, each)
    elif name == "no-requeue":
        draft.set("requeues", 0, each.line)
    elif name == "export":
        _export(draft, each)
    elif name in _DROPPED:
        draft.drop(each.line, each.text, _DROPPED[name])
    elif name not in ("mail-user", "mail-type", "cpus-per-task", "gpus-per-task", "gpus-per-socket", *_MEMORY_PER):
        draft.options.append(f"--{name}={value}" if value else f"--{name}")


def _mail(draft: Draft, user: Optional[Directive], types: Sequence[Directive]) -> None:
    """Set `mail`, which tells of the end; other events, and mail to whoever submits, stay options. sbatch adds up the events
    of all its lines."""
    events = ",".join(each.value for each in types).upper().split(",") if types else ["NONE"]
    if "NONE" in events:
        for each in [*([user] if user else []), *types]:
            draft.drop(each.line, each.text, "sbatch sends no mail without --mail-type")
    elif user and re.search(r"[\s$'\"{}<>]", user.value):
        draft.question(user.line, user.text, "was never filled in: write its value")
    elif user and user.value and set(events) <= {"END", "FAIL"}:
        draft.set("mail", user.value, user.line)
        if len(set(events)) == 1:
            draft.drop(types[0].line, types[0].text, "mail is sent when the job ends or fails")
    else:
        draft.options += [f"--mail-user={user.value}"] if user and user.value else []
        draft.options.append(f"--mail-type={','.join(dict.fromkeys(events))}")


def _notice(draft: Draft, each: Directive) -> None:
    """Read the signal before the time limit; `stop-signal` is for the ranks, so not one that only the batch script gets."""
    found = re.fullmatch(r"(?:([RB]+):)?(?:SIG)?(\w+)(?:@(\d+))?", each.value)
    if not found:
        draft.question(each.line, each.text, "not a signal that is understood: write stop-signal and stop-grace")
        return
    name = (
        signal.Signals(int(found[2])).name[3:] if found[2].isdigit() and int(found[2]) in _NUMBERS else found[2].upper()
    )
    draft.notice = Notice(each.line, name, int(found[3] or 60), "B" in (found[1] or ""))
    draft.set("stop-grace", f"{draft.notice.seconds}s", each.line)
    if not draft.notice.batch:
        stop_with(draft, name)


def stop_with(draft: Draft, name: str) -> None:
    """Set `stop-signal`, which asks the ranks to save and end."""
    assert draft.notice
    if name in STOP_SIGNALS:
        draft.set("stop-signal", name, draft.notice.line)
    else:
        draft.question(draft.notice.line, f"SIG{name}", f"stop-signal is one of {', '.join(STOP_SIGNALS)}")
        draft.differs("before the time limit", name, "TERM")


def _export(draft: Draft, each: Directive) -> None:
    """Ask if the script wants fewer of the submitting shell's variables than drumbeat passes on."""
    if "ALL" in each.value.split(",") or not each.value:
        draft.drop(each.line, each.text, "drumbeat passes your variables on")
    else:
        why = "all variables of your shell reach this job: submit it from a shell that has only those it should have"
        draft.question(each.line, each.text, why)


def exported(directives: Sequence[Directive]) -> Dict[str, str]:
    """Return the variables that `--export` gives a value."""
    given = [each.value.split(",") for each in directives if each.name == "export"][-1:]
    return dict(pair.split("=", 1) for pairs in given for pair in pairs if "=" in pair)


def _time(draft: Draft, each: Directive) -> None:
    text = each.value
    if re.fullmatch(r"\d+", text):
        text = f"{text}m"  # sbatch reads a bare number as minutes
    elif re.fullmatch(r"\d+:\d+", text):
        text = f"0:{text}"  # and two numbers as minutes:seconds
    elif re.fullmatch(r"(\d+)-(\d+)(:\d+)?", text):
        text += ":00" * (3 - len(text.partition("-")[2].split(":")))
    text = re.sub(r":(\d)(?!\d)", r":0\1", text)
    try:
        parse_duration(text)
    except ValueError:
        draft.drop(each.line, each.text, "not a time that is understood")
        return
    draft.set("time", text, each.line)


_GPUS = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)|gpu(?::([A-Za-z][\w.-]*))?")


def _gpus(draft: Draft, each: Directive) -> None:
    """Set GPUs per node. A type or other resources stay an option of sbatch; drumbeat then requests no GPUs itself."""
    items = each.value.split(",") if each.name == "gres" else [each.value]
    gpus = [item for item in items if each.name != "gres" or item.split(":")[0] == "gpu"]
    if not gpus:
        draft.options.append(f"--gres={each.value}")
        return
    found = _GPUS.fullmatch(gpus[0]) if len(gpus) == 1 else None
    nodes = draft.keys.get("nodes", 1) if each.name == "gpus" else 1
    if not found:
        draft.drop(each.line, each.text, "the number of GPUs is not a plain number: write gpus: N (per node)")
        return
    count, kind = int(found[2] or 1), found[1] or found[3]  # no number is one
    if count % nodes:
        draft.drop(each.line, each.text, f"{count} GPUs over {nodes} nodes is not the same number per node")
        return
    draft.set("gpus", count // nodes, each.line)
    if each.name == "gres" and (kind or len(items) > 1):
        kept = [f"gpu:{kind}:{count}" if kind and item is gpus[0] else item for item in items]
        draft.options.append(f"--gres={','.join(kept)}")
    elif kind:
        draft.options.append(f"--gpus-per-node={kind}:{count // nodes}")


def _gpus_each(draft: Draft, each: Directive, count: int) -> None:
    """Set GPUs per node from an option that counts per task or socket. `count`: how many of these a node has; 0 if unknown."""
    found = re.fullmatch(r"(?:([A-Za-z][\w.-]*):)?(\d+)", each.value)
    if found and count:
        draft.set("gpus", int(found[2]) * count, each.line)
        draft.options += [f"--gpus-per-node={found[1]}:{draft.keys['gpus']}"] if found[1] else []
    else:
        draft.drop(each.line, each.text, "the number of GPUs is not a plain number: write gpus: N (per node)")


def shown_gpus(given: Mapping[str, str]) -> Tuple[str, int, int]:
    """Return the option by which Slurm shows a task only some GPUs ('' if none does), how many it shows (0: the node decides),
    and how many tasks share one."""
    kind, _, value = given.get("gpu-bind", "").replace("verbose,", "", 1).partition(":")
    if kind == "none":
        return "", 1, 1
    text = f"--gpu-bind={kind}:{value}".rstrip(":")
    if kind in ("single", "per_task") and value.isdigit():
        return text, int(value) if kind == "per_task" else 1, int(value) if kind == "single" else 1
    if kind in ("map_gpu", "mask_gpu"):
        each = value.split(",")
        seen = {bin(int(mask, 16)).count("1") if kind == "mask_gpu" else 1 for mask in each}
        return text, seen.pop() if len(seen) == 1 and len(set(each)) == len(each) else 0, 1
    if kind:
        return text, 0, 1
    if given.get("ntasks-per-gpu", "").isdigit():
        return f"--ntasks-per-gpu={given['ntasks-per-gpu']}", 1, int(given["ntasks-per-gpu"])
    number = re.search(r"(\d+)$", given.get("gpus-per-task", ""))
    return (f"--gpus-per-task={given['gpus-per-task']}", int(number[1]), 1) if number else ("", 1, 1)


def _memory(draft: Draft, each: Directive, count: int) -> None:
    """Set memory per node from an option that counts per CPU or GPU. `count`: how many of these a node has; 0 if unknown."""
    found = re.fullmatch(r"(\d+)(?:([KMGT])B?)?", each.value, re.I)
    if found and count:
        size = int(found[1]) * count
        draft.set("memory", f"{size}{(found[2] or 'M').upper()}" if size else "0", each.line)
    elif found:
        draft.drop(each.line, each.text, "memory is per node here: add memory: SIZE if the site's is not right")
    else:
        draft.drop(each.line, each.text, "not a size that is understood")


_CORES = ("cpus-per-task", "cpus-per-gpu", "exclusive", "ntasks-per-gpu", "cores-per-socket")


def _cores(draft: Draft, given: Mapping[str, Directive], tasks: Optional[int]) -> None:
    """Set cores per node: tasks per node times cores per task, one core if no option says more."""
    each = given.get("cpus-per-task")
    if each and each.value.isdigit():
        draft.set("cpus", int(each.value) * (tasks or 1), each.line)
    elif tasks and tasks > 1 and not any(name in given for name in _CORES):
        said = next(given[name] for name in ("ntasks-per-node", "tasks-per-node", "ntasks") if name in given)
        draft.set("cpus", tasks, said.line)


def slurm_variables(draft: Draft, directives: Sequence[Directive]) -> Dict[str, str]:
    """Return Slurm's variables in the batch script as far as the options decide them; '' for one that Slurm does not set."""
    given = {each.name: each.value for each in directives}
    gpus = draft.keys.get("gpus")
    tasks = tasks_per_node(directives, gpus)
    unknown = "nodes" in given or "ntasks" in given and tasks is None
    nodes = str(draft.keys["nodes"]) if "nodes" in draft.keys else "" if unknown else "1"
    total = given.get("ntasks", "") or (str(tasks * int(nodes)) if tasks and nodes else "")
    found = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": total, "SLURM_NPROCS": total,
        "SLURM_TASKS_PER_NODE": (f"{tasks}(x{nodes})" if nodes != "1" else str(tasks)) if tasks and nodes else "",
        "SLURM_GPUS_ON_NODE": str(gpus or ""), "SLURM_JOB_NAME": given.get("job-name", ""),
        "SLURM_JOB_PARTITION": given.get("partition", ""), "SLURM_JOB_ACCOUNT": given.get("account", ""),
    }  # fmt: skip
    known = {name: value for name, value in found.items() if value and "$" not in value}
    for option in ("cpus-per-task", "ntasks-per-node", "gpus-per-node", "gpus", "gpus-per-task", "ntasks-per-gpu"):
        known[f"SLURM_{option.upper().replace('-', '_')}"] = given.get(option, "")
    per_task = (("cpu", "cpus-per-task"), ("gres/gpu", "gpus-per-task"))
    known["SLURM_TRES_PER_TASK"] = ",".join(f"{kind}={given[option]}" for kind, option in per_task if option in given)
    return {**known, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
