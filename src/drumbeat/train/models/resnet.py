"""ResNet 18 and 50 (v1.5: the stride sits in the 3x3 convolution) and Wide ResNet for small images.

Module names are torchvision's, so its weights load and its numbers can be compared.
"""

from __future__ import annotations

from typing import List, Optional, Type, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumbeat.train.layers.batch_norm import Block, block_of, fusable, norm_add_relu, norm_relu, norm_relu_pool


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    widening = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: Optional[nn.Sequential]) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Union[Tensor, Block]) -> Block:
        x = block_of(x)
        y = norm_relu(self.bn1, self.conv1(x.main))
        return residual(self.bn2, self.conv2(y), x, self.downsample)


class Bottleneck(nn.Module):
    widening = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: Optional[nn.Sequential]) -> None:
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = downsample

    def forward(self, x: Union[Tensor, Block]) -> Block:
        x = block_of(x)
        y = norm_relu(self.bn1, self.conv1(x.main))
        y = norm_relu(self.bn2, self.conv2(y))
        return residual(self.bn3, self.conv3(y), x, self.downsample)


def residual(norm: nn.BatchNorm2d, y: Tensor, x: Block, downsample: Optional[nn.Sequential]) -> Block:
    """The end of a block whose input was `x`."""
    if downsample is None:
        return norm_add_relu(norm, y, x.shortcut)
    convolve, shortcut_norm = downsample
    if not isinstance(shortcut_norm, nn.BatchNorm2d) or not fusable(norm, y):
        return norm_add_relu(norm, y, downsample(x.projection))
    return norm_add_relu(norm, y, convolve(x.projection), shortcut_norm)


class ResNet(nn.Module):
    def __init__(self, depth: int = 50, classes: int = 1000) -> None:
        super().__init__()
        kind: Type[Union[BasicBlock, Bottleneck]] = BasicBlock if depth == 18 else Bottleneck
        counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]
        self.conv1 = convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, count in enumerate(counts):
            width = 64 << stage
            blocks: List[nn.Module] = []
            for i in range(count):
                stride = 2 if i == 0 and stage > 0 else 1
                outputs = width * kind.widening
                other_shape = stride != 1 or inputs != outputs
                shortcut = (
                    nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
                    if other_shape
                    else None
                )
                blocks.append(kind(inputs, width, stride, shortcut))
                inputs = outputs
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = norm_relu_pool(self.bn1, self.stem(x))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(block_of(x).main.mean(dim=(2, 3)))

    def stem(self, images: Tensor) -> Tensor:
        """The first convolution. On a GPU each 2 x 2 square of the image becomes 12 channels (16 with padding) and the
        7 x 7 filter with stride 2 a 4 x 4 one with stride 1: the same sums, but tensor cores want more than 3 channels.
        """
        odd = not isinstance(self.conv1, nn.Conv2d)  # a pipeline stage that has none
        if odd or not images.is_cuda or images.shape[-1] % 2 or images.shape[-2] % 2:
            return self.conv1(images)
        if torch.is_autocast_enabled("cuda"):  # as the convolution would: half the bytes to rearrange
            images = images.to(torch.get_autocast_dtype("cuda"))
        squares = F.pad(F.pixel_unshuffle(images, 2), (2, 1, 2, 1, 0, 4)).contiguous(memory_format=torch.channels_last)
        return F.conv2d(squares, fold_filter(self.conv1.weight).to(squares.dtype))


def fold_filter(weight: Tensor) -> Tensor:
    """(out, 3, 7, 7) -> (out, 16, 4, 4) for `stem`: a zero row and column first, by parity, and 4 empty channels."""
    by_parity = F.pad(weight, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(0, 1, 3, 5, 2, 4)
    return F.pad(by_parity.flatten(1, 3), (0, 0, 0, 0, 0, 4)).contiguous(memory_format=torch.channels_last)


class WideBlock(nn.Module):
    """Normalise and activate first, then convolve (pre-activation)."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), convolution(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), convolution(outputs, outputs, 3)
        self.shortcut = convolution(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else None
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.bn1(x))
        y = F.relu(self.bn2(self.conv1(first)))
        y = self.conv2(F.dropout(y, self.dropout, self.training))
        return y + (x if self.shortcut is None else self.shortcut(first))


class WideResNet(nn.Module):
    """WRN-depth-widening (Zagoruyko and Komodakis, 2016) for 32 x 32 images; depth is 6 n + 4."""

    def __init__(self, depth: int = 28, widening: int = 10, classes: int = 100, dropout: float = 0.0) -> None:
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"depth {depth}: a wide ResNet has 6 n + 4 layers, such as 10, 16, 22, 28 or 40")
        inputs = 16
        self.stem = convolution(3, inputs, 3)
        blocks: List[nn.Module] = []
        for stage in range(3):
            outputs = (16 << stage) * widening
            for i in range((depth - 4) // 6):
                blocks.append(WideBlock(inputs, outputs, 2 if i == 0 and stage > 0 else 1, dropout))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.blocks(self.stem(x)))).mean(dim=(2, 3)))  # type: ignore[no-any-return]


def forward_flops(model: nn.Module, size: int) -> int:
    """Floating-point operations of one forward pass for one image, counted by torch on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model.to("meta").eval()(torch.empty(1, 3, size, size, device="meta"))
    return int(counter.get_total_flops())
