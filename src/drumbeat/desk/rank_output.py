"""What ranks printed, passed on to where the user looks; no reader's end ends the run."""

from __future__ import annotations

import os
import sys
from typing import Dict, Iterable, List, Optional, TextIO, Tuple

from drumbeat.base.ranges import ranges
from drumbeat.base.regex import regex
from drumbeat.runfolder.records import Line

_OWN_PREFIX = regex(r"\[rank\d+\]: ?")  # torch's, before each line of a traceback


def write_lines(lines: Iterable[Line]) -> None:
    """By rank. The same error output of several ranks, a traceback say, is shown once."""
    blocks: Dict[Tuple[Optional[int], str], List[str]] = {}
    for line in lines:
        blocks.setdefault((line.rank, line.stream), []).append(line.text)
    shown: Dict[Tuple[str, ...], List[int]] = {}
    for (rank, stream), texts in sorted(blocks.items(), key=lambda item: (item[0][0] or 0, item[0][1] != "out")):
        if stream == "err" and rank is not None and len(texts) > 1:
            shown.setdefault(tuple(_OWN_PREFIX.sub("", text, count=1) for text in texts), []).append(rank)
        else:
            write(sys.stdout if stream == "out" else sys.stderr, f"[{rank}] " if rank else "", texts)
    for block, ranks in shown.items():
        if ranks == [0]:
            write(sys.stderr, "", blocks[0, "err"])
        else:
            write(sys.stderr, f"[{ranges(ranks)}] ", block)


def write(stream: TextIO, prefix: str, texts: Iterable[str]) -> None:
    put(stream, "".join(f"{prefix}{text}\n" for text in texts))


def put(stream: TextIO, text: str) -> None:
    """A reader that went away (`| head`) or a closed terminal costs the view, never the run."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
