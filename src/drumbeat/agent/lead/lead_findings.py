"""What the lead says about members and ranks: findings in words."""

from __future__ import annotations

from typing import Set

from drumbeat.agent.lead.rank_end import RankEnd
from drumbeat.base.ranges import ranges
from drumbeat.findings.model import ERROR, WARNING, Evidence, Finding

NODE_LOST = "node-lost"


def left_behind_finding(ended: Set[int], total: int, what: str, seconds: float) -> Finding:
    """`what`: "ranks", or "nodes" where one command per node starts its ranks itself."""
    left = ranges(number for number in range(total) if number not in ended)
    rest = f"{what[:-1] if total - len(ended) == 1 else what} {left}"
    return Finding(
        "ranks-left-behind", WARNING, f"{len(ended)} of {total} {what} ended {seconds:.0f} s ago; {rest} still run"
        + ("s" if total - len(ended) == 1 else ""),
        "they ended with 0; one that waits for them in a collective waits until its timeout",
        f"drumbeat logs --rank {left.split('-')[0].split(',')[0]} shows what it does" if what == "ranks" else
        "a script that starts its launcher on one node only (if [ $NODE_RANK = 0 ]) must start it on every node",
    )  # fmt: skip


def lost_finding(node: int, host: str, why: str) -> Finding:
    return Finding(
        NODE_LOST, ERROR, f"node {node} ({host}) was lost", why, f"look at {host}; exclude it if this happens again",
        (Evidence(why),), node=node, host=host,
    )  # fmt: skip


def gone_finding(why: str) -> Finding:
    return Finding(
        NODE_LOST, WARNING, why, "the job has a spare for it", "look at what that node printed above",
        (Evidence(why),),
    )  # fmt: skip


def storage_finding(why: str, node: int, host: str) -> Finding:
    return Finding(
        "storage", ERROR, "the run folder could not be written any more", f"node {node}: {why}",
        "make room, or choose another place with --runs; start the run again", (Evidence(why),), node=node, host=host,
    )  # fmt: skip


def no_room_finding(why: str, node: int, host: str) -> Finding:
    return Finding(
        "process-limit", ERROR, f"no further process could be started on node {node} ({host})", why,
        "fewer processes per rank (data loader workers), or a higher limit (ulimit -u, the job's pids)", (Evidence(why),),
        node=node, host=host,
    )  # fmt: skip


def guard_lost_finding() -> Finding:
    return Finding(
        "guard-lost", ERROR, "the guard of the lead's agent was killed before the run ended",
        "something outside drumbeat ended it: a person, the out-of-memory killer, a scheduler",
        "look at the machine's kernel log for 'Out of memory'; start the run again",
    )  # fmt: skip


def stuck_finding(node: int, host: str, what: str) -> Finding:
    return Finding(
        "process-stuck", ERROR, f"a process on node {node} ({host}) cannot be ended",
        "it waits in the kernel, for a driver or a file system, and no signal reaches it there",
        f"look at {host}'s kernel log (dmesg); the node may need a restart: tell the support desk, and exclude it",
        (Evidence(what),), node=node, host=host,
    )  # fmt: skip


def stalled_finding(node: int, host: str, folder: str, seconds: float) -> Finding:
    return Finding(
        "folder-stalled", WARNING, f"the run folder has taken nothing from node {node} for {seconds:.0f} s",
        "its storage hangs or is very slow; the ranks go on, and what is to be written waits",
        f"look at the file system of {folder} on {host}; --runs puts run folders elsewhere",
        node=node, host=host,
    )  # fmt: skip


def killed_finding(ranks: str) -> Finding:
    return Finding(
        "not-saved", WARNING, f"{ranks} did not end when asked to, and had to be killed",
        "what was not saved by then is lost", "handle the stop signal (docs/run.md); stop-grace gives more time",
    )  # fmt: skip


def failed_save_finding(end: RankEnd) -> Finding:
    assert end.finding
    return Finding(
        "not-saved", WARNING, f"rank {end.rank} failed after it was asked to stop: {end.finding.title}",
        "its checkpoint may be missing or incomplete", f"look at the log of rank {end.rank} before you resume",
        end.finding.evidence, rank=end.rank,
    )  # fmt: skip


def lost_unsaved_finding(node: int, host: str) -> Finding:
    return Finding(
        "not-saved", WARNING, f"node {node} ({host}) was lost: nobody saw whether its ranks have saved",
        "its checkpoint may be missing or incomplete", "look at the checkpoint before you resume", node=node, host=host,
    )  # fmt: skip
