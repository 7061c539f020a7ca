"""A program that counts nothing but epochs: no view calls them steps."""

from __future__ import annotations

from drumbeat.report.gather import figures_of
from drumbeat.report.tables import page_of
from drumbeat.report.text import lines_of, rows
from drumbeat.watch.prometheus import families
from drumbeat.watch.session import Session
from drumbeat.watch.text import screen
from tests.runfolder.folders import make_run, metrics


def test_epochs_are_epochs_in_every_view(tmp_path):
    run = make_run(tmp_path / "r")
    metrics(
        run,
        *(
            {"t": 100.0 + 2 * n + rank, "rank": rank, "kind": "step", "printed": True, "step_is": "epoch", "step": n}
            for n in range(1, 7)
            for rank in (0, 1)
        ),
    )
    told = dict(rows(figures_of(run)))
    assert told["throughput"] == (
        "0.50 epochs/s (reported epochs, first to last; times of printed lines, to about 0.25 s on an idle node)"
    )
    assert told["spread"].startswith("median 0.50, ") and "per step" not in told
    assert told["per epoch"].startswith("mean 2000.0 ms")
    session = Session(run)
    session.load()
    assert "2 s per epoch (mean)" in "\n".join(screen(session, 120, 50))
    names = {family.name for family in families(session.head(), ())}
    assert "drumbeat_epoch_duration_seconds" in names and not any("step_duration" in name for name in names)


def test_the_page_names_the_parts_of_the_time_as_the_text_does(tmp_path):
    figures = figures_of(make_run(tmp_path / "r"))
    object.__setattr__(figures, "ledger", {"training": 5.0, "unknown": 3.4})
    assert "after the last step 3.4 s" in " ".join(" ".join(lines_of(figures)).split())
    assert "after the last step 3.4 s" in page_of(figures) and "unknown 3.4" not in page_of(figures)
    object.__setattr__(figures, "step_is", "epoch")
    object.__setattr__(figures, "ledger", {"first step": 24.0, "training": 5.0, "unknown": 3.4})
    told = dict(rows(figures))["time"]
    assert told == "through the first epoch 24 s, training 5.0 s, after the last epoch 3.4 s"
    assert told.partition(" 24 s")[0] in page_of(figures)
