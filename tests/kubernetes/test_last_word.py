"""A lead that was killed leaves no summary: what is known of its end is kept before the job is removed from the cluster."""

from types import SimpleNamespace

import pytest

from drumbeat.backends.contract import RUNNING, UNKNOWN, Status
from drumbeat.backends.kubernetes import PodFiles
from drumbeat.desk import status as desk_status
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import RunRecord, write_run_record

HANDLE = "kubernetes://team@bench/run"


@pytest.mark.parametrize(
    ("code", "detail", "words"),
    [
        ("137", "1 of 2 pods run", "ended with 137: killed, as a memory limit does it (ask for more with --memory"),
        ("137", "run-1 was killed because it used more memory than its limit (OOMKilled)", "(OOMKilled)"),
        ("70", "", "the lead's agent left no summary and ended with 70"),
        ("", "", "ended with an unknown code"),
    ],
)
def test_the_end_is_named(tmp_path, monkeypatch, code, detail, words):
    write_run_record(RunFolder(str(tmp_path)), RunRecord("run", handle=HANDLE))
    (tmp_path / "ended").write_text(code)
    told = Status(HANDLE, RUNNING, detail)
    PodFiles(str(tmp_path), SimpleNamespace(status=lambda: told))._name_end()
    monkeypatch.setattr(
        desk_status, "ask_scheduler", lambda handle: Status(HANDLE, UNKNOWN, "it is not in the cluster any more")
    )
    found = desk_status.status(Run.open(str(tmp_path)))
    assert found.state == "failed" and words in found.detail, found
