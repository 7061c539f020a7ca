"""A run folder that somebody else made, or that is a link, is never written to."""

import os
import stat
from pathlib import Path

import pytest

from drumbeat.desk.start.create import create_run
from drumbeat.runfolder.files import EventLog, replace
from drumbeat.runfolder.layout import NodeFolder, RunFolder, untrusted
from tests.agent.test_lead import order

NOBODY = 65534


def test_ones_own_folder_is_fine_also_below_a_link(tmp_path):
    (tmp_path / "real" / "run" / "nodes").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "real")
    assert untrusted(RunFolder(str(tmp_path / "runs" / "run")), 1) == ""
    assert untrusted(RunFolder(str(tmp_path / "not-there")), 1) == ""


@pytest.mark.parametrize("umask,mode", [(0o077, 0o700), (0o022, 0o755), (0, 0o775)])
def test_a_run_folder_is_as_private_as_the_umask_says(tmp_path, home, umask, mode):
    (tmp_path / "bundle").touch()
    before = os.umask(umask)
    try:
        folder = create_run(
            order(folder=str(tmp_path / "runs" / "r")), None, str(tmp_path / "bundle"), dict(os.environ)
        )
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == mode
    written = {name: stat.S_IMODE(os.stat(folder.at(name)).st_mode) for name in ("order.json", "run.json")}
    assert set(written.values()) == {0o644 & ~umask}


def runs_of(tmp_path, content, *names):
    """The bundles of runs created one after the other, in one folder."""
    (tmp_path / "bundle").write_bytes(content)
    made = []
    for name in names:
        at = str(tmp_path / "runs" / name)
        made.append(create_run(order(folder=at, run_id=name), None, str(tmp_path / "bundle"), dict(os.environ)).bundle)
    return made


def test_runs_beside_each_other_share_one_bundle_as_long_as_only_their_user_can_have_written_it(tmp_path, home):
    first, second = runs_of(tmp_path, b"program", "a-20260101-000001-aaaa", "b-20260101-000002-bbbb")
    assert os.path.samefile(first, second) and stat.S_IMODE(os.stat(first).st_mode) == 0o444 & ~_umask()
    (newer,) = runs_of(tmp_path, b"PROGRAM", "c-20260101-000003-cccc")
    assert not os.path.samefile(newer, second) and Path(newer).read_bytes() == b"PROGRAM"
    os.chmod(newer, 0o664)  # another member of the group can write to it
    (own,) = runs_of(tmp_path, b"PROGRAM", "d-20260101-000004-dddd")
    assert not os.path.samefile(own, newer)
    os.unlink(own)
    os.symlink(newer, own)  # or has put a link there
    os.unlink(newer)
    (alone,) = runs_of(tmp_path, b"PROGRAM", "e-20260101-000005-eeee")
    assert not os.path.islink(alone) and Path(alone).read_bytes() == b"PROGRAM"
    os.unlink(first)
    assert Path(second).read_bytes() == b"program", "removing one run takes nothing from another"


def test_a_bundle_is_copied_where_no_link_can_be_made(tmp_path, home, monkeypatch):
    def refuse(*words, **more):
        raise OSError(95, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = runs_of(tmp_path, b"program", "a-20260101-000001-aaaa", "b-20260101-000002-bbbb")
    assert not os.path.samefile(first, second) and Path(second).read_bytes() == b"program"


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_links_and_files_in_its_place(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "victim")
    assert "is a link" in untrusted(RunFolder(str(tmp_path / "run")), 1)
    other = tmp_path / "other"
    (other / "nodes").mkdir(parents=True)
    (other / "nodes" / "1").symlink_to(tmp_path / "victim")
    assert "is a link" in untrusted(RunFolder(str(other)), 1)
    assert untrusted(RunFolder(str(other)), 2) == ""
    (other / "nodes" / "3").write_text("")
    assert "not a folder" in untrusted(RunFolder(str(other)), 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the folder belongs to another user")
def test_another_users_folder(tmp_path):
    run = tmp_path / "run"
    (run / "nodes").mkdir(parents=True)
    os.chown(run / "nodes", NOBODY, NOBODY)
    assert f"another user (uid {NOBODY})" in untrusted(RunFolder(str(run)), 1)
    assert os.listdir(run / "nodes") == []


def test_nothing_is_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "events.jsonl").symlink_to(victim)
    with pytest.raises(OSError):
        EventLog(NodeFolder(str(tmp_path), 1).events, 1)
    (tmp_path / "x.json").symlink_to(victim)
    replace(str(tmp_path / "x.json"), "{}")  # by a file whose name nobody can know beforehand
    assert victim.read_text() == "mine" and (tmp_path / "x.json").read_text() == "{}"
