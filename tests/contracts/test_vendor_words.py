"""Only a vendor's own file decides by its name: every other room asks the contract (machine/vendors/contract.py).

Data may name a vendor: `{"vendor": "amd"}` in a condition, a word in a message, an example in a page.
"""

import ast

import pytest

from drumbeat.machine.vendors import VENDORS
from tests.contracts.source import SRC, of_each_file

NAMES = {vendor.name for vendor in VENDORS}


def decisions(nodes):
    """Where code depends on a vendor's name: compared, looked up, listed, or the key of a table."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            words = [node.left, *node.comparators]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            words = node.elts
        elif isinstance(node, ast.Dict):
            words = node.keys
        elif isinstance(node, ast.Subscript):
            words = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = node.args if node.func.attr in ("get", "startswith", "endswith") else []
        elif type(node).__name__ == "MatchValue":
            words = [node.value]
        else:
            continue
        if any(isinstance(word, ast.Constant) and word.value in NAMES for word in words):
            yield f"line {node.lineno}: {ast.unparse(node)[:100]}"


@pytest.mark.parametrize(
    "text",
    [
        "if gpu.vendor == 'nvidia': pass", "x = 'amd' in vendors", "flag = {'nvidia': '--nv'}.get(vendor)", "t['amd']",
        "for vendor in ('nvidia', 'amd'): pass", "peak = names.get('intel')", "vendor in {'amd'}",
    ],
)  # fmt: skip
def test_it_finds_such_code(text):
    assert list(decisions(ast.walk(ast.parse(text))))


def test_data_may_name_a_vendor():
    text = "when = {'vendor': 'amd', 'rocm': '>=6.3'}; words = 'no nvidia driver'"
    assert not list(decisions(ast.walk(ast.parse(text))))


@of_each_file
def places(path, nodes):
    return list(decisions(nodes))


def test_no_other_room_decides_by_a_vendors_name():
    found = {
        path.relative_to(SRC).as_posix(): found
        for path, found in places().items()
        if SRC / "machine" / "vendors" not in path.parents
    }
    assert {name: places for name, places in found.items() if places} == {}, "ask the vendor's contract instead"
