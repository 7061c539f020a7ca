"""What `make workloads` has seen so far, cell by cell: a run that was interrupted goes on where it was, with the same source.
Of another source the rows that are whole are kept until they are seen again, each with the source that it is of."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import platform
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Dict, Union

from tests.workloads.lines import LineRow
from tests.workloads.runner import HERE, NOT_YET, Row

TOP = HERE.parent.parent
_TESTED = ("src", "tests/workloads")


def source() -> str:
    """The commit and the kind of machine; where files are not committed, a digest of what differs as well."""
    commit = f"{_git('log', '-1', '--format=%h %cs').strip() or 'no commit'} {platform.machine()}"
    changed = _git("diff", "HEAD", "--", *_TESTED) + _git("ls-files", "-o", "--exclude-standard", "--", *_TESTED)
    return commit + (f" with changes {hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(TOP), *words], capture_output=True, text=True, check=False).stdout


def kept_source(path: Path) -> str:
    """Of which source the results in this file are."""
    return str(json.loads(path.read_text())["source"])


class Results:
    """In one file."""

    def __init__(self, path: Path, of: str = "") -> None:
        self.path, self.source, self.began = path, of or source(), datetime.date.today().isoformat()
        self.rows: Dict[str, Row] = {}
        self.lines: Dict[str, LineRow] = {}
        self.older: Dict[str, Row] = {}  # of other sources: rows that are whole, and why a program was not run
        self.older_lines: Dict[str, LineRow] = {}
        self._lock = threading.Lock()
        self._read()
        self.rows = {name: row.again() for name, row in self.rows.items()}

    def row(self, name: str) -> Row:
        return self.rows.get(name) or Row(name, source=self.source)

    def line(self, name: str) -> LineRow:
        return self.lines.get(name) or LineRow(name, source=self.source)

    def last_row(self, name: str, processes: str) -> Row:
        """For the page: of this source if all its cells were seen, else of the source before it."""
        row = self.row(name)
        if row.skipped:
            return row
        if not row.front and name not in self.older:
            return replace(row, skipped="not reached")
        row.finish(processes)
        older = self.older.get(name, row)
        return row if row.is_whole or (older.skipped and row.front != NOT_YET) else older

    def last_line(self, name: str) -> LineRow:
        line = self.line(name)
        return line if line.killed else self.older_lines.get(name, line)

    def keep(self, row: Union[Row, LineRow]) -> None:
        """Beside what other processes with the same source have written meanwhile."""
        with self._lock, open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            if isinstance(row, Row):
                self.rows[row.name] = row
            else:
                self.lines[row.name] = row
            named = (
                ("rows", self.rows),
                ("lines", self.lines),
                ("older", self.older),
                ("older_lines", self.older_lines),
            )
            rows = {part: {name: asdict(each) for name, each in of.items()} for part, of in named}
            new = self.path.with_suffix(".new")
            kept = {"source": self.source, "began": self.began, **rows}
            new.write_text(json.dumps(kept, indent=1))
            new.replace(self.path)

    def _read(self) -> None:
        try:
            kept = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return
        own = kept.get("source") == self.source
        rows = {name: Row(**{"source": kept["source"], **values}) for name, values in kept["rows"].items()}
        lines = {name: LineRow(**{"source": kept["source"], **values}) for name, values in kept["lines"].items()}
        self.older.update((name, Row(**values)) for name, values in kept.get("older", {}).items())
        self.older_lines.update((name, LineRow(**values)) for name, values in kept.get("older_lines", {}).items())
        if own:
            self.began = kept["began"]
            self.rows.update(rows)
            self.lines.update(lines)
        else:
            self.older.update((name, row) for name, row in rows.items() if row.skipped or row.oom)
            self.older_lines.update((name, line) for name, line in lines.items() if line.killed)
