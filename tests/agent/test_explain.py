"""Why a rank ended, where only the agent can know."""

import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest

from drumbeat.agent.lead.attempt import Attempt, rank_end
from drumbeat.agent.ranks.ends import Explainer, with_last_step
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.start import End, plain_end, start
from drumbeat.findings.model import ERROR, Finding
from drumbeat.machine.model import Facts, Identity
from drumbeat.metrics.printed import PrintedMetrics
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Metric
from tests.agent.test_lead import order


def test_a_missing_working_directory_is_named_as_such(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(workdir=str(tmp_path / "gone"), command=(sys.executable, "-V"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    pid = start(asked.command, os.environ, asked.workdir, folder.log(0, 3, "out"), folder.log(0, 3, "err"))
    (end,) = launcher.ends(0, plain_end(3, os.waitpid(pid, 0)[1], 0.0))
    finding = Explainer(asked, folder, launcher, 0, str(tmp_path)).explain(end)
    assert end.exit_code == 127
    assert finding.code == "workdir-missing" and asked.workdir in finding.title
    assert "No such file or directory" in finding.evidence[0].text and "python" not in finding.title


def started(tmp_path, command):
    """Start a real process, and explain its end."""
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(workdir=str(tmp_path), command=command)
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    pid = start(asked.command, os.environ, asked.workdir, folder.log(0, 3, "out"), folder.log(0, 3, "err"))
    (end,) = launcher.ends(0, plain_end(3, os.waitpid(pid, 0)[1], 0.0))
    return end, Explainer(asked, folder, launcher, 0, str(tmp_path)).explain(end)


@pytest.mark.parametrize("told", ["{} (ignored)", "{}"])
def test_words_behind_which_the_run_made_more_steps_are_history(tmp_path, told):
    """The reader of the output knows when each line came, and the lead when each step did."""
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(workdir=str(tmp_path), command=("python3",))
    written, printed, begin = {}, PrintedMetrics(folder.attempt(0)), time.time() - 60.0

    def write(at, line):
        with open(folder.log(0, 1, "err"), "a", encoding="utf-8") as file:
            print(line, file=file)
        printed.read(final=True)
        for path, (_, length) in printed.grown.items():
            written.setdefault(path, []).append((begin + at, length))

    explainer = Explainer(asked, folder, launcher_of(asked, folder, folder, "", ""), 0, str(tmp_path))

    explainer.written = written
    old = told.format("ERROR: OSError: [Errno 28] No space left on device")
    write(1.0, old)
    silent = explainer.explained(End(1, 7, None, begin + 30.0))
    write(30.0, "CRITICAL train: loss scale collapsed to 0 at step 20, aborting")
    spoke = explainer.explained(End(1, 7, None, begin + 30.0))
    assert [t for t, _ in spoke.later] == [t for t, _ in silent.later] == [begin + 1.0]
    for end, words in ((silent, "exit code 7"), (spoke, "loss scale collapsed")):
        attempt = Attempt(0, begin, 2, (0,), 2)
        ended = replace(end, noted=end.at)
        for steps, history in (
            (0, end is spoke and "ignored" in told),
            (1, end is spoke and "ignored" in told),
            (9, True),
        ):
            progress = Progress()
            for step in range(steps):
                progress.add(Metric(0, 0, begin + 1.5 + step, "step", step=step))
            attempt.ends = [rank_end(ended, 0, 0.0)]
            attempt.forget_history(progress)
            assert (words in attempt.ends[0].finding.title) == history
            assert history or attempt.ends[0].finding.code == "disk-full"
        attempt.ends = [replace(rank_end(ended, 0, 0.0), noted=begin + 1.0)]  # it raised then, and took long to end
        attempt.forget_history(progress)
        assert attempt.ends[0].finding == end.finding
    assert old in silent.later[0][1].cause


@pytest.mark.parametrize(
    "last, silence, of_thread",
    [("_queue.Empty", 0.1, True), ("RuntimeError: no batch", 9.0, True), ("RuntimeError: no batch", 0.1, False)],
)
def test_steps_that_go_on_without_a_thread_do_not_make_its_failure_history(last, silence, of_thread):
    """Those that are queued are still made. A rank that stands still before it fails has waited for something."""
    progress = Progress()
    for step in range(1, 12):
        progress.add(Metric(0, 0, 10.0 + 0.4 * step, "step", step=step))
    first, later = (Finding("exception", ERROR, words, "raised") for words in ("AssertionError: 31 samples", last))
    end = End(0, 1, None, progress.last_t + silence + 0.5, finding=first, later=((11.0, later),), own=True)
    end = replace(end, noted=progress.last_t + silence, of_thread=True)
    attempt = Attempt(0, 1.0, 2, (0,), 2, ends=[rank_end(end, 0, 0.0)])
    attempt.forget_history(progress)
    assert attempt.ends[0].finding.title == (first.title if of_thread else last)
    assert not of_thread or attempt.ends[0].finding.cause.endswith(last)


@pytest.mark.parametrize(
    "peer, code",
    [
        ("feature-store.internal:6379", "service-lost"),
        ("redis://cache.prod:6379", "service-lost"),
        ("gpu03.cluster.local:31877", "peer-lost"),  # a node of the job
        ("gpu03-ib0.cluster.local:31877", "peer-lost"),
        ("[10.0.0.7]:31877", "peer-lost"),
        ("pair.cc:598", "peer-lost"),
        ("rank 3", "peer-lost"),
    ],
)
def test_a_lost_peer_that_is_no_node_of_the_job_is_a_service(tmp_path, peer, code):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    with open(folder.log(0, 3, "err"), "w", encoding="utf-8") as file:
        file.write('Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n')
        file.write(f"ConnectionResetError: [Errno 104] Connection reset by peer: {peer}\n")
    asked = order(workdir=str(tmp_path), command=("python3",))
    launcher = launcher_of(asked, folder, folder, "", "")
    explainer = Explainer(asked, folder, launcher, 0, str(tmp_path))
    explainer.hosts = ("10.0.0.1", "gpu03.cluster.local")
    assert explainer.explain(End(3, 1, None, 0.0)).code == code


def test_only_a_command_that_is_not_executable_is_called_so(tmp_path):
    (tmp_path / "plain").write_text("text", encoding="utf-8")
    end, found = started(tmp_path / "a", (str(tmp_path / "plain"),))
    assert (end.exit_code, found.code) == (126, "not-executable")
    end, found = started(tmp_path / "b", (sys.executable, "-c", "#" * 3_000_000))
    assert end.exit_code == 1 and "not executable" not in found.title
    assert "Argument list too long" in found.evidence[-1].text
    end, found = started(tmp_path / "c", (str(tmp_path / "plain" / "x"),))
    assert (end.exit_code, found.code) == (127, "command-not-found")


@pytest.mark.parametrize("path, told", [("data/train.pt", True), ("/data/train.pt", False)])
def test_a_missing_file_with_a_relative_path_names_the_folder_it_is_looked_for_in(tmp_path, path, told):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(workdir=str(tmp_path), command=(sys.executable, "-c", f"open({path!r})"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    pid = start(asked.command, os.environ, asked.workdir, folder.log(0, 3, "out"), folder.log(0, 3, "err"))
    (end,) = launcher.ends(0, plain_end(3, os.waitpid(pid, 0)[1], 0.0))
    found = Explainer(asked, folder, launcher, 0, str(tmp_path)).explain(end)
    assert found.title == f"no such file '{path}'" + (f" (workdir {tmp_path})" if told else "")
    assert found.fix.startswith("check the path, and workdir:" if told else "list it")


@pytest.mark.parametrize(
    "after,doubted",
    [
        (["done"], True),
        (["W torchrun's table"] * 30, True),
        (["{'loss': '6.043', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '0.1'}"], False),
        ([f"another try: {number}" for number in range(60)], False),
    ],
)
def test_a_failure_counts_only_if_the_work_did_not_go_on(tmp_path, after, doubted):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("bash", "x.sh"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    failed = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "MemoryError: no more"]
    with open(folder.log(0, 0, "out"), "w", encoding="utf-8") as file:
        file.write("\n".join([*failed, *after]) + "\n")
    doubt = Explainer(asked, folder, launcher, 0, str(tmp_path)).doubt(End(0, 0, None, 0.0), False)
    assert (doubt is not None) == doubted
    if doubt:
        assert doubt.severity == "warning" and doubt.evidence[0].file == "nodes/0/attempt-0/rank-0.out"


@pytest.mark.parametrize("well, doubted", [(True, False), (False, True)])
def test_what_a_rank_caught_is_no_doubt_where_its_launcher_told_a_good_end(tmp_path, monkeypatch, well, doubted):
    """An import that is not there, told on stderr at the start; the steps went to stdout. Nobody's exit code is hidden."""
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("bash", "x.sh"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    monkeypatch.setattr(type(launcher), "ranks_ended_well", well)
    with open(folder.log(0, 0, "err"), "w", encoding="utf-8") as file:
        file.write("\n".join([*TRACEBACK[:2], "MemoryError: no more"]) + "\n")
    os.utime(folder.log(0, 0, "err"), (100.0, 100.0))
    with open(folder.log(0, 0, "out"), "w", encoding="utf-8") as file:
        file.write("step 19/20 loss 0.1\nstep 20/20 loss 0.1\n")
    found = Explainer(asked, folder, launcher, 0, str(tmp_path)).doubt(End(0, 0, None, 200.0), False)
    assert (found is not None) == doubted, found
    for begin, counts in ((0, False), (len("step 19/20 loss 0.1\n"), True)):  # what followed it: two steps, or five
        with open(folder.log(0, 0, "out"), "a", encoding="utf-8") as file:
            file.write("".join(f"step {step}\n" for step in range(4)) if begin else "")
        for t, ended in ((99.0, False), (101.0, counts)):
            written = {folder.log(0, 0, "out"): [(t, begin)]}
            explainer = Explainer(asked, folder, launcher, 0, str(tmp_path))
            explainer.written = written
            assert (explainer.doubt(End(0, 0, None, 200.0), False) is None) == (well or ended)


def test_words_about_a_gpu_are_only_quoted_where_there_is_none(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("python", "x.py"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    with open(folder.log(0, 0, "err"), "w", encoding="utf-8") as file:
        file.write("\n".join([*TRACEBACK[:2], "RuntimeError: CUDA error: out of memory (pretend)"]) + "\n")
    failed, survived = End(0, 1, None, 0.0), End(0, 0, None, 0.0)
    with_gpu, without = (
        Explainer(asked, folder, launcher, 0, str(tmp_path), facts=each) for each in (None, Facts("n", memory_bytes=1))
    )
    assert with_gpu.explain(failed).title == "the GPU ran out of memory"
    for found in (without.explain(failed), without.doubt(survived, False)):
        assert (found.code, found.confidence, found.fix) == ("gpu-out-of-memory", "unknown", "")
        assert found.title == 'the log says "the GPU ran out of memory", but no GPU was seen on this node'


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "ValueError: shapes do not match",
]
IGNORED = ["Exception ignored in: <function Pool.__del__ at 0x7f>", *TRACEBACK]


@pytest.mark.parametrize(
    "out,err,out_later,heard",
    [
        (["step 8/50 loss 0.6"], [*TRACEBACK, "training aborted"], 0.0, "ValueError: shapes do not match"),
        (["step 8/50 loss 0.6", "2026-11-16 10:00:00 - ERROR - no labels"], [], 0.0, "2026-11-16 10:00:00 - ERROR - no labels"),
        ([], ["\x1b[31mERROR\x1b[0m: no labels\x07 \x1b]0;title\x07"], 0.0, "ERROR: no labels"),
        (["step 8/50 loss 0.6", "Error: my data is bad"], [], 0.0, "Error: my data is bad"),
        (["step 8/50 loss 0.6"], ["Training failed: shard 7"], 0.0, "Training failed: shard 7"),
        (["Exception caught: RuntimeError('bad')", "bye"], [], 0.0, "Exception caught: RuntimeError('bad')"),
        (["[rank1]: An error occurred: [Errno 2] x"], [], 0.0, "An error occurred: [Errno 2] x"),
        (["\x1b[31mfatal error:\x1b[0m no labels"], [], 0.0, "fatal error: no labels"),
        (["Error: no such cache: made anew", "step 9/50 loss 0.5"], [], 0.0, ""),
        (["step 8/50 loss 0.6", "Error: 0.12", "Error: nan", "Uploads failed: 0", "error: none"], [], 0.0, ""),
        (["step 8/50 loss 0.6", "Test Error: small", "the error: small", "none of it failed"], [], 0.0, ""),
        (["2026-11-16 10:00:00 - WARNING - upload failed: again", "INFO: login failed: again"], [], 0.0, ""),
        (["Error: no labels", "Training finished"], [], 0.0, ""),
        (["step 8/50 loss 0.6"], TRACEBACK, 1.0, ""),  # it went on printing after that
        (["step 8/50 loss 0.6"], TRACEBACK, -60.0, "ValueError: shapes do not match"),
        ([*TRACEBACK, "step 9/50 loss 0.5"], [], 0.0, ""),
        (["ERROR: no such cache, made a new one", "step 9/50 loss 0.5"], [], 0.0, ""),
        (["step 8/50 loss 0.6", "Training finished"], TRACEBACK, 0.0, ""),
        (["step 50/50 loss 0.1"], IGNORED, 0.0, ""),
        (["step 50/50 loss 0.1", "0 errors"], ["WARNING: slow disk"], 0.0, ""),
    ],
)  # fmt: skip
def test_the_error_that_a_program_wrote_last_before_it_ended_with_0(tmp_path, out, err, out_later, heard):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("python", "x.py"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    for stream, lines, written in (("out", out, 1000.0 + out_later), ("err", err, 1000.0)):
        with open(folder.log(0, 0, stream), "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
        os.utime(folder.log(0, 0, stream), (written, written))
    explainer = Explainer(asked, folder, launcher, 0, str(tmp_path))
    found = explainer.caught(End(0, 0, None, 1006.0), False)
    assert (found.title if found else "") == heard
    assert found is None or (found.code, found.severity, found.confidence) == ("caught-error", "warning", "likely")
    assert explainer.caught(End(0, 0, None, 1100.0), False) is None  # it lived on after its last line


@pytest.mark.parametrize(
    "identity,advice",
    [
        (Identity(), "dmesg on that host (it may need root) says whether it was memory; watch the host memory"),
        (
            Identity("openmpi", batch="slurm"),
            "dmesg on that host, or sacct -j JOB -o State,MaxRSS; watch the host memory",
        ),
        (Identity("runai"), "kubectl describe pod POD says whether it was memory (OOMKilled); watch the host memory"),
    ],
)
def test_a_kill_from_outside_has_advice_for_the_place_of_the_run(tmp_path, identity, advice):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("python", "train.py"))
    explainer = Explainer(
        asked, folder, launcher_of(asked, folder, folder, "", ""), 0, str(tmp_path), facts=Facts("n", identity=identity)
    )
    finding = explainer.explain(End(0, None, int(signal.SIGKILL), 0.0))
    assert (finding.code, finding.fix) == ("killed", advice)
    terminated = explainer.explain(End(0, None, int(signal.SIGTERM), 0.0))
    assert terminated.code == "terminated" and ("sacct" in terminated.fix) == (identity.batch == "slurm")


def test_an_end_without_words_says_what_ends_a_program_like_that(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("python", "train.py"))
    explainer = Explainer(asked, folder, launcher_of(asked, folder, folder, "", ""), 0, str(tmp_path))
    finding = explainer.explain(End(0, 1, None, 0.0))
    assert (finding.code, finding.cause) == ("exit-code", "not known: it wrote nothing")
    assert "sys.exit, os._exit" in finding.fix
    assert with_last_step(finding, 20).cause == "not known: it wrote nothing; the last step seen on this node was 20"
    assert with_last_step(finding, None) == finding


STEPS = [f"step {number} loss 1.9" for number in range(2, 9)]
FULL = "OSError: [Errno 28] No space left on device: '/scratch/x'"


def explained(tmp_path, printed, end):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("python", "x.py"))
    with open(folder.log(0, 0, "out"), "w", encoding="utf-8") as file:
        file.write("\n".join(printed) + "\n")
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    return Explainer(asked, folder, launcher, 0, str(tmp_path)).explain(end)


@pytest.mark.parametrize("behind", [1, 7])
def test_an_error_line_with_steps_behind_it_did_not_end_the_rank(tmp_path, behind):
    found = explained(tmp_path, ["step 1 loss 2.0", FULL, *STEPS[:behind], "below target"], End(0, 3, None, 0.0))
    assert (found.code, found.confidence) == ("disk-full", "likely")
    place = f"nodes/0/attempt-0/rank-0.out, {behind + 1} lines before its end"
    assert found.seen == (f"{place}, with steps behind it",)


def test_one_at_the_end_did(tmp_path):
    found = explained(tmp_path, ["step 1 loss 2.0", FULL, "giving up"], End(0, 1, None, 0.0))
    assert (found.code, found.confidence, found.seen[0][:14]) == ("disk-full", "certain", "the last lines")


def test_a_table_that_a_rank_printed_is_not_its_own_end(tmp_path):
    table = ["=" * 60, "train.py FAILED", "-" * 60, "Failures:", "  <NO_OTHER_FAILURES>", "-" * 60,
             "Root Cause (first observed failure):", "[0]:", "  time      : 2026-11-17_01:00:58", "  host      : gpu-node-77",
             "  rank      : 5 (local_rank: 5)", "  exitcode  : -9 (pid: 104)", "  error_file: <N/A>",
             "  traceback : Signal 9 (SIGKILL) received by PID 104", "=" * 60]  # fmt: skip
    found = explained(tmp_path, table, End(0, 1, None, 0.0))
    assert (found.code, found.confidence, found.rank) == ("exit-code", "unknown", None)
    assert "SIGKILL" in found.title and found.seen[0] == "exit code 1"
    shutil.rmtree(tmp_path / "nodes")
    killed = explained(tmp_path, table, End(0, None, signal.SIGKILL, 0.0))
    assert killed.code == "killed"
