"""Following a run: every record once, whatever happens to the files meanwhile, at a cost that does not grow."""

import os
import shutil

from drumbeat.runfolder.events import Event
from drumbeat.runfolder.files import Files, Tail
from drumbeat.runfolder.follow import EVENTS, LINES, METRICS, Follower
from drumbeat.runfolder.records import Line, Metric, Sample
from tests.runfolder.folders import events, log, make_run, metrics

ENDED = ("attempt-ended", {"outcome": "failed", "exit_code": 1})


class Counting(Files):
    """Counts what is opened, listed and read."""

    def __init__(self, root):
        super().__init__(root)
        self.opened = self.listed = self.bytes = 0

    def chunk(self, name, offset, limit):
        found = super().chunk(name, offset, limit)
        self.opened += 1
        self.bytes += len(found.data) if found else 0
        return found

    def names(self, folder):
        self.listed += 1
        return super().names(folder)

    def taken(self):
        found = (self.opened, self.listed, self.bytes)
        self.opened = self.listed = self.bytes = 0
        return found


def texts(records):
    return [record.text for record in records if isinstance(record, Line)]


def steps(records):
    return [record.step for record in records if isinstance(record, Metric)]


def test_every_kind_of_record_once(tmp_path):
    run = make_run(tmp_path / "run", nodes=2)
    follower = Follower(run)
    assert follower.poll() == []
    events(run, ENDED)
    events(run, ("agent-started", {"pid": 1, "version": "1", "python": "3"}), node=1)
    metrics(run, {"t": 1.0, "rank": 2, "step": 1}, node=1)
    (tmp_path / "run/nodes/0/telemetry.jsonl").write_text(
        '{"t": 2.0, "host": "a", "gpus": [{"index": 0, "power": 90.5}]}\n'
    )
    log(run, 0, "hello\nhal")
    log(run, 1, "oh\n", "err")
    got = follower.poll()
    kinds = [record.kind for record in got if isinstance(record, Event)]
    (sample,) = [record for record in got if isinstance(record, Sample)]
    assert kinds == ["attempt-ended", "agent-started"] and sample.gpus[0].power == 90.5 and sample.node == 0
    assert steps(got) == [1] and texts(got) == ["hello", "oh"]
    assert [(line.rank, line.stream) for line in got if isinstance(line, Line)] == [(0, "out"), (1, "err")]
    assert follower.poll() == []
    log(run, 0, "f a line\nno end")
    assert texts(follower.poll()) == ["half a line"]
    assert [text for records in follower.drain() for text in texts(records)] == ["no end"] and follower.damaged == 0


def test_a_poll_costs_the_same_however_long_the_run_is(tmp_path):
    run = make_run(tmp_path / "run")
    files = Counting(run.path)
    follower = Follower(type(run)(run.path, run.record, files))
    costs = []
    for first in (0, 60_000):
        metrics(run, *({"t": float(step), "rank": 0, "step": step} for step in range(first, first + 30_000)))
        log(run, 0, "x" * 99 + "\n" * 1000)
        while follower.poll() or follower.behind:
            pass
        files.taken()
        metrics(run, {"t": 1.0, "rank": 0, "step": 1})
        assert steps(follower.poll()) == [1]
        costs.append(files.taken())
    (opened, listed, size), later = costs
    assert opened <= 6 and listed <= 4 and (later[0], later[1]) == (opened, listed)
    assert later[2] - size < 8, "a longer run has longer numbers, nothing else"


def test_one_poll_reads_a_bounded_amount(tmp_path):
    run = make_run(tmp_path / "run")
    for rank in range(12):
        log(run, rank, ("y" * 1023 + "\n") * 1500)
    files = Counting(run.path)
    follower = Follower(type(run)(run.path, run.record, files))
    got = follower.poll()
    assert follower.behind and files.bytes < 14 << 20 and len(got) < 14_000
    total = len(got)
    while follower.behind:
        total += len(follower.poll())
    assert total == 12 * 1500


def test_nodes_of_a_large_run_take_turns(tmp_path):
    nodes = 700
    run = make_run(tmp_path / "run", nodes=nodes)
    for node in range(nodes):
        metrics(run, {"t": 1.0, "rank": node, "step": node}, node=node)
    files = Counting(run.path)
    follower = Follower(type(run)(run.path, run.record, files), what=(EVENTS, METRICS))
    files.taken()
    seen = []
    for _ in range(4):
        seen += steps(follower.poll())
        opened, listed, _ = files.taken()
        assert opened <= 514 and listed <= 1
    assert sorted(seen) == list(range(nodes))
    for node in range(nodes):
        metrics(run, {"t": 2.0, "rank": node, "step": nodes + node}, node=node)
    assert sum(len(steps(records)) for records in follower.drain()) == nodes, "at the end none waits for its turn"


def test_a_new_attempt_and_what_the_old_one_still_had_to_say(tmp_path):
    run = make_run(tmp_path / "run")
    follower = Follower(run, what=(LINES,))
    log(run, 0, "one\n")
    assert texts(follower.poll()) == ["one"]
    log(run, 0, "last of the first, without an end")
    log(run, 0, "two\n", attempt=1)
    log(run, 0, "three\n", attempt=2)
    assert texts(follower.poll()) == ["last of the first, without an end", "two", "three"]
    log(run, 0, "never read", attempt=1)
    log(run, 0, "four\n", attempt=2)
    got = follower.poll()
    assert texts(got) == ["four"] and got[0].attempt == 2
    only = Follower(run, what=(LINES,), attempts=(1, 1))
    assert texts(only.poll()) == ["two"]


def test_from_the_end(tmp_path):
    """A job that a scheduler has started again: what its earlier starts said is not said again."""
    run = make_run(tmp_path / "run")
    events(run, ENDED)
    metrics(run, {"t": 1.0, "step": 1})
    log(run, 0, "old\n")
    follower = Follower(run, [0], from_end=True)
    log(run, 0, "of the old attempt\n")
    log(run, 0, "new\n", attempt=1)
    metrics(run, {"t": 2.0, "step": 2})
    got = follower.poll()
    assert steps(got) == [2] and texts(got) == ["new"] and not any(isinstance(record, Event) for record in got)


def test_files_that_are_cut_short_or_replaced(tmp_path):
    run = make_run(tmp_path / "run")
    follower = Follower(run, what=(METRICS,))
    metrics(run, *({"t": 1.0, "step": step} for step in range(5)))
    assert steps(follower.poll()) == [0, 1, 2, 3, 4]
    path = tmp_path / "run/nodes/0/metrics.jsonl"
    whole = path.read_bytes()
    mirrored = tmp_path / "copy"  # a mirror puts a longer copy in the file's place
    mirrored.write_bytes(whole + b'{"t": 1.0, "step": 5}\n')
    os.replace(mirrored, path)
    assert steps(follower.poll()) == [5]
    path.write_bytes(b'{"t": 1.0, "step": 70}\n')  # another file, shorter
    assert steps(follower.poll()) == [70]
    path.write_bytes(b'{"t": 1.0, "step": 80}\n' * 30)  # another file, longer
    assert steps(follower.poll()) == [80] * 30


def test_a_folder_that_vanishes_and_comes_back(tmp_path):
    run = make_run(tmp_path / "run", nodes=2)
    follower = Follower(run)
    metrics(run, {"t": 1.0, "step": 1}, node=1)
    log(run, 0, "before\n")
    follower.poll()
    os.rename(run.path, tmp_path / "away")
    assert follower.poll() == [] and follower.poll() == []
    shutil.copytree(tmp_path / "away", run.path)  # other inodes, the same bytes
    metrics(run, {"t": 1.0, "step": 2}, node=1)
    log(run, 0, "after\n")
    got = follower.poll()
    assert steps(got) == [2] and texts(got) == ["after"]


def test_one_file_per_node_of_a_large_run(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "run/nodes/0/attempt-0").mkdir()
    merged = tmp_path / "run/nodes/0/attempt-0/ranks.log"
    merged.write_text("3 out a line\n0 err x  y\ntorn\n12 out \n")
    follower = Follower(run)
    lines = [(line.rank, line.stream, line.text) for line in follower.poll()]
    assert lines == [(3, "out", "a line"), (0, "err", "x  y"), (12, "out", "")] and follower.damaged == 1
    assert texts(Follower(run, rank=12).poll()) == [""]


def test_logs_on_node_local_storage(tmp_path):
    run = make_run(tmp_path / "run")
    local = tmp_path / "local/attempt-0"
    local.mkdir(parents=True)
    (local / "rank-5.out").write_text("from the node's own disk\n")
    follower = Follower(run, [0])
    follower.read_logs_from(0, str(tmp_path / "local"))
    log(run, 0, "not this\n")
    assert texts(follower.poll()) == ["from the node's own disk"]


def test_a_pipe_or_a_folder_in_the_place_of_a_file_blocks_nobody(tmp_path):
    run = make_run(tmp_path / "run")
    os.mkfifo(tmp_path / "run/nodes/0/metrics.jsonl")
    (tmp_path / "run/events.jsonl").mkdir()
    (tmp_path / "run/nodes/0/attempt-0").write_text("no folder")
    assert Follower(run).poll() == [] and run.events() == [] and run.logs() == []


def test_a_line_without_end_does_not_eat_the_memory(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"z" * (5 << 20))
    tail = Tail(str(path))
    pieces = []
    while True:
        lines = tail.lines(final=True)
        assert sum(map(len, lines)) < 3 << 20
        pieces += lines
        if not lines and not tail.behind:
            break
    assert sum(map(len, pieces)) == 5 << 20


def test_logs_are_those_of_the_runs_last_attempt(tmp_path):
    """A node that the job went on without has only logs of an earlier attempt, in which another process was rank 1."""
    run = make_run(tmp_path / "run", nodes=3)
    for node in range(3):
        log(run, node, "first\n", node=node)
    for rank, node in enumerate((0, 2)):
        log(run, rank, "second\n", attempt=1, node=node)
    assert [(each.node, each.attempt, each.rank) for each in run.logs()] == [(0, 1, 0), (2, 1, 1)]
    assert [(each.node, each.attempt) for each in run.logs(rank=1)] == [(2, 1)]
    assert [(each.node, each.attempt) for each in run.logs(0, rank=1)] == [(1, 0)]
    assert run.attempts() == [0, 1] and run.attempts(1) == [0]
    (tmp_path / "run/nodes/1/attempt-0/nccl-rank1.log").touch()
    assert run.nccl_logs() == []


def test_a_progress_bar_is_shown_as_a_terminal_leaves_it(tmp_path):
    run = make_run(tmp_path / "run")
    bar = "".join(f"\repoch 0: {at}%|   | {at}/100 [loss=0.{at}]" for at in range(101))
    log(run, 0, f"{bar}\nRuntimeError: boom\nwindows\r\n\x1b[Ktwo\x1b[A\r\n", stream="err")
    log(run, 0, "\n", stream="out")
    left = ["", "epoch 0: 100%|   | 100/100 [loss=0.100]", "RuntimeError: boom", "windows", "two"]
    assert sorted(texts(Follower(run).poll())) == sorted(left)
    assert [line.text for each in run.logs() for line in run.lines(each)] == left
    assert [line.text for each in run.logs() for line in run.last_lines(each)] == left
    assert [line.text for each in run.logs() for line in run.last_lines(each, 60)][1:] == left[2:]  # cut inside the bar
