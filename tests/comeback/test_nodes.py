"""What is known about nodes: from the events of past runs to the exclude list of a new job."""

import json
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drumbeat import backends
from drumbeat.backends.slurm.directives import directives
from drumbeat.base.order import AvoidedNode, Option
from drumbeat.base.record import to_plain
from drumbeat.desk import nodes
from drumbeat.desk.nodes import BAD, FIRST, KEPT_FOR, LOST, MOST_BY_ITSELF, SLOW, Sighting, Store, learn
from drumbeat.desk.runs import open_run
from drumbeat.desk.start.create import create_run
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.jobfile.site import Site
from drumbeat.runfolder.files import EventLog
from tests.runfolder.folders import order

NOW = time.time()
LAKE = Site("lake", "three nodes", "slurm")


@pytest.fixture
def environ(home):
    return dict(os.environ)


def a_run(tmp_path, environ, name, *records, hosts=("n1", "n2", "n3"), **changes):
    """A run of three nodes, as its lead recorded it."""
    bundle = tmp_path / "bundle"
    bundle.touch()
    asked = order(tmp_path / name, run_id=name, nodes=len(hosts), site="lake", backend="slurm", **changes)
    folder = create_run(asked, None, str(bundle), environ)
    with open(folder.events, "ab") as file:
        log = EventLog(folder.events, 0, lambda path, data: file.write(data))
        for number, host in enumerate(hosts):
            log.write("node-joined", {"peer": number, "peer_host": f"{host}.lake.org", "address": "", "clock_offset": 0.0,
                                      "name": host})  # fmt: skip
        for kind, data in records:
            log.write(kind, data)
    return Path(folder.events)


def finding(code, host, title="x", severity=ERROR):
    return {"finding": to_plain(Finding(code, severity, title, "because", host=f"{host}.lake.org", node=1))}


LOST_N2 = ("failed", finding("node-lost", "n2"))


def known(environ, site="lake"):
    return {node.host: node for node in nodes.table(Site(site, "", "slurm"), (), environ).nodes}


def test_what_runs_say_about_nodes(tmp_path, environ):
    a_run(
        tmp_path, environ, "one", LOST_N2, ("failed", finding("killed", "n1")), ("failed", finding("exception", "n3")),
        ("finding", finding("slow-rank", "n3", severity=WARNING)), ("finding", finding("memlock-low", "n1")),
    )  # fmt: skip
    a_run(tmp_path, environ, "two", ("failed", finding("gpu-ecc", "n2", "a GPU had an uncorrectable memory error")))
    a_run(tmp_path, environ, "emulated", ("failed", finding("gpu-lost", "n1")), emulated=True)
    nodes = known(environ)
    assert [each.what for each in nodes["n1"].sightings] == [FIRST] and nodes["n1"].excluded is None
    assert [each.what for each in nodes["n3"].sightings] == [SLOW], "an exception is the program's own"
    assert sorted(each.what for each in nodes["n2"].sightings) == sorted([LOST, BAD])
    until = nodes["n2"].excluded.until
    assert abs(until - NOW - KEPT_FOR) < 86400 and nodes["n2"].excluded.why.startswith(
        ("lost in one", "bad hardware in two")
    )
    assert known(environ, "pond") == {}
    assert list(known(environ)) == ["n2", "n1", "n3"], "read once, and the excluded come first"


def test_the_age_of_an_exclusion_fits_its_cause(tmp_path, environ):
    gone = {"peer": 0, "peer_host": "n1.lake.org", "why": "its agent's connection broke", "silent": False}
    a_run(tmp_path, environ, "one", ("node-lost", gone), ("failed", finding("node-lost", "n1")))
    a_run(tmp_path, environ, "two", LOST_N2)
    a_run(tmp_path, environ, "three", ("failed", finding("gpu-lost", "n3")))
    ages = {host: round((node.excluded.until - NOW) / 3600) for host, node in known(environ).items()}
    assert ages == {"n1": 1, "n2": 24, "n3": 7 * 24}


def test_a_run_that_goes_on_is_read_again(tmp_path, environ):
    events = a_run(tmp_path, environ, "one")
    assert known(environ) == {}
    with open(events, "ab") as file:
        EventLog(str(events), 0, lambda path, data: file.write(data)).write(*LOST_N2)
    assert known(environ)["n2"].excluded


def test_most_nodes_lost_at_once_says_nothing_about_each(tmp_path, environ):
    lost = [("failed", finding("node-lost", f"n{number}")) for number in range(1, 4)]
    a_run(tmp_path, environ, "one", *lost)
    assert all(node.excluded is None and node.count(FIRST) == 1 for node in known(environ).values())


def test_a_preflight_that_no_node_passes_says_nothing_about_a_node(tmp_path, environ):
    failed = ("excluded", {"peer": 1, "peer_host": "n2.lake.org", "why": "memlock is too low"})
    a_run(tmp_path, environ, "never-ran", failed)
    assert known(environ) == {}
    started = ("attempt-started", {"world_size": 2, "master_addr": "n1", "master_port": 1})
    a_run(tmp_path, environ, "ran", failed, started)
    assert known(environ)["n2"].excluded.why == "bad hardware in ran: memlock is too low"


def test_runs_that_have_been_read_are_not_opened_again(tmp_path, environ, monkeypatch):
    opened = []
    monkeypatch.setattr(nodes, "open_run", lambda path, environ: opened.append(path) or open_run(path, environ))
    monkeypatch.setattr(nodes, "LOOKED_AT", 2)
    for name in ("one", "two", "three"):
        a_run(tmp_path, environ, name, LOST_N2)
    learn(environ)
    assert len(opened) == 3 and learn(environ).read and len(opened) == 3
    a_run(tmp_path, environ, "four")
    learn(environ)
    assert [os.path.basename(path) for path in opened[3:]] == ["four"]
    with open(tmp_path / "three" / "events.jsonl", "a") as file:
        file.write("\n")
    learn(environ)
    assert [os.path.basename(path) for path in opened[4:]] == ["three"]


def test_exclude_and_forget(tmp_path, environ, drumbeat):
    a_run(tmp_path, environ, "one", LOST_N2)
    done = drumbeat.here("nodes", "--site", "slurm", "exclude", "n[7-8]", "--for", "2d", "--why", "fan\nbroken")
    assert done.returncode == 0 and "avoid n7, n8 until" in done.stdout and "fan broken" in done.stdout, done.stderr
    shown = json.loads(drumbeat.here("nodes", "--site", "slurm", "--json").stdout)
    assert "n8" in drumbeat.here("nodes", "--site", "slurm", "n8").stdout
    assert "machines that they are given" in drumbeat.here("nodes", "--site", "localhost", "exclude", "n1").stdout
    assert [node["host"] for node in shown["nodes"]] == ["n7", "n8"]
    assert abs(shown["nodes"][0]["excluded"]["until"] - time.time() - 2 * 86400) < 600
    drumbeat.here("nodes", "--site", "slurm", "forget", "n7", "n9")
    assert [each.host for each in learn(environ).excluded("slurm", time.time())] == ["n8"]
    nodes.forget(LAKE, ["n2"], environ)
    assert known(environ) == {}
    with open(tmp_path / "one" / "events.jsonl", "a") as file:
        file.write("\n")
    assert known(environ) == {}, "what was forgotten does not come back from the same run"


@pytest.mark.parametrize(
    "words,said",
    [
        (("exclude",), "which node?"),
        (("exclude", "n1", "--for", "7"), "needs a unit"),
        (("exclude", "n1", "--for", "0s"), "no time at all"),
        (("exclude", "n1;rm"), "node list"),
        (("exclude", "n[1-9999999]"), "node list"),
        (("forget", "-n"), "unknown option"),
        (("--why", "x"), "belong to"),
        (("exclude", "n1", "--site", "nowhere"), "nowhere"),
    ],
)
def test_bad_words_are_refused(words, said, drumbeat):
    done = drumbeat.here("nodes", *words, *(() if "--site" in words else ("--site", "slurm")))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done


def test_the_store_is_private_and_small(tmp_path, environ):
    nodes.exclude(LAKE, ["n1"], "7d", "", environ)
    folder = Path(nodes.store_folder(environ))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    many = tuple(Sighting(float(number), "lake", "n1", "r", LOST, "y" * 5000) for number in range(5000))
    nodes.update_store(environ, lambda store: replace(store, sightings=many))
    assert len(nodes.read_store(environ).sightings) == nodes.MOST_RECORDS
    assert (folder / "nodes.json").stat().st_size < 2 << 20


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "9.0"}', '{"schema": "1.0", "sightings": 7}', "[" * 100000, "\0"]
)
def test_a_damaged_store_is_one_line_and_breaks_nothing(tmp_path, environ, text, capsys, drumbeat):
    folder = Path(nodes.store_folder(environ))
    folder.mkdir(parents=True, mode=0o700)
    (folder / "nodes.json").write_text(text)
    (folder / "nodes.json").chmod(0o600)
    asked = order(tmp_path / "x", site="lake", backend="slurm")
    assert nodes.avoiding(asked, environ) == asked
    said = capsys.readouterr().err
    assert said.count("\n") <= 2 and "no node is avoided" in said and "Traceback" not in said
    done = drumbeat.here("nodes", "--site", "slurm")
    assert done.returncode == 2 and "by hand must be named again" in done.stderr or "newer" in done.stderr
    assert "attribute" not in done.stderr


def test_nodes_are_listed_where_the_store_cannot_be_written(tmp_path, environ, capsys, monkeypatch):
    nodes.exclude(LAKE, ["n1"], "7d", "", environ)

    def refuse(path, text):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(nodes, "replace_file", refuse)
    a_run(tmp_path, environ, "r1", ("failed", finding("gpu-ecc", "n2")))
    table = nodes.table(LAKE, [], environ)
    assert {node.host for node in table.nodes} == {"n1", "n2"} and "cannot be saved" in capsys.readouterr().err
    with pytest.raises(nodes.NotKept):
        nodes.exclude(LAKE, ["n3"], "7d", "", environ)


def test_a_list_says_what_exclusions_mean_on_its_site(environ):
    here = nodes.site_here("localhost", environ)
    (noted,) = nodes.exclude(here, ["n1"], "7d", "", environ).lines()
    assert noted == "noted; but jobs on localhost run on the machines that they are given"
    listed = nodes.table(here, [], environ).lines()
    assert listed[-1] == "jobs on localhost run on the machines that they are given: none is avoided there"


def test_a_store_of_somebody_else_is_not_used(tmp_path, environ):
    folder = Path(nodes.store_folder(environ))
    folder.mkdir(parents=True, mode=0o700)
    (folder / "nodes.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(Exception, match="cannot be read"):
        nodes.read_store(environ)
    (folder / "nodes.json").unlink()
    (folder / "nodes.json").write_text("{}")
    (folder / "nodes.json").chmod(0o666)
    with pytest.raises(Exception, match="written to by others"):
        nodes.read_store(environ)


def test_no_site_is_emptied(tmp_path, environ):
    hosts = [f"n{number}" for number in range(40)]
    for number in range(0, 40, 2):
        a_run(tmp_path, environ, f"run{number}", ("failed", finding("gpu-lost", f"n{number}")), hosts=hosts)
    assert len(learn(environ).excluded("lake", NOW)) == MOST_BY_ITSELF


def test_expired_exclusions_do_not_count():
    store = Store(exclusions=(nodes.Exclusion("lake", "n1", "x", 0.0, 100.0),))
    assert store.excluded("lake", 99.0) and not store.excluded("lake", 101.0)
    assert store.bounded(101.0).exclusions == ()


def test_submit_asks_the_scheduler_to_leave_them_out(tmp_path, environ, monkeypatch):
    nodes.exclude(LAKE, ["n1", "gone"], "7d", "fan broken", environ)
    slurm = backends.get("slurm")
    monkeypatch.setattr(type(slurm), "existing_nodes", lambda self, hosts, environ: {"n1"})
    asked = order(tmp_path / "x", site="lake", backend="slurm")
    avoided = nodes.avoiding(asked, environ)
    assert [each.host for each in avoided.resources.avoided] == ["n1"]
    (line,) = [(text, why) for text, why in directives(avoided) if text.startswith("--exclude")]
    assert line[0] == "--exclude=n1" and "n1: fan broken; until" in line[1]
    own = replace(avoided.resources, options=(Option("--exclude=n5,n1", "as the job asks"),))
    lines = [text for text, _ in directives(replace(avoided, resources=own)) if text.startswith("--exclude")]
    assert lines == ["--exclude=n5,n1"]
    assert nodes.avoiding(replace(asked, backend="local"), environ).resources.avoided == ()
    assert AvoidedNode("n1", "x").host == "n1"
