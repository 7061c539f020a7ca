"""drumbeat diagnose, as a person calls it."""

import gzip
import io
import json
import pickle
import random
import sys
from types import SimpleNamespace

import pytest

from drumbeat.cli import main
from drumbeat.desk.log_sources import MAX_LINE, Source, is_text, lines
from tests.logs.reading import IB, run, start_up
from tests.logs.test_flight import dump

OOM = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture
def diagnose(tmp_path, monkeypatch, capsys):
    """Calls the command in this process: starting Python costs more than all that is tested here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # lines are cut at the terminal's width

    def call(*words, input=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input.encode())))
        code = main(["diagnose", *words])
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


def test_as_a_program(drumbeat):
    (drumbeat.folder / "x.log").write_text(OOM)
    result = drumbeat("diagnose", "x.log")
    assert result.returncode == 0 and "the GPU ran out of memory (rank 2)" in result.stdout


def test_one_screen_failure_first_then_transport(diagnose, tmp_path):
    (tmp_path / "slurm-1.out").write_text(run("NET/IB/0/GDRDMA", more=[IB]) + "\n" + OOM + "\n")
    result = diagnose("slurm-1.out")
    assert result.returncode == 0, result.stderr
    shown = result.stdout
    assert (
        shown.index("the GPU ran out of memory (rank 2)") < shown.index("slurm-1.out:19") < shown.index("rdma+gdr (IB)")
    )
    assert "fix " in shown and "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA" in shown
    assert len(shown.splitlines()) < 25


def test_json_has_it_all(diagnose, tmp_path):
    (tmp_path / "a.log").write_text(run("NET/IB/0", more=[IB]) + "\n" + OOM + "\n")
    report = json.loads(diagnose("a.log", "--json").stdout)
    assert report["transport"]["path"]["answer"] == "rdma" and report["transport"]["path"]["gdr"] is False
    assert report["transport"]["pairs"][0]["a"] == "n0"
    assert report["failure"]["answer"] == "gpu-out-of-memory"
    assert report["failure"]["finding"]["evidence"][0] == {"text": OOM[len("[rank2]: ") :], "file": "a.log", "line": 19}


def test_folder_gzip_and_stdin(diagnose, tmp_path):
    folder = tmp_path / "logs"
    (folder / "deep").mkdir(parents=True)
    (folder / "rank0.log").write_text(start_up(0, more=[IB]) + "\n")
    with gzip.open(folder / "deep" / "rank1.log.gz", "wt") as file:
        file.write(start_up(1, more=[IB]) + "\n" + OOM + "\n")
    (folder / "model.pt").write_bytes(b"\0" * 100)
    report = json.loads(diagnose("logs", "--json").stdout)
    assert report["transport"]["nodes"] == ["n0", "n1"]
    assert report["failure"]["finding"]["evidence"][0]["file"] == "logs/deep/rank1.log.gz"
    assert "out of memory" in diagnose("-", input=OOM + "\n").stdout


def test_nothing_to_read_is_said_and_is_no_answer(diagnose, tmp_path):
    (tmp_path / "empty.log").write_text("")
    for words in (["empty.log"], ["-"], ["empty.log", "--json"], ["."]):
        result = diagnose(*words)
        assert (result.returncode, result.stdout) == (2, "")
        assert "nothing to read" in result.stderr
    (tmp_path / "full.log").write_text("step 1 loss 2.0\n")
    assert diagnose("empty.log", "full.log").returncode == 0


def test_a_rank_that_ends_the_title_is_not_said_twice(diagnose, tmp_path):
    line = "[rank1]: RuntimeError: [/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:31245: Connection refused"
    (tmp_path / "x.log").write_text(f"{line}\n")
    shown = diagnose("x.log").stdout.splitlines()[0]
    assert shown.split(None, 1)[1] == "gloo could not connect to [127.0.1.1]:31245, first seen by rank 1 [certain]"


def test_half_a_gzip_is_read_as_far_as_it_goes(diagnose, tmp_path):
    whole = gzip.compress(("\n".join([OOM] + [f"step {n} {n * n}" for n in range(5000)])).encode())
    (tmp_path / "x.gz").write_bytes(whole[: len(whole) // 2])
    result = diagnose("x.gz")
    assert result.returncode == 0 and "ran out of memory" in result.stdout and "unfinished gzip" in result.stderr


def test_flight_recorder_dumps_in_a_folder(diagnose, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank, calls in enumerate((5, 3, 5)):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(["all_reduce"] * calls)))
    result = diagnose("traces")
    assert result.returncode == 0 and "rank 1 made 3 calls" in result.stdout


def test_a_run_folder_knows_who_ended_first(diagnose, tmp_path):
    folder = tmp_path / "run"
    for node in (0, 1):
        (folder / "nodes" / str(node) / "attempt-0").mkdir(parents=True)
    (folder / "run.json").write_text('{"schema": "1.0"}')
    peers = [{"node": n, "host": f"host{n}", "clock_offset": 0.0} for n in (0, 1)]
    (folder / "peers.json").write_text(json.dumps({"nodes": peers}))
    errors = {(0, 0): "OSError: [Errno 28] No space left on device", (1, 1): "RuntimeError: CUDA error: out of memory"}
    for (node, rank), text in errors.items():
        (folder / "nodes" / str(node) / "attempt-0" / f"rank-{rank}.err").write_text(text + "\n")
        event = {"kind": "rank-exited", "t": 100.0 - rank, "seq": 0, "node": node, "host": f"host{node}", "rank": rank}
        event.update(exit_code=1, signal=None, seconds=1.0, core_dumped=False, mono=1.0, attempt=0)
        (folder / "nodes" / str(node) / "events.jsonl").write_text(json.dumps(event) + "\n")
    report = json.loads(diagnose("run", "--json").stdout)
    failure = report["failure"]
    assert (failure["answer"], failure["finding"]["rank"], failure["finding"]["host"]) == (
        "gpu-out-of-memory",
        1,
        "host1",
    )
    assert failure["why_first"] == "drumbeat saw rank 1 fail first"
    assert failure["confidence"] != "unknown"
    for node, on_bus in ((0, {}), (1, {"nvidia": 1})):
        facts = {"schema": "1.0", "host": f"host{node}", "gpus_on_bus": on_bus}
        (folder / "nodes" / str(node) / "facts.json").write_text(json.dumps(facts))
    assert json.loads(diagnose("run", "--json").stdout)["failure"]["confidence"] == failure["confidence"]
    (folder / "nodes" / "1" / "facts.json").write_text(json.dumps({"schema": "1.0", "host": "host1"}))
    without = json.loads(diagnose("run", "--json").stdout)["failure"]
    assert (without["confidence"], without["finding"]["confidence"]) == ("unknown", "unknown")
    title = 'the log says "the GPU ran out of memory", but no GPU was seen on this node'
    assert (without["finding"]["title"], without["finding"]["fix"]) == (title, "")
    assert without["finding"]["evidence"][0]["text"] == "RuntimeError: CUDA error: out of memory"


def test_a_run_folders_nccl_logs_are_read_too(diagnose, tmp_path):
    attempt = tmp_path / "run" / "nodes" / "0" / "attempt-0"
    attempt.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"schema": "1.0"}')
    (attempt / "rank-0.out").write_text("hello\n")
    (attempt / "nccl-0.n1.7").write_text(
        "n1:7:7 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
        "n1:7:7 [0] NCCL INFO Using network Socket\n"
        "n1:7:7 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 1 cudaDev 0 busId 60 commId 0x2 - Init START\n"
        "n1:7:7 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 1 cudaDev 0 busId 60 commId 0x2 - Init COMPLETE\n"
    )
    result = diagnose("run")
    assert result.returncode == 0 and "nobody to send to" in result.stdout and "nccl-0.n1.7" in result.stdout


def test_a_silent_death_is_told_by_the_run_itself(diagnose, tmp_path):
    folder = tmp_path / "run"
    (folder / "nodes" / "0" / "attempt-0").mkdir(parents=True)
    (folder / "run.json").write_text('{"schema": "1.0"}')
    (folder / "nodes" / "0" / "attempt-0" / "rank-0.err").write_text("step 1\n")
    finding = {"code": "oom-kill", "severity": "error", "title": "killed for its memory", "rank": 0}
    event = {
        "kind": "failed",
        "t": 1.0,
        "mono": 1.0,
        "seq": 0,
        "host": "n",
        "node": 0,
        "attempt": 0,
        "finding": finding,
    }
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    failure = json.loads(diagnose("run", "--json").stdout)["failure"]
    assert (failure["answer"], failure["finding"]["rank"]) == ("oom-kill", 0)


def test_what_cannot_be_read_is_said_in_one_line(diagnose, tmp_path):
    (tmp_path / "empty").mkdir()
    for word, said in (("nowhere.log", "nowhere.log: no such file"), ("empty", "nothing to read")):
        result = diagnose(word)
        assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr


def test_a_newer_run_folder_is_refused(diagnose, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"schema": "9.0"}')
    result = diagnose("run")
    assert result.returncode == 2 and "newer drumbeat" in result.stderr


def test_binary_files_are_passed_over(diagnose, tmp_path):
    (tmp_path / "core").write_bytes(b"\x7fELF" + b"\0" * 5000)
    (tmp_path / "weights").write_bytes(random.Random(7).randbytes(100_000))
    for name in ("core", "weights"):
        result = diagnose(name)
        assert result.returncode == 2 and "not text" in result.stderr


@pytest.mark.parametrize(
    "start",
    [
        b"",
        "шаг 5 из 9, ошибка 0.31\n".encode("koi8-r") * 40,
        "学習 3 回目\n".encode("euc-jp") * 40,
        b"\x1b[32mstep 4\x1b[0m\r\x07\n" * 40,
        b"step 4 loss 2.1\n" * 40 + b"\0" * 60,
    ],
)
def test_text_of_any_encoding_is_text(start):
    assert is_text(start)


def test_nothing_in_a_log_steers_the_terminal(diagnose, tmp_path):
    (tmp_path / "x.log").write_bytes(b"ValueError\n[rank0]: FileNotFoundError: \x1b]0;evil\x07\x1b[2J\x9b31m gone\n")
    shown = diagnose("x.log").stdout
    assert "FileNotFoundError" in shown and not any(char in shown for char in "\x1b\x07\x9b")


def test_rules_are_listed(diagnose):
    listed = diagnose("--rules").stdout
    assert "D8   duplicate-gpu" in listed and "source: nccl#1241" in listed
    assert {"id", "code", "cause", "fix", "source"} <= set(json.loads(diagnose("--rules", "--json").stdout)[0])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "long.log"
    with path.open("wb") as file:
        file.write(b"first\n")
        for _ in range(4):
            file.write(b"x" * (1 << 20))
        file.write(b"\nlast")
    found = [
        (number, line)
        for first, some in lines(Source(str(path), "long.log"))
        for number, line in enumerate(some, first)
    ]
    assert [number for number, _ in found] == [1, 2, 3]
    assert found[0][1] == b"first" and 0 < len(found[1][1]) <= MAX_LINE and found[2][1] == b"last"
