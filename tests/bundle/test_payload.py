"""The part of drumbeat.pyz that travels to pods: small, complete, and the same code without its docstrings."""

import ast
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from drumbeat.bundle import build as payload_room
from drumbeat.bundle.build import cached_payload, packed, without_docstrings

SOURCE = Path(__file__).parent.parent.parent / "src"
IMPORT_ALL = """
import importlib, sys, zipfile
sys.path.insert(0, sys.argv[1])
for name in zipfile.ZipFile(sys.argv[1]).namelist():
    if name.startswith("drumbeat/") and name.endswith(".py") and not name.startswith("drumbeat/inrank/"):
        importlib.import_module(name[: -len(".py")].replace("/", ".").removesuffix(".__init__"))
from drumbeat.logs.meaning.rules import rulebook
from drumbeat.metrics.printed import read_line
from drumbeat.metrics.table import rules
print(len(rulebook().rules), len(rules()), sum(read_line(f"step {at} loss 0.5")[0]["step"] == at for at in range(20)))
"""


@pytest.fixture(scope="module")
def data(pyz):
    return packed(str(pyz))


@pytest.fixture(scope="module")
def payload(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("payload") / "node.pyz"
    path.write_bytes(lzma.decompress(data))
    return path


def test_it_leaves_room_to_grow(data, pyz):
    assert len(data) < 500_000, "a config map holds 1 MiB, as text in a secret it is a quarter more"
    assert data == packed(str(pyz))


def test_it_is_packed_once_and_kept_whole(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(payload_room, "packed", lambda bundle: made.append(bundle) or b"the payload")
    (tmp_path / "a.pyz").write_bytes(b"a bundle")
    environ, bundle = {"XDG_CACHE_HOME": str(tmp_path / "cache")}, str(tmp_path / "a.pyz")
    first, again = (cached_payload(bundle, environ) for _ in range(2))
    assert first == again == b"the payload" and len(made) == 1
    (kept,) = (tmp_path / "cache" / "drumbeat").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_bytes(kept.read_bytes()[1:])
    assert cached_payload(bundle, environ) == first and len(made) == 2, "a damaged one is packed anew"
    (tmp_path / "a.pyz").write_bytes(b"another bundle")
    cached_payload(bundle, environ)
    assert len(made) == 3, "each bundle has its own"


def test_it_is_packed_where_nothing_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(payload_room, "packed", lambda bundle: b"the payload")
    (tmp_path / "a.pyz").write_bytes(b"a bundle")
    (tmp_path / "cache").write_text("no folder")
    assert cached_payload(str(tmp_path / "a.pyz"), {"XDG_CACHE_HOME": str(tmp_path / "cache")}) == b"the payload"
    assert cached_payload(str(tmp_path / "a.pyz"), {"HOME": str(tmp_path / "cache")}) == b"the payload"


def test_every_module_in_it_finds_what_it_imports(payload, tmp_path):
    """Imports inside functions too: the modules that they name are there."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(payload)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(int(count) > 10 for count in done.stdout.split()), "rules and formats came along"


def test_what_only_the_desk_needs_stays_there(payload):
    rooms = {name.split("/")[1] for name in zipfile.ZipFile(payload).namelist() if name.endswith(".py") and "/" in name}
    assert rooms.isdisjoint({"api", "convert", "jobfile", "report", "train", "tune"})
    assert {"agent", "causes", "inrank", "logs", "machine", "runfolder"} <= rooms


@pytest.mark.parametrize("words", [["status"], ["run", "--", "true"], []])
def test_a_command_of_the_desk_is_refused_in_one_line(payload, words):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(payload), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "where you submit jobs" in done.stderr


def without_docstring(body):
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented else body


def same(before, after):
    """Compare two trees, with the line of each statement, in a fifth of the time of comparing their dumps."""
    rest = [(before, after)]
    while rest:
        one, other = rest.pop()
        if type(one) is not type(other) or isinstance(one, ast.stmt) and one.lineno != other.lineno:
            return False
        if isinstance(one, ast.AST):
            for name in one._fields:
                pair = getattr(one, name, None), getattr(other, name, None)
                if name == "body" and isinstance(pair[0], list):
                    pair = without_docstring(pair[0]), without_docstring(pair[1])
                rest.append(pair)
        elif isinstance(one, list):
            if len(one) != len(other):
                return False
            rest += zip(one, other)
        elif one != other:
            return False
    return True


def test_only_docstrings_are_taken_out(payload):
    """Line numbers, too, stay: they stand in tracebacks that people send."""
    sent = [SOURCE / name for name in zipfile.ZipFile(payload).namelist() if name.endswith(".py")]
    for path in filter(Path.exists, sent):
        assert same(ast.parse(path.read_bytes()), ast.parse(without_docstrings(path.read_bytes()))), path
