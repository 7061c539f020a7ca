"""A docstring is a sentence that stands alone: it starts with a verb or names the thing, never with a question word."""

import ast

from tests.contracts.source import SRC, of_each_file

QUESTIONS = ("What", "Which", "Whether", "How", "Who", "Whose", "Where", "When", "Why", "Is", "Are", "Does", "Has")


@of_each_file
def docstrings(path, nodes):
    places = [
        each for each in nodes if isinstance(each, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    found = [(each, ast.get_docstring(each)) for each in places]
    return [(each.body[0].lineno, text) for each, text in found if text]


def test_no_docstring_begins_with_a_question_word():
    wrong = []
    for file, found in docstrings().items():
        inside = file.relative_to(SRC)
        wrong += [
            f"{inside}:{line}: {text.splitlines()[0]}"
            for line, text in found
            if text.split(maxsplit=1)[0].rstrip(",:") in QUESTIONS
        ]
    assert not wrong, "\n".join(wrong)
