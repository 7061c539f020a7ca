"""Schedulers' own tools: one that is missing, one that does not answer, and what they say when they fail."""

import os

import pytest

from drumbeat.backends.contract import advised, ask_tool, complaint
from drumbeat.backends.kubernetes.client import problem_of
from drumbeat.base.problem import Problem


@pytest.fixture
def tool(tmp_path):
    """Make a tool of this text, and return the environment that has it."""

    def make(text):
        path = tmp_path / "frob"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    return make


def test_a_tool_reads_what_it_is_given_and_speaks_english(tool):
    environ = {**tool('read line; echo "$line $LC_ALL" "$@"; exit 3'), "LC_ALL": "de_DE"}
    done = ask_tool(["frob", "--now"], environ, "", "", input=b"hello\n")
    assert (done.returncode, done.stdout) == (3, b"hello C --now\n")
    assert ask_tool(["frob"], tool("cat; echo end"), "", "").stdout == b"end\n", (
        "nothing to read is no terminal to wait for"
    )


def test_a_tool_that_is_missing_or_silent_is_one_clear_error(tool):
    with pytest.raises(Problem, match="there is no frob here\n  install it"):
        ask_tool(["frob"], dict(os.environ), "install it", "try again")
    with pytest.raises(Problem, match="frob get has not answered for 0.2 s\n  try again"):
        ask_tool(["frob", "--context=x", "get"], tool("exec sleep 60"), "install it", "try again", seconds=0.2)


def test_complaints_are_one_line_without_repetition():
    text = "frob: error: no such queue\n\nfrob: error: no such queue\nfrob: \x1b[2Jsee the manual\n"
    assert complaint(text, r"^frob: (error: )?") == "no such queue; see the manual"
    assert complaint("") == ""


def test_kubectls_warnings_are_no_part_of_its_complaint():
    text = 'Warning: would violate PodSecurity\nError from server (NotFound): error when creating "STDIN": no room\n'
    assert str(problem_of(text)).startswith("Kubernetes refuses: no room\n")


def test_the_first_row_that_fits_counts():
    table = (("queue", "name another queue"), ("no such", "look again"))
    assert (
        advised("No such Queue", table, "x") == "name another queue" and advised("no such node", table) == "look again"
    )
    assert advised("all is well", table, "nothing") == "nothing"
