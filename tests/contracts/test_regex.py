"""Regular expressions that are compiled when first used: the same as compiled ones, and each of them valid."""

import importlib
import pkgutil
import re
import subprocess
import sys

import pytest

import drumbeat
from drumbeat.base.regex import _OFFERED, _Pattern, regex
from tests.conftest import SOURCE

APART = (
    "drumbeat.__main__",
    "drumbeat.train",
    "drumbeat.metrics.integrations",
    "drumbeat.watch",
    "drumbeat.inrank.collective_test",
)


@pytest.mark.parametrize("flags", [0, re.IGNORECASE | re.MULTILINE])
@pytest.mark.parametrize("text", [r"(?P<word>\w+) (\d+)", rb"(?P<word>\w+) (\d+)"])
def test_the_same_as_a_compiled_one(text, flags):
    lazy, compiled = regex(text, flags), re.compile(text, flags)
    given = "Some 12\nmore 34" if isinstance(text, str) else b"Some 12\nmore 34"
    for name in ("search", "match", "fullmatch"):
        one, other = getattr(lazy, name)(given), getattr(compiled, name)(given)
        assert (one and one.groups()) == (other and other.groups())
    for name in ("findall", "split"):
        assert getattr(lazy, name)(given) == getattr(compiled, name)(given)
    assert [each.span() for each in lazy.finditer(given)] == [each.span() for each in compiled.finditer(given)]
    assert lazy.sub(given[:0], given) == compiled.sub(given[:0], given)
    assert (
        lazy.groupindex == compiled.groupindex and lazy.groups == compiled.groups and lazy.pattern == compiled.pattern
    )


def test_compiled_once_and_not_before(monkeypatch):
    made = []
    monkeypatch.setattr(re, "compile", lambda *given, compile=re.compile: made.append(given) or compile(*given))
    one = regex("a+")
    assert not made
    assert one.match("aa") and one.search("ba") and made == [("a+", 0)]
    assert not hasattr(one, "no_such_thing") and len(made) == 1


PROBE = """
import re, sys
compiled, compile = [], re.compile
def noted(*given):
    module = sys._getframe(1).f_globals["__name__"]
    if module.startswith("drumbeat"):
        compiled.append((module, given[0]))
    return compile(*given)
re.compile = noted
import drumbeat.agent.agent, drumbeat.agent.loop
print(compiled, [name for name in ("statistics", "importlib.resources") if name in sys.modules])
"""


def test_an_agent_compiles_none_when_it_is_imported():
    """Every node of every run pays for them, and for these modules of the standard library."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROBE], env={"PYTHONPATH": SOURCE}, capture_output=True, text=True
    )
    assert done.stdout == "[] []\n", done.stdout + done.stderr


def test_each_of_ours_is_valid():
    """A mistake in one would otherwise show only when somebody uses it."""
    found = 0
    for module in pkgutil.walk_packages(drumbeat.__path__, "drumbeat."):
        if not module.name.startswith(APART):
            for value in vars(importlib.import_module(module.name)).values():
                found += sum(1 for each in _members(value) if each.pattern is not None)
    assert found > 150


def _members(value):
    if isinstance(value, _Pattern):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _members(each)
    elif isinstance(value, dict):
        yield from _members([*value.values()])


def test_what_it_offers_exists():
    assert all(hasattr(re.compile(""), name) for name in _OFFERED)
