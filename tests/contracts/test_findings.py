"""Findings are data: each code in Python is in the YAML and the other way round, and each template gets its values."""

import ast
import re
from pathlib import Path

import pytest

from drumbeat.findings.catalog import FIELDS, NAME, WORDS, entries, filled
from drumbeat.findings.model import SEVERITIES

ROOT = Path(__file__).parent.parent.parent
SRC = ROOT / "src" / "drumbeat"
FILES = sorted(path.stem for path in (SRC / "findings").glob("*.yaml"))
KEYS = {"severity", "source", "means", *WORDS}


def trees():
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "find" in text:
            yield path, ast.parse(text)


def catalogs():
    """Module -> name there -> file, where a module makes or imports a catalog."""
    made, imported = {}, []
    for path, tree in trees():
        module = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if getattr(node.value.func, "id", "") == "Catalog":
                    made.setdefault(module, {})[node.targets[0].id] = node.value.args[0].value
            elif isinstance(node, ast.ImportFrom):
                imported += [(module, node.module, name.name) for name in node.names]
    for module, source, name in imported:
        if name in made.get(source, {}):
            made.setdefault(module, {})[name] = made[source][name]
    return made


def calls():
    """Each call of a catalog: its place, its file, the codes and variants it may give, and its keywords."""
    made = catalogs()
    for path, tree in trees():
        names = made.get(".".join(path.relative_to(SRC.parent).with_suffix("").parts), {})
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names:
                keywords = {keyword.arg for keyword in node.keywords}
                texts = [literals(each) for each in node.args]
                place = f"{path.relative_to(SRC)}:{node.lineno}"
                yield place, names[node.func.id], texts[0], texts[1] if texts[1:] else [""], keywords


def literals(node):
    """The texts that an expression may be; None if it is computed elsewhere."""
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.IfExp):
        both = literals(node.body), literals(node.orelse)
        return None if None in both else both[0] + both[1]
    return None


def names_in(entry):
    return {found[0] for key in WORDS for found in NAME.findall(entry.get(key, ""))}


def test_every_call_has_an_entry_and_gives_its_values():
    wrong = []
    for place, file, codes, variants, keywords in calls():
        if codes is None or variants is None or None in keywords:
            continue
        known = entries(file)
        wanted = [f"{code}/{variant}" if variant else code for code in codes for variant in variants]
        wrong += [f"{place}: {file}.yaml has no {name}" for name in wanted if name not in known]
        found = [known[name] for name in wanted if name in known]
        for name, entry in zip(wanted, found):
            missing = names_in(entry) - keywords
            wrong += [f"{place}: {name} needs {', '.join(sorted(missing))}"] if missing else []
            if not (entry.get("severity") or "severity" in keywords):
                wrong.append(f"{place}: {name} has no severity")
        used = FIELDS.union(*map(names_in, found)) if found else keywords
        wrong += [f"{place}: nothing uses {', '.join(sorted(keywords - used))}"] if keywords - used else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", FILES)
def test_every_entry_is_used_and_well_formed(file):
    python = "\n".join(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    literal = set(re.findall(r'"([a-z0-9-]+)"', python))
    for name, entry in entries(file).items():
        code, _, variant = name.partition("/")
        assert set(entry) <= KEYS and entry["title"], name
        assert entry.get("severity") in (None, *SEVERITIES), name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code), name
        given = code in literal or (code.startswith("hang-") and code[len("hang-") :] in literal)
        assert given and (not variant or variant in literal), f"{file}.yaml: nothing gives {name}"
        assert not entry["title"].endswith("."), name


@pytest.mark.parametrize("file", FILES)
def test_every_code_is_documented(file):
    page = (ROOT / "docs" / "codes.md").read_text(encoding="utf-8")
    codes = [code for code, entry in entries(file).items() if entry.get("severity") not in ("ok", "info")]
    assert not [code for code in codes if "/" not in code and f"`{code}`" not in page]


def test_no_words_of_a_finding_are_left_in_python():
    """A Finding is made by a catalog, by a rule, or from what a program printed."""
    made = {
        str(path.relative_to(SRC))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
    }
    assert made - {path for path in made if path.startswith("logs/")} == WITHOUT


# Here the words come from elsewhere: a rule, a job file's problem, a program's output, a record.
WITHOUT = {"findings/catalog.py", "cli/lint.py", "lint/engine.py", "agent/ranks/ends.py"}


def test_templates():
    assert filled("{n:rank} of {all}", {"n": 1, "all": 4}) == "1 rank of 4"
    assert filled("{n:process} took {s:.1f} s[ ({why})]", {"n": 2, "s": 1.25, "why": ""}) == "2 processes took 1.2 s"
    assert filled("set env: {A: 1}[, {why}]", {"why": "now"}) == "set env: {A: 1}, now"
    with pytest.raises(KeyError):
        filled("{missing}", {})
