"""`status` of a running run says what its GPUs do."""

from drumbeat.runfolder.lines import gpu_use
from drumbeat.runfolder.run import Run
from tests.runfolder.folders import make_run
from tests.watch.pages import running
from tests.watch.recorded import gpu, recorded, sample


def test_status_shows_the_gpus(drumbeat, tmp_path):
    run = running(recorded(tmp_path / "r"))
    sample(run, 1, run.record.created + 50, [gpu(0, 10.0), gpu(1, 30.0, throttle=["power limit"], power=None)])
    done = drumbeat("status", run.path)
    assert "GPUs       4 at 55 %, memory 50 %, 1,500 W, 1 slowed down by power limit" in done.stdout, done.stderr


def test_the_latest_whole_sample_counts(tmp_path):
    run = make_run(tmp_path / "r")
    assert run.latest_sample(0) is None and gpu_use(run) is None
    sample(run, 0, 1000.0, [gpu(0, 40.0)])
    with open(run.folder.node(0).telemetry, "a") as file:
        file.write('{"t": 1005.0, "gpus": [{"ind')
    assert Run.open(run.path).latest_sample(0).t == 1000.0 and gpu_use(run).use == 40.0
