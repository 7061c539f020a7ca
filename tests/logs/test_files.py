"""How the bytes of a file become lines: marks of an encoding, and lines without end."""

import codecs
import io
import json
import tarfile
import zipfile

import pytest

from drumbeat.desk.log_sources import LONGEST, MAX_LINE, Source, lines

LOG = "step 1 loss 2.0\nTraceback (most recent call last):\n  File \"t.py\", line 3, in <module>\nKeyError: 'größe'\n"
OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def failure(drumbeat, content, name="x.log"):
    (drumbeat.folder / name).write_bytes(content)
    done = drumbeat.here("diagnose", "--json", name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["failure"]


@pytest.mark.parametrize(
    "content",
    [
        LOG.encode("utf-16"), LOG.encode("utf-32"), codecs.BOM_UTF8 + LOG.encode(), codecs.BOM_UTF16_BE + LOG.encode("utf-16-be"),
        codecs.BOM_UTF32_BE + LOG.encode("utf-32-be"), LOG.encode("utf-16")[:-1],
    ],
)  # fmt: skip
def test_a_file_is_decoded_by_its_mark(drumbeat, content):
    found = failure(drumbeat, content)
    assert (found["answer"], found["finding"]["title"], found["seen"]) == (
        "exception",
        "KeyError: 'größe'",
        ["x.log:2-4"],
    )


def test_one_that_cannot_be_read_is_an_error(drumbeat):
    (drumbeat.folder / "x.log").write_bytes(LOG.encode("utf-16-be"))
    assert drumbeat.here("diagnose", "x.log").returncode == 2


@pytest.mark.parametrize("size", [LONGEST + 5, MAX_LINE + 5, 5_000_000])
@pytest.mark.parametrize("after", [b"", b"\n", b"\nstep 2 loss 1.9\n"])
def test_the_end_of_a_long_line_is_read_and_its_middle_is_not_seen(drumbeat, size, after):
    found = failure(drumbeat, b"step 1 loss 2.0\n" + b"x" * size + b" " + OOM.encode() + after)
    assert found["answer"] == "gpu-out-of-memory" and found["finding"]["evidence"][0]["line"] == 2
    assert any("the middle of x.log:2" in each for each in found["unseen"])


def test_with_a_middle_that_was_not_read_none_is_not_certain(drumbeat):
    assert failure(drumbeat, b"step 1 loss 2.0\nTraining finished\n")["unseen"] == []
    found = failure(drumbeat, b"step 1 loss 2.0\n" + b"x" * 100_000 + b"\n" + b"y" * 9_000 + b"\nstep 2 loss 1.9\n")
    assert (found["answer"], found["confidence"]) == ("none", "likely")
    assert any("x.log:2 (and of 1 more)" in each for each in found["unseen"])


def test_lines_keep_their_numbers_and_memory_is_bounded(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a\n" + b"b" * 3_000_000 + b"end\nc\n" + b"d" * 20_000 + b"\n" + b"e\rf\r" * 20_000 + b"\ng")
    source = Source(str(path), "x")
    found = [(number + place, line) for number, some in lines(source) for place, line in enumerate(some)]
    by_number = dict(found)
    assert by_number[1] == b"a" and by_number[3] == b"c" and by_number[6] == b"g" and source.cut == [2, 4]
    assert by_number[2].endswith(b"bend") and len(by_number[2]) <= LONGEST + 1 and len(by_number[4]) <= LONGEST + 1


def test_a_progress_bar_is_no_long_line(drumbeat):
    bar = b"".join(b"\r%d%%|####      | %d/100 [00:01<00:05, 2.0it/s]" % (n, n) for n in range(100)) * 20
    assert failure(drumbeat, bar + b"\n" + OOM.encode() + b"\n")["unseen"] == []


def zipped(files):
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return whole.getvalue()


def tarred(files, mode):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode=mode) as packed:
        link = tarfile.TarInfo("passwd.log")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


def test_logs_in_an_archive_are_read_and_its_names_lead_nowhere(drumbeat, monkeypatch):
    files = {
        "../../up.log": b"step 1 loss 2.0\n",
        "/abs/r0.out": LOG.encode(),
        "model.pt": b"\0" * 5000,
        ".DS_Store": b"x",
    }
    for number, content in enumerate((zipped(files), tarred(files, "w"), tarred(files, "w:gz"))):
        found = failure(drumbeat, content, f"mail{number}")
        assert (found["answer"], found["seen"]) == ("exception", [f"mail{number}/abs/r0.out:2-4"])
    assert sorted(each.name for each in drumbeat.folder.iterdir()) == ["mail0", "mail1", "mail2"]
    (drumbeat.folder / "cut.zip").write_bytes(zipped(files)[:-100])
    assert "cut.zip: damaged or locked" in drumbeat.here("diagnose", "cut.zip").stderr
    (drumbeat.folder / "run.tgz").write_bytes(tarred({"run-1/run.json": b'{"run_id": "run-1"}'}, "w:gz"))
    assert "unpack it (tar xf), and diagnose that folder" in drumbeat.here("diagnose", "run.tgz").stderr
    monkeypatch.setattr("drumbeat.desk.log_sources.MAX_UNPACKED", 1000)
    (drumbeat.folder / "bomb.zip").write_bytes(zipped({"a.log": b"x" * 5000}))
    refused = drumbeat.here("diagnose", "bomb.zip")
    assert refused.returncode == 2 and "unpack it" in refused.stderr
