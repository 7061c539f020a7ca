"""How long `cancel` waits before the scheduler is asked to end the job."""

import argparse
from types import SimpleNamespace

import pytest

from drumbeat.cli import cancel
from drumbeat.desk import cancel as ending
from drumbeat.desk import runs, status
from drumbeat.runfolder.events import Stopping

STOPPING = Stopping("stopping", 2.0, 2.0, 5, "host", 0, 0, "drumbeat cancel", 15, 5.0)


@pytest.mark.parametrize("events,waited,said", [
    ([], [20.0], "did not end by itself"),
    ([STOPPING], [20.0, 60.0], "has ended"),
])  # fmt: skip
def test_a_lead_that_is_stopping_is_given_longer(monkeypatch, capsys, events, waited, said):
    found = SimpleNamespace(
        run_id="a", order=lambda: SimpleNamespace(stop_grace=5.0), last_run_events=lambda: events,
        was_cancelled=lambda: bool(events),
    )  # fmt: skip
    waits = []
    monkeypatch.setattr(runs, "find_running", lambda *_: found)
    monkeypatch.setattr(status, "leftovers", lambda _: [])
    monkeypatch.setattr(status, "status", lambda _: SimpleNamespace(state="running"))
    monkeypatch.setattr(ending, "cancel", lambda _: None)
    monkeypatch.setattr(ending, "end_job", lambda _: True)
    monkeypatch.setattr(ending, "wait_ended", lambda _, seconds: waits.append(seconds) or len(waits) == 2)
    assert cancel.run(argparse.Namespace(run="a")) == 0 and waits == waited
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert ("so it ends now" if events else "have 5 s to save") in shown.err
