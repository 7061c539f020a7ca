"""Our own recipes, two gloo ranks: tune writes their settings itself, and what a recipe refuses is told in its words."""

import json
import sys

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[cpu]'")

RECIPE = (sys.executable, "-m", "drumbeat", "train")
SMALL = ("length=32", "validation=0", "batch=4")


def tune(drumbeat, what, *words, recipe="llama", sets=()):
    flags = ("--ranks-per-node", 2, "--steps", 5, "--json", *words)
    done = drumbeat("tune", what, *flags, "--", *RECIPE, recipe, "--set", *SMALL, *sets, timeout=170)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_batch(drumbeat):
    """4 samples a step on 2 ranks: micro-batch 1 in two pieces, then 2 in one."""
    answer = tune(drumbeat, "batch", "--seconds", 60, sets=("data=synthetic", "accumulate=2"))
    tried = [(each["point"]["batch"], each["point"]["accumulate"], each["outcome"]) for each in answer["trials"]]
    assert tried == [(1, 2, "ok"), (2, 1, "ok"), (2, 1, "ok")]
    assert all(each["unit"] == "tokens/s" and each["speed"] > 0 for each in answer["trials"])
    assert answer["words"] in ("--set batch=4 accumulate=1", "--set batch=4 accumulate=2")


def test_hooks_are_compared_after_the_same_steps(drumbeat):
    answer = tune(drumbeat, "hooks", "--hooks", "all-reduce,powersgd:1", sets=("data=synthetic",))
    plain, powersgd = answer["trials"]
    assert [plain["outcome"], powersgd["outcome"]] == ["ok", "ok"], answer
    assert plain["loss"] and powersgd["loss"] and plain["loss"] != powersgd["loss"]


def test_layouts_that_a_recipe_refuses_do_not_count(drumbeat):
    """bert takes no tensor parallelism: it says so, and the next one is tried."""
    answer = tune(drumbeat, "layout", "--candidates", 3, recipe="bert", sets=("layout=ddp",))
    outcomes = {each["point"]["layout"]: each["outcome"] for each in answer["trials"]}
    assert list(outcomes)[:3] == ["dp_replicate=2", "dp_shard=2", "tp=2"]
    assert outcomes["dp_replicate=2"] == outcomes["dp_shard=2"] == "ok" and outcomes["tp=2"] == "refused"
    assert len(outcomes) == 5  # all there are
    assert "bert runs with layouts ddp" in next(
        each["why"] for each in answer["trials"] if each["point"]["layout"] == "tp=2"
    )
    assert answer["recommended"]["outcome"] == "ok" and answer["words"].startswith("--layout dp_")
