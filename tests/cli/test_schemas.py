"""What each command prints with --json is what its published schema says, and the schema names every key of it."""

import functools
import hashlib
import json
import os
import re

import jsonschema

from drumbeat.cli import schemas
from drumbeat.cli.schemas import SHAPES
from tests.cli.test_json import TAKES
from tests.conftest import ROOT

schema_of = functools.cache(schemas.schema_of)  # each reads the source of its records
SCRIPT = "for i in range(3): print(f'step {i} loss {1 / (i + 1):.3f} tokens/s {100 + i}', flush=True)"
LOG = ROOT / "examples/logs/tcp.log"
SBATCH = ROOT / "examples/run.sbatch"
JOB = ["--ranks-per-node", "1", "--", "python3", "-c", SCRIPT]
COMMANDS = {
    "compare": ["one", "two"],
    "convert": [SBATCH],
    "diagnose": [LOG],
    "doctor": [],
    "facts": [],
    "lint": [SBATCH],
    "list": [],
    "logs": ["one"],
    "nodes": [],
    "plan": ["--nodes", "2", *JOB],
    "predict": ["--model", "llama3-8b", "--gpu", "H100", "--nodes", "1,2"],
    "report": ["one"],
    "site": ["list"],
    "status": [],
    "submit": JOB,
    "tune": ["batch", "--dry-run", "--", "python3", "train.py", "--batch-size", "{batch}"],
    "watch": [],
}
MORE = [
    ("diagnose", ["--rules"]),
    ("nodes", ["exclude", "nid1"]),
    ("plan", ["--site", "olivia", "--render", *JOB]),
    ("plan", ["--against", "1", "--nodes", "2", *JOB]),
    ("predict", ["--model", "llama3-8b", "--gpu", "H100", "--search"]),
    ("site", ["show", "lumi"]),
    ("site", ["image", "mi300x-cx7", "--base", "docker.io/rocm/pytorch"]),
    ("status", ["bad"]),
    ("diagnose", ["bad"]),
]


def strict(schema):
    """The schema, with no room for a key that it does not name."""
    if isinstance(schema, dict):
        closed = {} if "properties" not in schema else {"additionalProperties": False}
        return {**closed, **{key: strict(value) for key, value in schema.items()}}
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


def test_every_command_with_json_has_a_schema():
    assert set(SHAPES) == set(TAKES)
    for name in SHAPES:
        schema = schema_of(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"].startswith(f"drumbeat:{name}:")
    assert "seconds since" in json.dumps(schema_of("report")), "what the source says of a field"


def test_changed_keys_raise_the_version():
    """DRUMBEAT_WRITE_GOLDEN=1 records the keys, once the version beside them is another one."""
    path = ROOT / "tests/golden/schemas.json"
    records, commands = {}, {}
    for name in sorted(SHAPES):
        keys = {}
        collect(schema_of(name), name, keys)
        records.update(keys)
        told = json.dumps(keys, sort_keys=True)
        commands[name] = [schema_of(name)["$id"].split(":")[2], hashlib.sha256(told.encode()).hexdigest()[:12]]
    old = json.loads(path.read_text())["commands"] if path.exists() else {}
    changed = [name for name, (version, keys) in commands.items() if name in old and old[name][1] != keys]
    same = [name for name in changed if old[name][0] == commands[name][0]]
    assert not same, f"other keys in --json of {same}: raise VERSION in cli/schemas.py, or the record's own SCHEMA"
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        lines = [f"  {json.dumps(name)}: {json.dumps(keys)}" for name, keys in sorted(records.items())]
        told = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in commands.items()]
        path.write_text("\n".join(['{"commands": {', ",\n".join(told), '}, "keys": {', ",\n".join(lines), "}}", ""]))
    assert json.loads(path.read_text())["commands"] == commands, "DRUMBEAT_WRITE_GOLDEN=1 records them"


def collect(part, place, found):
    """The keys of each object of a schema, by the record's name or the way to it."""
    if isinstance(part, list):
        for each in part:
            collect(each, place, found)
    if isinstance(part, dict):
        if "properties" in part:
            found[place] = sorted(part["properties"])
        for key, value in part.items():
            if isinstance(value, (dict, list)):
                of_place = place if key in ("properties", "items", "anyOf") else f"{place}.{key}"
                collect(value, key if "$defs" in (key, place) else of_place, found)


def test_outputs_are_what_the_schemas_say(drumbeat):
    for name in ("one", "two"):
        assert drumbeat("run", "--name", name, *JOB).returncode == 0
    bad = ["run", "--name", "bad", "--ranks-per-node", "1", "--", "python3", "-c", "raise ValueError(3)"]
    assert drumbeat(*bad).returncode == 1
    wrong = {}
    for name, words in [*COMMANDS.items(), *MORE]:
        cut = words.index("--") if "--" in words else len(words)
        argv = [name, *words[:cut], "--json", *words[cut:]]
        done = drumbeat.here(*argv)
        values = done.stdout.splitlines() if name == "logs" else [done.stdout]
        for each in values:
            errors = mistakes(name, json.loads(each)) if each else [done.stderr]
            if errors:
                wrong[" ".join(map(str, argv))] = errors[:5]
    assert not wrong, json.dumps(wrong, indent=1)


def mistakes(name, value):
    found = jsonschema.Draft202012Validator(strict(schema_of(name))).iter_errors(value)
    return [(list(each.absolute_path), each.message[:300]) for each in found]


def test_a_schema_is_printed_without_other_arguments(drumbeat):
    done = drumbeat.here("compare", "--json-schema")
    assert done.returncode == 0 and json.loads(done.stdout)["$id"].startswith("drumbeat:compare:")


KEYS = re.compile(r"`(status|diagnose|report)`: (.*?)(?=`(?:status|diagnose|report)`: |\|$)", re.MULTILINE)


def test_the_keys_of_the_page_are_in_the_schemas():
    """docs/agents.md, each key that it names, however deep."""
    rows = KEYS.findall((ROOT / "docs/agents.md").read_text())
    paths = [(name, path) for name, row in rows for path in re.findall(r"`(\.[\w.]+)`", row)]
    assert len(paths) > 12
    for name, path in paths:
        schema = schema_of(name)
        found = [schema]
        for key in path.strip(".").split("."):
            found = [part["properties"][key] for part in opened(schema, found) if key in part.get("properties", {})]
        assert found, f"{name}: {path}"


def opened(schema, parts):
    """What a reference or one of several alternatives stands for."""
    for part in parts:
        if "$ref" in part:
            yield from opened(schema, [schema["$defs"][part["$ref"].rpartition("/")[2]]])
        elif "anyOf" in part:
            yield from opened(schema, part["anyOf"])
        else:
            yield part
