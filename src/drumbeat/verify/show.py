"""Output of `drumbeat verify`."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from drumbeat.base.text import memory, step_time
from drumbeat.findings.model import ERROR, OK, worst
from drumbeat.verify.chart import Look, line_chart, standalone
from drumbeat.verify.judge import Judgement

_MARKS = {OK: "ok", "info": "ok"}


def table(results: Mapping[str, Any], judgement: Judgement) -> str:
    ranks, nodes = results["world_size"], len({each["node"] for each in results["ranks"]})
    device = results["ranks"][0]["gpu"] if results["ranks"] else None
    size = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {nodes} {'node' if nodes == 1 else 'nodes'}"
    lines = [
        f"{size}, {results['library']} on {device or 'the CPU'}, torch {results['torch']}, {results['seconds']:.1f} s"
        f"{', quick' if results['quick'] else ''}"
    ]
    head = f"{'':16}{'size':>9} {'time':>10} {'algbw':>9} {'busbw':>9} {'ceiling':>9} {'':>6} {'latency':>10}"
    lines += ["", head] if judgement.rows else []
    for row in judgement.rows:
        bound = f"{row.ceiling.bound:.4g}" if row.ceiling.bound else "unknown"
        part = f"{row.ratio:.0%}" if row.ratio is not None else ""
        lines.append(
            f"{row.op:16}{memory(row.bytes):>9} {step_time(row.seconds):>10} {row.algbw:>9.3f} {row.busbw:>9.3f} {bound:>9} "
            f"{part:>6} {step_time(row.latency):>10}"
        )
    if judgement.rows:
        lines.append(f"{'':16}{'':>9} {'':>10} {'GB/s':>9} {'GB/s':>9} {'GB/s':>9}")
    lines.append("")
    for verdict in judgement.verdicts:
        severity = worst(verdict.findings)
        mark = "unknown" if verdict.answer == "unknown" and severity == OK else _MARKS.get(severity, severity)
        summary = verdict.summary[:1].upper() + verdict.summary[1:]
        lines.append(f"{mark:<8} {verdict.check}: {verdict.answer}. {summary}")
        for finding in verdict.findings:
            lines += [f"         {finding.title}"] if finding.title != verdict.summary else []
            lines += [f"         {words}" for words in (finding.cause, finding.fix and f"fix: {finding.fix}") if words]
            if finding.severity == ERROR:
                lines += [f"           {evidence.text}" for evidence in finding.evidence]
    return "\n".join(lines)


# The MPI test's figures as text. Pure.


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
        rate = "-"  # for a few bytes it is pure latency
        if row["bytes"] >= 4096 and row["seconds"] > 0:
            rate = f"{2 * (ranks - 1) / ranks * row['bytes'] / row['seconds'] / 1e9:.3f} GB/s"
        lines.append(f"{memory(row['bytes']):>10}  {row['seconds'] * 1e6:>7.1f} us  {rate:>14}  {sums}")
    lines.append(NOT_MEASURED)
    if hosts == 1:
        lines.append("all ranks were on one node: nothing of this went over the network")
    return lines


def plot(results: Mapping[str, Any], judgement: Judgement) -> str:
    """Plot busbw over message size, one line per operation and one per ceiling, both axes logarithmic."""
    series: Dict[str, List[Tuple[float, float]]] = {}
    for one in results["collectives"]:
        if one["dtype"] == "float32" and one["busbw"] > 0:
            series.setdefault(one["op"], []).append((one["bytes"], one["busbw"]))
    sizes = sorted({size for points in series.values() for size, _ in points})
    ends = [sizes[0], sizes[-1]] if sizes else []
    bounds = {row.op: row.ceiling.bound for row in judgement.rows if row.ceiling.bound and row.op in series}
    ceilings = {f"{op} ceiling": [(size, bound) for size in ends] for op, bound in bounds.items()}
    lines = {**{op: sorted(points) for op, points in series.items()}, **ceilings}
    title = f"{results['world_size']} ranks, {results['library']}: bus bandwidth"
    title += " (dashed: ceiling)" if bounds else ""
    ticks = {size: memory(int(size)) for size in sizes[:: 1 if len(sizes) <= 8 else 2]}
    return standalone(line_chart(title, lines, "message size", "GB/s", Look(dots=True, log=True, ticks=ticks)))
