"""Numbers, sizes and times in words, and rows as columns: one form for every view."""

import pytest

from drumbeat.base.text import columns, count, duration, labelled, memory, short, step_time, traffic


@pytest.mark.parametrize(
    "words, text",
    [
        (memory(-1), "unlimited"),
        (memory(0), "0 B"),
        (memory(64 << 10), "64 KiB"),
        (memory(100 << 20), "100 MiB"),
        (memory(1 << 30), "1 GiB"),
        (memory(79.6 * 2**30), "79.6 GiB"),
        (memory(1007 << 30), "1007 GiB"),
        (memory(2 << 40), "2 TiB"),
        (traffic(0.4), "0.4 B"),
        (traffic(12_345), "12.3 kB"),
        (traffic(999_600), "1000 kB"),
        (traffic(1.5e9), "1.5 GB"),
        (short(512), "512"),
        (short(12_300), "12.3k"),
        (short(1.5e9), "1.5G"),
        (count(1, "node"), "1 node"),
        (count(1200, "process", "processes"), "1,200 processes"),
        (duration(4.52), "4.5 s"),
        (duration(99.4), "99 s"),
        (duration(130), "2 m 10 s"),
        (duration(930, brief=True), "16 m"),
        (duration(3660), "1 h 01 m"),
        (duration(47 * 3600), "47 h 00 m"),
        (duration(76 * 3600), "3 d 04 h"),
        (step_time(1.23e-5), "12.3 us"),
        (step_time(0.0661), "66.1 ms"),
        (step_time(1.25), "1.25 s"),
        (step_time(0.0), "0 us"),
        (step_time(130), "2 m 10 s"),
    ],
)
def test_words(words, text):
    assert words == text


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("rank", "GPU"), ("0", "0-3")]
    assert columns(rows) == ["rank  GPU", "0     0-3"]
    assert columns(rows, right=True) == ["rank  GPU", "   0  0-3"]


def test_long_lines_are_folded_beside_their_label():
    lines = [("cause", "one two three four five six seven"), ("", "more")]
    assert list(labelled(lines)) == ["cause      one two three four five six seven", "           more"]
    assert list(labelled(lines, 42)) == [
        "cause      one two three four five six",
        "           seven",
        "           more",
    ]
