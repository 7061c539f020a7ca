"""Read pasted `scontrol show job` and `show node`: why a job ended or waits, its resources, drained nodes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, List, Optional, Tuple

from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, INFO, WARNING, Evidence, Finding, PastedDump

find = Catalog("logs")
_ENTRY = re.compile(r"^(?=JobId=|NodeName=)", re.MULTILINE)
_FIELD = re.compile(r"(?:^|\s)([A-Z][\w:]*)=((?:(?!\s[A-Z][\w:]*=)[^\n])*)")
_STATES = {
    "TIMEOUT": ("time-limit", "the job reached its time limit", "ask for more time, or checkpoint and requeue"),
    "OUT_OF_MEMORY": (
        "oom-kill",
        "the job ran out of host memory",
        "ask for more memory (--mem), or use less per rank",
    ),
    "NODE_FAIL": (
        "node-failure",
        "a node of the job failed",
        "submit again; drumbeat nodes remembers which one it was",
    ),
    "PREEMPTED": ("preempted", "the job was preempted", "checkpoint often and requeue"),
    "CANCELLED": ("cancelled", "the job was cancelled", "nothing, if that was meant"),
    "FAILED": ("job-failed", "the job failed", "drumbeat diagnose its output file says why"),
}
_WAITS = {
    "ReqNodeNotAvail": "nodes that it asks for are down, drained or reserved",
    "AssocGrp": "the account has used up what it may use at once",
    "QOSMax": "the QOS allows no more at once",
    "AssocMax": "the account allows no more at once",
    "InvalidAccount": "the account is not valid here",
    "BadConstraints": "no node has what it asks for",
    "Dependency": "it waits for another job",
    "JobHeldUser": "it is held (scontrol release)",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "Resources": "it waits for free nodes",
    "Priority": "others come first",
}


def read_pasted_jobs(text: str, file: str) -> Optional[PastedDump]:
    """Read Slurm's jobs and nodes in a pasted text."""
    if "JobId=" not in text and "NodeName=" not in text:
        return None
    facts: List[str] = []
    findings: List[Finding] = []
    data: Dict[str, List[str]] = {"jobs": [], "drained": []}
    kinds = set()
    starts = [match.start() for match in _ENTRY.finditer(text)][:1000]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        entry, before = text[start:end], len(findings)
        fields = {name: value.strip() for name, value in _FIELD.findall(entry)}
        if "JobId" in fields:
            kinds.add("job")
            data["jobs"].append(fields["JobId"].split(" ")[0])
            _job(fields, facts, findings)
        elif "NodeName" in fields:
            kinds.add("node")
            _node(fields, facts, findings, data)
        findings[before:] = [replace(one, evidence=_lines(text, start, entry, one, file)) for one in findings[before:]]
    if not facts:
        return None
    kind = f"scontrol show {' and '.join(sorted(kinds))}"
    placed = [replace(one, seen=(f"{kind}: {file}",)) for one in findings]
    return PastedDump(kind, file, tuple(facts), tuple(placed), data)


_SHOWS = {"job-waits": "Reason=", "job-without-gpus": "TRES", "node-unavailable": "State="}


def _lines(text: str, start: int, entry: str, finding: Finding, file: str) -> Tuple[Evidence, ...]:
    """Return the line that names the job or node, and the line of the field behind the finding."""
    places = [0, entry.find(_SHOWS.get(finding.code, "JobState="))]
    numbers = dict.fromkeys(entry.count("\n", 0, place) for place in places if place >= 0)
    first, lines = text.count("\n", 0, start) + 1, entry.split("\n")
    return tuple(Evidence(lines[number].strip()[:200], file, first + number) for number in numbers)


def _job(fields: Dict[str, str], facts: List[str], findings: List[Finding]) -> None:
    job = fields["JobId"].split(" ")[0]
    state = fields.get("JobState", "unknown").split(" ")[0]
    reason = fields.get("Reason", "").split(" ")[0]
    count = fields.get("NumNodes", "").split(" ")[0]
    about = [state, f"{count} node{'s' * (count != '1')}" if count else "", fields.get("NodeList", "")]
    if {"RunTime", "TimeLimit"} <= fields.keys():
        waits, limit = state == "PENDING", fields["TimeLimit"]
        about.append(f"not started, time limit {limit}" if waits else f"ran {fields['RunTime']} of {limit}")
    facts.append(f"job {job}: {', '.join(part for part in about if part and part != '(null)')}")
    if state in _STATES:
        code, title, fix = _STATES[state]
        exit_code = fields.get("ExitCode", "")
        cause = f"exit code {exit_code.split(':')[0]}, signal {exit_code.split(':')[1]}" if ":" in exit_code else ""
        findings.append(Finding(code, ERROR, f"job {job}: {title}", cause, fix))
    if state == "PENDING" and reason and reason != "None":
        words = next((text for start, text in _WAITS.items() if reason.startswith(start)), "")
        severity = INFO if reason in ("Resources", "Priority", "Dependency") else WARNING
        wanted = fields.get("ReqNodeList", "(null)").split(" ")[0]
        named = "" if wanted[:1] == "(" else "nodes"
        findings.append(find("job-waits", named, job=job, reason=reason, words=words, wanted=wanted, severity=severity))
    tres = (
        fields.get("TresPerNode", "") + fields.get("AllocTRES", "") + fields.get("TRES", "") + fields.get("ReqTRES", "")
    )
    if tres and "gpu" not in tres:
        findings.append(find("job-without-gpus", job=job))


def _node(fields: Dict[str, str], facts: List[str], findings: List[Finding], data: Dict[str, List[str]]) -> None:
    node, state = fields["NodeName"].split(" ")[0], fields.get("State", "unknown").split(" ")[0]
    about = [state, fields.get("Gres", ""), f"{fields['CPUTot']} cores" if "CPUTot" in fields else ""]
    facts.append(f"node {node}: {', '.join(part for part in about if part and part != '(null)')}")
    if any(word in state for word in ("DRAIN", "DOWN", "FAIL", "NOT_RESPONDING", "*")):
        data["drained"].append(node)
        reason = fields.get("Reason", "").split("[")[0].strip()
        findings.append(find("node-unavailable", name=node, state=state, reason=reason))
