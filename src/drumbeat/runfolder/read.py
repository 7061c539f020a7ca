"""Reading a run folder: tolerant of half lines and unknown keys, strict about a newer schema."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional

from drumbeat.record import RecordError, check_schema
from drumbeat.runfolder.layout import SCHEMA, RunFolder


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in a file; None when it is not there or not whole."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: str) -> Iterator[Dict[str, Any]]:
    """The JSON lines of a file; a torn line is passed over."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def open_run(path: str) -> RunFolder:
    """The run folder at `path`; RecordError when it is none, or one of a newer drumbeat."""
    folder = RunFolder(os.path.abspath(path))
    run = read_json(folder.run_json)
    if run is None:
        raise RecordError(f"{path}: not a run folder (no readable run.json)")
    check_schema(str(run.get("schema", "?")), SCHEMA, folder.run_json)
    return folder


def clock_offsets(folder: RunFolder) -> Dict[int, float]:
    peers = read_json(folder.peers) or {}
    return {int(peer["node"]): float(peer["clock_offset"]) for peer in peers.get("nodes", ()) if "node" in peer}


def earlier_attempts(folder: RunFolder) -> List[Dict[str, Any]]:
    """Attempts that the run's events tell of. One without an end was cut off: its node, or the whole job, was killed."""
    found: List[Dict[str, Any]] = []
    for event in read_lines(folder.events):
        kind = event.get("kind")
        if kind == "attempt-started":
            cut_off = {"outcome": "cut off", "exit_code": None, "finding": None}
            found.append({"attempt": int(event.get("attempt") or 0), **cut_off})
        elif found and kind == "failed":
            found[-1]["finding"] = event.get("finding")
        elif found and kind == "attempt-ended":
            found[-1].update(outcome=event.get("outcome"), exit_code=event.get("exit_code"))
    return found


def events(folder: RunFolder) -> List[Dict[str, Any]]:
    """All events of all nodes, in the order of the lead's clock."""
    offsets = clock_offsets(folder)
    found = list(read_lines(folder.events))
    for node in folder.nodes():
        shift = offsets.get(node.node, 0.0)
        found += ({**event, "t": event.get("t", 0.0) + shift} for event in read_lines(node.events))
    return sorted(found, key=lambda event: (event.get("t", 0.0), event.get("node", 0), event.get("seq", 0)))


@dataclass
class Tail:
    """Follows one growing file from where it was left; returns only whole lines, or all of it at the end."""

    path: str
    position: int = 0
    _rest: bytes = b""

    def lines(self, final: bool = False) -> List[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read(4 << 20)
        except OSError:
            data = b""
        self.position += len(data)
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()
        if (final and self._rest) or len(self._rest) > 1 << 20:  # a line without end must not eat the memory
            parts.append(self._rest)
            self._rest = b""
        return [part.decode("utf-8", "replace") for part in parts]
