"""Decoding on the GPU, as far as a CPU can show it: which files go where, and what happens to broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor

Image = pytest.importorskip("PIL.Image", reason="reading images needs Pillow")

from drumbeat.train.data import Stream  # noqa: E402
from drumbeat.train.data.decode import chosen_box, decoded  # noqa: E402
from drumbeat.train.data.decoders import Decoders, DeviceDecoder, Draw, decoders_for  # noqa: E402  # noqa: E402
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

    def __init__(self, files: List[Path], workers: int = 1, shared: bool = False) -> None:
        super().__init__(torch.device("cpu"), Decoders(workers), shared)
        self.paths, self.taken = files, 0

    def _cropped(self, size: int, files: List[Tensor], draws: List[Draw]) -> Optional[Tensor]:
        known = {path.read_bytes(): str(path) for path in self.paths}
        self.taken = len(files)
        if not files:
            return None
        try:
            made = [decoded(known[bytes(file.numpy())], size, draw) for file, draw in zip(files, draws)]
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        return torch.from_numpy(np.stack(made))


def test_what_the_gpu_cannot_decode_goes_to_the_processes_and_the_order_stays(files: List[Path]) -> None:
    gpu = PlayedGpu(files)
    wanted = [(str(path), (0, 1, i)) for i, path in enumerate(files)]
    want = np.stack([decoded(path, SIZE, draw) for path, draw in wanted])
    assert torch.equal(gpu.decode(SIZE, wanted), torch.from_numpy(want)) and gpu.taken == 2, "the PNG is not its own"


def test_both_at_once_share_a_batch_in_the_same_way_every_time(files: List[Path]) -> None:
    both = PlayedGpu(files, workers=24, shared=True)  # as fast as the GPU: half of each batch
    wanted = [(str(files[i % 3]), (0, 1, i)) for i in range(6)]
    want = torch.from_numpy(np.stack([decoded(path, SIZE, draw) for path, draw in wanted]))
    assert torch.equal(both.decode(SIZE, wanted), want) and both.taken == 2, "the first three, less the PNG"
    files[0].write_bytes(b"no image")
    with pytest.raises(Refusal, match="0.jpg: cannot be read as an image"):
        both.decode(SIZE, wanted)


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
    with pytest.raises(Refusal, match="decode=both: it takes an NVIDIA GPU"):
        decoders_for("both", 1, here)
    with pytest.raises(Refusal, match="known: auto, gpu, cpu, both"):
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
        assert [bytes(file) for file in processes.read([str(path) for path in paths])] == [
            p.read_bytes() for p in paths
        ]
    with pytest.raises(Refusal, match="gone.jpg: cannot be read: No such file"):
        processes.read([str(tmp_path / "gone.jpg"), str(paths[1])])
    assert [len(file) for file in processes.read([str(paths[1])])] == [100_000], "and goes on after a refusal"


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
