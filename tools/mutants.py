"""Change one operator or number at a time, and see whether `make quick` notices.

A mutant counts once its covering tests kill it: the quick tests, or, where those pass, the tests outside `make quick` that import
its module. Mutants that no test kills are listed: each is either harmless or a gap in the tests.

    .venv/bin/python tools/mutants.py --seed 1 --count 30
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


class Mutant(NamedTuple):
    file: Path  # below the root
    line: int
    before: str
    after: str
    start: int  # in the file, in characters
    end: int


def mutants(path: Path) -> Iterator[Mutant]:
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def changed(node: ast.expr, after: str) -> Mutant:
        # Columns count UTF-8 bytes.
        def place(line: int, column: int) -> int:
            source = text[starts[line - 1] : starts[line]].encode("utf-8")
            return starts[line - 1] + len(source[:column].decode("utf-8"))

        start, end = place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)
        return Mutant(path.relative_to(ROOT), node.lineno, text[start:end], f"({after})", start, end)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            sides = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield changed(node, f"{sides[0]} {COMPARISONS[type(node.ops[0])]} {sides[1]}")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _text(node):
            yield changed(node, f"{ast.unparse(node.left)} {ARITHMETIC[type(node.op)]} {ast.unparse(node.right)}")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield changed(node, word.join(f"({ast.unparse(value)})" for value in node.values))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield changed(node, ast.unparse(node.operand))


def _text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or isinstance(part, ast.Constant) and isinstance(part.value, str)
        for part in ast.walk(node)
    )


def quick_tests() -> List[str]:
    """Return the folders and files that `make quick` tests, as the Makefile has them."""
    lists = re.findall(r"^(?:SHORT|COMPUTED) := \$\(addprefix tests/,(.*)\)$", (ROOT / "Makefile").read_text(), re.M)
    assert len(lists) == 2, "the Makefile has SHORT and COMPUTED"
    return [f"tests/{name}" for names in lists for name in names.split()]


def covering(mutant: Mutant, quick: List[str]) -> Tuple[List[str], List[str]]:
    """Return the tests that import the module or test its room: those of `make quick`, and the others."""
    parts = mutant.file.with_suffix("").parts[1:]
    module, room = ".".join(parts), parts[1]
    inside, outside = [], []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if module in path.read_text(encoding="utf-8") or name.startswith(f"tests/{room}/"):
            (inside if any(f"{name}/".startswith(f"{each}/") for each in quick) else outside).append(name)
    return inside, outside


def killed(tree: Path, tests: List[str]) -> bool:
    """Return whether one of the tests fails. Most of a mutant's killers are near it, so those come first."""
    if not tests:
        return False
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command + tests, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode in (0, 1, 2, 3, 5), done.stdout.decode()[-2000:]
    return done.returncode in (1, 2, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="mutants that some test kills")
    parser.add_argument(
        "--near", action="store_true", help="only the quick tests that import the module or test its room"
    )
    args = parser.parse_args()
    quick = quick_tests()
    every = [path for path in sorted((ROOT / "src" / "drumbeat").rglob("*.py")) if "train" not in path.parts]
    choice = random.Random(args.seed)
    caught = missed = 0
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "x", "-C", folder], stdin=archive.stdout, check=True)
        archive.wait()
        while caught + missed < args.count:
            candidates = list(mutants(choice.choice(every)))
            if not candidates:
                continue
            mutant = choice.choice(candidates)
            target = tree / mutant.file
            before = target.read_text(encoding="utf-8")
            target.write_text(before[: mutant.start] + mutant.after + before[mutant.end :], encoding="utf-8")
            near, outside = covering(mutant, quick)
            if killed(tree, near) or (not args.near and killed(tree, quick)):
                caught, word = caught + 1, "caught"
            elif args.near:
                missed, word = missed + 1, "not caught near it"
            elif killed(tree, outside):
                missed, word = missed + 1, "missed"
            else:
                survivors.append(mutant)
                word = "survived every test"
            target.write_text(before, encoding="utf-8")
            print(f"{word:20} {mutant.file}:{mutant.line}  {mutant.before!r} -> {mutant.after!r}", flush=True)
    if args.near:
        print(f"the quick tests near them catch {caught} of {caught + missed} mutants")
    else:
        decided = f"{caught} of {caught + missed} mutants that tests kill"
        print(f"make quick catches {decided}; {len(survivors)} survived every test")
    return 0


if __name__ == "__main__":
    sys.exit(main())
