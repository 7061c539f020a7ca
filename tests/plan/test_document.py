"""docs/environment.md is made from the tables, and the tables hold all that is ever set."""

import re
from pathlib import Path

from tools.reference.environment import page as environment_page

from drumbeat.machine.vendors import VENDORS
from drumbeat.plan.scene import FABRICS, fits, known_early, parse, still_open
from drumbeat.plan.show import _condition
from drumbeat.plan.variables import COMPUTED, DEAD, DEBUGGING, OLD, SETTINGS, SPELT
from tests.plan.making import order

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_current():
    page = (ROOT / "docs/environment.md").read_text()
    assert page == environment_page(), "python -m tools.reference"


def test_every_variable_the_code_names_is_in_the_page():
    page = environment_page()
    source = ROOT / "src/drumbeat"
    files = (source / "plan/environment.py", *(source / "machine/vendors").glob("*.py"))
    named = {name for file in files for name in re.findall(r'EnvVar\(\s*"([A-Z_]+)"', file.read_text())}
    named |= {name for vendor in VENDORS for name in (*vendor.visibility[:1], *(cache[0] for cache in vendor.caches))}
    assert len(named) > 8 and all(f"## `{name}`" in page for name in named)


def test_entries_are_whole():
    for entry in (*SETTINGS, *COMPUTED):
        assert entry.why and entry.reference and entry.name in SPELT, entry.name
    for rule in SETTINGS:
        assert set(rule.when.get("fabric", "roce").split("|")) <= set(FABRICS), rule.name
    assert not set(DEAD) & set(OLD)
    for name in (*[dead.use for dead in DEAD.values() if dead.use], *OLD.values(), *DEBUGGING):
        assert name in SPELT or name in DEBUGGING, name


def test_one_setting_at_most_fits_a_machine():
    """Rules for one name must exclude each other: the first would win by chance."""
    for rule in SETTINGS:
        same = [other for other in SETTINGS if other.name == rule.name and other.value != rule.value]
        for other in same:
            assert any(
                key in other.when and not set(rule.when[key].split("|")) & set(other.when[key].split("|"))
                for key in rule.when
            ), (rule.name, rule.value, other.value)


def test_every_condition_has_words():
    """Nothing known: whatever a node decides can be said after an `if`."""
    for entry in COMPUTED:
        open_part = still_open(entry.needs, known_early(order()))
        assert open_part is None or _condition(open_part) or not open_part, entry.name
    assert all(_condition(rule.when) for rule in SETTINGS if "nodes" not in rule.when and "mpi" not in rule.when)


def test_a_condition_before_any_node_is_seen():
    known = {"fabric": ("slingshot", "efa"), "nodes": ("many",), "gpus-used": ("4",)}
    assert still_open({"nodes": "many", "gpus-used": "<8"}, known) == {}
    assert still_open({"fabric": "roce|infiniband"}, known) is None and still_open({"gpus-used": ">4"}, known) is None
    assert still_open({"fabric": "slingshot", "rocm": "<6.2"}, known) == {"fabric": "slingshot", "rocm": "<6.2"}


def test_versions():
    assert parse("6.2.4-120") == (6, 2, 4) and parse("v2.21.5+cuda") == (2, 21, 5) and parse("") is parse(None) is None
    assert fits("<6.2", "6.1.9") and not fits("<6.2", "6.10") and fits(">=2.21", "2.21") and not fits(">2.21", "2.21.0")
    assert not fits("<6.2", None) and fits("<6.2 or unknown", None)
