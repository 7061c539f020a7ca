import gzip
import io
import json
import os
import tarfile

import pytest

from drumbeat.base.problem import Problem
from drumbeat.base.record import from_plain
from drumbeat.cli import main
from drumbeat.machine.gather import gather
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts
from drumbeat.machine.replay import CaptureHost, FolderHost, RecordingHost
from tests.trees.archetypes import NAMES

SECRETS = {
    "NCCL_AUTH_TOKEN": "s3cr3t-a",
    "TORCH_HUB_KEY": "s3cr3t-b",
    "SLURM_JWT": "s3cr3t-c",
    "HF_TOKEN": "s3cr3t-d",
    "FI_PROXY": "http://me:s3cr3t-e@proxy:3128",
    "NCCL_NOTE": "hf_s3cr3tfghijklmnop",
    "WANDB_API_KEY": "s3cr3t-g",
    "MY_OWN_THING": "s3cr3t-h",
}


@pytest.mark.parametrize("name", NAMES[:7])
def test_a_capture_gives_the_facts_it_was_taken_from(name, machine, facts_of, tmp_path):
    recording = RecordingHost(FolderHost(str(machine(name))))
    assert gather(recording) == facts_of(name)
    size = recording.write_capture(str(tmp_path / "n.tar.gz"))
    assert gather(CaptureHost(str(tmp_path / "n.tar.gz"))) == facts_of(name)
    assert size == os.path.getsize(tmp_path / "n.tar.gz") < 64 << 10
    assert os.listdir(tmp_path) == ["n.tar.gz"]


def test_this_machine_captured_and_replayed(tmp_path):
    recording = RecordingHost(LiveHost())
    facts = gather(recording)
    recording.write_capture(str(tmp_path / "n.tar.gz"))
    assert gather(CaptureHost(str(tmp_path / "n.tar.gz"))) == facts


def test_no_secret_gets_into_a_capture_or_into_facts(tmp_path, monkeypatch, capsys):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["facts", "--json", "--capture", str(tmp_path / "n.tar.gz")]) == 0
    printed = capsys.readouterr().out
    with tarfile.open(tmp_path / "n.tar.gz") as archive:
        packed = "".join(archive.extractfile(member).read().decode() for member in archive)
    assert "s3cr3t" not in printed + packed
    assert from_plain(Facts, json.loads(printed)).environment["NCCL_DEBUG"] == "INFO"


def archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            member.linkname = "/etc/passwd"
            tar.addfile(member, io.BytesIO(content))


HOSTILE = {
    "text": lambda path: path.write_text("no archive"),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(gzip.compress(b"capture.json" + b"\0" * 600)[:40]),
    "no capture": lambda path: archive(path, [("other.json", b"{}", tarfile.REGTYPE)]),
    "elsewhere": lambda path: archive(path, [("../capture.json", b"{}", tarfile.REGTYPE)]),
    "a link": lambda path: archive(path, [("capture.json", b"", tarfile.SYMTYPE)]),
    "not JSON": lambda path: archive(path, [("capture.json", b"{", tarfile.REGTYPE)]),
    "deep JSON": lambda path: archive(path, [("capture.json", b"[" * 200000, tarfile.REGTYPE)]),
    "a list": lambda path: archive(path, [("capture.json", b"[]", tarfile.REGTYPE)]),
    "newer": lambda path: archive(path, [("capture.json", b'{"schema": 2}', tarfile.REGTYPE)]),
    "a bomb": lambda path: bomb(path),
}


def bomb(path):
    """70 MB of nothing, and a header that promises more."""
    member = tarfile.TarInfo("capture.json")
    member.size = 1 << 40
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(member.tobuf())
        for _ in range(70):
            file.write(b"\0" * (1 << 20))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_capture_is_one_clear_problem(kind, tmp_path):
    HOSTILE[kind](tmp_path / "n.tar.gz")
    with pytest.raises(Problem, match="n.tar.gz"):
        CaptureHost(str(tmp_path / "n.tar.gz"))


def test_answers_of_the_wrong_type_are_no_answers(tmp_path):
    wrong = {"schema": 1, "read": {"/proc/meminfo": 5}, "list": {"/sys/class/net": "eth0"}, "data": [1], "resolve": 3}
    wrong["data"] = {"/proc/cpuinfo@0+8192": "not base64!"}
    archive(tmp_path / "n.tar.gz", [("capture.json", json.dumps(wrong).encode(), tarfile.REGTYPE)])
    facts = gather(CaptureHost(str(tmp_path / "n.tar.gz")))
    assert facts.memory_bytes is None and facts.interfaces == ()


def test_a_place_that_is_not_there(capsys):
    assert main(["facts", "--root", "/nowhere/at/all"]) == 2
    assert "no such folder or capture" in capsys.readouterr().err


def test_a_capture_that_cannot_be_written(capsys):
    assert main(["facts", "--capture", "/proc/n.tar.gz"]) == 2
    assert "/proc/n.tar.gz" in capsys.readouterr().err
