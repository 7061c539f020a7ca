"""Our own recipes, two gloo ranks: tune writes their settings itself, and what a recipe refuses is told in its words."""

import json
import sys

import pytest

from tests.conftest import need_torch

need_torch("needs torch")
pytestmark = pytest.mark.timeout(600)  # torch starts twice a trial, and takes its time on a busy machine

RECIPE = (sys.executable, "-m", "drumbeat", "train")
SMALL = ("length=32", "validation=0")


def tune(drumbeat, what, *words, recipe="llama", sets=(), ranks=2):
    limits = ("--seconds", 250, "--silence", 250)  # torch may take minutes to start beside others
    flags = ("--ranks-per-node", ranks, "--steps", 5, *limits, "--json", *words)
    done = drumbeat("tune", what, *flags, "--", *RECIPE, recipe, "--set", *SMALL, *sets, timeout=580)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.proof
def test_batch(drumbeat):
    """2 samples per step: micro-batch 1 in two pieces, then 2 in one. One rank is enough: each takes seconds to import torch."""
    answer = tune(drumbeat, "batch", sets=("data=synthetic", "batch=2", "accumulate=2"), ranks=1)
    tried = [(each["point"]["batch"], each["point"]["accumulate"], each["outcome"]) for each in answer["trials"]]
    assert tried == [(1, 2, "ok"), (2, 1, "ok"), (2, 1, "ok")]
    assert all(each["unit"] == "tokens/s" and each["speed"] > 0 for each in answer["trials"])
    assert answer["words"] in ("--set batch=2 accumulate=1", "--set batch=2 accumulate=2")


@pytest.mark.proof
def test_what_a_recipe_refuses_is_told_in_its_words(drumbeat):
    """FSDP takes no hook but its own."""
    answer = tune(drumbeat, "hooks", "--hooks", "all-reduce,bf16", sets=("data=synthetic", "batch=4", "layout=fsdp"))
    own, other = answer["trials"]
    assert (own["outcome"], other["outcome"]) == ("ok", "refused"), answer
    assert "DDP" in other["why"] and own["loss"] > 0
    assert answer["words"] == "--set hook=all-reduce"


@pytest.mark.parametrize(
    "layouts", [("dp_replicate=2",), pytest.param(("dp_replicate=2", "dp_shard=2"), marks=pytest.mark.proof)]
)
def test_layouts(drumbeat, layouts):
    """Those that this recipe takes come first: replicas, then shards."""
    answer = tune(drumbeat, "layout", "--candidates", len(layouts), recipe="bert", sets=("batch=4",))
    tried = [(each["point"]["layout"], each["outcome"]) for each in answer["trials"]]
    assert tried == [(layout, "ok") for layout in layouts]
    assert answer["words"] in [f"--layout {layout}" for layout in layouts]
