"""Files import each other in one direction only: no circle, not even for types or inside a function."""

import ast

from tests.contracts.source import SRC, of_each_file


def imports():
    """Module -> the modules of the product that it imports."""
    statements = {}
    for path, found in statements_of().items():
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        statements[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = found
    return {name: set(_imported(found, set(statements))) for name, found in statements.items()}


@of_each_file
def statements_of(path, nodes):
    return [each for each in nodes if isinstance(each, (ast.Import, ast.ImportFrom))]


def _imported(statements, names):
    for node in statements:
        if isinstance(node, ast.Import):
            yield from {each.name for each in node.names} & names
        elif node.module:
            below = {f"{node.module}.{each.name}" for each in node.names} & names
            yield from below or {node.module} & names


def circles(graph):
    """Groups of modules that reach each other: what is left when those that import nothing left are taken away, both ways."""
    left = {name: set(others) - {name} for name, others in graph.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        ends = {name for name, others in left.items() if not others & set(left) or name not in imported}
        if not ends:
            return left
        left = {name: others - ends for name, others in left.items() if name not in ends}


def test_no_file_imports_one_that_imports_it():
    left = circles(imports())
    assert not left, "in circles: " + ", ".join(
        f"{name} -> {sorted(others & set(left))}" for name, others in left.items()
    )


def test_a_circle_is_found():
    graph = {"top": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a", "leaf"}, "leaf": set()}
    assert set(circles(graph)) == {"a", "b", "c"}
    assert not circles({"top": {"a", "leaf"}, "a": {"leaf"}, "leaf": set()})
