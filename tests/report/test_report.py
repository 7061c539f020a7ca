"""One run: what its folder holds, and nothing more."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest

from drumbeat.base.record import to_plain
from drumbeat.cli import main
from drumbeat.machine.model import Facts, Gpu, GpuSample
from drumbeat.report.figures import GpuUse, Note, Speed
from drumbeat.report.gather import Devices, figures_of
from drumbeat.report.scaling import compare
from drumbeat.report.text import gpu_rows, lines_of, rows, speed_words
from drumbeat.runfolder.files import replace_json
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Sample, parse_metric, so_far_line
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import ledger
from drumbeat.runfolder.summary import AttemptEnd, summarize, write_summary
from drumbeat.verify.chart import line_chart, share_bar
from tests.runfolder.folders import events, make_run, metrics, order

TOKENS, STEP = 512, 0.5


def finished(path, **changes):
    """Two ranks, 100 steps of half a second with 512 tokens per rank, on two H100 of 300 W each."""
    run = make_run(path)
    setup = {"flops_per_token": 6e11, "flops_formula": "6 N", "flops_dtype": "bf16", "precision": "bf16"}
    metrics(run, {"t": 1010.0, "rank": 0, "kind": "setup", "step": 20, **setup})
    for step in range(1, 101):
        for rank in (0, 1):
            t = 1010.0 + STEP * step + 0.1 * rank  # rank 1 is late
            metrics(run, {"t": t, "rank": rank, "step": step, "steps": 100, "tokens": TOKENS, "loss": 5 - step / 50})
    with open(run.folder.node(0).telemetry, "w") as file:
        for t in range(1005, 1066, 5):
            gpus = [{"index": n, "busy": 90.0, "power": 300.0, "memory_used": 8 << 30} for n in (0, 1)]
            port = {"received": (t - 1000) * 10**6, "sent": (t - 1000) * 2 * 10**6}
            file.write(json.dumps({"t": float(t), "host": "h", "gpus": gpus, "network": {"mlx5_0:1": port}}) + "\n")
    gpus = tuple(Gpu(n, "nvidia", "NVIDIA H100 80GB HBM3") for n in (0, 1))
    replace_json(run.folder.node(0).facts, Facts("h", gpus=gpus, versions={"torch": "2.13.0"}))
    progress = Progress()
    for metric in run.metrics(0):
        progress.add(metric)
    parts = {**ledger(1000.0, 1065.0, []), "start": 10.0, "first step": 0.5, "training": 49.5, "unknown": 5.0}
    ends = [AttemptEnd(0, "finished", 0)]
    write_summary(run.folder, summarize(order(path, **changes), ends, [], (), progress, parts))
    return Run.open(str(path))


def test_the_figures_are_those_of_the_folder(tmp_path):
    run = finished(tmp_path / "run")
    figures = figures_of(run)
    summary = run.summary()
    assert figures.speed.value == summary.throughput.value and figures.speed.unit == "tokens/s"
    assert figures.speed.median == pytest.approx(2 * TOKENS / STEP) and figures.speed.intervals == 99
    assert figures.batch == 2 * TOKENS and figures.loss == (4.98, 3.0) and figures.gpus == 2
    assert figures.seconds == 65.0 and figures.gpu_hours == pytest.approx(2 * 65 / 3600)
    assert figures.training_share == summary.training_share and figures.ledger == summary.ledger
    rate = figures.speed.value
    assert figures.utilisation.mfu == pytest.approx(rate * 6e11 / (2 * 989e12), rel=0.01)
    assert figures.gpu.energy_kwh == pytest.approx(2 * 300 * 60 / 3.6e6) and figures.gpu.busy == 90.0
    work = 99 * 2 * TOKENS
    assert figures.gpu.joules_per_unit == pytest.approx(600 * run.progress().seconds / work, rel=0.02)
    assert figures.network["rdma"].received == 60e6 and figures.network["rdma"].sent == 120e6
    assert figures.slowest.rank == 1 and figures.slowest.ms == pytest.approx(100, abs=1)


def test_the_ettr_of_a_job_that_was_queued_again(tmp_path):
    """Two starts, the second after 30 s in the queue: 100 s of training in 160 s on its nodes."""
    run = make_run(tmp_path / "run")
    (tmp_path / "run" / "job.sbatch").write_text("")
    about = {"run_id": "r", "nodes": 1, "ranks_per_node": 1, "launcher": "ranks", "launcher_why": ""}
    meeting = {"world_size": 1, "master_addr": "h", "master_port": 1}
    parts = [Progress(step=step, first_step=first, first_t=begin, last_t=end) for step, first, begin, end in
             ((50, 1, 1020.0, 1070.0), (100, 51, 1130.0, 1180.0))]  # fmt: skip
    for begin, part, outcome in ((1000.0, parts[0], "requeue"), (1110.0, parts[1], "finished")):
        ended = {"outcome": outcome, "exit_code": 0, "progress": to_plain(part), "t": begin + 80.0}
        events(
            run,
            ("run-started", {**about, "t": begin, "job_began": begin}),
            ("attempt-started", {**meeting, "t": begin + 5.0}),
            ("attempt-ended", ended),
        )
    metrics(run, {"t": 1130.0, "rank": 0, "step": 51}, {"t": 1180.0, "rank": 0, "step": 100})
    figures = figures_of(Run.open(run.path), now=1190.0)
    assert figures.starts == 2 and sum(figures.ledger.values()) == pytest.approx(190.0)
    words = next(text for label, text in rows(figures) if label == "ETTR")
    assert words.startswith(
        f"{figures.training_share:.1%} of the time on its nodes; over 2 starts of the job; the rest: "
    )


def test_a_large_run_is_read_by_its_sums_and_says_the_same(tmp_path, monkeypatch):
    """Of 12 nodes with two ranks each, agents have added up the reports of all ranks. One rank was late at first, which nobody
    sees at the end of its metrics or in their middle."""
    nodes, last = 12, 400
    run = make_run(tmp_path / "run", nodes=nodes)
    for node in range(nodes):
        progress, lines = Progress(), []
        for step in range(1, last + 1):
            for rank in (2 * node, 2 * node + 1):
                late = 0.8 if rank == 17 and step <= 100 else 0.0
                record = {"t": 1010.0 + STEP * step + late, "rank": rank, "kind": "step", "step": step, "steps": last}
                lines.append(json.dumps({**record, "tokens": TOKENS, "loss": 2.0}) + "\n")
                progress.add(parse_metric(json.loads(lines[-1]), node))
            if step % 40 == 0:
                lines.append(so_far_line(progress.snapshot(), record["t"]))
        with open(run.folder.node(node).metrics, "w") as file:
            file.writelines(lines)
        with open(run.folder.node(node).telemetry, "w") as file:
            for t in range(1005, 1066, 5):
                gpus = [{"index": 0, "busy": 90.0, "power": 300.0}]
                file.write(json.dumps({"t": float(t), "host": f"h{node}", "gpus": gpus}) + "\n")
    run = Run.open(run.path)
    whole = figures_of(run, now=1300.0)
    monkeypatch.setattr("drumbeat.report.gather._MOST_METRICS", 96 << 10)
    assert figures_of(run, now=1300.0) == whole
    assert whole.batch == nodes * 2 * TOKENS and whole.step == last
    assert whole.slowest.rank == 17 and whole.slowest.ms == pytest.approx(200, abs=5)


def test_time_lost_to_a_slow_rank_is_reported(tmp_path):
    run = make_run(tmp_path / "run")
    events(
        run,
        ("stalled", {"rank": 2, "seconds": 20.0, "share": 0.6}),
        ("stalled", {"rank": 2, "seconds": 130.0, "share": 0.0}),
    )
    assert "the others waited 2 m 10 s for rank 2" in " ".join(
        " ".join(lines_of(figures_of(Run.open(run.path)))).split()
    )


def test_a_pause_is_no_step_time(tmp_path):
    """Steps of 50 ms, of which the tenth comes 20 s late: what it took is a pause, not a step."""
    for name, work in (("printed", {"printed": True}), ("reported", {"tokens": 100})):
        run = make_run(tmp_path / name)
        times = [1010.0 + 0.05 * step + (20.0 if step >= 10 else 0.0) for step in range(1, 101)]
        metrics(run, *({"t": t, "rank": 0, "step": step, **work} for step, t in enumerate(times, 1)))
        events(run, ("attempt-started", {"world_size": 1, "master_addr": "h", "master_port": 1}))
        path = tmp_path / name / "events.jsonl"
        path.write_text(json.dumps({**json.loads(path.read_text()), "t": 1009.0}) + "\n")
        figures = figures_of(Run.open(run.path))
        assert figures.phases.step == pytest.approx(50.0, rel=0.03), name
        said = " ".join(" ".join(lines_of(figures)).split())
        assert "; without the 20 s in which it had paused)" in said
        assert figures.speed.hung == pytest.approx(20.0) == figures.ledger["paused"]
    assert figures.speed.low == pytest.approx(2000.0) and figures.speed.intervals == 98
    twins = [dataclasses.replace(figures, name=name, ranks=1) for name in ("a", "b")]
    assert not any("paused" in question for question in compare(twins).questions)


def test_a_toolkit_that_no_gpu_uses_is_called_that(tmp_path):
    run = make_run(tmp_path / "run")
    replace_json(run.folder.node(0).facts, Facts("h", versions={"cuda": "13.0", "torch-cuda": "12.8"}))
    said = " ".join(" ".join(lines_of(figures_of(run))).split())
    assert "torch built for CUDA 12.8, CUDA toolkit 13.0 (installed, not used: no GPU)" in said


def test_text_fits_and_says_what_is_not_measured(tmp_path):
    lines = lines_of(figures_of(finished(tmp_path / "run")))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "FLOPs (6 N) / (2 x 989" in text and "J per token in training" in text
    bare = lines_of(figures_of(make_run(tmp_path / "bare")))
    said = "\n".join(bare)
    for label in ("loss", "throughput", "spread", "batch", "GPU use", "energy", "network", "per step"):
        assert re.search(rf"^{label} +not measured", said, re.MULTILINE), label


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path, capsys):
    run = finished(tmp_path / "run")
    out = tmp_path / "report.html"
    assert main(["report", run.path, "--html", str(out)]) == 0
    page = out.read_text()
    assert "<script" not in page and "default-src 'none'" in page
    assert set(re.findall(r"""(?:https?:)?//[^"'\s<]+""", page)) == {"http://www.w3.org/2000/svg"}, (
        "only SVG's own name"
    )
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 5 and all(ElementTree.fromstring(each) is not None for each in charts)
    assert "loss" in page and "GPU power" in page


def test_the_page_begins_with_the_verdict(tmp_path):
    """Before any table: how it ended, what was wrong, its fix, and the main figures."""
    from drumbeat.report.tables import page_of

    figures = figures_of(finished(tmp_path / "run"))
    page = page_of(figures)
    assert page.index('class="verdict ok"') < page.index("<svg") < page.index("<table>")
    failed = dataclasses.replace(figures, outcome="failed", notes=(Note("error", "rank 1: out of memory", "less"),))
    head = page_of(failed).partition("<svg")[0]
    assert 'class="verdict error"' in head and "rank 1: out of memory" in head and "<b>Fix:</b> less" in head
    copies = dataclasses.replace(
        figures, world="2 copies", notes=(Note("warning", "2 copies of one training", "join"),)
    )
    head = page_of(copies).partition("<svg")[0]
    assert 'class="verdict "' in head and "2 copies of one training" in head and "<b>Fix:</b> join" in head
    told = dataclasses.replace(
        figures, outcome="hanging", exit_code=None, end="", ledger={"training": 9.0, "hang": 40.0}
    )
    assert {("step", "100 of 100, resumed from 20"), ("end", "hanging for 40 s")} <= set(rows(told)), rows(told)


def test_legends_stand_below_the_drawing_and_end_inside_of_it():
    """A letter of 13 px is 6.7 wide on average."""
    long = share_bar("Time", {"without a reported step": 50.5, "start": 45.7}, "s", {})
    short = share_bar("Time", {"start": 50.5, "training": 45.7}, "s", {})
    lines = line_chart("Loss", {"training": [(1, 2.0), (2, 1.0)], "validation": [(1, 3.0)]}, "step", "loss")
    for drawn, rows_of in ((long, 2), (short, 1), (lines, 1)):
        picture = ElementTree.fromstring(drawn)
        width, height = map(float, picture.get("viewBox").split()[2:])
        texts = [
            (float(each.get("x")), float(each.get("y")), each.text) for each in picture.iter("{http://www.w3.org/2000/svg}text")
            if each.text.startswith(("start", "training", "validation", "without"))
        ]  # fmt: skip
        assert all(x + 6.7 * len(text) < width and y < height for x, y, text in texts), texts
        assert len(texts) == 2 and len({y for _, y, _ in texts}) == rows_of


def test_every_figure_is_a_file_and_validation_is_drawn(tmp_path, capsys):
    run = finished(tmp_path / "run")
    losses = [{"t": 1020.0 + 10 * k, "rank": 0, "kind": "validation", "step": k, "loss": 3.0 - k} for k in range(2)]
    metrics(run, *losses, *({**each, "t": each["t"] + 0.1, "rank": 1} for each in losses))
    assert [value for _, value in figures_of(run).curves["validation loss"]] == [3.0, 2.0], "one rank's"
    assert main(["report", run.path, "--svg", str(tmp_path / "svg")]) == 0
    files = {path.name: path.read_text() for path in (tmp_path / "svg").iterdir()}
    assert set(files) == {"time.svg", "loss.svg", "throughput.svg", "gpu-busy-mean.svg", "gpu-power-mean.svg"}
    for name, text in files.items():
        words = [each.text for each in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
        over = "step" if name == "loss.svg" else "seconds since the command"
        assert "<style>" in text and (name == "time.svg" or over in words), words
    words = [each.text for each in ElementTree.fromstring(files["loss.svg"]).iter("{http://www.w3.org/2000/svg}text")]
    assert {"training", "validation", "loss"} <= set(words)


def test_names_cannot_break_the_page(tmp_path):
    run = finished(tmp_path / "run", command=("python", "<img src=x onerror=alert(1)>"))
    from drumbeat.report.tables import page_of

    assert "<img" not in page_of(figures_of(run))


def test_json(tmp_path, capsys):
    run = finished(tmp_path / "run")
    metrics(run, {"t": 1070.0, "rank": 0, "step": 101, "loss": "nan"})
    assert main(["report", run.path, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (
        plain["name"] == "run" and plain["setting"]["software"]["torch"] == "2.13.0" and plain["utilisation"]["mfu"] > 0
    )


def test_a_target_in_the_command_is_compared_with_the_accuracy(tmp_path):
    run = finished(tmp_path / "run")
    from drumbeat.base.order import dump_order
    from drumbeat.runfolder.files import replace

    command = ("python", "t.py", "--target-accuracy", "0.95")
    replace(run.folder.order, dump_order(order(tmp_path / "run", command=command)))
    summary = run.summary()
    summary.progress.accuracy = 0.7082
    write_summary(run.folder, summary)
    figures = figures_of(run)
    assert figures.target == 0.95 and figures.target_reached is False
    assert any("not reached 0.95 (last accuracy 0.7082)" in line for line in lines_of(figures))


def test_export(tmp_path, capsys):
    run = finished(tmp_path / "run")
    assert main(["report", run.path, "--export", f"csv={tmp_path}/m.csv"]) == 0
    rows = (tmp_path / "m.csv").read_text().splitlines()
    assert len(rows) == 202 and rows[0].startswith("t,node,rank,kind,step,steps,loss")
    for bad in ("csv", "xls=1", "csv=/nowhere/x.csv"):
        assert main(["report", run.path, "--export", bad]) == 2
    capsys.readouterr()
    assert main(["report", make_run(tmp_path / "bare").path, "--export", f"csv={tmp_path}/n.csv"]) == 2
    assert "no metrics" in capsys.readouterr().err


def test_a_newer_folder_is_refused(tmp_path, capsys):
    replace_json(make_run(tmp_path / "new").folder.run_json, {"schema": "9.0", "run_id": "new"})
    assert main(["report", str(tmp_path / "new")]) == 2
    assert "newer drumbeat" in capsys.readouterr().err


def test_a_check_that_was_made_twice_shows_what_it_said_last(tmp_path):
    run = make_run(tmp_path / "run")
    for confidence, summary in (("likely", "2 ranks connected"), ("certain", "2 ranks in one world")):
        verdict = {
            "check": "world",
            "answer": "as planned",
            "confidence": confidence,
            "summary": summary,
            "seen": ["x"],
        }
        events(run, ("verdict", {"verdict": verdict, "peer": 0}))
    told = [note.text for note in figures_of(run).notes if note.text.startswith("world")]
    assert told == ["world: as planned: 2 ranks in one world (certain)"]


def test_a_warning_about_the_world_that_was_refuted_is_told_as_such(tmp_path):
    run = make_run(tmp_path / "run")
    finding = {"code": "ranks-never-joined", "severity": "warning", "title": "2 copies of one training", "fix": "join"}
    unknown = {"check": "world", "answer": "unknown", "confidence": "unknown", "summary": "2 groups", "seen": ["x"]}
    events(run, ("verdict", {"verdict": unknown, "peer": 0}), ("finding", {"finding": finding}))
    told = [
        (note.severity, note.text) for note in figures_of(run).notes if "world" in note.text or "copies" in note.text
    ]
    assert told == [("warning", "2 copies of one training")], "not that the world is unknown, too"
    one = {**unknown, "answer": "as planned", "confidence": "certain", "count": 2, "summary": "2 ranks in one world"}
    events(run, ("verdict", {"verdict": one, "peer": 0}))
    told = [
        (note.severity, note.text) for note in figures_of(run).notes if "world" in note.text or "copies" in note.text
    ]
    assert ("info", "no longer holds: 2 copies of one training") in told and figures_of(run).world == ""
    assert all(severity == "info" for severity, _ in told)


@pytest.mark.parametrize("schema", ["99", '"x"', "[]", "null", "1e400"])
def test_a_summary_of_another_version_is_named_and_left_out(tmp_path, capsys, schema):
    run = finished(tmp_path / "run")
    with open(run.folder.summary) as file:
        text = file.read()
    assert '"schema": "1.0"' in text
    with open(run.folder.summary, "w") as file:
        file.write(text.replace('"schema": "1.0"', f'"schema": {schema}'))
    assert main(["status", run.path]) == main(["report", run.path, "--json"]) == 0
    said = capsys.readouterr().out
    notes = json.loads(said[said.index("{") :])["notes"]
    assert len([note for note in notes if "summary.json: " in note["text"] and "schema" in note["text"]]) == 1


def test_hostile_metrics_break_nothing(tmp_path):
    run = finished(tmp_path / "run")
    odd = ["x" * 500, "nan", -1, 1e17, True]
    for number, value in enumerate(odd):
        bad = {"communication_exposed_ms": value, "data_ms": value, "flops_per_token": value, "precision": value}
        metrics(run, {"t": 1062.0, "rank": number, "step": 102 + number, **bad})
        metrics(
            run, {"t": 1062.0, "rank": 0, "kind": "setup", **bad}, {"t": 1062.0, "kind": "summary", "total_s": value}
        )
    metrics(run, '{"t": 1063.0, "rank": 0, "step": 200, "data_ms": NaN, "communication_exposed_ms": Infinity}', "{torn")
    figures = figures_of(run)
    assert figures.speed.value == run.summary().throughput.value and max(map(len, lines_of(figures))) <= 90


def test_export_to_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = finished(tmp_path / "run")
    assert main(["report", run.path, "--export", f"tensorboard={tmp_path}/tb"]) == 0
    found = accumulator.EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    losses = found.Scalars("step/loss")
    assert [(each.step, round(each.value, 2)) for each in losses][:2] == [(1, 4.98), (2, 4.96)] and len(losses) == 100


def test_means_of_gpus_are_over_time_not_over_samples():
    """Samples are close together at first, while nothing runs yet."""
    devices = Devices()
    for t, power in [(0.0, 100.0), (1.0, 100.0), (2.0, 100.0), (3.0, 500.0), (23.0, 500.0)]:
        capped = ("power limit",) if power == 500.0 else ()
        devices.add(Sample(0, t, gpus=(GpuSample(0, power=power, throttle=capped),)))
    assert devices.slowed() == {"power limit": pytest.approx(20 / 23)}
    assert "slowed by power limit 87% of the time" in gpu_rows(GpuUse(5, slowed=devices.slowed()), 1)[0][1]
    assert devices.mean("power") == pytest.approx((2 * 100 + 300 + 20 * 500) / 23)
    assert devices.mean("busy") is None


def test_a_printed_rate_of_unknown_scope_is_explained_and_not_divided(tmp_path):
    figures = figures_of(make_run(tmp_path / "run"))
    words = speed_words(dataclasses.replace(figures, ranks=4, speed=Speed(512.0, "tokens/s as printed", "stated")))
    assert words.startswith("512 tokens/s as printed (") and "per rank or of all ranks" in words and ";" not in words
