"""A run folder on another machine, read through a copy that follows it by byte offset."""

import io
import json
import os
import subprocess
import sys

import pytest

from drumbeat.runfolder import mirror
from drumbeat.runfolder.files import Tail
from drumbeat.runfolder.layout import ask_to_stop
from drumbeat.runfolder.mirror import COMPLETE, ENDED, LIMIT, Mirror, Source, is_complete, serve
from drumbeat.runfolder.run import Run


def exchange_with(root, log=None):
    def exchange(request):
        if log is not None:
            log.append(json.loads(request))
        out = io.BytesIO()
        assert serve(str(root), io.BytesIO(request), out) == 0
        if log is not None:
            log.append(len(out.getvalue()))
        return out.getvalue()

    return exchange


def write(root, name, text, mode="w"):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.write(text)


@pytest.fixture
def both(tmp_path):
    """The lead's folder, and the desk's, which has its own run.json."""
    lead, desk = tmp_path / "lead", tmp_path / "desk"
    write(lead, "run.json", '{"schema": "1.0", "run_id": "of-the-lead"}')
    write(desk, "run.json", '{"schema": "1.0", "run_id": "of-the-desk"}')
    write(lead, "events.jsonl", '{"a": 1}\n')
    return lead, desk


def test_what_grows_is_sent_from_where_it_was_left(both):
    lead, desk = both
    log = []
    mirror = Mirror(str(desk), lambda: [Source(exchange_with(lead, log))], every=0.0)
    tail = Tail("nodes/0/attempt-0/rank-0.out", 0, mirror)
    assert tail.lines() == []
    write(lead, "nodes/0/attempt-0/rank-0.out", "x" * 50_000 + "\nhalf")
    assert [len(line) for line in tail.lines()] == [50_000]
    write(lead, "nodes/0/attempt-0/rank-0.out", " a line\n", "a")
    assert tail.lines() == ["half a line"]
    assert log[-1] < 400, "only the new bytes travel"
    assert Run.open(str(desk), mirror).run_id == "of-the-desk", "the desk's own files stay"


def test_a_file_that_is_replaced_or_shortened_is_sent_as_a_whole(both):
    lead, desk = both
    mirror = Mirror(str(desk), lambda: [Source(exchange_with(lead))], every=0.0)
    write(lead, "peers.json", "one")
    assert mirror.read("peers.json") == b"one"
    write(lead, "peers.json", "two")  # as long as before
    os.utime(lead / "peers.json", ns=(1, 1))
    assert mirror.read("peers.json") == b"two"
    write(lead, "events.jsonl", "new\n")
    assert mirror.read("events.jsonl") == b"new\n"


def test_members_send_their_own_until_the_lead_has_gathered_it(both, tmp_path):
    lead, desk = both
    member = tmp_path / "member"
    write(member, "nodes/1/attempt-0/rank-1.out", "from the member\n")
    write(lead, "nodes/1/attempt-0/rank-1.out", "from")
    sources = [Source(exchange_with(lead)), Source(exchange_with(member), "nodes/1")]
    mirror = Mirror(str(desk), lambda: sources, every=0.0)
    assert mirror.read("nodes/1/attempt-0/rank-1.out") == b"from the member\n"
    sources.pop()  # it has gone, and the lead has only a part of its files so far
    assert mirror.read("nodes/1/attempt-0/rank-1.out") == b"from the member\n"
    write(lead, "nodes/1/attempt-0/rank-1.out", "from the member\nlast words\n")
    assert mirror.read("nodes/1/attempt-0/rank-1.out") == b"from the member\nlast words\n"


def test_a_member_that_ends_before_its_last_files_were_fetched(both, tmp_path):
    """Its pod is still listed, and cannot be asked any more: what the lead has gathered of it counts."""
    lead, desk = both
    member = tmp_path / "member"
    write(member, "nodes/1/facts.json", "{}")
    answers = [exchange_with(member)]
    sources = [
        Source(exchange_with(lead)),
        Source(lambda request: answers[0](request) if answers else None, "nodes/1"),
    ]
    mirror = Mirror(str(desk), lambda: sources, every=0.0)
    mirror.sync()
    answers.clear()
    write(lead, "nodes/1/facts.json", "{}")
    write(lead, "nodes/1/attempt-0/rank-2.out", "rank 2\n")
    write(lead, ENDED, "0\n")
    mirror.sync()
    assert mirror.complete and (desk / "nodes/1/attempt-0/rank-2.out").read_text() == "rank 2\n"


def test_a_member_that_writes_into_the_leads_folder(both, tmp_path):
    lead, desk = both
    (tmp_path / "member").mkdir()
    write(lead, "nodes/1/attempt-0/rank-1.out", "shared after all\n")
    sources = [Source(exchange_with(lead)), Source(exchange_with(tmp_path / "member"), "nodes/1")]
    assert Mirror(str(desk), lambda: sources).read("nodes/1/attempt-0/rank-1.out") == b"shared after all\n"


def test_the_end(both):
    lead, desk = both
    ended = []
    mirror = Mirror(str(desk), lambda: [Source(exchange_with(lead))], lambda: ended.append(1), every=0.0)
    write(lead, "summary.json", "{}")
    assert mirror.read("summary.json") == b"{}" and not ended
    (lead / "summary.json").unlink()  # it is started again
    assert mirror.read("summary.json") is None
    write(lead, "summary.json", "{}")
    write(lead, ENDED, "0\n")
    assert mirror.read("summary.json") == b"{}" and ended == [1] and is_complete(str(desk))
    write(lead, "events.jsonl", "more\n", "a")
    assert mirror.read("events.jsonl") == b'{"a": 1}\n', "nobody is asked any more"
    assert Mirror(str(desk), lambda: 1 / 0).read("events.jsonl") is not None


def test_the_last_files_are_waited_for_while_there_is_a_lead(both):
    """The summary is written before the lead's agent ends, and only then may what it left in a cluster be removed."""
    lead, desk = both
    write(lead, "summary.json", "{}")
    asked, done = [], []

    def sources():
        asked.append(1)
        if len(asked) == 4:
            write(lead, ENDED, "0")
        return [Source(exchange_with(lead))]

    Mirror(str(desk), sources, lambda: done.append(1)).settle(0)  # one look has taken longer than that
    assert done == [1] and is_complete(str(desk))
    gone = Mirror(str(desk.parent / "other"), list)
    gone.settle(3600)
    assert not gone.complete, "nobody can send the rest: no waiting"


def test_larger_than_one_answer(both):
    lead, desk = both
    write(lead, "nodes/0/attempt-0/rank-0.out", "y" * (2 * LIMIT + 5))
    write(lead, ENDED, "0\n")
    mirror = Mirror(str(desk), lambda: [Source(exchange_with(lead))])
    mirror.sync()
    assert (desk / "nodes/0/attempt-0/rank-0.out").stat().st_size == 2 * LIMIT + 5 and mirror.complete


def test_an_answer_that_is_cut_off_or_not_ours_does_no_harm(both):
    lead, desk = both
    whole = exchange_with(lead)
    for cut in (0, 1, 20, 80, -1):
        Mirror(str(desk), lambda cut=cut: [Source(lambda request: whole(request)[:cut])]).sync()
    for answer in (None, b"", b"\x00\xff", b"[1]\n", b'{"bytes": -5}\n', b'{"path": "a", "bytes": "x"}\n'):
        Mirror(str(desk), lambda answer=answer: [Source(lambda request: answer)]).sync()
    for path in ("../evil", "/tmp/evil", "a/../../evil", "run.json", ""):
        piece = json.dumps({"path": path, "offset": 0, "size": 1, "bytes": 1}).encode() + b"\nx" + b'{"end": true}\n'
        Mirror(str(desk), lambda piece=piece: [Source(lambda request: piece)]).sync()
    assert sorted(os.listdir(desk)) in (["events.jsonl", "run.json"], ["run.json"])
    assert "of-the-desk" in (desk / "run.json").read_text()
    assert not (desk / COMPLETE).exists()


@pytest.mark.parametrize(
    "header,data",
    [
        ({"path": "./run.json"}, b"{}"), ({"path": "a//b"}, b"x"), ({"path": "nodes/./0/x"}, b"x"),
        ({"path": "a", "bytes": -12}, b""),
        ({"path": "a", "bytes": 1e999}, b""), ({"path": "a", "offset": "x"}, b"y"), ({"path": "n" * 300}, b"x"),
        ({"path": "nodes"}, b"x"),
        ({"end": True, "left": 5, "gone": 7}, b""),
    ],
)  # fmt: skip
def test_an_answer_that_means_harm(both, header, data):
    lead, desk = both
    write(desk, "nodes/0/x", "ours")
    before = (desk / "run.json").read_text()
    line = json.dumps({"bytes": len(data), **header}).encode() + b"\n" + data
    mirror = Mirror(str(desk), lambda: [Source(lambda request: line)])
    mirror.settle(0.1)
    assert not mirror.complete and (desk / "run.json").read_text() == before
    assert sorted(path.name for path in desk.rglob("*")) == ["0", "nodes", "run.json", "x"]


def test_nothing_is_appended_through_a_link_and_the_file_takes_its_place(both, tmp_path):
    lead, desk = both
    write(tmp_path, "victim", "mine")
    (desk / "events.jsonl").symlink_to(tmp_path / "victim")
    end = b'{"end": true}\n'
    piece = json.dumps({"path": "events.jsonl", "offset": 4, "size": 5, "bytes": 1}).encode() + b"\nx" + end
    Mirror(str(desk), lambda: [Source(lambda request: piece)]).sync()
    assert (tmp_path / "victim").read_text() == "mine"
    with pytest.raises(OSError):
        Mirror(str(desk), list)._write("events.jsonl", b"x", 4)  # the link came after the look at its size
    assert (tmp_path / "victim").read_text() == "mine"
    Mirror(str(desk), lambda: [Source(exchange_with(lead))]).sync()
    assert (desk / "events.jsonl").read_text() == '{"a": 1}\n' and not (desk / "events.jsonl").is_symlink()


@pytest.mark.parametrize("swap", ["file", "link", "pipe"])
def test_a_result_that_is_swapped_after_the_look_at_it_is_not_sent(tmp_path, monkeypatch, swap):
    """Who owns it, and what it is, is asked of the open file."""
    path = tmp_path / "result-0.pkl"
    path.write_bytes(b"x" * 9)
    path.chmod(0o600)
    found = list(mirror._files(str(tmp_path), ""))
    path.unlink()
    if swap == "pipe":
        os.mkfifo(path)
    else:
        write(tmp_path, "evil", "evilevil!")
        (tmp_path / "evil").chmod(0o600 if swap == "link" else 0o666)
        os.symlink("evil", path) if swap == "link" else os.rename(tmp_path / "evil", path)
    monkeypatch.setattr(mirror, "_files", lambda root, under: iter(found))
    ((end, _),) = mirror.answer(str(tmp_path), {})
    assert end["left"] == ["result-0.pkl"] and not end["more"]


def test_what_is_sent_is_the_file_that_was_judged(tmp_path, monkeypatch):
    """Another one that takes its name while its owner is looked at is not read."""
    path, evil = tmp_path / "result-0.pkl", tmp_path / "evil.tmp"
    for each, data in ((path, b"mine"), (evil, b"evil")):
        each.write_bytes(data)
        each.chmod(0o600)
    own = os.geteuid()

    def swap():
        if evil.exists():
            os.replace(evil, path)
        return own

    monkeypatch.setattr(os, "geteuid", swap)
    (_, data), _ = mirror.answer(str(tmp_path), {})
    assert data == b"mine" and path.read_bytes() == b"evil"


def test_stop_is_not_written_through_a_link(both, tmp_path, capsys):
    lead, desk = both
    write(tmp_path, "victim", "mine")
    (lead / "stop").symlink_to(tmp_path / "victim")
    request, out = json.dumps({"append": {"stop": "x\n"}}).encode(), io.BytesIO()
    assert serve(str(lead), io.BytesIO(request), out) == 1 and out.getvalue() == b""
    assert capsys.readouterr().err.count("\n") == 1
    assert not Run.open(str(desk), Mirror(str(desk), lambda: [Source(lambda _: b"")])).ask_to_stop("CANCEL", "x")
    with pytest.raises(OSError):
        ask_to_stop(str(lead / "stop"), "CANCEL", "x")
    with pytest.raises(OSError):
        Run.open(str(lead)).ask_to_stop("CANCEL", "x")
    assert (tmp_path / "victim").read_text() == "mine"
    (lead / "stop").unlink()
    os.mkfifo(lead / "stop")
    reader = os.open(lead / "stop", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        ask_to_stop(str(lead / "stop"), "CANCEL", "x")
    os.close(reader)


def test_stop_reaches_the_lead(both):
    lead, desk = both
    write(lead, "stop", "")
    run = Run.open(str(desk), Mirror(str(desk), lambda: [Source(exchange_with(lead))]))
    assert run.ask_to_stop("CANCEL", "drumbeat cancel")
    assert (lead / "stop").read_text() == "CANCEL drumbeat cancel\n"
    assert not Run.open(str(desk), Mirror(str(desk), list)).ask_to_stop("CANCEL", "x")


def test_the_far_side_as_a_program(both):
    lead, desk = both

    def exchange(request):
        code = "import sys; from drumbeat.cli.entry import main; sys.exit(main(['_files', sys.argv[1]]))"
        argv = [sys.executable, "-c", code, str(lead)]
        return subprocess.run(argv, input=request, capture_output=True, check=True).stdout

    assert Mirror(str(desk), lambda: [Source(exchange)]).read("events.jsonl") == b'{"a": 1}\n'
