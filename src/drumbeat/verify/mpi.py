"""What the MPI test's figures mean, in words. Pure."""

from __future__ import annotations

from typing import Any, List, Mapping

NOT_MEASURED = (
    "not measured: GPU memory, NCCL or RCCL, other collectives, single pairs (drumbeat verify measures NCCL's)"
)


def mpi_failed(results: Mapping[str, Any]) -> bool:
    return any(row["right"] != results["ranks"] for row in results["rows"])


def mpi_lines(results: Mapping[str, Any]) -> List[str]:
    ranks, hosts = results["ranks"], len(set(results["hosts"]))
    lines = [
        f"MPI_Allreduce of doubles in host memory, {ranks} ranks on {hosts} {'node' if hosts == 1 else 'nodes'}, "
        f"by {results['library']}",
        f"{'size':>10}  {'time':>10}  {'bus bandwidth':>14}  sums",
    ]
    for row in results["rows"]:
        wrong = ranks - row["right"]
        sums = f"right on all {ranks} ranks" if not wrong else f"WRONG on {wrong} of {ranks} ranks"
        rate = "-"  # of a few bytes it is latency alone
        if row["bytes"] >= 4096 and row["seconds"] > 0:
            rate = f"{2 * (ranks - 1) / ranks * row['bytes'] / row['seconds'] / 1e9:.3f} GB/s"
        lines.append(f"{_size(row['bytes']):>10}  {row['seconds'] * 1e6:>7.1f} us  {rate:>14}  {sums}")
    lines.append(NOT_MEASURED)
    if hosts == 1:
        lines.append("all ranks were on one node: nothing of this went over the network")
    return lines


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB" if count >= 1 << 10 else f"{count} B"
