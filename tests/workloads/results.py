"""What `make workloads` has seen so far, cell by cell: a run that was interrupted goes on where it was, with the same source."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Dict, Union

from tests.workloads.lines import LineRow
from tests.workloads.runner import HERE, Row

TOP = HERE.parent.parent
_TESTED = ("src", "tests/workloads")


def source() -> str:
    """The commit; where files are not committed, a digest of what differs as well."""
    commit = _git("log", "-1", "--format=%h %cs").strip() or "no commit"
    changed = _git("diff", "HEAD", "--", *_TESTED) + _git("ls-files", "-o", "--exclude-standard", "--", *_TESTED)
    return commit + (f" with changes {hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(TOP), *words], capture_output=True, text=True, check=False).stdout


def kept_source(path: Path) -> str:
    """Of which source the results in this file are."""
    return str(json.loads(path.read_text())["source"])


class Results:
    """In one file. Rows of another source are forgotten: a page is about one."""

    def __init__(self, path: Path, of: str = "") -> None:
        self.path, self.source, self.began = path, of or source(), datetime.date.today().isoformat()
        self.rows: Dict[str, Row] = {}
        self.lines: Dict[str, LineRow] = {}
        self._lock = threading.Lock()
        self._read()
        self.rows = {name: row.again() for name, row in self.rows.items()}

    def row(self, name: str) -> Row:
        return self.rows.get(name) or Row(name)

    def line(self, name: str) -> LineRow:
        return self.lines.get(name) or LineRow(name)

    def keep(self, row: Union[Row, LineRow]) -> None:
        """Beside what other processes with the same source have written meanwhile."""
        with self._lock, open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            if isinstance(row, Row):
                self.rows[row.name] = row
            else:
                self.lines[row.name] = row
            rows = {name: asdict(each) for name, each in self.rows.items()}
            lines = {name: asdict(each) for name, each in self.lines.items()}
            new = self.path.with_suffix(".new")
            kept = {"source": self.source, "began": self.began, "rows": rows, "lines": lines}
            new.write_text(json.dumps(kept, indent=1))
            new.replace(self.path)

    def _read(self) -> None:
        try:
            kept = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return
        if kept.get("source") == self.source:
            self.began = kept["began"]
            self.rows.update((name, Row(**values)) for name, values in kept["rows"].items())
            self.lines.update((name, LineRow(**values)) for name, values in kept["lines"].items())
