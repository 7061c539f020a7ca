"""However damaged a machine's files are, reading it ends, and yields facts: with holes, not with a crash."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumbeat.base.problem import Problem
from drumbeat.base.record import from_plain, to_json, to_plain
from drumbeat.machine.gather import gather
from drumbeat.machine.gpu_names import names
from drumbeat.machine.model import Facts
from drumbeat.machine.replay import FolderHost
from drumbeat.machine.table import table
from tests.trees.archetypes import build

RAISED = re.compile(r"^\w+: \w*(Error|Exception|Interrupt)\b")


def as_file(content):
    return lambda place: place.write_bytes(content)


DAMAGE = {
    "missing": lambda place: None,
    "empty": as_file(b""),
    "blank lines": as_file(b"\n\n \t\n"),
    "binary": as_file(bytes(range(256)) * 8),
    "huge": as_file(b"9" * (2 << 20)),
    "negative": as_file(b"-1\n"),
    "too large a number": as_file(b"99999999999999999999999999\n"),
    "a wide range": as_file(b"0-99999999,5-1,x\n"),
    "other digits": as_file("\u0663\u00b2\u2014\n".encode()),
    "no colon": as_file(b"ACTIVE LinkUp InfiniBand 400\n"),
    "elf only in name": as_file(b"\x7fELF\x02\x01" + b"\xff" * 80),
    "loop": lambda place: place.symlink_to(place.name),
    "loop upwards": lambda place: place.symlink_to(".."),
    "dangling": lambda place: place.symlink_to("/nowhere/at/all"),
    "out of the folder": lambda place: place.symlink_to("/../../../../../../etc/passwd"),
    "folder": lambda place: place.mkdir(),
    "pipe": lambda place: os.mkfifo(place),
}


IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of small files are made and moved
MACHINES = {}  # name -> its folder and what is in it


@pytest.fixture(scope="module", autouse=True)
def machines():
    """Of our own: these are damaged, and fixed again after each example."""
    folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
    for name in ("lumi-g", "dgx-h100", "rcp-pod", "workstation"):
        build(name, folder / name)
        MACHINES[name] = (folder / name, sorted(places(folder / name)))
    yield
    shutil.rmtree(folder)


def places(root):
    """Every file, link and folder, the CPUs' thousand files thinned out, so that each matter is hit as often."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.relpath(os.path.join(folder, name), root)
            number = re.match(r"sys/devices/system/(?:cpu/cpu|node/node)(\d+)", path)
            if not path.startswith(".drumbeat") and not (number and int(number.group(1)) > 2):
                yield path


@contextlib.contextmanager
def damaged(root, wounds):
    undo = []
    wounded = set()
    try:
        for path, kind in wounds:
            place = root / path
            if os.path.lexists(place) and wounded.isdisjoint(place.parents):
                aside = place.with_name(place.name + ".aside~")
                place.rename(aside)
                undo.append((place, aside))
                wounded.add(place)
                DAMAGE[kind](place)
        yield
    finally:
        for place, aside in reversed(undo):
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            elif os.path.lexists(place):
                place.unlink()
            aside.rename(place)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(data=st.data())
def test_no_damage_stops_a_reader(data):
    root, paths = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    wound = st.tuples(st.sampled_from(paths), st.sampled_from(sorted(DAMAGE)))
    with damaged(root, data.draw(st.lists(wound, min_size=1, max_size=6, unique_by=lambda pair: pair[0]))):
        facts = gather(FolderHost(str(root)))
    check(facts)


def check(facts):
    raised = [note for note in facts.unknown if RAISED.match(note)]
    assert not raised, "a reader gave up on its whole subject"
    assert from_plain(Facts, json.loads(to_json(facts))) == facts
    assert "root:" not in json.dumps(to_plain(facts)), "a link led out of the folder"
    assert table(facts).replace("\n", "").isprintable()


def test_the_same_wound_everywhere():
    root, paths = MACHINES["dgx-h100"]
    files = [
        path for path in paths if (root / path).is_file() and not (root / path).is_symlink() and "/cpu/" not in path
    ]
    for kind in sorted(DAMAGE.keys() - {"huge"}):  # that alone would be a gigabyte
        with damaged(root, [(path, kind) for path in files]):
            check(gather(FolderHost(str(root))))


def test_an_empty_folder_is_a_machine_that_says_nothing(tmp_path):
    facts = gather(FolderHost(str(tmp_path)))
    check(facts)
    assert facts.host == "unknown" and facts.arch is None and facts.gpus == () and facts.cpus.online == ()
    assert len(facts.unknown) == 3, facts.unknown


@pytest.mark.parametrize(
    "told",
    [
        {"environ": [], "affinity": "all", "limits": 3, "commands": {"nvidia-smi": 5}, "addresses": {"eth0": "x"}},
        {"environ": {"A": 1}, "affinity": [True, "1", -1], "hostname": 7, "disk_bytes": {"/dev/shm": "many"}},
        {"addresses": {"eth0": [1, None]}, "environ": {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-"}},
        {
            "environ": {
                "SLURM_JOB_ID": "1",
                "SLURM_NODEID": "-7",
                "SLURM_TASKS_PER_NODE": "8(x,2",
                "PATH": "\x00\x1b[2J",
            }
        },
    ],
)
def test_wrong_types_in_host_json_are_no_answers(told, tmp_path):
    (tmp_path / ".drumbeat").mkdir()
    (tmp_path / ".drumbeat/host.json").write_text(json.dumps(told))
    check(gather(FolderHost(str(tmp_path))))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100000, "nan"])
def test_a_host_json_that_is_none_is_said(text, tmp_path):
    (tmp_path / ".drumbeat").mkdir()
    (tmp_path / ".drumbeat/host.json").write_text(text)
    with pytest.raises(Problem, match="host.json"):
        FolderHost(str(tmp_path))


def test_files_that_may_not_be_read():
    """As an ordinary user, where every second file or folder is closed to us."""
    root = Path(tempfile.mkdtemp(dir=IN_MEMORY))
    try:
        build("dgx-h100", root)
        for index, path in enumerate(sorted(places(root))):
            place = root / path
            if index % 2 and not place.is_symlink() and place.name not in ("sys", "devices", "class", "proc"):
                place.chmod(0)
        root.chmod(0o755)
        facts = from_plain(Facts, json.loads(as_nobody(lambda: to_json(gather(FolderHost(str(root)))))))
        check(facts)
        assert facts.unknown
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", str(root)], check=True)
        shutil.rmtree(root)


def as_nobody(make_text):
    """Run in a child without privileges; the interpreter itself may be where nobody else can read it, so no exec."""
    names()  # what is imported late must be there before
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            with open(writer, "w") as pipe:
                pipe.write(make_text())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return text
