"""Findings are data: each code in Python is in the YAML and the other way round, and each template gets its values."""

import ast
import functools
import re

import pytest

from drumbeat.findings.catalog import FIELDS, NAME, WORDS, entries, filled
from drumbeat.findings.model import SEVERITIES
from tests.conftest import ROOT
from tests.contracts.source import SRC, of_each_file, text_of

FILES = sorted(path.stem for path in (SRC / "findings").glob("*.yaml"))
KEYS = {"severity", "source", "means", *WORDS}


@of_each_file
def catalogs_in(path, nodes):
    """Each catalog that a file makes: its name there, and its YAML file."""
    assigned = [each for each in nodes if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    return [
        (each.targets[0].id, each.value.args[0].value)
        for each in assigned
        if getattr(each.value.func, "id", "") == "Catalog"
    ]


@of_each_file
def imports_in(path, nodes):
    imports = [each for each in nodes if isinstance(each, ast.ImportFrom)]
    return [(each.module, name.name) for each in imports for name in each.names]


@of_each_file
def calls_in(path, nodes):
    """Each call of a plain name: the name, its line, what its arguments may be, and its keywords."""
    made = [each for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    return [
        (each.func.id, each.lineno, [literals(one) for one in each.args], {one.arg for one in each.keywords})
        for each in made
    ]


def module_of(path):
    return ".".join(path.relative_to(SRC.parent).with_suffix("").parts)


def catalogs():
    """Module -> name there -> file, where a module makes or imports a catalog."""
    made = {module_of(path): dict(found) for path, found in catalogs_in().items() if found}
    for path, imported in imports_in().items():
        for source, name in imported:
            if name in made.get(source, {}):
                made.setdefault(module_of(path), {})[name] = made[source][name]
    return made


def calls():
    """Each call of a catalog: its place, its file, the codes and variants it may give, and its keywords."""
    made = catalogs()
    for path, called in calls_in().items():
        names = made.get(module_of(path), {})
        for name, line, texts, keywords in called:
            if name in names:
                place = f"{path.relative_to(SRC)}:{line}"
                yield place, names[name], texts[0], texts[1] if texts[1:] else [""], keywords


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


@functools.lru_cache(maxsize=1)
def literals_in_python():
    return set(re.findall(r'"([a-z0-9-]+)"', "\n".join(text_of(path) for path in SRC.rglob("*.py"))))


@pytest.mark.parametrize("file", FILES)
def test_every_entry_is_used_and_well_formed(file):
    literal = literals_in_python()
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
        for path, called in calls_in().items()
        if any(name == "Finding" for name, *_ in called)
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


@pytest.mark.parametrize("file", FILES)
def test_values_are_named_unlike_other_fields(file):
    """A value named like a field sets it: `local` is a bool, and a text there makes the finding unreadable."""
    used = {name for entry in entries(file).values() for text in entry.values() for name, _ in NAME.findall(text)}
    assert used & FIELDS <= {"node", "host", "rank"}
