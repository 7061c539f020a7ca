"""A checkpoint that was damaged is never loaded: all ranks say so and use the one before it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from io import BufferedWriter
from pathlib import Path
from typing import Any, Callable, List, Tuple

import pytest
import torch
from gloo_world import GlooWorld
from torch import nn

from drumbeat.train.checkpoint.folder import committed, sealed
from drumbeat.train.refusal import Refusal


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit in the middle: of a tensor's values, in torch's files of this size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def forget(path: Path) -> None:
    """A commit marker as drumbeat wrote it before it recorded checksums."""
    marker = json.loads(path.read_text())
    del marker["files"], marker["checksum"]
    path.write_text(json.dumps(marker))


def misspell(path: Path) -> None:
    """A flipped bit that leaves the marker good JSON, with everything in it that is asked for."""
    path.write_text(path.read_text().replace('"ranks": 2', '"ranks": 3'))


def damaged(folder: str, damage: List[str], how: Callable[[Path], None] = cut) -> Tuple[str, List[str]]:
    """Save after one step and after two, damage files, load into a fresh model: what was loaded, and what is said of it."""
    from drumbeat.train.checkpoint.checkpoints import Checkpoints

    def fresh() -> Tuple[nn.Module, torch.optim.Optimizer, Checkpoints]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, Checkpoints(folder, [model], optimizer)

    def tensors() -> List[torch.Tensor]:
        return [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]

    model, optimizer, saves = fresh()
    states = []
    for step in (1, 2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        states.append([tensor.detach().clone() for tensor in tensors()])
        saves.save(step, {"sample": 10 * step}, wait=True)
    if saves.rank == 0:
        for name in damage:
            how(Path(folder) / name)
    saves._meet()
    model, optimizer, saves = fresh()
    try:
        loaded = saves.load(["sample"])
    except Refusal as refusal:
        return str(refusal), []
    assert loaded is not None
    same = [torch.equal(now, before) for now, before in zip(tensors(), states[loaded.step - 1])]
    words = "as saved" if same == [True] * 4 else "another state"
    return f"step {loaded.step}, sample {loaded.extra['sample']}, {words}", list(loaded.notes)


@pytest.mark.parametrize(
    "name, how, why",
    [
        (
            "__1_0.distcp",
            cut,
            r"/__1_0.distcp cannot be read: it is damaged, it has [\d,]+ bytes and [\d,]+ were saved;",
        ),
        (
            "__1_0.distcp",
            flip,
            "/__1_0.distcp cannot be read: it is damaged, its checksum is not that of what was saved;",
        ),
        ("__0_0.distcp", flip, "/__0_0.distcp cannot be read: it is damaged, its checksum"),
        ("__0_0.distcp", Path.unlink, "/__0_0.distcp cannot be read: No such file"),
        (".metadata", cut, "/.metadata cannot be read: it is damaged, it has"),
        (".metadata", flip, "/.metadata cannot be read: it is damaged, its checksum"),
        ("commit.json", cut, "/commit.json cannot be read: "),
        ("commit.json", misspell, "/commit.json cannot be read: it is damaged, its checksum"),
    ],
)
def test_all_ranks_fall_back_to_the_checkpoint_before_a_damaged_one(
    world: GlooWorld, tmp_path: Path, name: str, how: Callable[[Path], None], why: str
) -> None:
    (first, said), (second, nothing) = world.run(damaged, str(tmp_path), [f"step-00000002/{name}"], how, size=2)
    assert first == second == "step 1, sample 10, as saved" and nothing == []
    (words,) = said
    assert words.startswith("the checkpoint of step 2 CANNOT BE READ and is left out, 1 step is lost: "), words
    assert re.search(why, words), words
    assert words.endswith("it is now called step-00000002.unreadable")
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002.unreadable"]


def test_a_checkpoint_without_a_record_of_its_files_is_loaded_and_said_to_be_unchecked(
    world: GlooWorld, tmp_path: Path
) -> None:
    (first, said), (second, nothing) = world.run(damaged, str(tmp_path), ["step-00000002/commit.json"], forget, size=2)
    assert first == second == "step 2, sample 20, as saved" and nothing == []
    assert said == ["the checkpoint of step 2 has no checksums (an older drumbeat saved it): NOT CHECKED"]


def test_each_file_is_checked_by_some_rank_and_the_metadata_by_all() -> None:
    from drumbeat.train.checkpoint.folder import share

    names = [".metadata", *(f"__{rank}_{number}.distcp" for rank in range(12) for number in range(2)), "another"]
    checksums = dict.fromkeys(names, (1, 1))
    for size in (1, 2, 5, 12, 40):
        shares = [share(checksums, rank, size) for rank in range(size)]
        assert all(".metadata" in each for each in shares)
        assert sorted(name for each in shares for name in each if name != ".metadata") == sorted(names[1:])
    assert share(checksums, 11, 12) == [".metadata", "__11_0.distcp", "__11_1.distcp"]


def test_a_file_that_a_second_thread_could_not_write_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does not notice: it would write metadata in which those tensors are missing."""
    from drumbeat.train.checkpoint import checkpoints
    from drumbeat.train.checkpoint.folder import SummedFile

    def write(file: SummedFile, data: Any) -> int:
        if threading.current_thread().name.startswith("drumbeat-checkpoint"):
            return BufferedWriter.write(file, data)
        raise OSError(28, "No space left on device")

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    saves = checkpoints.Checkpoints(str(tmp_path), [model], torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(checkpoints, "writers", lambda state: 4)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(SummedFile, "write", write)
    saves.save(1, {})
    ended = saves.finish()
    assert ended is not None and "No space left on device" in ended.error
    assert not (tmp_path / "step-00000001").exists()


def test_where_no_checkpoint_can_be_read_all_ranks_refuse_and_nothing_is_moved(
    world: GlooWorld, tmp_path: Path
) -> None:
    names = [f"step-0000000{step}/__{rank}_0.distcp" for step, rank in ((1, 0), (2, 1))]
    (first, _), (second, _) = world.run(damaged, str(tmp_path), names, size=2)
    assert first == second and first.startswith("none of 2 checkpoints can be read: "), first
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]


def test_a_later_checkpoint_that_cannot_be_read_costs_none_of_the_new_ones(tmp_path: Path) -> None:
    """It could not be renamed, so it still counts as committed; the step that was saved in its place must stay."""
    from drumbeat.train.checkpoint.folder import Unreadable, commit, name_of, read_marker, set_aside

    for step in (2, 4, 8, 6, 7):
        place = tmp_path / name_of(step)
        place.mkdir()
        marker = {"step": step, "ranks": 1, "model": "m", "parameters": 5}
        commit(str(tmp_path), marker, keep=1 if step == 7 else 2, place=str(place))
    assert committed(str(tmp_path)) == [7, 8] and (tmp_path / "latest").read_text() == name_of(7)
    (tmp_path / f"{name_of(8)}.unreadable").write_text("an earlier one")
    assert set_aside(str(tmp_path / name_of(8))) == str(tmp_path / f"{name_of(8)}.unreadable-2")
    assert committed(str(tmp_path)) == [7]
    for other in ("step-00000009", "step-9", "step-²"):
        shutil.copytree(tmp_path / name_of(7), tmp_path / other)
    assert committed(str(tmp_path)) == [7, 9], "names that we do not give are not ours"
    with pytest.raises(Unreadable, match="is that of step 7"):
        read_marker(str(tmp_path / "step-00000009"))
    (tmp_path / name_of(9) / "commit.json").write_text('{"version": Infinity, "step": 9}')
    with pytest.raises(Unreadable):
        read_marker(str(tmp_path / name_of(9)))


def three_saved(folder: Path) -> Tuple[nn.Module, Any]:
    from drumbeat.train.checkpoint.checkpoints import Checkpoints

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    saves = Checkpoints(str(folder), [model], torch.optim.SGD(model.parameters(), lr=0.1), keep=3)
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(step)
        saves.save(step, {}, wait=True)
    return model, saves


def test_a_checkpoint_whose_marker_is_gone_is_left_out_aloud_and_never_removed(tmp_path: Path) -> None:
    _, saves = three_saved(tmp_path)
    (tmp_path / "step-00000003" / "commit.json").unlink()
    loaded = saves.load([])
    assert loaded.step == 2 and "step 3 CANNOT BE READ and is left out, 1 step is lost" in loaded.notes[0]
    assert (tmp_path / "step-00000003.unreadable" / ".metadata").exists()


def test_where_all_markers_are_gone_training_does_not_begin_anew(tmp_path: Path) -> None:
    _, saves = three_saved(tmp_path)
    for marker in tmp_path.glob("*/commit.json"):
        marker.unlink()
    with pytest.raises(Refusal, match="none of 3 checkpoints can be read"):
        saves.load([])
    assert len(list(tmp_path.glob("step-*/.metadata"))) == 3


def test_a_save_that_did_not_finish_is_removed_and_one_that_cannot_be_looked_at_is_not(tmp_path: Path) -> None:
    _, saves = three_saved(tmp_path)
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "commit.json").symlink_to("nowhere")
    (tmp_path / "step-00000001.removed").mkdir()
    loaded = saves.load([])
    assert loaded.step == 3 and "step 5 CANNOT BE READ" in loaded.notes[0]
    assert sorted(path.name for path in tmp_path.glob("step-*[!123]")) == ["step-00000005.unreadable"]


def test_a_second_save_of_a_step_that_fails_leaves_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, saves = three_saved(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(Refusal, match="No space left"):
        patch.setattr("drumbeat.train.checkpoint.checkpoints.save", full)
        saves.save(3, {}, wait=True)
    assert saves.load([]).step == 3 and bool((model.weight == 3).all())
    with torch.no_grad():
        model.weight.fill_(7)
    saves.save(3, {}, wait=True)
    with torch.no_grad():
        model.weight.fill_(0)
    assert saves.load([]).step == 3 and bool((model.weight == 7).all())
    names = ["latest", "step-00000001", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("name", ["../x", "a/b", "x\0y", "\ud800", "__" + "9" * 5000 + "_0", "\x1b[31m"])
def test_a_marker_names_only_files_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    _, saves = three_saved(tmp_path)
    path = tmp_path / "step-00000003" / "commit.json"
    marker = json.loads(path.read_text())
    del marker["checksum"]
    path.write_text(sealed({**marker, "files": {name: [0, 0]}}))
    loaded = saves.load([])
    assert loaded.step == 2 and "a name in it is none of a checkpoint's files" in loaded.notes[0]


def test_files_that_are_none_or_are_not_recorded_are_not_read(tmp_path: Path) -> None:
    _, saves = three_saved(tmp_path)
    data = next((tmp_path / "step-00000003").glob("*.distcp"))
    data.unlink()
    os.mkfifo(data)
    assert "it is no file" in (loaded := saves.load([])).notes[0] and loaded.step == 2
    shutil.copy(next((tmp_path / "step-00000002").glob("*.distcp")), tmp_path / "step-00000002" / "__9_9.distcp")
    assert "__9_9.distcp is not in the record" in (loaded := saves.load([])).notes[0] and loaded.step == 1
