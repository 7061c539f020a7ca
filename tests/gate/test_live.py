"""The gate in a real run. There is no NCCL here: ranks write what NCCL would have written to where it was told to write."""

import json
import sys

import pytest

from tests.gate.logs import log

RANK = """
import os, socket, sys, time
path = os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
with open(path, "w", buffering=1) as file:
    for line in open(sys.argv[1]):
        file.write(line)
    print("level", os.environ["NCCL_DEBUG"], flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def job(drumbeat, tmp_path):
    """Run one rank that leaves this log; the finished process and the run folder."""

    def run(lines, seconds, *flags, job="", env=None):
        (tmp_path / "rank.py").write_text(RANK)
        (tmp_path / "lines").write_text("".join(line + "\n" for line in lines))
        (tmp_path / "job.yaml").write_text(job)
        command = (sys.executable, tmp_path / "rank.py", tmp_path / "lines", seconds)
        done = drumbeat("run", tmp_path / "job.yaml", *flags, "--", *command, env=env)
        return done, drumbeat.run_folder()

    return run


def kept(folder):
    return sorted(path.name for path in (folder / "nodes/0/attempt-0").glob("nccl*"))


def events(folder, kind):
    lines = (folder / "nodes/0/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_the_wrong_network_ends_the_job_in_seconds_and_is_not_tried_again(job):
    lines = log(network="Socket", before=["Failed to open libibverbs.so[.1]"])
    done, folder = job(lines, 60, job="expect: {transport: rdma}\nrestarts: 2\nstop-grace: 2s\n")
    assert done.returncode == 1, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["failure"]["code"] == "transport-mismatch" and len(summary["attempts"]) == 1
    assert "libibverbs" in summary["failure"]["cause"] and summary["failure"]["fix"] in done.stderr
    assert kept(folder) == ["nccl-rank0.log"]
    evidence = summary["failure"]["evidence"][0]
    text = (folder / evidence["file"]).read_text().splitlines()
    assert text[evidence["line"] - 1] == evidence["text"]


def test_a_warning_lets_it_finish(job):
    done, folder = job(log(network="Socket"), 1.5, job="expect: {transport: rdma}\nchecks: {transport: warn}\n")
    assert done.returncode == 0 and "goes over tcp, not rdma" in done.stderr
    assert kept(folder) == ["nccl-rank0.log"]


def test_the_right_network_is_recorded_and_leaves_no_file(job):
    done, folder = job(log(), 1.5, job="expect: {transport: roce, gdr: true}\n")
    assert done.returncode == 0 and "rdma+gdr (RoCE)" in done.stderr, done.stderr
    (verdict,) = [event for event in events(folder, "verdict") if event["verdict"]["check"] == "transport"]
    assert verdict["verdict"]["answer"] == "rdma"
    assert kept(folder) == []
    assert "level INFO" in done.stdout


def test_lines_the_user_asked_for_arrive_and_no_others(job, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    warned = "n0:100:150 [0] transport/net_ib.cc:149 NCCL WARN NET/IB : Unable to open device mlx5_0"
    done, _ = job([*log(), warned], 1.5, job="expect: {transport: rdma}\n")
    assert warned in done.stdout and "Using network" not in done.stdout


def test_off_leaves_the_variables_alone(drumbeat, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code = "import os; print(os.environ['NCCL_DEBUG'], 'NCCL_DEBUG_FILE' in os.environ)"
    (drumbeat.folder / "job.yaml").write_text("expect: {transport: rdma}\nchecks: {transport: off}\n")
    done = drumbeat("run", "job.yaml", "--", sys.executable, "-c", code)
    assert done.returncode == 0 and "WARN False" in done.stdout
    assert not events(drumbeat.run_folder(), "verdict") or all(
        event["verdict"]["check"] == "affinity" for event in events(drumbeat.run_folder(), "verdict")
    )
