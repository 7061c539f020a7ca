"""What `drumbeat verify` prints for a person."""

from __future__ import annotations

from typing import Any, Mapping

from drumbeat.findings.model import ERROR, OK, worst
from drumbeat.verify.judge import Judgement

_MARKS = {OK: "ok", "info": "ok"}


def table(results: Mapping[str, Any], judgement: Judgement) -> str:
    ranks, nodes = results["world_size"], len({each["node"] for each in results["ranks"]})
    device = results["ranks"][0]["gpu"] if results["ranks"] else None
    size = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {nodes} {'node' if nodes == 1 else 'nodes'}"
    lines = [
        f"{size}, {results['library']} on {device or 'the CPU'}, torch {results['torch']}, {results['seconds']:.1f} s"
        f"{', quick' if results['quick'] else ''}",
    ]
    if judgement.rows:
        lines += [
            "",
            f"{'':16}{'size':>9} {'time':>10} {'algbw':>9} {'busbw':>9} {'ceiling':>9} {'':>6} {'latency':>10}",
        ]
    for row in judgement.rows:
        bound = f"{row.ceiling.bound:.4g}" if row.ceiling.bound else "unknown"
        part = f"{row.ratio:.0%}" if row.ratio is not None else ""
        lines.append(
            f"{row.op:16}{bytes_text(row.bytes):>9} {duration(row.seconds):>10} {row.algbw:>9.3f} {row.busbw:>9.3f} {bound:>9} "
            f"{part:>6} {duration(row.latency):>10}"
        )
    if judgement.rows:
        lines.append(f"{'':16}{'':>9} {'':>10} {'GB/s':>9} {'GB/s':>9} {'GB/s':>9}")
    lines.append("")
    for verdict in judgement.verdicts:
        severity = worst(verdict.findings)
        mark = "unknown" if verdict.answer == "unknown" and severity == OK else _MARKS.get(severity, severity)
        lines.append(f"{mark:<8} {verdict.check}: {verdict.answer}. {_sentence(verdict.summary)}")
        for finding in verdict.findings:
            lines += [f"         {finding.title}"] if finding.title != verdict.summary else []
            lines += [f"         {words}" for words in (finding.cause, finding.fix and f"fix: {finding.fix}") if words]
            if finding.severity == ERROR:
                lines += [f"           {evidence.text}" for evidence in finding.evidence]
    return "\n".join(lines)


def bytes_text(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
