"""The part of drumbeat.pyz that travels to pods: small, complete, and the same code without its docstrings."""

import ast
import lzma
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from drumbeat.bundle.build import bundle_bytes
from drumbeat.bundle.payload import packed, without_docstrings, without_types

SOURCE = Path(__file__).parent.parent.parent / "src"
IMPORT_ALL = """
import importlib, sys, zipfile
sys.path.insert(0, sys.argv[1])
for name in zipfile.ZipFile(sys.argv[1]).namelist():
    if name.startswith("drumbeat/") and name.endswith(".py") and not name.startswith("drumbeat/inrank/"):
        importlib.import_module(name[: -len(".py")].replace("/", ".").removesuffix(".__init__"))
from drumbeat.logs.meaning.rules import rulebook
from drumbeat.metrics.table import rules
print(len(rulebook().rules), len(rules()))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("payload") / "drumbeat.pyz"
    path.write_bytes(bundle_bytes())
    return path


@pytest.fixture(scope="module")
def payload(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("payload") / "node.pyz"
    path.write_bytes(lzma.decompress(packed(str(whole))))
    return path


def test_it_leaves_room_to_grow(whole):
    data = packed(str(whole))
    assert len(data) < 500_000, "a config map holds 1 MiB, as text in a secret it is a quarter more"
    assert data == packed(str(whole))


def test_every_module_in_it_finds_what_it_imports(payload, tmp_path):
    """Imports inside functions too: the modules that they name are there."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(payload)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(int(count) > 10 for count in done.stdout.split()), "rules and formats came along"


def test_what_only_the_desk_needs_stays_there(payload):
    rooms = {name.split("/")[1] for name in zipfile.ZipFile(payload).namelist() if name.endswith(".py") and "/" in name}
    assert rooms.isdisjoint({"api", "convert", "jobfile", "report", "train", "tune"})
    assert {"agent", "causes", "inrank", "logs", "machine", "runfolder"} <= rooms


@pytest.mark.parametrize("words", [["status"], ["run", "--", "true"], []])
def test_a_command_of_the_desk_is_refused_in_one_line(payload, words):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(payload), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "where you submit jobs" in done.stderr


class Untyped(ast.NodeTransformer):
    """Takes out what `without_types` takes out."""

    inside = False  # a function

    def visit_FunctionDef(self, node):
        node.returns = None
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        inside, self.inside = self.inside, True
        self.generic_visit(node)
        self.inside = inside
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        inside, self.inside = self.inside, False
        self.generic_visit(node)
        self.inside = inside
        return node

    def visit_AnnAssign(self, node):
        one_line = node.lineno == node.annotation.end_lineno
        if not (self.inside and node.value and one_line):
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def test_only_docstrings_and_types_are_taken_out():
    """Line numbers, too, stay: they stand in tracebacks that people send."""
    for path in sorted(SOURCE.rglob("*.py")):
        before = Untyped().visit(ast.parse(path.read_bytes()))
        after = ast.parse(without_docstrings(without_types(path.read_bytes())))
        for tree in (before, after):
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if (
                    isinstance(body, list)
                    and body
                    and isinstance(body[0], ast.Expr)
                    and isinstance(body[0].value, ast.Constant)
                ):
                    del body[0]
        statements = [
            [(type(n), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.stmt)] for tree in (before, after)
        ]
        assert ast.dump(before) == ast.dump(after) and statements[0] == statements[1], path
