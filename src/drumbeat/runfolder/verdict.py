"""RUN/verdict: how the run ended, for the script or process that started the agents and reads no JSON.

Lines NAME=VALUE: `code`, the exit code; `next`, end or requeue; `stopped`, 1 where the run ended only because its scheduler asked
for it (whether it comes back is then the scheduler's choice); `lost`, every node that this run has lost so far, where the job
is to be queued again without them. The lead writes it once per start. `lost` and `requeues` beside it are kept between
starts.
"""

from __future__ import annotations

import os
from typing import List, Sequence

from drumbeat.base.regex import regex
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.write import replace

VERDICT = "verdict"
END, REQUEUE = "end", "requeue"
_HOST = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def write_verdict(
    folder: RunFolder, code: int, next_step: str, lost: Sequence[str], counts: bool, stopped: bool = False
) -> None:
    """`counts`: this requeue is one of the few that the job allows. `stopped`: the scheduler asked for the end."""
    assert next_step in (END, REQUEUE), next_step
    hosts = ",".join(host for host in dict.fromkeys([*lost_nodes(folder), *lost]) if _HOST.fullmatch(host))
    if lost:
        replace(folder.lost, hosts + "\n")
    if counts:
        replace(folder.requeues, f"{requeues(folder) + 1}\n")
    again = hosts if lost and next_step == REQUEUE else ""
    replace(folder.verdict, f"code={int(code)}\nnext={next_step}\nlost={again}\n" + ("stopped=1\n" if stopped else ""))


def next_step(folder: RunFolder) -> str:
    """END or REQUEUE; END where there is no verdict."""
    return REQUEUE if f"next={REQUEUE}" in _text(folder.verdict).splitlines() else END


def lost_nodes(folder: RunFolder) -> List[str]:
    return [name for name in _text(folder.lost).split(",") if name]


def requeues(folder: RunFolder) -> int:
    """How often drumbeat has queued this job again, as far as it counts."""
    text = _text(folder.requeues)
    return int(text) if text.isdigit() and len(text) < 6 else 0


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(1 << 20).strip()
    except OSError:
        return ""


def forget_end(folder: RunFolder) -> None:
    """A job that starts again has not ended."""
    for path in (folder.summary, folder.verdict):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
