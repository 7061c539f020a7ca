"""The script's own reckoning: patterns that show every mistake, schedules of pairs, and a smoke test that cannot hang it."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[cpu]'")
import torch

from drumbeat.inrank.collective_test import gpu, pair_tests, sweep
from drumbeat.inrank.collective_test.sweep import OPS, Case

SOURCE = Path(gpu.__file__)


@pytest.mark.parametrize("size", [1, 2, 84, 85, 169, 1000, 4096])
def test_sums_stay_exact_in_bfloat16(size):
    total = sweep.total(size, 7)
    assert 0 < int(total.max()) <= sweep.EXACT
    assert torch.equal(total.to(torch.bfloat16).long(), total)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 9, 96])
def test_a_shifted_sum_shows(size):
    """Whatever the number of ranks: data of a neighbouring line, block or buffer must not pass for the right one."""
    total = sweep.tile(sweep.total(size, 3), 1 << 14, torch.zeros(0))
    for shift in (1 << power for power in range(13)):
        assert not torch.equal(total[shift:], total[:-shift]), shift


def test_payloads_differ_between_ranks_targets_and_calls():
    seen = [tuple(sweep.payload(*key).tolist()) for key in itertools.product(range(8), range(8), range(4))]
    assert len(set(seen)) == len(seen) and max(map(max, seen)) < sweep.PERIOD
    stale = sweep.payload(1, 0, 5) == sweep.payload(1, 0, 6)
    assert stale.float().mean() < 0.1, "an output left over from the call before shows"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 64, 100, 512])
def test_rounds_of_pairs(count):
    rounds = pair_tests.matchings(count)
    limit = count - 1 + count % 2 if count <= 4 else math.ceil(math.log2(count)) + count % 2
    assert len(rounds) == (limit if count > 1 else 0)
    met = set()
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members)) == count - count % 2, (
            "everybody has a partner, but one of an odd number"
        )
        assert not met & set(pairs), "a partner is met once"
        met |= set(pairs)


def test_pairs_inside_nodes_come_before_pairs_between_them():
    rounds = pair_tests.pair_rounds([0, 0, 0, 0, 1, 1, 1, 1])
    assert [kind for kind, _ in rounds] == ["inside"] * 3 + ["between"]
    assert rounds[3][1] == {0: 4, 4: 0, 1: 5, 5: 1, 2: 6, 6: 2, 3: 7, 7: 3}, "like with like: each its own NIC"
    assert all(len(partners) == 8 for _, partners in rounds)


def test_uneven_nodes():
    rounds = pair_tests.pair_rounds([0, 1, 1])
    assert rounds == [("inside", {1: 2, 2: 1}), ("between", {0: 1, 1: 0})]


def test_smoke_says_what_torch_sees():
    done = subprocess.run([sys.executable, SOURCE, "0"], capture_output=True, text=True)
    said = json.loads(done.stdout)
    if torch.cuda.is_available():
        assert said["ok"] and done.returncode == 0
    else:
        assert not said["ok"] and done.returncode == 1 and "torch sees no GPU" in said["why"]


def test_a_wedged_driver_does_not_hang_the_rank(tmp_path, monkeypatch):
    (tmp_path / "gpu.py").write_text("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)")
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    monkeypatch.setattr(gpu, "GPU_FILES", ("/",))
    monkeypatch.setattr(gpu, "SMOKE_SECONDS", 0.5)
    smoke = gpu.Smoke("auto")
    said = smoke.answer()
    assert not said["ok"] and "did not answer within 0.5 s" in said["why"]
    assert smoke.child.wait(120) == -9


def test_a_smoke_test_that_dies_is_told(tmp_path, monkeypatch):
    (tmp_path / "gpu.py").write_text("import os; os.abort()")
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    monkeypatch.setattr(gpu, "GPU_FILES", ("/",))
    assert "ended with -6" in gpu.Smoke("auto").answer()["why"]
    assert gpu.Smoke("gloo").answer()["gpu"] is None, "gloo was asked for: no GPU is touched"


@pytest.mark.parametrize(
    "shown,index", [({}, 3), ({"CUDA_VISIBLE_DEVICES": "5"}, 0), ({"HIP_VISIBLE_DEVICES": "0,1,2,3"}, 3)]
)
def test_which_gpu_is_the_ranks_own(monkeypatch, shown, index):
    for vendor in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{vendor}_VISIBLE_DEVICES", raising=False)
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert gpu.own_gpu() == index


def by_hand(op, inputs, part, rank, salt):
    """The result of a collective, from the inputs of all ranks."""
    mine = slice(rank * part, (rank + 1) * part)
    results = {
        "all_reduce": lambda: sum(inputs),
        "all_gather": lambda: torch.cat(inputs),
        "reduce_scatter": lambda: sum(inputs)[mine],
        "all_to_all": lambda: torch.cat([each[mine] for each in inputs]),
        "broadcast": lambda: inputs[salt % len(inputs)],
        "send_recv": lambda: inputs[rank - 1],
    }
    return results[op]()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", OPS)
def test_what_a_rank_expects_is_what_the_others_send(op, size):
    worlds = [SimpleNamespace(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
    cases = [Case(world, op, 4096, torch.float32) for world in worlds]
    for salt in (1, 4):
        for case in cases:
            case.fill(salt)
        for rank, case in enumerate(cases):
            want = torch.cat([elements for _, elements in case.expected(salt)])
            assert torch.equal(want, by_hand(op, [each.input for each in cases], case.part, rank, salt))
            assert len(want) == len(case.output) and case.part * size == case.whole
            assert case.output is case.input or not torch.equal(case.output, want), "an untouched output shows"


def test_sizes_and_rates_are_those_of_nccl_tests():
    world = SimpleNamespace(rank=0, size=4, device=torch.device("cpu"))
    cases = {op: Case(world, op, 4096, torch.float32) for op in OPS}
    assert {op: case.bytes for op, case in cases.items()} == dict.fromkeys(OPS, 4096)
    assert [cases[op].factor() for op in OPS] == [1.5, 0.75, 0.75, 0.75, 1.0, 1.0]
    assert Case(world, "all_gather", 1, torch.bfloat16).bytes == 4 * 2, "never less than one element per rank"
