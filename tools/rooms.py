"""Lines and files of each room of the package, and modules that only one sibling imports; patterns of the log reader. A mirror,
not a gate."""

from __future__ import annotations

import ast
import collections
import gc
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Mapping, Set

from drumbeat.base.data import parse_yaml

SOURCE = Path(__file__).resolve().parent.parent / "src" / "drumbeat"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str, nodes: Iterable[ast.AST]) -> int:
    """Count the lines that hold code: no blanks, comments or docstrings."""
    lines = {number for number, line in enumerate(text.split("\n"), 1) if line.strip() and line.lstrip()[0] != "#"}
    docstrings: Set[int] = set()
    for node in nodes:
        if isinstance(node, (ast.JoinedStr, ast.Constant)):  # a blank line in a text is code
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines - docstrings)


def imported(nodes: Iterable[ast.AST], modules: Mapping[str, object]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{name.name}" for name in node.names} & modules.keys()
            yield from below or {node.module} & modules.keys()
        elif isinstance(node, ast.Import):
            yield from {name.name for name in node.names} & modules.keys()


def compiled(nodes: Iterable[ast.AST]) -> int:
    """Count the regular expressions that a module compiles."""
    calls = (ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
    return sum(name in ("re.compile", "regex") for name in calls)


def of_rules() -> int:
    """Count the patterns of the log rules; what a rule is silent on (`unless`) is not counted."""
    rules = [rule for path in (SOURCE / "logs" / "rules").glob("*.yaml") for rule in parse_yaml(path.read_bytes())]
    patterns = [rule.get(key, []) for rule in rules for key in ("pattern", "mentions")]
    return sum(1 if isinstance(each, str) else len(each) for each in patterns)


def main() -> None:
    gc.disable()  # it would walk the trees of all files again and again, for half of the time that this takes
    files, lines, data = collections.Counter(), collections.Counter(), collections.Counter()
    modules: Dict[str, Path] = {}
    trees: Dict[Path, List[ast.AST]] = {}  # all nodes of each module
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        room = room if "." not in room else "(top)"
        text = path.read_text(encoding="utf-8")
        trees[path] = list(ast.walk(ast.parse(text)))
        files[room] += 1
        lines[room] += code_lines(text, trees[path])
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in SOURCE.rglob("*.yaml"):
        data[path.relative_to(SOURCE).parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    importers: Dict[str, Set[Path]] = collections.defaultdict(set)
    for path in modules.values():
        for name in imported(trees[path], modules):
            importers[name].add(path)
    alone = [
        name for name, who in importers.items() if len(who) == 1 and next(iter(who)).parent == modules[name].parent
    ]
    print(f"{'room':12} {'files':>5} {'code':>7} {'yaml':>6}")
    for room in sorted(files, key=lambda room: -lines[room]):
        print(f"{room:12} {files[room]:5} {lines[room]:7,} {data[room]:6,}")
    print(f"{'all':12} {sum(files.values()):5} {sum(lines.values()):7,} {sum(data.values()):6,}")
    print(f"{'no train':12} {sum(files.values()) - files['train']:5} {sum(lines.values()) - lines['train']:7,}")
    print(f"imported by one sibling only: {len(alone)}")
    code = sum(compiled(nodes) for path, nodes in trees.items() if path.relative_to(SOURCE).parts[0] == "logs")
    print(f"patterns of the log reader: {of_rules()} in rules, {code} in code")


if __name__ == "__main__":
    main()
