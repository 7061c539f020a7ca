"""Files import each other in one direction only: no circle, not even for types or inside a function."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent.parent / "src"


def imports():
    """Module -> the modules of the product that it imports."""
    names = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: set(_imported(path, set(names))) for name, path in names.items()}


def _imported(path, names):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from {each.name for each in node.names} & names
        elif isinstance(node, ast.ImportFrom) and node.module:
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
