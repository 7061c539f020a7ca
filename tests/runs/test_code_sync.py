"""`code: sync`: the job runs in a copy of what git lists, as it stood when the job was made."""

import io
import json
import os
import subprocess
import tarfile

import pytest

from drumbeat.base.problem import Problem
from drumbeat.desk.start import code_sync


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "project"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "train.py").write_text("import helper, os; print('ran', helper.VALUE, os.getcwd(), flush=True)\n")
    (root / "sub" / "helper.py").write_text("VALUE = 'committed'\n")
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    (root / ".gitignore").write_text("data/\nruns/\n")
    (root / "data").mkdir()
    (root / "data" / "large.bin").write_bytes(b"x" * 1000)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=u", "-c", "user.email=u@e", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", root, *words], check=True)
    (root / "sub" / "helper.py").write_text("VALUE = 'changed'\n")
    (root / "new.py").write_text("")
    return root


def test_the_ranks_run_in_the_copy_with_uncommitted_changes(checkout, drumbeat):
    flags = ("--code", "sync", "--workdir", checkout / "sub", "--runs", checkout / "runs", "--nodes", "2")
    done = drumbeat("run", *flags, "--ranks-per-node", "1", "--", "python3", "train.py")
    assert done.returncode == 0, done.stderr
    (folder,) = (checkout / "runs").iterdir()
    assert done.stdout.count(f"ran changed {folder}/code/sub") == 2
    order, code = json.loads((folder / "order.json").read_text()), json.loads((folder / "code.json").read_text())
    assert order["code_digest"] == code["sent"]["sha256"] and len(order["code_digest"]) == 64
    assert code["dirty"] is True
    with tarfile.open(folder / "code.tar.gz") as archive:
        assert set(archive.getnames()) == {".gitignore", "new.py", "sub/helper.py", "sub/train.py", "tool.sh"}


def test_the_same_tree_makes_the_same_archive(checkout):
    first = code_sync.pack(str(checkout), "/nowhere/run")
    os.utime(checkout / "tool.sh", (1, 1))
    assert code_sync.pack(str(checkout), "/nowhere/run") == first
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert len(archive.getnames()) == 5
    (checkout / "tool.sh").chmod(0o644)
    assert code_sync.pack(str(checkout), "/nowhere/run") != first


def test_too_much_and_no_checkout_are_said(checkout, tmp_path, monkeypatch, drumbeat):
    monkeypatch.setattr(code_sync, "MOST_BYTES", 50)
    with pytest.raises(Problem, match="Largest: sub/train.py"):
        code_sync.pack(str(checkout), "/nowhere/run")
    plain = tmp_path / "plain"
    plain.mkdir()
    done = drumbeat("run", "--code", "sync", "--workdir", plain, "--", "true")
    assert done.returncode == 2 and "is not a git checkout" in done.stderr and "Traceback" not in done.stderr
    done = drumbeat("run", "--code", "image", "--", "true")
    assert done.returncode == 2 and "no container" in done.stderr


@pytest.mark.parametrize(
    "name,link", [("../evil", ""), ("/tmp/evil", ""), ("a/../../evil", ""), ("inside", "../../etc/passwd")]
)
def test_an_archive_writes_nothing_outside(name, link, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        if link:
            entry.type, entry.linkname = tarfile.SYMTYPE, link
        archive.addfile(entry, io.BytesIO(b""))
    with pytest.raises(Problem):
        code_sync.unpack(buffer.getvalue(), str(tmp_path / "code"))
    assert not (tmp_path / "evil").exists()


def test_private_files_stay_private(tmp_path):
    root, target = tmp_path / "tree", tmp_path / "copy"
    root.mkdir()
    subprocess.run(["git", "init", "-q", root], check=True)
    for name, mode in (("a.py", 0o644), (".env", 0o600)):
        (root / name).write_text("x = 1\n")
        (root / name).chmod(mode)
    code_sync.unpack(code_sync.pack(str(root), str(root / "run-1")), str(target))
    assert [(target / name).stat().st_mode & 0o777 for name in ("a.py", ".env")] == [0o644, 0o600]
    assert target.stat().st_mode & 0o777 == 0o700
