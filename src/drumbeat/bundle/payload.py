"""The part of drumbeat.pyz that travels to pods in a config map or a secret, which hold 1 MiB.

The list of files is computed: everything that the node's commands import, at the top of a file or inside a function, with the
data of every package that those files name. Byte code, docstrings, types and PyYAML are left out; every line keeps its number.
"""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import zipfile
from typing import Iterator, List, Mapping, Set, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.bundle.cache import cache_folder, intact, keep, remove_old, sealed

LARGEST = 800_000  # bytes: a config map and a secret hold 1 MiB, and encoded as text it grows by a quarter
_ENTRY, _WHOLE = "drumbeat.cli.node_entry", "drumbeat.cli.entry"
# Read as text, copied beside the ranks or run there: no import leads to it.
_IN_RANKS = "drumbeat/inrank/"
_YAML = "yaml/"  # stays at the desk: what nodes read of YAML files has a JSON twin
_DOCSTRING = regex(rb'(\A|:\n([ \t]+))"""(?:[^"\\]|\\.|"(?!""))*"""(?=\n(\n*\2[^\s#.])?)', re.DOTALL)
_INDENT = regex(rb'("""(?:[^"\\]|\\.|"(?!""))*""")|^(?: {4})+', re.DOTALL | re.MULTILINE)  # not inside a text
_DATA = regex(rb'"(drumbeat\.[\w.]+)"(?:, "(\w+)"\))?')  # one file of a package, or all of them
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FINDINGS = "drumbeat/findings"
_CATALOG = regex(rb'Catalog\("(\w+)"\)')
_IMPORT = regex(rb"(?m)^[ \t]*from (drumbeat[\w.]*) import (?:\(([^)]*)\)|([^\n]*))")


def cached_payload(bundle: str, environ: Mapping[str, str]) -> bytes:
    """Return the payload of a bundle, packed once (which takes two seconds) and cached. If it cannot be cached, pack it each
    time."""
    with open(bundle, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    try:
        path = os.path.join(cache_folder(environ), f"drumbeat-{digest[:16]}.payload")
        data = intact(path)
        if not data:
            data = packed(bundle)
            keep(path, sealed(data))
            remove_old(os.path.dirname(path), ".payload")
        return data
    except (OSError, Problem):
        return packed(bundle)


def packed(bundle: str) -> bytes:
    """Return the payload of a bundle, compressed: the same bytes for the same bundle."""
    with zipfile.ZipFile(bundle) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".pyc") and not name.startswith(_YAML)]
        files = {name: archive.read(name) for name in names}
    files["__main__.py"] = files["__main__.py"].replace(_WHOLE.encode(), _ENTRY.encode())
    files["drumbeat/cli/__init__.py"] = b""  # the table of commands that people type
    needed = node_files(files)
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w", zipfile.ZIP_STORED) as target:
        for name, data in sorted(files.items(), key=lambda item: (item[0].rpartition(".")[2], item[0])):
            if name in needed or not name.startswith("drumbeat/"):
                text = without_docstrings(without_types(data)) if name.endswith(".py") else data
                if name.startswith("drumbeat/logs/rules/") and name.endswith(".json"):
                    text = _without_sources(data)
                elif name == "drumbeat/logs/meaning/model.py":  # nodes read by the grammar alone
                    text = _NO_MODEL
                elif name == "drumbeat/logs/meaning/weights.json":
                    text = _other_codes(data, files["drumbeat/logs/meaning/words.json"])
                target.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    whole = lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)  # a fifth smaller than gzip
    if len(whole) > LARGEST:
        raise Problem(f"drumbeat.pyz is {len(whole)} bytes packed, more than travels to pods ({LARGEST})")
    return whole


_NO_MODEL = b"NO_CAUSES = ()\ndef likely(text):\n return {}\ndef guess(text):\n return ''\n"


def _other_codes(weights: bytes, words: bytes) -> bytes:
    """Return the model's codes that no grammar row has: the only values that nodes need from it."""
    rows = {code for row in json.loads(words)["rows"] for code in row}
    return json.dumps({"codes": [code for code in json.loads(weights)["codes"] if code not in rows]}).encode()


def _without_sources(data: bytes) -> bytes:
    """Leave out the sources of rules: nodes do not use them."""
    rules = [{**rule, "source": "-"} for rule in json.loads(data)]
    for rule in rules:
        if rule.get("role") == "noise" or rule.get("role") == "note" and "explains" not in rule:  # not shown on nodes
            rule.update(title="-", cause="-", fix="-")
    return json.dumps(rules, separators=(",", ":")).encode()


def node_files(files: Mapping[str, bytes]) -> Set[str]:
    """Return the names of the files that a node's commands can reach."""
    needed: Set[str] = set()
    modules = [_ENTRY, *(_module(name) for name in files if name.startswith(_IN_RANKS) and name.endswith(".py"))]
    while modules:
        module = modules.pop()
        file = _file(module, files)
        if not file or file in needed:
            continue
        needed.add(file)
        parts = module.split(".")
        modules += [".".join(parts[:count]) for count in range(1, len(parts))]
        modules += _imports(files[file])
    data = {found.groups() for name in needed for found in _DATA.finditer(files[name])}
    data |= {(_module(_FINDINGS).encode(), found[1]) for name in needed for found in _CATALOG.finditer(files[name])}
    for name in files:
        folder, _, file = name.rpartition("/")
        package, (stem, _, ending) = _module(folder).encode(), file.partition(".")
        if ending in ("json", "sh") and {(package, stem.encode()), (package, None)} & data:
            needed |= {name, f"{folder}/__init__.py"}
    return needed


def without_docstrings(data: bytes) -> bytes:
    """Replace each docstring by as many empty lines, or by an empty string where it is the whole body; indent with tabs."""
    data = _DOCSTRING.sub(
        lambda found: (b":\n" if found[3] else found[1] + b'""') + b"\n" * found[0][len(found[1]) :].count(b"\n"), data
    )
    return _INDENT.sub(lambda found: found[1] or b"\t" * (len(found[0]) // 4), data)


def without_types(data: bytes) -> bytes:
    """Remove type annotations of parameters, results and variables of functions. A test compares the syntax trees of all
    files."""
    lines = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    spans: List[Tuple[int, int]] = []

    def at(node: ast.AST) -> Tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.arg) and node.annotation:
            spans.append((at(node)[0] + len(node.arg.encode()), at(node.annotation)[1]))
        elif (
            isinstance(node, ast.AnnAssign) and in_function and node.value and node.lineno == node.annotation.end_lineno
        ):
            spans.append((at(node.target)[1], at(node.annotation)[1]))
        elif isinstance(node, _FUNCTIONS) and node.returns:
            begin, end = at(node.returns)
            spans.append((data.rindex(b")", 0, data.rindex(b"->", 0, begin)) + 1, end))
        for child in ast.iter_child_nodes(node):
            visit(child, isinstance(node, _FUNCTIONS) or in_function and not isinstance(node, ast.ClassDef))

    visit(ast.parse(data), False)
    parts, end = [], 0
    for begin, after in sorted(spans):
        parts += [data[end:begin], b"\n" * data.count(b"\n", begin, after)]
        end = after
    return b"".join(parts) + data[end:]


def _imports(data: bytes) -> Iterator[str]:
    for found in _IMPORT.finditer(data):
        package = found[1].decode()
        yield package
        for name in (found[2] or found[3]).decode().split(","):
            yield f"{package}.{name.split(' as ')[0].strip()}"


def _file(module: str, files: Mapping[str, bytes]) -> str:
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in files), "")


def _module(name: str) -> str:
    return name[: -len(".py")].replace("/", ".") if name.endswith(".py") else name.replace("/", ".")
