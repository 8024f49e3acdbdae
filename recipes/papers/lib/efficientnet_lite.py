"""EfficientNet-Lite0, the EfficientNet for small devices: no squeeze-and-excitation, relu6, unscaled stem and head.

Its weights, trained on ImageNet, come from recipes/papers/programs/convert_efficientnet_lite.py.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from papers.lib.weights import fill, read_tensors

SIDE, CLASSES = 224, 1000
MEAN, STD = 127 / 255, 128 / 255  # the same for every channel
# (blocks, kernel, stride of the first block, expansion factor, channels out)
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD = 32, 1280


class Convolution(nn.Sequential):
    """Convolution without bias, batch norm and, with `activated`, relu6.

    Padded as in TensorFlow, where it was trained: with stride 2, one pixel less on the left and at the top. An odd
    number of pixels would need one more, so sides must be multiples of 32.
    """

    def __init__(
        self, channels: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1, activated: bool = True
    ):
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        before, behind = (kernel - stride) // 2, kernel // 2
        if stride > 1:
            parts["pad"] = nn.ZeroPad2d((before, behind, before, behind))
        padding = behind if stride == 1 else 0
        parts["conv"] = nn.Conv2d(channels, width, kernel, stride, padding, groups=groups, bias=False)
        parts["norm"] = nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)
        if activated:
            parts["act"] = nn.ReLU6()
        super().__init__(parts)


class Block(nn.Module):
    """Pointwise expansion, depthwise convolution, pointwise projection; added to the input where the shapes agree.

    Args:
        channels: channels of the input.
        width: channels of the output.
        kernel: kernel size of the depthwise convolution.
        stride: stride of the depthwise convolution.
        factor: hidden channels per input channel; with 1 there is no expansion.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int, factor: int):
        super().__init__()
        hidden = channels * factor
        self.expand = Convolution(channels, hidden) if factor > 1 else None
        self.depthwise = Convolution(hidden, hidden, kernel, stride, groups=hidden)
        self.project = Convolution(hidden, width, activated=False)
        self.adds = stride == 1 and channels == width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, height, width) -> (batch, width, height / stride, width / stride)."""
        hidden = x if self.expand is None else self.expand(x)
        hidden = self.project(self.depthwise(hidden))
        return x + hidden if self.adds else hidden


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite0.

    Args:
        classes: number of outputs.
    """

    def __init__(self, classes: int = CLASSES):
        super().__init__()
        self.stem = Convolution(3, STEM, 3, 2)
        blocks, channels = [], STEM
        for count, kernel, stride, factor, width in STAGES:
            for number in range(count):
                blocks.append(Block(channels, width, kernel, stride if number == 0 else 1, factor))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = Convolution(channels, HEAD)
        self.classifier = nn.Linear(HEAD, classes)

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None
    ) -> ImageClassifierOutputWithNoAttention:
        """Map images (batch, 3, 224, 224) to logits (batch, classes) and, with labels (batch,), the loss."""
        pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)  # faster on a CPU
        hidden = self.head(self.blocks(self.stem(pixel_values)))
        logits = self.classifier(hidden.mean((2, 3)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


def load_efficientnet_lite(file: str | Path) -> EfficientNetLite:
    """Load the network in eval mode with weights written by recipes/papers/programs/convert_efficientnet_lite.py.

    Raises:
        ConfigError: the file is missing, not a safetensors file, or of another network.
    """
    model = EfficientNetLite()
    fill(model, read_tensors(file, "what recipes/papers/programs/convert_efficientnet_lite.py writes"), str(file))
    return model.eval()
