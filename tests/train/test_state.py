"""A save copies what is there now, whatever happened since the last one; and one that fails costs only itself."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from gloo_world import GlooWorld
from torch import nn

from drumbeat.cli import main
from drumbeat.train.checkpoint.checkpoints import free_bytes
from drumbeat.train.checkpoint.folder import committed
from drumbeat.train.checkpoint.state import TrainingState
from drumbeat.train.optim import MasterAdamW
from drumbeat.train.refusal import Refusal


def stepped(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def made(kind: Any = torch.optim.AdamW) -> Tuple[nn.Module, Any, TrainingState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.5}, {"params": list(model[1].parameters())}]
    optimizer = kind(groups, lr=0.1)
    stepped(optimizer)
    return model, optimizer, TrainingState([model], optimizer)


def same(a: Dict[str, Any], b: Dict[str, Any]) -> bool:
    pairs = [(a[kind][key], b[kind][key]) for kind in ("model", "optimizer") for key in b[kind]]
    return all(torch.equal(x, y) for x, y in pairs) and a["groups"] == b["groups"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, MasterAdamW])
def test_a_copy_is_of_now_and_does_not_move(kind: Any) -> None:
    model, optimizer, state = made(kind)
    first, arrived = state.copied()
    arrived()
    assert same(first, state.now())
    kept = {key: value.clone() for key, value in first["model"].items()}
    room = first["model"]["0.weight"].data_ptr()
    optimizer.param_groups[0]["lr"] = 0.025
    model(torch.randn(8, 4))  # moves the running means
    stepped(optimizer)
    assert all(torch.equal(first["model"][key], value) for key, value in kept.items()), "training does not reach it"
    assert not same(first, state.now())
    second, _ = state.copied()
    assert same(second, state.now()) and second["model"]["0.weight"].data_ptr() == room, "into the same memory"
    values = {name: dict(second["groups"][name]) for name in ("0.weight", "1.bias")}
    assert (values["0.weight"]["lr"], values["1.bias"]["lr"]) == (0.025, 0.1)
    assert values["0.weight"]["weight_decay"] == 0.5 != values["1.bias"]["weight_decay"]
    assert set(optimizer.param_groups[0]) == {*values["0.weight"], "params"}, "nothing of ours stays in the groups"


def test_tensors_that_were_replaced_are_found_again() -> None:
    model, optimizer, state = made()
    state.copied()
    model[0].weight.data = torch.full((4, 4), 7.0)  # other memory under the same parameter
    assert torch.equal(state.copied()[0]["model"]["0.weight"], torch.full((4, 4), 7.0))
    optimizer.load_state_dict(optimizer.state_dict())  # other tensors for the same parameters
    stepped(optimizer)
    copy, _ = state.copied()
    assert same(copy, state.now())
    assert float(copy["optimizer"]["state.0.weight.step"]) == 2
    model[1].running_mean = torch.full((4,), 3.0)
    assert torch.equal(state.copied()[0]["model"]["1.running_mean"], torch.full((4,), 3.0))


def test_what_was_copied_can_be_restored() -> None:
    _, optimizer, state = made()
    optimizer.param_groups[1]["lr"] = 0.7
    copy, _ = state.copied()
    kept = {**copy, "model": {k: v.clone() for k, v in copy["model"].items()}}
    kept["optimizer"] = {k: v.clone() for k, v in copy["optimizer"].items()}
    stepped(optimizer)
    optimizer.param_groups[1]["lr"] = 0.0
    assert not same(state.now(), kept)
    state.restore(kept)
    assert same(state.now(), kept) and optimizer.param_groups[1]["betas"] == (0.9, 0.999)


class Nested(torch.optim.SGD):
    """An optimizer whose state is nested, has numbers in it, and is in dtypes of its own."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            inner = self.state[p].setdefault("inner", {"sums": [torch.zeros(3, dtype=torch.float64)], "calls": 0})
            inner["sums"][0] += p.detach().double().sum() / 3
            inner["calls"] += 1


OPTIMIZERS: Dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True),
    "master": MasterAdamW,
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "plain sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "nested": Nested,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_tensor_comes_back_bit_by_bit_in_its_dtype(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    from drumbeat.train.checkpoint.checkpoints import Checkpoints

    def fresh() -> Tuple[nn.Module, Any, Checkpoints]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
        used = list(model.parameters())[:-1]
        optimizer = OPTIMIZERS[kind]([{"params": used[:2]}, {"params": used[2:]}], lr=0.1)
        return model, optimizer, Checkpoints(str(tmp_path), [model], optimizer)

    model, optimizer, saves = fresh()
    for _ in range(3):
        model(torch.randn(8, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.3
    saves.save(3, {"sample": 7}, wait=True)
    want = saves.state.now()
    _, again, loads = fresh()
    assert loads.load(["sample"]) == (3, {"sample": 7}, [])
    got = loads.state.now()
    for part in ("model", "optimizer"):
        assert set(got[part]) == set(want[part])
        for name, value in want[part].items():
            if isinstance(value, torch.Tensor):
                assert got[part][name].dtype == value.dtype, name
                assert torch.equal(got[part][name], value), name
            else:
                assert got[part][name] == value
    assert got["groups"] == want["groups"] and again.param_groups[1]["lr"] == 0.3


def test_a_checkpoint_in_another_precision_is_refused_by_name(tmp_path: Path) -> None:
    from drumbeat.train.checkpoint.checkpoints import Checkpoints

    def of(dtype: torch.dtype, kind: Any) -> Checkpoints:
        model = nn.Linear(4, 4).to(dtype)
        optimizer = kind(model.parameters())
        stepped(optimizer)
        return Checkpoints(str(tmp_path), [model], optimizer)

    of(torch.bfloat16, MasterAdamW).save(1, {}, wait=True)
    with pytest.raises(Refusal, match=r"step-00000001: model.\w+ was saved as torch.bfloat16 and is torch.float32"):
        of(torch.float32, MasterAdamW).load([])
    with pytest.raises(
        Refusal, match=r"holds the state of MasterAdamW, and this run uses AdamW; resume with the optim"
    ):
        of(torch.bfloat16, torch.optim.AdamW).load([])


SMALL = ["steps=6", "batch=2", "validation=0", "report_every=1", "save_every=2"]


def test_a_failed_background_save_is_said_and_latest_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-00000004").write_text("a file where a folder should be")
    assert main(["train", "llama", "--set", *SMALL, f"checkpoint={tmp_path}", f"figures=jsonl={tmp_path}/f"]) == 0
    said = capsys.readouterr().out
    assert "the checkpoint of step 4 FAILED: " in said and "step 6/6" in said
    ends = [json.loads(line) for line in (tmp_path / "f").read_text().splitlines()]
    saves = {line["step"]: line.get("error") for line in ends if line["kind"] == "checkpoint"}
    assert saves[2] is None and "File exists" in saves[4] and saves[6] is None
    assert (tmp_path / "latest").read_text() == "step-00000006"


def test_a_failed_last_save_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-00000006").write_text("a file where a folder should be")
    assert main(["train", "llama", "--set", *SMALL, f"checkpoint={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "step-00000006 cannot be written" in said and "make room" in said
    assert (tmp_path / "latest").read_text() == "step-00000004"


def failing(folder: str) -> List[str]:
    """Rank 0 cannot move `latest`: every rank hears of it."""
    from drumbeat.train.checkpoint.checkpoints import Checkpoints

    model = nn.Linear(4, 4)
    saves = Checkpoints(folder, [model], torch.optim.SGD(model.parameters(), lr=0.1))
    saves.save(3, {})
    ended = saves.finish()
    assert ended is not None
    return [ended.error]


def test_every_rank_hears_of_a_failed_commit(world: GlooWorld, tmp_path: Path) -> None:
    (tmp_path / "latest.part").mkdir()
    for (error,) in world.run(failing, str(tmp_path), size=2):
        assert "Is a directory" in error
    assert not (tmp_path / "latest").exists()


def test_room_is_made_before_it_is_needed_and_kept_while_it_fits() -> None:
    model, optimizer, state = made()
    state.make_room(state.now())
    rooms = {name: room.data_ptr() for name, room in state._copies["model"].items()}
    assert {name: copy.data_ptr() for name, copy in state.copied()[0]["model"].items()} == rooms
    optimizer.state.pop(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones(4, 4))  # another tensor of the same shape: the state is walked anew
    optimizer.param_groups[0]["params"][0] = model[0].weight
    stepped(optimizer)
    second, _ = state.copied()
    assert same(second, state.now()) and second["model"]["0.weight"].data_ptr() == rooms["0.weight"]


def test_saving_faster_than_the_disk_writes_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from drumbeat.train.checkpoint.checkpoints import Checkpoints

    written = Checkpoints._write

    def slowly(self: Checkpoints, step: int, state: Dict[str, Any]) -> None:
        time.sleep(3 if step == 1 else 0)
        written(self, step, state)

    monkeypatch.setattr(Checkpoints, "_write", slowly)
    settings = ["steps=3", "save_every=1", f"checkpoint={tmp_path}", "batch=2", "length=8", "validation=0"]
    assert main(["train", "llama", "--set", *settings]) == 0
    said = capfd.readouterr().out
    took = re.search(r"checkpoint of step 1, which took (\d+) s", said)  # at least as long as the write was held up
    assert said.count("training waited") == 1 and took and int(took.group(1)) >= 3, said


def statistics_of_all_ranks(folder: str) -> Tuple[float, float, float]:
    """A running mean of this rank after a save; in a fresh model after a load; and there as rank 0 alone would load it."""
    import torch.distributed as dist

    from drumbeat.train.images import set_up_images
    from drumbeat.train.models.resnet import ResNet
    from drumbeat.train.recipes import meshes_for, resolved
    from drumbeat.train.recipes.resnet import ResNetSettings
    from drumbeat.train.world import join

    world = join()
    asked = ResNetSettings(depth=18, layout="ddp", checkpoint=folder)
    settings = resolved(asked, world, meshes_for(asked, world))

    def fresh() -> Tuple[Any, torch.Tensor]:
        meshes = meshes_for(settings, world)
        trainer = set_up_images(settings, world, meshes, lambda: ResNet(18, 4), lambda step: 1.0)
        return trainer, next(value for name, value in trainer.model.named_buffers() if name.endswith("running_mean"))

    trainer, mean = fresh()
    mean.fill_(float(world.rank))
    trainer.save(folder, wait=True)
    dist.barrier()
    again, loaded = fresh()
    again.load(folder)
    other, agreed = fresh()
    other.checkpoints(folder).size = 3  # as if another number of ranks loaded it
    other.load(folder)
    return float(mean[0]), float(loaded[0]), float(agreed[0])


def test_a_checkpoint_holds_each_ranks_statistics_and_those_of_all(world: GlooWorld, tmp_path: Path) -> None:
    assert world.run(statistics_of_all_ranks, str(tmp_path), size=2) == [(0.0, 0.0, 0.5), (1.0, 1.0, 0.5)]


def test_an_older_or_newer_checkpoint_is_refused_with_its_version(tmp_path: Path) -> None:
    from drumbeat.train.checkpoint.checkpoints import Checkpoints
    from drumbeat.train.checkpoint.folder import sealed

    model = nn.Linear(2, 2)
    saves = Checkpoints(str(tmp_path), [model], torch.optim.SGD(model.parameters(), lr=0.1))
    saves.save(1, {}, wait=True)
    marker = tmp_path / "step-00000001" / "commit.json"
    known = json.loads(marker.read_text())
    del known["checksum"]
    assert known["version"] == 2
    marker.write_text(sealed({**known, "version": 3}))
    with pytest.raises(Refusal, match=r"a newer drumbeat: checkpoint version 3, this one reads version 2"):
        saves.load([])
    del known["version"], known["files"]
    marker.write_text(json.dumps(known))
    with pytest.raises(Refusal, match=r"an older drumbeat: checkpoint version 1, this one reads version 2"):
        saves.load([])


def test_generators_come_back() -> None:
    import random

    import numpy as np

    from drumbeat.train.checkpoint.state import generators, restore_generators

    random.gauss(0, 1)
    np.random.standard_normal()
    before = generators()
    want = (random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(())), random.random())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    restore_generators(before)
    assert (random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(())), random.random()) == want


def train_with_small_files(words: List[str]) -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a file that grows beyond it cannot be written
    return main(words)


def test_a_disk_that_is_full_keeps_the_last_good_one_and_nothing_else(world: GlooWorld, tmp_path: Path) -> None:
    output, tmp_path = tmp_path / "output", tmp_path / "checkpoints"
    words = ["train", "llama", "--set", *SMALL, f"checkpoint={tmp_path}"]
    assert main([*words, "stop_after=3", "keep=1"]) == 75
    (tmp_path / "step-00000002").mkdir()  # cut short by a kill
    process = world.start(output, train_with_small_files, words)
    process.join(300)
    text = output.read_text()
    assert process.exitcode == 2 and "cannot be written" in text, text
    # On a busy machine the save of step 4 may still be under way when the last step's fails.
    assert "File too large (rank 0)" in text and "inline_container" not in text, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "latest", "step-00000003"]
    assert main(words) == 0, "and from there it goes on"


def test_a_state_that_is_written_as_it_is_is_never_whole_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drumbeat.train.checkpoint import checkpoints

    copies: Dict[int, List[Any]] = {}  # by thread: the memory of what was copied to the host
    held: List[int] = []

    def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:  # on_host copies only from a GPU; this one always does
        own = copies.setdefault(threading.get_ident(), [])
        held.append(sum(storage.nbytes() for storage in own))
        own.append((copy := tensor.detach().clone()).untyped_storage())
        return copy

    monkeypatch.setattr(checkpoints, "on_host", copy_to_host)
    monkeypatch.setattr(checkpoints, "free_bytes", lambda: 100)
    for threads in (1, 2):
        monkeypatch.setattr(checkpoints, "writers", lambda state, threads=threads: threads)
        copies.clear()
        model, _, state = made()
        stepped(state.optimizer)
        before = {name: value.clone() for name, value in state.now()["optimizer"].items()}
        place = checkpoints.Checkpoints(str(tmp_path / str(threads)), [model], state.optimizer)
        (saved,) = place.save(1, {"sample": 0})
        assert not saved.error and not saved.copied
        stepped(state.optimizer)
        assert place.load(["sample"]) is not None
        assert all(torch.equal(value, before[name]) for name, value in state.now()["optimizer"].items())
    assert len(held) > 10 and not any(held), "each is given back before the next one comes"


def test_the_files_of_a_rank_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from drumbeat.train.checkpoint import checkpoints

    model, _, state = made()
    place = checkpoints.Checkpoints(str(tmp_path), [model], state.optimizer)
    monkeypatch.setattr(checkpoints, "writers", lambda state: 2)
    place.save(1, {"sample": 0}, wait=True)
    before = {name: value.clone() for name, value in state.now()["optimizer"].items()}
    stepped(state.optimizer)
    both, read_data = threading.Barrier(2), FileSystemReader.read_data

    def read(*args: Any) -> Any:
        both.wait(60)
        return read_data(*args)

    monkeypatch.setattr(FileSystemReader, "read_data", read)
    assert place.load(["sample"]) is not None
    assert all(torch.equal(value, before[name]) for name, value in state.now()["optimizer"].items())


def test_a_state_too_large_to_be_copied_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from drumbeat.train.checkpoint import checkpoints

    monkeypatch.setattr(checkpoints, "free_bytes", lambda: 100)
    model, _, state = made()
    first = checkpoints.Checkpoints(str(tmp_path / "alone"), [model], state.optimizer)
    (saved,) = first.save(1, {"sample": 0})
    assert not saved.error and not saved.copied and committed(str(tmp_path / "alone")) == [1], (
        "nobody has to wait for it"
    )
    assert not first.state._copies
    before = {name: value.clone() for name, value in state.now()["model"].items()}
    stepped(state.optimizer)
    assert first.load(["sample"]) is not None
    assert all(torch.equal(value, before[name]) for name, value in state.now()["model"].items())
    settings = ["steps=4", "save_every=2", f"checkpoint={tmp_path / 'run'}", "batch=2", "length=8", "validation=0"]
    assert main(["train", "llama", "--verify-resume", "--set", *settings]) == 0
    said = capfd.readouterr().out
    assert "resume is exact" in said and "saves will make training wait: copies of" in said, said
    assert "training waited" not in said, "it is not because saves are too frequent"


def test_free_memory_is_that_of_the_host_or_of_the_control_group(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path)) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4096 kB\nMemAvailable:  2048 kB\nHugePages_Total: 0\n")
    assert free_bytes(str(tmp_path)) == 2048 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert free_bytes(str(tmp_path)) == 2048 << 10
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("400000\n")
    assert free_bytes(str(tmp_path)) == 600000
    (group / "memory.current").write_text("1400000\n")
    assert free_bytes(str(tmp_path)) == 0
