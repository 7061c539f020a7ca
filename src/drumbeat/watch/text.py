"""The run at a glance in words, and its nodes as rows: what the terminal shows, with or without Textual."""

from __future__ import annotations

import shutil
import sys
import time
from typing import List, Optional, Sequence, Tuple

from drumbeat.backends.contract import QUEUED
from drumbeat.base.text import count, duration, folded, labelled, step_time, traffic
from drumbeat.findings.model import INFO, Finding
from drumbeat.runfolder.lines import GpuUse, end_words, failure_label, progress_words
from drumbeat.runfolder.progress import speed
from drumbeat.runfolder.state import CODES
from drumbeat.watch.model import Head, RunView
from drumbeat.watch.node_view import NodeView, memory_percent
from drumbeat.watch.session import Session

COLUMNS = ("node", "host", "GPU", "use", "mem", "power", "clock", "temp", "slowed by", "in", "out", "cpu")
# Columns by importance: without room for all of them, the last of these go first.
FIRST = ("node", "host", "use", "slowed by", "mem", "power", "temp", "in", "out", "GPU", "cpu", "clock")
_GAP = 2  # between two columns
_WRAPPED = ("run", "nodes", "failed", "doubt", "error", "warning", "fix", "cause")  # that must be readable to the end
_MOST_WRAPPED = 3  # lines of one of them
_BLOCKS = "▁▂▃▄▅▆▇█"
_STEADY = 0.02  # a change of speed below this is none


def glance(head: Head, view: RunView) -> List[Tuple[str, str]]:
    """Return label and text of each line; unknown values are left out, or say so."""
    lines = [("run", _title(head)), ("progress", _progress(head, view))]
    if head.rate is not None or head.mean_step_seconds is not None:
        lines.append(("speed", _speed(head)))
    if head.predicted:
        lines.append(("predicted", head.predicted))
    lines.append(("nodes", _nodes(head)))
    if head.gpus:
        words = GpuUse(head.gpus, head.gpu_use, head.gpu_memory, head.power, head.throttled).words
        lines.append(("GPUs", words + (f", {head.energy / 3.6e6:.3g} kWh" if head.energy else "")))
    if head.slowest and (head.slowest.stands_out or head.quiet is None):
        lines.append(("slowest", slowest_words(head)))
    shown = [check for check in head.checks if check.answer != "unknown"]
    unused = () if not view.emulated else ("traffic",) if head.gpus else ("traffic", "transport")
    if any(finding.code in CODES for finding in head.findings if finding.severity != INFO):
        unused = (*unused, "world")  # a warning says more
    unknown = [check.check for check in head.checks if check.answer == "unknown" and check.check not in unused]
    for check in shown:
        where = f" (on {check.nodes} of {count(check.judged, 'node')})" if check.nodes < check.judged else ""
        lines.append((check.check, f"{check.words}{where}"))
    if unknown:
        lines.append(("unknown", f"{', '.join(unknown)}: could not be judged"))
    if head.failure:
        lines.append((failure_label(head.word), finding_words(head.failure)))
        lines += [("fix", head.failure.fix)] if head.failure.fix else []
    for finding in list(head.findings)[-3:]:
        if finding != head.failure:
            lines.append((finding.severity, finding_words(finding)))
    lines += [("replaced", words) for words in view.replaced[-2:]]
    if view.summary:
        lines.append(("end", end_words(view.summary)))
    return lines


def _title(head: Head) -> str:
    told = [each.title for each in (head.failure, *head.findings[-3:]) if each]  # below, with its fix
    detail = f": {head.detail}" if head.detail and not any(head.detail in title for title in told) else ""
    again = f", attempt {head.attempt + 1}" if head.attempt else ""
    took = f", {duration(head.elapsed)}" if head.elapsed is not None else ""
    return f"{head.run_id}  {head.word}{again}{took}{detail}"


def _progress(head: Head, view: RunView) -> str:
    if head.step is None and head.epoch is None:
        if head.state == QUEUED or head.phase in ("starting", "waiting for nodes", "starting ranks"):
            return "not started yet"
        return "no step yet" if head.phase == "waiting for the first step" else "no step recognised"
    return progress_words(view.shown, head.seconds_left, head.quiet, rate=False)


def _speed(head: Head) -> str:
    parts = []
    if head.rate is not None:
        parts.append(speed(head.rate, head.rate_unit, rough=head.rate_rough))
        if head.recent_rate is not None:
            parts.append(f"last minute {speed(head.recent_rate, '').strip()} {trend(head)}")
    if head.mean_step_seconds is not None:
        parts.append(f"{step_time(head.mean_step_seconds)} per {head.step_is or 'step'} (mean)")
    return "  ".join(parts)


def trend(head: Head) -> str:
    """Compare the last minute with the whole run."""
    if not head.rate or head.recent_rate is None:
        return ""
    change = head.recent_rate / head.rate - 1
    return "steady" if abs(change) < _STEADY else f"{'up' if change > 0 else 'down'} {abs(change):.0%}"


def _nodes(head: Head) -> str:
    parts = [f"{head.nodes_here:,} of {count(head.nodes, 'node')}" if head.nodes else "unknown"]
    if head.world:
        parts.append(count(head.world, "rank") + (f", {head.ranks_ended} ended" if head.ranks_ended else ""))
    if head.received is not None or head.sent is not None:
        parts.append(f"network in {_rate(head.received)} out {_rate(head.sent)}")
    elif head.network_why:
        parts.append(f"network {head.network_why}")
    return "  ".join(parts)


def slowest_words(head: Head) -> str:
    slow = head.slowest
    assert slow is not None
    if not slow.stands_out:
        return f"none stands out (rank {slow.rank}: +{slow.spread:.0%})"
    behind = f", {count(slow.behind, 'step')} behind" if slow.behind > 1 else ""
    times = f"{step_time(slow.step_seconds)} per {head.step_is or 'step'} lately, median rank {step_time(slow.median_seconds)}"
    return f"rank {slow.rank} (node {slow.node}): {times} (+{slow.spread:.0%}){behind}"


def finding_words(finding: Finding) -> str:
    """Return the finding with its subject, unless its title begins with that."""
    who = f"node {finding.node}" if finding.node is not None else ""
    who = f"rank {finding.rank}" if finding.rank is not None else who
    return f"{who}: {finding.title}" if who and not finding.title.startswith(who) else finding.title


def node_cells(node: NodeView) -> Tuple[str, ...]:
    """Return a node's cells in the order of COLUMNS."""
    means, gpus = node.means, node.gpus
    clocks = [gpu.clock for gpu in gpus if gpu.clock is not None]
    heat = [gpu.temperature for gpu in gpus if gpu.temperature is not None]
    remark = f"lost: {node.lost}" if node.lost else node.idle or ", ".join(node.throttle)
    return (
        str(node.node), node.host or "-", str(len(gpus)) if gpus else "-", percent(means["gpu_use"]),
        percent(means["memory"]), "-" if means["power"] is None else power(means["power"]),
        f"{min(clocks):.0f} MHz" if clocks else "-", f"{max(heat):.0f} °C" if heat else "-",
        remark, _rate(node.received), _rate(node.sent), percent(node.cpu_busy),
    )  # fmt: skip


def column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> List[int]:
    """Return the letters that each column needs; 0: nothing is known of it. The first column is always known."""
    found = []
    for place, title in enumerate(columns):
        longest = max((len(row[place]) for row in rows if row[place] != "-"), default=0)
        found.append(max(longest, len(title)) if longest or not place else 0)
    return found


def fitting(columns: Sequence[str], widths: Sequence[int], width: int, first: Sequence[str] = ()) -> List[int]:
    """Return the columns that fit into `width` characters. Columns without known values are left out; if room is short, the
    most important ones, listed first in `first`, are kept."""
    kept, room = [], width + _GAP
    for title in first or columns:
        place = columns.index(title)
        if widths[place] and widths[place] + _GAP <= room:
            kept.append(place)
            room -= widths[place] + _GAP
    return sorted(kept)


def cut_row(columns: Sequence[str], row: Sequence[str], width: int) -> Tuple[str, ...]:
    """Shorten long host names in the middle and long reasons at the end, so that they leave room for the numbers."""
    cells = list(row)
    for title, most in (("host", width // 4), ("slowed by", width // 3)):
        place = columns.index(title) if title in columns else -1
        if place >= 0 and len(cells[place]) > most > 3:
            tail = most // 2 if title == "host" else 0
            cells[place] = f"{cells[place][: most - 1 - tail]}…{cells[place][len(cells[place]) - tail :]}"
    return tuple(cells)


def wrapped(lines: Sequence[Tuple[str, str]], width: int) -> List[Tuple[str, str]]:
    """Wrap what went wrong and its fix on up to three lines each; everything else on one."""
    found: List[Tuple[str, str]] = []
    for label, text in lines:
        pieces = folded(text, width) if label in _WRAPPED else [text]
        if len(pieces) > _MOST_WRAPPED:
            pieces = [*pieces[: _MOST_WRAPPED - 1], " ".join(pieces[_MOST_WRAPPED - 1 :])]
        found += [(label if not place else "", piece) for place, piece in enumerate(pieces)]
    return found


GPU_FIRST = ("GPU", "use", "memory", "power", "slowed by", "temp", "ECC", "clock", "cap", "energy")
GPU_COLUMNS = ("GPU", "use", "memory", "power", "cap", "clock", "temp", "energy", "ECC", "slowed by")
RANK_COLUMNS = ("rank", "step", "step time", "memory", "last report", "end")


def gpu_rows(node: NodeView) -> List[Tuple[str, ...]]:
    """Return rows in the order of GPU_COLUMNS."""
    return [
        (
            str(gpu.index), percent(gpu.busy), percent(memory_percent(gpu)), "-" if gpu.power is None else power(gpu.power),
            "-" if gpu.power_cap is None else power(gpu.power_cap), "-" if gpu.clock is None else f"{gpu.clock:.0f} MHz",
            "-" if gpu.temperature is None else f"{gpu.temperature:.0f} °C",
            "-" if gpu.energy is None else f"{gpu.energy / 3.6e6:.3g} kWh",
            "-" if gpu.ecc_uncorrected is None else str(gpu.ecc_uncorrected),
            "-" if gpu.throttle is None else ", ".join(gpu.throttle) or "nothing",
        )
        for gpu in node.gpus
    ]  # fmt: skip


def rank_rows(node: NodeView, now: float) -> List[Tuple[str, ...]]:
    """Return rows in the order of RANK_COLUMNS."""
    return [
        (
            str(rank.rank), "-" if rank.step is None else str(rank.step),
            "-" if rank.step_seconds is None else step_time(rank.step_seconds),
            "-" if rank.memory_gib is None else f"{rank.memory_gib:.1f} GiB",
            "-" if rank.reported is None else f"{duration(max(0.0, now - rank.reported))} ago",
            "" if rank.ended is None else f"signal {-rank.ended}" if rank.ended < 0 else f"exit code {rank.ended}",
        )
        for rank in sorted(node.ranks.values(), key=lambda rank: rank.rank)
    ]  # fmt: skip


def matching(nodes: Sequence[NodeView], wanted: str) -> List[NodeView]:
    """Return nodes whose number, host or trouble (`lost`, `temperature`) contains the text."""

    def text(node: NodeView) -> str:
        lost = f"lost: {node.lost}" if node.lost else ""
        return " ".join((str(node.node), node.host, lost, node.idle, *node.throttle)).lower()

    return [node for node in nodes if wanted.strip().lower() in text(node)]


def percent(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.0f} %"


def power(watts: float) -> str:
    return f"{watts:.0f} W" if watts < 10_000 else f"{watts / 1000:.1f} kW"


def _rate(amount: Optional[float]) -> str:
    return "-" if amount is None else f"{traffic(amount)}/s"


def spark(values: Sequence[float], width: int) -> str:
    """Draw a curve as a line of blocks."""
    if len(values) < 2 or width < 2:
        return ""
    shown = [values[int(place * (len(values) - 1) / (width - 1))] for place in range(min(width, len(values)))]
    if len(values) < width:
        shown = list(values)
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    return "".join(_BLOCKS[int((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def clock(t: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(t))
    except (OSError, OverflowError, ValueError):  # no calendar reaches that far
        return "--:--:--"


# The terminal view without Textual: the same words, written again every two seconds; or once, where it is no
# terminal.


_EVERY = 2.0
_AT_ONCE = 20  # polls between two drawings of a run that still has to be read


def watch_plain(session: Session, once: bool) -> int:
    if once:
        session.load()
        print("\n".join(screen(session, *shutil.get_terminal_size((80, 24)), whole=True)))
        return 0
    while True:
        for _ in range(_AT_ONCE):
            if not session.tick():
                break
        columns, rows = shutil.get_terminal_size((80, 24))
        lines = screen(session, columns, rows - 1)
        sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        sys.stdout.flush()
        if not session.standing.goes_on:
            return 0
        time.sleep(_EVERY)


def screen(session: Session, columns: int, rows: int, whole: bool = False) -> List[str]:
    """Return the screen: no line wider than `columns`, not more than `rows` lines unless `whole`."""
    head, view = session.head(), session.view
    lines = [*labelled(wrapped(glance(head, view), columns))]
    nodes = [view.nodes[number] for number in sorted(view.nodes)]
    recent = [f"{clock(mark.t)}   {mark.text}" for mark in sorted(view.marks, key=lambda mark: mark.t)[-3:]]
    room = len(nodes) if whole else max(1, rows - len(lines) - len(recent) - 5)
    if nodes:
        lines += ["", *table([node_cells(node) for node in nodes[:room]], columns)]
        if len(nodes) > room:
            lines.append(f"... and {len(nodes) - room:,} more nodes")
    if recent:
        lines += ["", *recent]
    return [_cut(line, columns) for line in (lines if whole else lines[:rows])]


def table(rows: Sequence[Sequence[str]], width: int) -> List[str]:
    """Return nodes below a header; columns without known values, or without room, are left out."""
    cut = [cut_row(COLUMNS, row, width) for row in rows]
    widths = column_widths(COLUMNS, cut)
    shown = fitting(COLUMNS, widths, width, FIRST)
    return ["  ".join(f"{row[place]:<{widths[place]}}" for place in shown).rstrip() for row in [COLUMNS, *cut]]


def _cut(line: str, columns: int) -> str:
    line = "".join(letter if letter.isprintable() else "?" for letter in line)  # a host name is no place for escapes
    return line if len(line) <= columns else line[: columns - 1] + "…"
