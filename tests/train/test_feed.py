"""Decoding on the GPU, as far as a CPU can show it: which files go where, and what happens to broken ones."""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor

Image = pytest.importorskip("PIL.Image", reason="reading images needs Pillow")

from drumbeat.train.data import Stream, nvjpeg  # noqa: E402
from drumbeat.train.data.decode import baseline_size, chosen_box, decoded  # noqa: E402
from drumbeat.train.data.decoders import Decoders, DeviceDecoder, decoders_for  # noqa: E402
from drumbeat.train.data.images import ImageFolder  # noqa: E402
from drumbeat.train.refusal import Refusal  # noqa: E402
from drumbeat.train.world import World  # noqa: E402

SIZE = 8


@pytest.fixture()
def files(tmp_path: Path) -> List[Path]:
    """Two JPEG files with a PNG between them, in one class."""
    random = np.random.default_rng(0)
    paths = []
    for i, ending in enumerate(("jpg", "png", "jpg")):
        coarse = Image.fromarray((random.random((5, 7, 3)) * 255).astype(np.uint8)).resize((40, 30))
        paths.append(tmp_path / "class" / f"{i}.{ending}")
        paths[-1].parent.mkdir(exist_ok=True)
        coarse.save(paths[-1])
    return paths


class PlayedGpu(DeviceDecoder):
    """Decodes with Pillow what the GPU would, and fails as it does: one broken file fails the batch."""

    def __init__(self, files: List[Path], workers: int = 1) -> None:
        super().__init__(torch.device("cpu"), Decoders(workers))
        self.taken = 0

    def _beside_training(self) -> Any:
        return contextlib.nullcontext()

    def _cropped(self, size: int, files: Any, about: Any, stream: Any) -> Tensor:
        self.taken = len(files)
        made = []
        for address, (length, width, height, flip, box) in zip(files, about):
            try:
                image = Image.open(io.BytesIO(ctypes.string_at(int(address), int(length)))).convert("RGB")
            except OSError as error:
                raise nvjpeg.NvjpegError(str(error)) from None
            assert image.size == (width, height)
            pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=tuple(box)))
            made.append(pixels[:, ::-1] if flip else pixels)
        return torch.from_numpy(np.stack(made))


def test_what_the_gpu_cannot_decode_goes_to_the_processes_and_the_order_stays(files: List[Path]) -> None:
    gpu = PlayedGpu(files)
    wanted = [(str(path), (0, 1, i)) for i, path in enumerate(files)]
    want = np.stack([decoded(path, SIZE, draw) for path, draw in wanted])
    got = gpu.decode(SIZE, wanted).numpy()
    assert gpu.taken == 2, "the PNG is not its own"
    assert np.abs(got.astype(int) - want).max() <= 1, "a GPU's crops are in single precision"


def test_a_batch_without_a_jpeg_file_goes_to_the_processes(files: List[Path]) -> None:
    gpu = PlayedGpu(files)
    want = torch.from_numpy(decoded(str(files[1]), SIZE, (0, 1, 1))[None])
    assert torch.equal(gpu.decode(SIZE, [(str(files[1]), (0, 1, 1))]), want) and gpu.taken == 0


@pytest.mark.parametrize(
    "mode,options,size",
    [
        ("RGB", {}, (50, 37)),
        ("L", {}, (50, 37)),
        ("RGB", {"subsampling": 0, "comment": b"x" * 300}, (50, 37)),
        ("RGB", {"progressive": True}, (0, 0)),
        ("CMYK", {}, (0, 0)),
    ],
)
def test_the_size_of_a_baseline_file_is_read_from_its_frame(mode: str, options: Any, size: Tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new(mode, (50, 37)).save(file, "JPEG", **options)
    data = file.getvalue()
    assert baseline_size(memoryview(data)) == size
    assert all(baseline_size(memoryview(data[:cut])) in (size, (0, 0)) for cut in range(len(data))), "cut anywhere"


def test_a_broken_file_is_named_by_the_processes(files: List[Path]) -> None:
    files[2].write_bytes(files[2].read_bytes()[:60])
    images = ImageFolder(str(files[0].parent.parent), SIZE, decoders=PlayedGpu(files))
    assert images.read([0, 1], [0, 0])[0].shape == (2, SIZE, SIZE, 3)
    with pytest.raises(Refusal, match="2.jpg: cannot be read as an image"):
        images.read([0, 1, 2], [0, 0, 0])
    files[1].unlink()
    with pytest.raises(Refusal, match="1.png: cannot be read"):
        images.read([0, 1], [0, 0])


def test_where_images_are_decoded() -> None:
    here = World(0, 1, 0, 1, torch.device("cpu"))
    assert isinstance(decoders_for("auto", 1, here), Decoders) and isinstance(decoders_for("cpu", 1, here), Decoders)
    with pytest.raises(Refusal, match="NVIDIA GPU; use decode=cpu"):
        decoders_for("gpu", 1, here)
    with pytest.raises(Refusal, match="known: auto, gpu, cpu"):
        decoders_for("tpu", 1, here)


def test_a_crop_follows_from_its_draw_alone() -> None:
    boxes: List[Tuple[object, bool]] = [chosen_box(500, 375, (0, epoch, 7)) for epoch in (0, 0, 1)]
    assert boxes[0] == boxes[1] != boxes[2]
    assert chosen_box(500, 400, None) == ((75.0, 25.0, 425.0, 375.0), False), "validation: the middle"


def test_files_are_read_by_processes_in_the_order_asked(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}" for i in range(30)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * (i * 100_000 % 700_001))  # the first is empty
    processes = Decoders(workers=3)
    for _ in range(2):
        parts = processes.read([(str(path), None) for path in paths])
        lengths = [int(length) for about, _ in parts for length in about["length"]]
        assert lengths == [path.stat().st_size for path in paths]
        assert b"".join(bytes(data) for _, data in parts) == b"".join(path.read_bytes() for path in paths)
    with pytest.raises(Refusal, match="gone.jpg: cannot be read: No such file"):
        processes.read([(str(tmp_path / "gone.jpg"), None), (str(paths[1]), None)])
    ((about, _),) = processes.read([(str(paths[1]), None)])
    assert about["length"] == 100_000 and about["width"] == 0, "and goes on after a refusal"


def test_two_batches_are_made_at_a_time_and_come_in_order(files: List[Path]) -> None:
    images = ImageFolder(str(files[0].parent.parent), SIZE, decoders=PlayedGpu(files))
    ahead, alone = Stream(images, 2), Stream(images, 2, prefetch=0)
    for _ in range(6):
        (got,), (want,) = next(ahead), next(alone)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert ahead.readers == 2 and ahead.state_dict() == alone.state_dict() == {"sample": 12}
    ahead.close()
    files[0].write_bytes(b"no image")
    for _ in range(2):  # asked again it fails again, and no sample is passed over
        with pytest.raises(Refusal, match="0.jpg: cannot be read as an image"):
            for _ in range(4):
                next(ahead)
        where = ahead.state_dict()
    assert ahead.state_dict() == where
