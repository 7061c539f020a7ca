"""`scontrol show job` and `show node`: why a job ended or waits, what it was given, which nodes are drained."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

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


def read(text: str) -> Optional[Content]:
    facts: List[str] = []
    findings: List[Finding] = []
    data: Dict[str, List[str]] = {"jobs": [], "drained": []}
    kinds = set()
    for entry in _ENTRY.split(text)[1:1000]:
        fields = {name: value.strip() for name, value in _FIELD.findall(entry)}
        if "JobId" in fields:
            kinds.add("job")
            data["jobs"].append(fields["JobId"].split(" ")[0])
            _job(fields, facts, findings)
        elif "NodeName" in fields:
            kinds.add("node")
            _node(fields, facts, findings, data)
    if not facts:
        return None
    return Content(f"scontrol show {' and '.join(sorted(kinds))}", tuple(facts), tuple(findings), data)


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
        title = f"job {job} waits: {reason}" + (f" ({words})" if words else "")
        wanted = fields.get("ReqNodeList", "(null)").split(" ")[0]
        fix = (
            f"it asks for {wanted} by name (--nodelist): without that it could start elsewhere"
            if wanted[:1] != "("
            else ""
        )
        findings.append(Finding("job-waits", severity, title, "", fix))
    tres = (
        fields.get("TresPerNode", "") + fields.get("AllocTRES", "") + fields.get("TRES", "") + fields.get("ReqTRES", "")
    )
    if tres and "gpu" not in tres:
        findings.append(
            Finding("job-without-gpus", INFO, f"job {job} asked for no GPU", "", "--gpus-per-node (or --gres=gpu:N)")
        )


def _node(fields: Dict[str, str], facts: List[str], findings: List[Finding], data: Dict[str, List[str]]) -> None:
    node, state = fields["NodeName"].split(" ")[0], fields.get("State", "unknown").split(" ")[0]
    about = [state, fields.get("Gres", ""), f"{fields['CPUTot']} cores" if "CPUTot" in fields else ""]
    facts.append(f"node {node}: {', '.join(part for part in about if part and part != '(null)')}")
    if any(word in state for word in ("DRAIN", "DOWN", "FAIL", "NOT_RESPONDING", "*")):
        data["drained"].append(node)
        reason = fields.get("Reason", "").split("[")[0].strip()
        findings.append(
            Finding(
                "node-unavailable",
                WARNING,
                f"node {node} takes no jobs: {state}" + (f" ({reason})" if reason else ""),
                "an administrator or a health check took it out, or it does not answer",
                f"--exclude={node} where it still gets jobs",
            )
        )
