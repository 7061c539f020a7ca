"""Starting is cheap: help and errors import neither torch nor numpy nor any third-party package but YAML."""

import functools
import json
import os
import subprocess
import sys

import pytest

from drumbeat.cli import COMMANDS

PROBE = """
import sys, json
from drumbeat import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("MODULES" + json.dumps([code, sorted(sys.modules)]))
"""


def modules_after(*words):
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=150)
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout.rpartition("MODULES")[2])


@functools.cache
def bare_modules():
    """What the interpreter itself loads."""
    bare = subprocess.run(
        [sys.executable, "-c", "import sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
    )
    return frozenset(json.loads(bare.stdout))


def third_party(modules):
    standard = set(sys.stdlib_module_names) | bare_modules() | {"drumbeat", "yaml", "_yaml", "__main__"}
    found = {name.split(".")[0] for name in modules} - {name.split(".")[0] for name in standard}
    return sorted(name for name in found if "cython" not in name)  # the compiled part of YAML brings that


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("no-such-command",), *((n, "--help") for n in COMMANDS)]
)
def test_help(words, home):
    code, modules = modules_after(*words)
    assert code == (2 if words[0] == "no-such-command" else 0)
    assert third_party(modules) == []
    if words[0].startswith("-"):
        assert not {"argparse", "yaml", "subprocess"} & set(modules)


@pytest.mark.parametrize(
    "words", [("run",), ("run", "missing.yaml"), ("status", "none"), ("logs", "none"), ("cancel", "none")]
)
def test_errors(words, home):
    code, modules = modules_after(*words)
    assert code == 2 and third_party(modules) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_option_with_2(name, drumbeat):
    done = drumbeat.here(name, "--no-such-option")
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error(home):
    done = subprocess.run(
        f"{sys.executable} -m drumbeat --help | head -1", shell=True, capture_output=True, text=True, env=os.environ
    )
    assert "Traceback" not in done.stderr and done.stdout
