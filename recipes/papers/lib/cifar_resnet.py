"""ResNets for images of 32 x 32 pixels (He et al. 2016, section 4.2): 6n + 2 layers, widths 16, 32 and 64.

Where width and size change, the shortcut has no weights ("option A"): every second pixel, with zeros for new channels.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from papers.lib.weights import fill, read_tensors
from snnk_peft.errors import ConfigError

SIDE, WIDTHS = 32, (16, 32, 64)


class Block(nn.Module):
    """relu(x' + bn(conv(relu(bn(conv(x)))))), where x' is x or, if the shape changes, its shortcut.

    Args:
        channels: channels of the input.
        width: channels of the output.
        stride: stride of the first convolution and of the shortcut.
    """

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.stride, self.added = stride, width - channels
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, height, width) -> (batch, width, height / stride, width / stride)."""
        hidden = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1 or self.added:
            before = self.added // 2
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.added - before))
        return torch.relu(x + hidden)


class CifarResNet(nn.Module):
    """Three stages of n blocks, mean over the pixels, one linear layer.

    Args:
        depth: number of layers with weights, 6n + 2.
        classes: number of outputs.

    Raises:
        ConfigError: the depth is not 6n + 2.
    """

    def __init__(self, depth: int = 20, classes: int = 10):
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigError(f"depth is {depth}; expected 6n + 2, such as 20, 32 or 56")
        self.depth, blocks = depth, depth // 6
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        channels = WIDTHS[0]
        for number, width in enumerate(WIDTHS, start=1):
            stage = []
            for block in range(blocks):
                stage.append(Block(channels, width, 2 if number > 1 and block == 0 else 1))
                channels = width
            self.add_module(f"layer{number}", nn.Sequential(*stage))
        self.linear = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None
    ) -> ImageClassifierOutputWithNoAttention:
        """Map images (batch, 3, 32, 32) to logits (batch, classes) and, with labels (batch,), the loss."""
        pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)  # a third faster on a CPU
        hidden = torch.relu(self.bn1(self.conv1(pixel_values)))
        for number in range(1, len(WIDTHS) + 1):
            hidden = self.get_submodule(f"layer{number}")(hidden)
        logits = self.linear(hidden.mean((2, 3)))
        loss = None if labels is None else functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


def load_cifar_resnet(file: str | Path, depth: int = 20) -> CifarResNet:
    """Load a trained network from a safetensors file; the number of classes is that of its last layer.

    Args:
        file: file with the tensor names of this module (conv1, bn1, layer1.0.conv1, ..., linear).
        depth: number of layers.

    Raises:
        ConfigError: the file is missing, not a safetensors file, or of another network.
    """
    tensors = read_tensors(file, f"a safetensors file of a ResNet-{depth}")
    bias = tensors.get("linear.bias")
    model = CifarResNet(depth, 10 if bias is None else len(bias))
    fill(model, tensors, f"{file}, read as ResNet-{depth},")
    return model
