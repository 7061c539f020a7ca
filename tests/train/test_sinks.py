"""Figures really arrive where they were asked to go, and can be read back there."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from tests.conftest import wait_for

from drumbeat.cli import main
from drumbeat.metrics.trackers import MODULES
from drumbeat.train.measure import Reporter
from drumbeat.train.refusal import Refusal


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[dev]' brings it")


def written(sink: str) -> None:
    """Two steps and a checkpoint that became durable late, as a run reports them."""
    reporter = Reporter(True, [sink])
    reporter.figures("step", 1, {"tokens": 64}, {"loss": 2.5, "forward+backward_ms": 7.0}, 2)
    reporter.figures("step", 2, {"tokens": 64}, {"loss": math.nan, "forward+backward_ms": 8.0}, 2)
    reporter.figures("checkpoint", 1, {}, {"path": "somewhere", "save_s": 0.5})
    reporter.close()


def test_json_lines_of_a_whole_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    assert (
        main(
            ["train", "llama", "--set", "steps=8", "batch=2", "report_every=2", "validation=8", f"figures=jsonl={file}"]
        )
        == 0
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [("step", step) for step in (2, 4, 6, 8)]
    assert [(line["kind"], line["step"]) for line in lines] == [("setup", 0), *steps, ("validation", 8)]
    last = lines[4]
    phases = {"data_ms", "forward+backward_ms", "optimizer_ms", "other_ms"}
    assert phases < set(last) and last["tokens_per_s"] > 0 and last["grad_norm"] > 0
    assert "mfu" not in last and last["tflops"] > 0, "a CPU has no MFU"


def test_drumbeat_hears_of_steps_between_two_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where reports are minutes apart, the steps between them are progress: no view says that no step was seen."""
    monkeypatch.setattr("drumbeat.train.loop._QUIET", 0.0)
    monkeypatch.setenv("DRUMBEAT_METRICS", str(tmp_path / "metrics"))
    assert main(["train", "llama", "--set", "steps=4", "batch=2", "report_every=4", "validation=8"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    steps = [(line["step"], line["steps"], "loss" in line) for line in lines if line["kind"] == "step"]
    assert steps == [(1, 4, False), (2, 4, False), (3, 4, False), (4, 4, True)]
    assert len({line["tokens"] for line in lines if line["kind"] == "step"}) == 1, "each line has those of its own step"
    assert "at step 3/4, " in capsys.readouterr().out


def test_json_lines_hold_no_bare_nan(tmp_path: Path) -> None:
    written(f"jsonl={tmp_path}/f")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "f").read_text().splitlines()]
    assert lines[1]["loss"] == "nan" and lines[2]["path"] == "somewhere"


def test_tensorboard(tmp_path: Path) -> None:
    need("tensorboard")
    written(f"tensorboard={tmp_path}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in read.Scalars("step/forward_backward_ms")] == [(1, 7.0), (2, 8.0)]
    assert math.isnan(read.Scalars("step/loss")[1].value)
    assert [(e.step, e.value) for e in read.Scalars("checkpoint/save_s")] == [(1, 0.5)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    written("wandb=test")
    from wandb.proto import wandb_internal_pb2

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")

    def rows() -> List[Dict[str, Any]]:
        found = []
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        return found

    wait_for(lambda: len(rows()) == 3, what="wandb's own process to write")  # after finish() has returned
    assert [row["step"] for row in rows()] == [1, 2, 1], "nothing is dropped because its step is in the past"
    assert rows()[0]["step/loss"] == 2.5 and rows()[2]["checkpoint/save_s"] == 0.5


def log_records(data: bytes) -> Iterator[bytes]:
    """wandb's file: 7 bytes, then records in blocks of 32 KiB, each with checksum, length and kind (whole, first, ...)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little room for a head: the rest of the block is empty
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + size > len(data):  # still being written
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    written("mlflow=test")
    import mlflow

    (run,) = mlflow.search_runs(experiment_names=["test"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step/forward_backward_ms")
    assert [(point.step, point.value) for point in history] == [(1, 7.0), (2, 8.0)]
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_clear_line(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[package], None)  # type: ignore[arg-type]  # Python then finds no such module
    assert main(["train", "llama", "--set", "steps=1", f"figures={package}=x"]) == 2
    said = capsys.readouterr().err
    assert f"{package} is not installed" in said and f"pip install {package}" in said


def test_only_rank_0_writes(tmp_path: Path) -> None:
    Reporter(False, [f"jsonl={tmp_path}/f"]).figures("step", 1, {}, {"loss": 1.0})
    assert not (tmp_path / "f").exists()
    with pytest.raises(Refusal, match="no place for figures"):
        Reporter(True, ["paper"])
