"""Kernel caches lie under paths that everybody can guess: what somebody else made there is never used."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from drumbeat.agent.member.node import private_caches
from drumbeat.base.folders import make_temporary, replaceable
from drumbeat.base.order import EnvVar


def planned(path):
    return [EnvVar("TRITON_CACHE_DIR", str(path), "node-local", "default"), EnvVar("A", "b", "c", "user")]


def test_a_new_one_is_made_for_us_alone(tmp_path):
    before = os.umask(0)
    try:
        variables, findings = private_caches(planned(tmp_path / "t"), str(tmp_path / "own"))
    finally:
        os.umask(before)
    assert variables == planned(tmp_path / "t") and not findings
    assert os.stat(tmp_path / "t").st_mode & 0o777 == 0o700


def test_our_own_is_found_again_and_closed_to_others(tmp_path):
    (tmp_path / "t").mkdir(mode=0o755)
    (tmp_path / "t" / "kernel").write_text("k")
    variables, findings = private_caches(planned(tmp_path / "t"), str(tmp_path / "own"))
    assert variables[0].value == str(tmp_path / "t") and not findings
    assert os.stat(tmp_path / "t").st_mode & 0o777 == 0o700


def open_to_all(path):
    path.mkdir()
    os.chmod(path, 0o777)


def a_link(path):
    (path.parent / "theirs").mkdir()
    path.symlink_to(path.parent / "theirs")


def of_another_user(path):
    path.mkdir(mode=0o755)
    os.chown(path, 12345, 12345)


def a_file(path):
    path.write_text("")


@pytest.mark.parametrize("plant", [open_to_all, a_link, of_another_user, a_file])
def test_a_planted_folder_is_never_used(tmp_path, plant):
    if plant is of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    plant(tmp_path / "t")
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    variables, findings = private_caches([*planned(tmp_path / "t"), *planned(tmp_path / "t")], str(own))
    assert variables[0].value == str(own / "t") and "this run only" in variables[0].why
    assert os.stat(own / "t").st_mode & 0o777 == 0o700
    assert [finding.code for finding in findings] == ["cache-not-private"]
    assert str(tmp_path / "t") in findings[0].fix


def test_what_the_user_names_stays(tmp_path):
    open_to_all(tmp_path / "t")
    mine = [EnvVar("TRITON_CACHE_DIR", str(tmp_path / "t"), "as the job asks", "user")]
    assert private_caches(mine, str(tmp_path)) == (mine, [])


def test_programs_and_sockets_lie_where_nobody_can_put_others_in_their_place(tmp_path, monkeypatch):
    """A temporary folder that all may write to, without the sticky bit, lets others rename what is in it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    assert replaceable(str(shared)) and not os.listdir(shared)
    made = make_temporary("drumbeat-test-")
    try:
        assert not made.startswith(str(shared)) and os.stat(made).st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(made)
    shared.chmod(0o1777)
    made = make_temporary("drumbeat-test-")
    assert os.path.dirname(made) == str(shared)


def test_what_a_killed_agent_left_is_removed_by_the_next_start_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = "import sys, time; from drumbeat.base.folders import make_temporary as make; print(make(sys.argv[1])); time.sleep(600)"
    found = {}
    for name in ("drumbeat-killed-", "drumbeat-alive-"):
        process = subprocess.Popen(
            [sys.executable, "-uc", make, name],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        found[name] = process, process.stdout.readline().strip()
        os.utime(os.path.join(found[name][1], "held"), (0, 0))
    (killed, left), (alive, used) = found.values()
    try:
        killed.kill()
        killed.wait()
        mine = tmp_path / "drumbeat-results"
        mine.mkdir()
        new = make_temporary("drumbeat-test-")
        assert not os.path.exists(left) and os.path.isdir(used) and mine.is_dir() and os.path.isdir(new)
    finally:
        alive.kill()
        alive.wait()
