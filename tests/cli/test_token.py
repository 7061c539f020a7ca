"""The user's token: long enough not to be guessed, and readable by nobody else."""

import os
import stat

import pytest

from drumbeat.base.problem import Problem
from drumbeat.desk.start.create import users_token


def test_it_is_made_once_for_this_user_alone(tmp_path):
    environ = {"HOME": str(tmp_path)}
    token = users_token(environ)
    path = tmp_path / ".config" / "drumbeat" / "token"
    assert len(token) == 64 and users_token(environ) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_one_that_others_can_read_is_refused(tmp_path):
    environ = {"HOME": str(tmp_path)}
    users_token(environ)
    path = tmp_path / ".config" / "drumbeat" / "token"
    path.chmod(0o640)
    with pytest.raises(Problem, match="can be read by others"):
        users_token(environ)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(Problem, match="holds no token"):
        users_token(environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the file belongs to another user")
def test_one_that_another_user_made_is_refused(tmp_path, monkeypatch):
    environ = {"HOME": str(tmp_path)}
    users_token(environ)
    os.chown(tmp_path / ".config" / "drumbeat" / "token", 65534, 65534)
    with pytest.raises(Problem, match="belongs to another user"):
        users_token(environ)


def test_a_short_one_in_the_environment_is_refused():
    with pytest.raises(Problem, match="could guess it"):
        users_token({"DRUMBEAT_TOKEN": "secret"})
    assert users_token({"DRUMBEAT_TOKEN": "x" * 16}) == "x" * 16
