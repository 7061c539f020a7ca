"""A docstring is a sentence that stands alone: it starts with a verb or names the thing, never with a question word."""

import ast
from pathlib import Path

SRC = Path(__file__).parent.parent.parent / "src" / "drumbeat"

QUESTIONS = ("What", "Which", "Whether", "How", "Who", "Whose", "Where", "When", "Why", "Is", "Are", "Does", "Has")


def docstrings(file: Path):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def test_no_docstring_begins_with_a_question_word():
    wrong = []
    for file in sorted(SRC.rglob("*.py")):
        inside = file.relative_to(SRC)
        wrong += [
            f"{inside}:{line}: {text.splitlines()[0]}"
            for line, text in docstrings(file)
            if text.split(maxsplit=1)[0].rstrip(",:") in QUESTIONS
        ]
    assert not wrong, "\n".join(wrong)
