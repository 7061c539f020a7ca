"""Functions take few parameters."""

import ast

from tests.contracts.source import SRC, of_each_file

MOST = 7  # pass the value that more of them are parts of
# Functions that still take more.
TO_DO = {
    ("logs/exits.py", "explain_exit"),
    ("predict/cost.py", "parts"),
}


def parameters(function, of_class):
    given = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return given[1:] if of_class and given[:1] in (["self"], ["cls"]) else given


@of_each_file
def with_more(path, nodes):
    methods = {id(each) for node in nodes if isinstance(node, ast.ClassDef) for each in node.body}
    functions = [each for each in nodes if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [each.name for each in functions if len(parameters(each, id(each) in methods)) > MOST]


def test_no_function_takes_more_than_seven_parameters():
    found = {file.relative_to(SRC): names for file, names in with_more().items()}
    wrong = {(file.as_posix(), name) for file, names in found.items() if file.parts[0] != "train" for name in names}
    assert wrong - TO_DO == set(), f"more than {MOST} parameters"
    assert wrong >= TO_DO, "take it off the list"
