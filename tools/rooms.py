"""Lines and files of each room of the package, and modules that only one sibling imports. A mirror, not a gate."""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from pathlib import Path
from typing import Dict, Iterator, Set

SOURCE = Path(__file__).resolve().parent.parent / "src" / "drumbeat"
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no blanks, comments or docstrings."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: Set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: Set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def imported(path: Path, modules: Dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{name.name}" for name in node.names} & set(modules)
            yield from below or {node.module} & set(modules)
        elif isinstance(node, ast.Import):
            yield from {name.name for name in node.names} & set(modules)


def main() -> None:
    files, lines, data = collections.Counter(), collections.Counter(), collections.Counter()
    modules: Dict[str, Path] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        room = room if "." not in room else "(top)"
        files[room] += 1
        lines[room] += code_lines(path)
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in SOURCE.rglob("*.yaml"):
        data[path.relative_to(SOURCE).parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    importers: Dict[str, Set[Path]] = collections.defaultdict(set)
    for path in modules.values():
        for name in imported(path, modules):
            importers[name].add(path)
    alone = [name for name, who in importers.items() if len(who) == 1 and next(iter(who)).parent == modules[name].parent]
    print(f"{'room':12} {'files':>5} {'code':>7} {'yaml':>6}")
    for room in sorted(files, key=lambda room: -lines[room]):
        print(f"{room:12} {files[room]:5} {lines[room]:7,} {data[room]:6,}")
    print(f"{'all':12} {sum(files.values()):5} {sum(lines.values()):7,} {sum(data.values()):6,}")
    print(f"{'no train':12} {sum(files.values()) - files['train']:5} {sum(lines.values()) - lines['train']:7,}")
    print(f"imported by one sibling only: {len(alone)}")


if __name__ == "__main__":
    main()
