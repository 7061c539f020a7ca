"""The plan of each machine, against the one that was reviewed line by line; and what must hold on all of them."""

import json
import os
from pathlib import Path

import pytest

from tests.plan.archetype import plans_of, shown
from tests.trees.archetypes import NAMES

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", NAMES)
def test_plan_is_as_reviewed(name):
    plans = plans_of(name, nodes=1 if name == "slingshot-single-node" else 2)
    text = json.dumps(shown(plans[0]), indent=1, ensure_ascii=False) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "review the difference, then DRUMBEAT_WRITE_GOLDEN=1 to record it"
    for plan in plans:
        bound = [slot.cpus for slot in plan.binding.slots]
        assert len({cpu for cpus in bound for cpu in cpus}) == sum(map(len, bound)), "two ranks share a core"


def test_lumi_masks_are_those_of_the_user_guide():
    plan = plans_of("lumi-g")[1]
    assert plan.binding.mask_cpu == (
        "0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000"
    )
    assert [slot.cores for slot in plan.binding.slots] == [
        "49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47",
    ]  # fmt: skip
    assert [slot.nic for slot in plan.binding.slots] == ["cxi0", "cxi0", "cxi1", "cxi1", "cxi2", "cxi2", "cxi3", "cxi3"]


def test_nodes_of_a_cluster_get_their_own_values_only_where_they_differ():
    first, second = plans_of("mi300x-thor2")
    values = [{each.name: each.value for each in plan.variables} for plan in (first, second)]
    assert {name for name in values[0] if values[0][name] != values[1].get(name)} == {
        "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    }  # fmt: skip
    assert first.rendezvous.address == second.rendezvous.address
