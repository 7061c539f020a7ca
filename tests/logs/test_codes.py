"""docs/codes.md is what the rules say, and no code is given that it does not list."""

import ast
from pathlib import Path

from tools.reference.codes import page

ROOT = Path(__file__).parent.parent.parent


def test_the_committed_page_is_the_generated_one():
    assert (ROOT / "docs" / "codes.md").read_text() == page(), "python -m tools.reference"


def test_every_code_of_the_log_reader_is_listed():
    listed, room = page(), ROOT / "src" / "drumbeat" / "logs"
    for file in sorted(room.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and node.args:
                code = node.args[0]
                if isinstance(code, ast.Constant) and code.value:
                    assert f"- `{code.value}`:" in listed, (
                        f"{file.name}:{node.lineno}: {code.value} has no line in codes.py"
                    )
