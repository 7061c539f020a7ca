"""Event kinds: the vocabulary of events.jsonl. One line is one event; readers ignore kinds they do not know.

Every event carries: `kind`, `t` (wall clock of its host), `mono` (monotonic clock of its host), `seq` (counts up in its
file), `host`, `node` (node rank) and `attempt`. The rest is the kind's own, listed here; a test holds writers to this list.
"""

from __future__ import annotations

from typing import Dict, Tuple

KINDS: Dict[str, Tuple[str, ...]] = {
    # lead, top-level events.jsonl
    "run-started": ("run_id", "nodes", "ranks_per_node", "launcher", "launcher_why"),
    "node-joined": ("peer", "peer_host", "address", "clock_offset"),
    "mustered": ("seconds", "master_addr", "master_port"),
    "attempt-started": ("world_size", "master_addr", "master_port"),
    "first-step": ("seconds",),  # from run-started to the first reported training step
    "failed": ("finding",),  # a Finding: the first real failure
    "consequence": ("rank", "what"),
    "attempt-ended": ("outcome", "exit_code"),  # outcome: finished, failed, stopped, time-limit, requeue
    "decided": ("action", "why"),  # stop, restart, requeue
    "stopping": ("why", "signal", "grace"),
    "node-lost": ("peer", "peer_host", "why"),
    "run-ended": ("outcome", "exit_code"),
    # every agent, nodes/K/events.jsonl
    "agent-started": ("pid", "version", "python"),
    "rank-started": ("rank", "local_rank", "pid", "cpus"),
    "rank-exited": ("rank", "exit_code", "signal", "seconds", "core_dumped"),
    "verdict": ("verdict",),  # a Verdict: transport, affinity; also by the lead, with `peer`
    "finding": ("finding",),  # a Finding that stops nothing
    "agent-ended": ("cpu_seconds", "seconds", "reaped"),
}

COMMON = ("kind", "t", "mono", "seq", "host", "node", "attempt")
