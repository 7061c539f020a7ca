"""JPEG files decoded and cropped on the GPU that trains: by torchvision's nvJPEG, which uses the chip's own decoders.

Processes read the files: in threads of the rank, each of a thousand system calls per batch would wait for the interpreter's lock.
Two threads take turns: one has files read while the other waits for the GPU, which works on a stream per thread, beside
training. What the GPU cannot decode (other formats, broken files, four colour channels) goes to the decoding processes. With
`decode=both` the last images of every batch go there too, at the same time. How many follows from the number of processes
alone, never from measured times: the two decoders differ by a bit in some pixels, and a resumed run must see the same ones.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from drumbeat.train.data.decode import chosen_box
from drumbeat.train.data.decoders import Decoders, Draw
from drumbeat.train.refusal import Refusal
from drumbeat.train.world import World

_JPEG = b"\xff\xd8\xff"
_PROCESSES = 24  # that decode as many images per second as the GPU does (measured/gpu.md: 25 and 36)


def unavailable(device: torch.device) -> Optional[str]:
    """None, or why images cannot be decoded on this device."""
    if device.type != "cuda" or torch.version.hip:
        return "it takes an NVIDIA GPU"
    try:
        from torchvision.io import decode_jpeg

        from drumbeat.train.kernels import crop  # noqa: F401 - Triton must be there

        decode_jpeg([_smallest()], device=device)
    except (ImportError, RuntimeError, OSError) as error:
        return str(error).splitlines()[0] or type(error).__name__
    return None


def decoders_for(where: str, workers: int, world: World) -> Union[Decoders, DeviceDecoder]:
    """`where`: gpu, cpu, both at once, or auto, the GPU where it can."""
    if where not in ("auto", "gpu", "cpu", "both"):
        raise Refusal(f"decode={where} is unknown", "known: auto, gpu, cpu, both")
    processes = Decoders(workers, world.local_size)
    reason = "" if where == "cpu" else unavailable(world.device)
    if where in ("gpu", "both") and reason:
        raise Refusal(f"decode={where}: {reason}", "use decode=cpu")
    return processes if where == "cpu" or reason else DeviceDecoder(world.device, processes, shared=where == "both")


class DeviceDecoder:
    """Takes the place of `Decoders`; `others` decodes what the GPU cannot, and its share of each batch where it is `shared`."""

    def __init__(self, device: torch.device, others: Decoders, shared: bool = False) -> None:
        self.device, self.others = device, others
        self.share = others.workers / (others.workers + _PROCESSES) if shared else 0.0
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="drumbeat-share")
        self._own = threading.local()  # .stream

    def decode(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Tensor:
        """(count, size, size, 3) bytes on the device, complete when this returns."""
        first = len(images) - int(len(images) * self.share)
        if first == len(images):
            return self._decoded(size, images)
        share = self._beside.submit(self.others.decode, size, images[first:])
        try:
            ours = self._decoded(size, images[:first])
        finally:
            theirs = share.result()
        return torch.cat([ours, torch.from_numpy(theirs).to(self.device)])

    def _decoded(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Tensor:
        files = self.others.read([path for path, _ in images])
        here = [i for i, file in enumerate(files) if file[:3] == _JPEG]
        with self._beside_training():
            try:
                jpegs = [torch.frombuffer(files[i], dtype=torch.uint8) for i in here]
                cropped = self._cropped(size, jpegs, [images[i][1] for i in here])
            except RuntimeError:  # one of them; the processes find out which, and name it if it is broken
                here, cropped = [], None
            if cropped is not None and len(here) == len(images):
                return cropped
            return self._mixed(size, images, here, cropped)

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._own.stream):
            yield
        self._own.stream.synchronize()

    def _cropped(self, size: int, files: List[Tensor], draws: List[Draw]) -> Optional[Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        from drumbeat.train.kernels.crop import crop_and_resize

        if not files:
            return None
        whole = decode_jpeg(files, mode=ImageReadMode.RGB, device=self.device)
        boxes, flips = zip(*(chosen_box(image.shape[2], image.shape[1], draw) for image, draw in zip(whole, draws)))
        return crop_and_resize(whole, list(boxes), list(flips), size)

    def _mixed(
        self, size: int, images: Sequence[Tuple[str, Draw]], here: List[int], cropped: Optional[Tensor]
    ) -> Tensor:
        out = torch.empty((len(images), size, size, 3), dtype=torch.uint8, device=self.device)
        rest = [i for i in range(len(images)) if i not in set(here)]
        if cropped is not None:
            out[torch.tensor(here, device=self.device)] = cropped
        if rest:
            pixels = torch.from_numpy(self.others.decode(size, [images[i] for i in rest]))
            out[torch.tensor(rest, device=self.device)] = pixels.to(self.device)
        return out


def _smallest() -> Tensor:
    """A JPEG image of 16 x 16 grey pixels, to see whether there is a decoder."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16), (128, 128, 128)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
