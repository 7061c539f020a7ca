"""A run folder is read in one way: only `runfolder` follows its files and knows their names; all views ask it."""

import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src" / "drumbeat"
FOLLOWS = re.compile(r"\bTail\(")
NAMES = re.compile(r"""["'/](?:events|metrics|telemetry)\.jsonl["']|["'/]summary\.json["']""")
LOOK_UP = re.compile(r"""\bevent\[["']""")  # a typed record has attributes
# An agent follows what its own ranks write, on the node's own disk. Kubernetes has events of its own.
AGENT = {"agent/member/progress.py", "agent/folder/child.py", "agent/watchers/nccl_log.py"}
KUBERNETES = {"backends/kubernetes/client.py"}


def files_with(pattern):
    paths = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "runfolder"]
    return {str(path.relative_to(SOURCE)) for path in paths if pattern.search(path.read_text(encoding="utf-8"))}


def test_only_runfolder_follows_a_run():
    assert files_with(FOLLOWS) == AGENT


def test_only_runfolder_knows_the_names_of_its_files():
    assert files_with(NAMES) == {"agent/member/progress.py"}


def test_events_are_typed_records():
    assert files_with(LOOK_UP) == KUBERNETES
