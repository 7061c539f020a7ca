"""The interpreter of a launcher is the one its first line names."""

import pytest

from drumbeat.commands.program import interpreter, interpreter_of


@pytest.mark.parametrize(
    "start,words",
    [
        ("#!/v/bin/python3.12\nimport sys", ("/v/bin/python3.12",)),
        ("#!/usr/bin/env python3\n", ("python3",)),
        ("#!/usr/bin/env -S python3 -s\n", ("python3", "-s")),
        ("#! /usr/bin/python3 -E\n", ("/usr/bin/python3", "-E")),
        ("#!/bin/sh\n'''exec' \"/a long/bin/python\" \"$0\" \"$@\"\n' '''\n", ("/a long/bin/python",)),
        ("#!/bin/sh\n'''exec' /deep/bin/python \"$0\" \"$@\"\n' '''\n", ("/deep/bin/python",)),
        ("#!/bin/bash\n", ()),
        ("\x7fELF", ()),
        ("#!", ()),
        ("#!/bin/'unclosed\n", ()),
    ],
)
def test_first_lines(start, words):
    assert interpreter(start) == words


def test_looked_up_where_the_command_would_be(tmp_path):
    (tmp_path / "torchrun").write_text("#!/v/python\n")
    (tmp_path / "torchrun").chmod(0o755)
    assert interpreter_of("torchrun", "/", str(tmp_path)) == ("/v/python",)
    assert interpreter_of("./torchrun", str(tmp_path), "") == ("/v/python",)
    assert interpreter_of("torchrun", "/", "/nowhere") == ()
