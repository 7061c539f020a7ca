"""docs/codes.md is what the rules say, and no code is given that it does not list."""

import ast
from pathlib import Path

from drumbeat.diagnose import codes
from drumbeat.diagnose.codes import page

ROOT = Path(__file__).parent.parent.parent


def test_the_committed_page_is_the_generated_one():
    assert (ROOT / "docs" / "codes.md").read_text() == page(), "python -m drumbeat.diagnose.codes > docs/codes.md"


def test_every_code_of_the_source_is_listed():
    listed = page()
    for file in sorted(Path(codes.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Finding"
                and node.args
            ):
                code = node.args[0]
                if isinstance(code, ast.Constant):
                    assert f"| `{code.value}` |" in listed, (
                        f"{file.name}:{node.lineno}: {code.value} has no line in codes.py"
                    )
