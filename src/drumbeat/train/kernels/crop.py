"""Crops of images of different sizes, resized to one size and flipped, in one launch.

The filter is Pillow's and torchvision's antialiased "bilinear": a triangle as wide as two output pixels, and never narrower
than two input pixels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _weight(at, centre, reach):
    distance = tl.abs((at + 0.5 - centre) / reach)
    return tl.maximum(1 - distance, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _crop(addresses, heights, widths, boxes, flips, out, size, tile: tl.constexpr):
    image, y = tl.program_id(0), tl.program_id(1)
    source = tl.load(addresses + image).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(heights + image), tl.load(widths + image)
    left, top = tl.load(boxes + image * 4), tl.load(boxes + image * 4 + 1)
    right, bottom = tl.load(boxes + image * 4 + 2), tl.load(boxes + image * 4 + 3)
    step_x, step_y = (right - left) / size, (bottom - top) / size
    reach_x, reach_y = tl.maximum(step_x, 1.0), tl.maximum(step_y, 1.0)
    x = tl.arange(0, tile)
    from_x = tl.where(tl.load(flips + image) != 0, size - 1 - x, x)
    centre_x, centre_y = left + (from_x + 0.5) * step_x, top + (y + 0.5) * step_y
    first_x, first_y = tl.floor(centre_x - reach_x + 0.5).to(tl.int32), tl.floor(centre_y - reach_y + 0.5).to(tl.int32)
    taps_x, taps_y = tl.ceil(2 * reach_x).to(tl.int32) + 1, tl.ceil(2 * reach_y).to(tl.int32) + 1
    plane = height * width
    red, green, blue = tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.float32), tl.zeros((tile,), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    for j in range(taps_y):
        row = first_y + j + 0 * x
        weight_y = tl.where((row >= 0) & (row < height), _weight(row, centre_y, reach_y), 0.0)
        for i in range(taps_x):
            column = first_x + i
            inside = (column >= 0) & (column < width) & (x < size) & (weight_y > 0)
            weight = tl.where(inside, _weight(column, centre_x, reach_x) * weight_y, 0.0)
            at = source + row * width + column
            red += weight * tl.load(at, mask=inside, other=0).to(tl.float32)
            green += weight * tl.load(at + plane, mask=inside, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2 * plane, mask=inside, other=0).to(tl.float32)
            total += weight
    at = out + ((image.to(tl.int64) * size + y) * size + x) * 3
    total = tl.maximum(total, 1e-6)
    tl.store(at, (red / total + 0.5).to(tl.uint8), mask=x < size)
    tl.store(at + 1, (green / total + 0.5).to(tl.uint8), mask=x < size)
    tl.store(at + 2, (blue / total + 0.5).to(tl.uint8), mask=x < size)


def crop_and_resize(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Return (count, size, size, 3) bytes. `images`: rows of addresses, heights, widths and flips of images, each three planes of
    bytes; `boxes`: left, top, right and bottom of each crop in pixels. Both are on the device."""
    count = images.shape[1]
    out = torch.empty((count, size, size, 3), dtype=torch.uint8, device=images.device)
    tile = triton.next_power_of_2(size)
    _crop[(count, size)](images[0], images[1], images[2], boxes, images[3], out, size, tile, num_warps=4)
    return out
