"""Processes are read in one way: only `base/proc.py` opens files below /proc/PID and walks over /proc; all others ask it or
the inspector's snapshot."""

import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src" / "drumbeat"
OF_A_PROCESS = re.compile(r"""["']/proc/?(?:\{|["']\s*[),%+])|/proc/(?:%[sd]|\*)""")
WALKS = re.compile(r"\bproc\.pids\(")


def files_with(pattern):
    found = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    return {str(path.relative_to(SOURCE)) for path, text in found.items() if pattern.search(text)}


def test_only_one_file_reads_below_the_folder_of_a_process():
    assert files_with(OF_A_PROCESS) == {"base/proc.py"}


def test_only_the_snapshot_walks_over_all_processes():
    assert files_with(WALKS) == {"inspector/tree.py"}
