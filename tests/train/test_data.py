"""Data as it lies on disk: image folders, CIFAR-100's records, token files; and what is wrong with them."""

from __future__ import annotations

import os
import pickle
import struct
import threading
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor

from drumbeat.cli import main
from drumbeat.train.data.decoders import Decoders
from drumbeat.train.data.images import ImageFolder, cifar100
from drumbeat.train.data.text import read_megatron_index, token_file
from drumbeat.train.refusal import Refusal


def image(path: Path, size: Tuple[int, int], mode: str = "RGB", value: int = 0) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(value)
    shape = (size[1], size[0]) if mode in ("L", "1") else (size[1], size[0], len(mode))
    Image.fromarray((random.random(shape) * 60 + value).astype(np.uint8), "L" if mode == "1" else mode).convert(
        mode
    ).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("PIL", reason="image files need Pillow")
    for part, count in (("train", 8), ("val", 3)):
        for i in range(count):
            image(tmp_path / part / "dark" / f"{i}.jpg", (37 + i, 20 + 3 * i), value=i)
            image(tmp_path / part / "light" / f"{i}.PNG", (16, 90), value=150 + i)
    image(tmp_path / "train" / "light" / "grey.png", (40, 40), "L", 180)
    image(tmp_path / "train" / "light" / "clear.png", (40, 40), "RGBA", 180)
    image(tmp_path / "train" / "dark" / "one.png", (1, 1))
    (tmp_path / "train" / ".checkpoints").mkdir()
    (tmp_path / "train" / "notes.txt").write_text("not a class")
    return tmp_path


def test_an_image_folder_of_all_kinds_is_read_and_learned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = ImageFolder(str(folder / "train"), size=24, decoders=Decoders(3))
    assert images.classes == ["dark", "light"] and len(images) == 19
    everything = list(range(len(images)))
    pixels, labels = images.read(everything, [0] * 19)
    assert images.finish(pixels).shape == (19, 3, 24, 24)
    means = images.finish(pixels).mean(dim=(1, 2, 3))
    assert means[labels == 0].max() < means[labels == 1].min(), "labels belong to their images"
    again = ImageFolder(str(folder / "train"), size=24, decoders=Decoders(1)).read(everything, [0] * 19)[0]
    assert torch.equal(pixels, again), "the number of decoders changes nothing"
    assert not torch.equal(pixels, images.read(everything, [1] * 19)[0]), "another epoch, other crops"
    kept = ImageFolder(str(folder / "val"), size=24, train=False, classes=images.classes)
    assert torch.equal(kept.read([0], [0])[0], kept.read([0], [5])[0])
    texts = [f"data={folder}", "depth=18", "size=24", "batch=8", "steps=6", "report_every=6", "warmup=1"]
    assert main(["train", "resnet", "--set", *texts]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_corrupt_image_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, broken in (("3.jpg", b"not an image"), ("4.jpg", None)):
        path = folder / "train" / "dark" / name
        path.write_bytes(broken if broken is not None else path.read_bytes()[:200])
        images = ImageFolder(str(folder / "train"), size=24)
        at = [file for file, _ in images.files].index(str(path))
        with pytest.raises(Refusal, match=f"dark/{name}: cannot be read as an image"):
            images.read([0, at], [0, 0])
    texts = [f"data={folder}", "depth=18", "size=24", "batch=19", "steps=1", "report_every=1"]
    assert main(["train", "resnet", "--set", *texts]) == 2
    said = capsys.readouterr().err
    assert "cannot be read as an image" in said and said.count("\n") <= 2, said


def test_folders_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "empty").mkdir()
    with pytest.raises(Refusal, match="train/empty: no images in this class"):
        ImageFolder(str(folder / "train"))
    with pytest.raises(Refusal, match="class 'light' is not among the training images' classes"):
        ImageFolder(str(folder / "val"), classes=["dark"])
    late = ImageFolder(str(folder / "val"), classes=["bright", "dark", "light"])
    assert {label for _, label in late.files} == {1, 2}, "a label means what it means in training"
    (tmp_path / "nothing").mkdir()
    with pytest.raises(Refusal, match="nothing: no images in it"):
        ImageFolder(str(tmp_path / "nothing"))


def records(path: Path, count: int) -> None:
    """CIFAR-100's binary version: coarse label, fine label, then 1,024 red, green and blue bytes."""
    rows = np.zeros((count, 3074), dtype=np.uint8)
    rows[:, 0], rows[:, 1] = 9, np.arange(count) % 100
    rows[:, 2:1026] = np.arange(count)[:, None]  # red is the image's number
    rows[:, 1026] = 200  # the first green byte: the pixel at the top left
    rows.tofile(path)


def test_cifar_100_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records(tmp_path / "train.bin", 120)
    records(tmp_path / "test.bin", 20)
    images = cifar100(str(tmp_path), train=False)
    assert images.pixels.shape == (20, 32, 32, 3) and images.labels.tolist() == list(range(20))
    assert images.pixels[7, :, :, 0].min() == 7 == images.pixels[7].reshape(-1, 3)[5, 0]
    assert images.pixels[7, 0, 0].tolist() == [7, 200, 0] and images.pixels[7, 0, 1].tolist() == [7, 0, 0]
    texts = [f"data={tmp_path}", "depth=10", "widening=1", "batch=40", "epochs=1"]
    assert main(["train", "wide-resnet", "--set", *texts]) == 0
    said = capsys.readouterr().out
    assert torch.cuda.is_available() or "Total processes used: 1" in said
    assert "Epoch 1/1 completed" in said and "Target accuracy 0.95 NOT reached for 2 epochs in a row (best " in said
    assert main(["train", "wide-resnet", "--set", *texts, "steps=2", "validate_every=1", "target_accuracy=0"]) == 0
    said = capsys.readouterr().out
    assert said.count("Validation Accuracy") == 2 and "Target accuracy 0.0 reached and held for 2 epochs" in said
    with pytest.raises(Refusal, match="class 99 with classes=10"):
        cifar100(str(tmp_path), train=True, classes=10)
    (tmp_path / "test.bin").write_bytes(b"x" * 3075)
    with pytest.raises(Refusal, match="3075 bytes are no whole number"):
        cifar100(str(tmp_path), train=False)


def megatron(path: Path, documents: List[List[int]], code: int = 4, dtype: str = "int32") -> None:
    """What Megatron's preprocessing writes: PATH.bin with the tokens and PATH.idx."""
    tokens = [np.array(document, dtype=dtype) for document in documents]
    np.concatenate(tokens).tofile(path.with_suffix(".bin"))
    sizes = np.array([len(t) for t in tokens], dtype=np.int32)
    places = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1, dtype=np.int64)
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + places.astype(np.int64).tobytes() + bounds.tobytes())


def test_a_megatron_pair_says_its_own_type_and_documents(tmp_path: Path) -> None:
    documents = [list(range(100, 150)), [7], list(range(70_000, 70_100))]
    megatron(tmp_path / "text", documents)
    index = read_megatron_index(str(tmp_path / "text.idx"))
    assert (index.dtype, index.tokens, index.documents.tolist()) == ("int32", 151, [0, 50, 51, 151])
    windows = token_file(str(tmp_path / "text.bin"), 10, dtype="uint16")  # the index knows better than the default
    assert windows.read([4], [0])[0].tolist() == [[140, 141, 142, 143, 144, 145, 146, 147, 148, 149]]
    assert windows.read([4], [0])[1][0, -1] == 7
    megatron(tmp_path / "short", [[1, 2, 3] * 40], 8, "uint16")
    assert token_file(str(tmp_path / "short.bin"), 10).read([0], [0])[0].tolist() == [[1, 2, 3] * 3 + [1]]


def spoiled(tmp_path: Path) -> List[Tuple[str, str, Any]]:
    """(what must be said, file, more arguments)"""
    megatron(tmp_path / "cut", [[1] * 300])
    (tmp_path / "cut.idx").write_bytes((tmp_path / "cut.idx").read_bytes()[:40])
    megatron(tmp_path / "other", [[1] * 300])
    (tmp_path / "other.bin").write_bytes(b"1234")
    megatron(tmp_path / "float", [[1] * 300], code=7)
    megatron(tmp_path / "alien", [[1] * 300])
    (tmp_path / "alien.idx").write_text("something else")
    np.arange(1, 500, dtype=np.int32).tofile(tmp_path / "wide.bin")
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "few.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    np.save(tmp_path / "real.npy", np.ones(300))
    np.save(tmp_path / "table.npy", np.ones((30, 10), dtype=int))
    (tmp_path / "no.npy").write_text("no array")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "many.bin")
    return [
        ("cut.idx: cut short", "cut.bin", {}),
        ("4 bytes, but .*other.idx describes 1,200", "other.bin", {}),
        ("token type 7 is unknown", "float.bin", {}),
        ("alien.idx: no index of Megatron's", "alien.bin", {}),
        ("as uint16 every other token is 0; it was written as int32", "wide.bin", {}),
        ("few.bin: 10 tokens are too few", "few.bin", {}),
        ("empty.bin: 0 bytes", "empty.bin", {}),
        ("shape .300,. and type float64", "real.npy", {}),
        ("shape .30, 10.", "table.npy", {}),
        ("no.npy: cannot be read as a NumPy array", "no.npy", {}),
        ("empty.npy: cannot be read as a NumPy array", "empty.npy", {}),
        ("token type 'float' is unknown", "many.bin", {"dtype": "float"}),
        ("ends in .bin or .npy", "alien.idx", {}),
    ]


def test_token_files_that_are_not_what_they_seem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, name, more in spoiled(tmp_path):
        with pytest.raises(Refusal, match=words):
            token_file(str(tmp_path / name), 10, **more)
    assert token_file(str(tmp_path / "wide.bin"), 10, dtype="int32").read([0], [0])[0][0, 0] == 1
    texts = [f"data={tmp_path}/many.bin", "length=16", "batch=12", "steps=2", "validation=0"]
    assert main(["train", "llama", "--set", *texts]) == 2
    said = capsys.readouterr().err
    assert "the model's vocabulary has 256" in said and "token_type" in said


class Noted:
    """Notes which thread reads."""

    def __init__(self) -> None:
        self.threads: List[str] = []

    def __len__(self) -> int:
        return 64

    def read(self, indices: List[int], epochs: List[int]) -> Tuple[Tensor, Tensor]:
        self.threads.append(threading.current_thread().name)
        return torch.tensor(indices), torch.tensor(epochs)


def test_reading_is_another_threads_work() -> None:
    from drumbeat.train.data import Stream

    samples = Noted()
    stream = Stream(samples, 4)
    for _ in range(5):
        next(stream)
    stream.close()
    assert len(samples.threads) >= 5 and set(samples.threads) == {"drumbeat-data_0"}


def test_cifar100s_python_version_and_nothing_else_that_is_pickled(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    planes = np.arange(3 * 3072, dtype=np.uint8).reshape(3, 3072)
    (folder / "test").write_bytes(pickle.dumps({b"data": planes, b"fine_labels": [1, 99, 0]}, protocol=2))
    for place in (tmp_path, folder):
        images = cifar100(str(place), train=False)
        assert len(images) == 3 and images.labels.tolist() == [1, 99, 0]
        assert (images.pixels[2, :, :, 1].ravel() == planes[2, 1024:2048]).all(), "the green plane"
    hostile = b"cos\nsystem\n(S'touch /tmp/never'\ntR."
    for content, words in (
        (hostile, "it names os.system, which is not part of an array"),
        (pickle.dumps({b"data": planes, b"fine_labels": [1]}), "not CIFAR-100"),
        (pickle.dumps([1, 2]), "cannot be read as CIFAR-100's Python version"),
        (b"", "cannot be read as CIFAR-100's Python version"),
    ):
        (folder / "train").write_bytes(content)
        with pytest.raises(Refusal, match=words):
            cifar100(str(tmp_path), train=True)


def test_the_gpus_queues_are_asked_for_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(BaseException):
        pass

    def join() -> None:
        raise Started(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr("drumbeat.train.world.join", join)  # where a process first touches its GPU
    monkeypatch.setattr("drumbeat.train.recipes.resnet.join", join)
    with pytest.raises(Started, match="32"):
        main(["train", "resnet", "--set", "steps=1"])
