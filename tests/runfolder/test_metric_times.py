"""A reported time that is no time of this run counts for nothing."""

import json
import time
from types import SimpleNamespace

from drumbeat.agent.member.progress import NodeMetrics
from drumbeat.runfolder.layout import RunFolder


def test_implausible_times_are_left_out(tmp_path):
    folder = RunFolder(str(tmp_path)).node(0)
    (tmp_path / "nodes" / "0").mkdir(parents=True)
    child = SimpleNamespace(append_if_room=lambda path, data: None, take_records=list)
    metrics = NodeMetrics(folder, str(tmp_path), None, child)
    now = time.time()
    records = [
        {"t": t, "kind": "step", "rank": 0, "step": n, "loss": 1.0} for n, t in enumerate((1, now, 9e12, now + 2))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(metrics.ship(0, final=True)) == 2
    assert 0 < metrics.progress.seconds < 10
