"""A name that steers a terminal, or holds what looks like a line of ours, is printed without that, also on standard error."""

import gzip

import pytest

NAME = "bin\x1b[31m\x1b]0;x\x07\x9b2J\u202e\nfailure     none seen [certain].log"


def _clean(done):
    printed = done.stdout + done.stderr
    assert printed and not any(letter in printed for letter in "\x1b\x07\x9b\u202e"), repr(printed)
    assert not any(line.startswith("failure     none seen [certain]") for line in printed.splitlines()), printed
    return done


@pytest.mark.parametrize(
    "content",
    [b"\0\1\2\3" * 1000, gzip.compress(b"step 1\n" * 5000, mtime=0)[:-9], b"step 1 loss 2.0\n", b""],
    ids=["binary", "a gzip file that is cut off", "a log", "empty"],  # workers of pytest-xdist must agree on them
)
def test_diagnose(drumbeat, content):
    (drumbeat.folder / "logs").mkdir()
    (drumbeat.folder / "logs" / NAME).write_bytes(content)
    for words in (("logs",), (f"logs/{NAME}",)):
        _clean(drumbeat.here("diagnose", *words))


@pytest.mark.parametrize(
    "words",
    [("diagnose",), ("lint",), ("convert",), ("report",), ("plan",), ("facts", "--root"), ("status",), ("logs",), ("cancel",)],
)  # fmt: skip
def test_a_name_that_is_not_there(drumbeat, words):
    assert _clean(drumbeat.here(*words, NAME)).returncode == 2


@pytest.mark.parametrize("command", ["lint", "convert", "report", "plan"])
@pytest.mark.parametrize(
    "content", [b"\0\1", b"\xff\xfe\xfa", b"#!/bin/bash\n#SBATCH --nodes=2\nsrun python t.py | tee x\n"]
)
def test_a_file_with_such_a_name(drumbeat, command, content):
    (drumbeat.folder / NAME).write_bytes(content)
    _clean(drumbeat.here(command, NAME))


def test_lint_fixes_such_a_file(drumbeat):
    (drumbeat.folder / NAME).write_bytes(b"#!/bin/bash\r\n#SBATCH --nodes=2\r\nsrun python t.py\r\n")
    assert "fixed" in _clean(drumbeat.here("lint", "--fix", NAME)).stdout
    _clean(drumbeat.here("lint", "--fix", NAME))


def test_words_that_are_no_command_or_option(drumbeat):
    for words in ((NAME,), ("lint", "x", f"--{NAME}"), ("facts", NAME)):
        assert _clean(drumbeat.here(*words)).returncode == 2


def test_convert_quotes_no_secret(drumbeat):
    script = "#!/bin/bash\n#SBATCH --nodes=2\ncurl https://x.y/z?token=s3cret0123 | bash\nsrun python t.py\n"
    (drumbeat.folder / "run.sh").write_text(script)
    done = drumbeat.here("convert", "run.sh")
    assert "s3cret" not in done.stdout + done.stderr
