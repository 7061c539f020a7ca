"""docs/codes.md is what the rules say, and no code is given that it does not list."""

import ast
from pathlib import Path

from tools.reference import codes
from tools.reference.codes import page

ROOT = Path(__file__).parent.parent.parent


def test_the_committed_page_is_the_generated_one():
    assert (ROOT / "docs" / "codes.md").read_text() == page(), "python -m tools.reference"


def codes_in(file):
    """The code of every finding that this file makes, with its severity as the source spells it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding" and node.args:
            code, severity = node.args[0], node.args[1]
            if isinstance(code, ast.Constant) and code.value:
                yield code.value, severity.id if isinstance(severity, ast.Name) else "", f"{file.name}:{node.lineno}"


def test_every_code_of_the_source_is_listed():
    listed = page()
    for file in sorted(Path(codes.__file__).parent.glob("*.py")):
        for code, _, where in codes_in(file):
            assert f"| `{code}` |" in listed, f"{where}: {code} has no line in codes.py"


def test_so_is_every_failure_that_a_run_folder_can_record():
    listed, room = page(), Path(codes.__file__).parent.parent
    for file in [*sorted((room / "agent").rglob("*.py")), *sorted((room / "desk").rglob("*.py"))]:
        for code, severity, where in codes_in(file):
            assert severity != "ERROR" or f"| `{code}` |" in listed, f"{where}: {code} has no line in codes.py"
