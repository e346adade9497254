"""From pictures to feature maps: a torchvision ResNet's forward pass written out, in which frozen normalisations are folded
into the convolutions before them. The function stays the same; rounding differs. For training (`feature_map`) weights and
names stay what they are; for deployment (`baked`) the normalisations are gone for good.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops import FrozenBatchNorm2d

Convolve = Callable[[Any, Any, Tensor], Tensor]  # a convolution, the normalisation after it, what they are given


def folded(conv: Any, norm: Any, x: Tensor) -> Tensor:
    """norm(conv(x)), as one convolution where the normalisation does not learn."""
    if not isinstance(norm, FrozenBatchNorm2d):
        made: Tensor = norm(conv(x))
        return made
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    weight, bias = conv.weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale
    return F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def feature_map(backbone: nn.Module, pictures: Tensor, convolve: Convolve = folded) -> Tensor:
    """The map (N, C, h, w) of pictures (N, 3, H, W) after the last layer of a ResNet, as LeRobot's policies have it."""
    parts: list[Any] = list(backbone.children())
    conv, norm, relu, pool, *layers = parts
    if conv.weight.is_contiguous(memory_format=torch.channels_last):
        pictures = pictures.contiguous(memory_format=torch.channels_last)
    x: Tensor = pool(relu(convolve(conv, norm, pictures)))
    for layer in layers:
        for block in layer.children():
            x = _residual(block, x, convolve)
    return x


def _residual(block: Any, x: Tensor, convolve: Convolve) -> Tensor:
    """A basic block or a bottleneck of a ResNet."""
    y = F.relu(convolve(block.conv1, block.bn1, x))
    y = convolve(block.conv2, block.bn2, y)
    if hasattr(block, "conv3"):
        y = convolve(block.conv3, block.bn3, F.relu(y))
    return F.relu(y + (x if block.downsample is None else convolve(block.downsample[0], block.downsample[1], x)))


def to_channels_last(backbone: nn.Module) -> None:
    """Lays weights, and by that maps, out channels last, the way processors like them."""
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def calibrate(backbone: nn.Module, pictures: Tensor) -> None:
    """Gives frozen normalisations the statistics of these pictures, layer after layer. Without pretrained weights they
    normalise nothing, and what differs between two pictures is lost in what all have in common.
    """

    def fit(conv: Any, norm: Any, x: Tensor) -> Tensor:
        y: Tensor = conv(x)
        if isinstance(norm, FrozenBatchNorm2d):
            norm.running_mean.copy_(y.mean((0, 2, 3)))
            norm.running_var.copy_(y.var((0, 2, 3)))
        made: Tensor = norm(y)
        return made

    feature_map(backbone, pictures, fit)


@torch.no_grad()
def baked(backbone: nn.Module) -> int:
    """Multiplies normalisations into the convolutions before them, once for all; returns how many. If there were any,
    weights lie channels last (beside group normalisations, which Diffusion Policy has, that is slower). For a copy of a
    policy that is not trained any more.
    """
    count = 0
    for module in list(backbone.modules()):
        for (first, conv), (second, norm) in pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, FrozenBatchNorm2d | nn.BatchNorm2d):
                module.register_module(first, _fused(conv, norm))
                module.register_module(second, nn.Identity())
                count += 1
    if count:
        to_channels_last(backbone)
    return count


def _fused(conv: Any, norm: Any) -> nn.Conv2d:
    weight, bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    made = nn.Conv2d(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups,
        padding_mode=conv.padding_mode, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    made.weight, made.bias = weight, bias
    return made
