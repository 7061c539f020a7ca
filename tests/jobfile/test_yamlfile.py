"""Untrusted YAML: what comes in as text with lines, and every refusal with its exact words."""

import os

import pytest

from drumbeat.base.problem import Problem
from drumbeat.jobfile.yamlfile import MAX_BYTES, MAX_DEPTH, Items, Table, Text, load_file, load_text


def load(text):
    return load_text(text, "job.yaml", "a job file")


def refusal(action, *args):
    with pytest.raises(Problem) as caught:
        action(*args)
    assert "\n" not in caught.value.what, "one line"
    return caught.value.what


def test_values_stay_as_written():
    table = load("a: 1:30:00\nb: off\nc: 012\nd: 1e3\ne: no\nf: ~\ng: 0x10\nh: 2026-01-01\ni: 1_000\nj: .inf\n")
    assert [node.value for node in table.entries.values()] == (
        ["1:30:00", "off", "012", "1e3", "no", "~", "0x10", "2026-01-01", "1_000", ".inf"]
    )


def test_lines_and_quotes_are_kept():
    table = load('# first\na: "x"\nb:\n  - y\n  - z\nc: {d: w}\n')
    assert table.entries["a"] == Text("x", 2, quoted=True)
    assert table.entries["b"] == Items((Text("y", 4), Text("z", 5)), 4)
    assert table.entries["c"] == Table({"d": Text("w", 6)}, {"d": 6}, 6)
    assert table.lines == {"a": 2, "b": 3, "c": 6}


def test_block_text_keeps_its_lines():
    assert load("setup: |\n  module load x\n  source y\n").entries["setup"].value == "module load x\nsource y\n"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "j.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert list(load_file(str(tmp_path / "j.yaml"), "a job file").entries) == ["a"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "job.yaml: is empty, not a job file"),
        ("\n# only a comment\n", "job.yaml: is empty, not a job file"),
        ("---\n", "job.yaml: is empty, not a job file"),
        ("a: 1\nb: \0\n", "job.yaml:2: a control character ('\\x00') is not allowed in a job file"),
        ("a: \x1b[31m\n", "job.yaml:1: a control character ('\\x1b') is not allowed in a job file"),
        (
            "a: [b,\nc: {d\n",
            "job.yaml:3: not YAML: expected ',' or '}', but got '<stream end>' (is the { of line 2 closed?)",
        ),
        ("a: 1\nb: [c\nd: e\n", "job.yaml:3: not YAML: expected ',' or ']', but got ':' (is the [ of line 2 closed?)"),
        ('a: "b\nc: d\n', "job.yaml:3: not YAML: found unexpected end of stream (is the quote of line 1 closed?)"),
        ("a: [b*, hn???]\n", "job.yaml:1: not YAML: expected ',' or ']', but got '?'"),
        ("a: [b,\n  hn[1-4]]\n", "job.yaml:2: not YAML: expected ',' or ']', but got '['"),
        ("a: &x 1\n", "job.yaml:1: anchors ('&x') are not allowed; write the value out"),
        ("a: *x\n", "job.yaml:1: aliases ('*x') are not allowed; write the value out"),
        ("a: 1\n<<: {b: 2}\n", "job.yaml:2: merge keys ('<<') are not allowed; write the values out"),
        (
            "a: !!python/name:os.system x\n",
            "job.yaml:1: tags ('tag:yaml.org,2002:python/name:os.system') are not allowed",
        ),
        ("a: !mine x\n", "job.yaml:1: tags ('!mine') are not allowed"),
        ("a: 1\n---\nb: 2\n", "job.yaml:2: a second document ('---') is not allowed"),
        ("a: 1\nb: 2\na: 3\n", "job.yaml:3: key 'a' is given twice, first on line 1"),
        ("a: {b: 1, b: 2}\n", "job.yaml:1: key 'b' is given twice, first on line 1"),
        ("[a, b]\n", "job.yaml:1: expected 'key: value' lines at the top of a job file, got a list"),
        ("just words\n", "job.yaml:1: expected 'key: value' lines at the top of a job file, got 'just words'"),
        ("? [a]\n: 1\n", "job.yaml:1: a key must be a word, got a list"),
        ("?\n: 1\n", "job.yaml:1: a key is missing before ':'"),
        (
            "a: [1, 2\n",
            "job.yaml:2: not YAML: expected ',' or ']', but got '<stream end>' (is the [ of line 1 closed?)",
        ),
        ("a: b: c\n", "job.yaml:1: not YAML: mapping values are not allowed here"),
        ("a:\n\t- b\n", "job.yaml:2: not YAML: found character '\\t' that cannot start any token"),
        ('a: "\\UFFFFFFFF"\n', "job.yaml: not YAML: an escape or a version number is out of range"),
        ("a: " + "[" * 16 + "\n", "job.yaml:1: nested deeper than 16 levels"),
        ("[" * 200_000, "job.yaml:1: nested deeper than 16 levels"),
        ("- " * 100_000, "job.yaml:1: nested deeper than 16 levels"),
        ("a: [" + "1," * 20_000 + "]\n", "job.yaml:1: more than 10000 values"),
    ],
)
def test_refused_text(text, message):
    assert refusal(load, text) == message


def test_the_deepest_that_is_allowed():
    inside = MAX_DEPTH - 1
    assert load("a: " + "[" * inside + "x" + "]" * inside)


def test_refused_files(tmp_path):
    def answer(name):
        return refusal(load_file, str(tmp_path / name), "a job file").replace(str(tmp_path) + "/", "")

    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    (tmp_path / "utf16.yaml").write_bytes("a: 1\n".encode("utf-16"))
    (tmp_path / "big.yaml").write_bytes(b"a" * (MAX_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.yaml")
    assert answer("none.yaml") == "none.yaml: no such file"
    assert (
        answer("nul\0.yaml") == repr(str(tmp_path) + "/nul\0.yaml").replace(str(tmp_path) + "/", "") + ": no such file"
    )
    assert answer("latin.yaml") == "latin.yaml:2: not UTF-8 text, so not a job file"
    assert answer("utf16.yaml") == "utf16.yaml:1: not UTF-8 text, so not a job file"
    assert answer("big.yaml") == "big.yaml: 262145 bytes is too large for a job file (at most 262144)"
    assert answer("pipe.yaml") == "pipe.yaml: is not a regular file, so not a job file"
    assert refusal(load_file, str(tmp_path), "a job file") == f"{tmp_path}: is a folder, not a job file"
    assert refusal(load_file, "/proc/self/mem", "a job file").startswith("/proc/self/mem: cannot be read: ")
    assert answer("none.yaml/x") == "none.yaml/x: no such file"


def test_ten_megabytes_of_garbage(tmp_path):
    path = tmp_path / "garbage.yaml"
    path.write_bytes(os.urandom(1 << 20) * 10)
    assert refusal(load_file, str(path), "a job file") == (
        f"{path}: 10485760 bytes is too large for a job file (at most 262144)"
    )
