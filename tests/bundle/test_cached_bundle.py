"""The bundle that is kept between runs: agents run it with the run's token, so it must be ours, and whole."""

import os
import subprocess
import sys
import time

import pytest

import drumbeat
from drumbeat.base.problem import Problem
from drumbeat.bundle import build
from drumbeat.bundle.build import cached_bundle, remove_old

MINE, OTHER = os.geteuid(), 12345


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One bundle, built once: the bytes, and the name under which they are looked for."""
    cache = tmp_path_factory.mktemp("cache")
    path = cached_bundle({"XDG_CACHE_HOME": str(cache)})
    with open(path, "rb") as file:
        return os.path.basename(path), file.read()


@pytest.fixture
def planted(tmp_path, kept, monkeypatch):
    """A cache with a file under the right name; `rebuilt` says whether the bundle was built anew."""
    rebuilt = []
    name, good = kept
    monkeypatch.setattr(
        build, "_zipped", lambda sources, plain=(): rebuilt.append(1) or good[: -len(build.SEAL) - 2] + b"\0\0"
    )
    monkeypatch.setattr(build, "_byte_code", lambda sources: {})
    monkeypatch.setattr(build, "_twins", lambda sources: {})
    folder = tmp_path / "drumbeat"
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(good)
    os.chmod(folder / name, 0o600)
    return folder / name, {"XDG_CACHE_HOME": str(tmp_path)}, rebuilt, good


def test_an_intact_one_is_used_again(planted):
    path, environ, rebuilt, _ = planted
    assert cached_bundle(environ) == str(path) and not rebuilt


def test_a_source_that_changed_is_another_bundle(tmp_path, monkeypatch):
    source = tmp_path / "agent.py"
    source.write_text("a = 1")
    files = {"drumbeat/agent.py": str(source)}
    first = build._key(files)
    assert build._key(files) == first
    os.utime(source, (1, 1))
    second = build._key(files)
    source.write_text("a = 12")
    os.utime(source, (1, 1))
    third = build._key(files)
    monkeypatch.setattr(build, "_ROOT", "/another/installation")
    assert len({first, second, third, build._key(files)}) == 4


def test_python_runs_a_sealed_bundle(planted):
    done = subprocess.run([sys.executable, "-I", "-S", str(planted[0]), "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def cut_short(path, good):
    path.write_bytes(good[:-1000])


def changed(path, good):
    path.write_bytes(good.replace(b"drumbeat/cli", b"drumbeat/cIi"))


def empty(path, good):
    path.write_bytes(b"")


def writable_by_all(path, good):
    os.chmod(path, 0o666)


def of_another_user(path, good):
    os.chown(path, OTHER, OTHER)


def a_link(path, good):
    other = path.parent.parent / "elsewhere.pyz"
    os.rename(path, other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [cut_short, changed, empty, writable_by_all, of_another_user, a_link])
def test_any_other_is_built_anew(planted, damage):
    if damage is of_another_user and MINE != 0:
        pytest.skip("only root can give a file away")
    path, environ, rebuilt, good = planted
    damage(path, good)
    assert cached_bundle(environ) == str(path)
    assert rebuilt and path.read_bytes() == good and not path.is_symlink()
    assert os.stat(path).st_uid == MINE and os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.skipif(MINE != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(planted):
    path, environ, rebuilt, _ = planted
    os.chown(path.parent, OTHER, OTHER)
    with pytest.raises(Problem, match="belongs to another user"):
        cached_bundle(environ)
    assert not rebuilt


def test_a_folder_that_others_can_write_to_is_refused(planted):
    path, environ, _, _ = planted
    os.chmod(path.parent, 0o777)
    with pytest.raises(Problem, match="can be written to by others"):
        cached_bundle(environ)


def test_a_folder_in_one_that_everybody_can_write_to_is_refused(planted, tmp_path):
    _, environ, _, _ = planted
    tmp_path.chmod(0o777)
    with pytest.raises(Problem, match="can be written to by everybody"):
        cached_bundle(environ)
    tmp_path.chmod(0o1777)
    cached_bundle(environ)


def test_no_umask_makes_it_writable(planted):
    path, environ, _, _ = planted
    path.unlink()
    path.parent.rmdir()
    before = os.umask(0)
    try:
        cached_bundle(environ)
    finally:
        os.umask(before)
    assert os.stat(path.parent).st_mode & 0o777 == 0o700 and os.stat(path).st_mode & 0o777 == 0o600


def test_without_home_the_user_database_is_asked(planted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "home_folder", lambda environ: str(tmp_path / "home"))
    assert cached_bundle({}).startswith(str(tmp_path / "home" / ".cache"))
    monkeypatch.setattr(build, "home_folder", lambda environ: "")
    with pytest.raises(Problem, match="neither HOME nor the user database"):
        cached_bundle({})
    assert not (tmp_path / ".cache").exists()


def test_old_ones_go_and_those_in_use_stay(tmp_path):
    names = [f"drumbeat-{number:016x}.pyz" for number in range(9)]
    for age, name in enumerate(names):  # the last one is the newest
        (tmp_path / name).write_bytes(b"a bundle")
        os.utime(tmp_path / name, (time.time() - 90000 + age,) * 2)
    (tmp_path / "notes.txt").write_text("not ours")
    user = (
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.dirname(drumbeat.__file__))!r})\n"
        f"from drumbeat.bundle.build import hold; hold({str(tmp_path / names[1])!r}); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", user], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        os.utime(tmp_path / names[1], (time.time() - 90000 + 1,) * 2)  # long ago: only the lock keeps it
        os.utime(tmp_path / names[2])  # somebody was given this path just now
        remove_old(str(tmp_path))
        assert sorted(os.listdir(tmp_path)) == [names[1], names[2], *names[5:], "notes.txt"]
        other.communicate("\n")
    remove_old(str(tmp_path))
    assert names[1] not in os.listdir(tmp_path), "nobody uses it any more"
