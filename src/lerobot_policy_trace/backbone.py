"""The policy's picture encoder, computed faster: frozen normalisations are folded into the convolutions before them, and
tensors lie the way processors like them. For training (`quicken`) weights and their names stay what they are; for deployment
(`bake`) the normalisations are gone for good. The function stays the same; rounding differs.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops import FrozenBatchNorm2d


class FoldedConv2d(nn.Conv2d):
    """A convolution that does the work of the frozen normalisation after it."""

    norm: FrozenBatchNorm2d  # not a submodule of it: names stay as they are

    def forward(self, x: Tensor) -> Tensor:
        """norm(conv(x))."""
        norm = self.norm
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        weight, bias = self.weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class Folded(FrozenBatchNorm2d):
    """A frozen normalisation whose work is done."""

    def forward(self, x: Tensor) -> Tensor:
        """Nothing."""
        return x


def fold(module: nn.Module) -> int:
    """Folds every frozen normalisation that directly follows a convolution without bias; returns how many."""
    folded = 0
    children = list(module.children())
    for conv, norm in pairwise(children):
        plain = type(conv) is nn.Conv2d and conv.bias is None and conv.padding_mode == "zeros"
        if plain and type(norm) is FrozenBatchNorm2d:
            conv.__class__, norm.__class__ = FoldedConv2d, Folded
            conv.__dict__["norm"] = norm
            folded += 1
    return folded + sum(fold(child) for child in children if type(child) is not FoldedConv2d)


@torch.no_grad()
def calibrate(backbone: nn.Module, pictures: Tensor) -> None:
    """Gives frozen normalisations the statistics of these pictures, layer after layer. Without pretrained weights they
    normalise nothing, and what differs between two pictures is lost in what all have in common.
    """

    def fit(norm: nn.Module, given: tuple[Tensor]) -> None:
        norm.running_mean.copy_(given[0].mean((0, 2, 3)))  # type: ignore[operator]
        norm.running_var.copy_(given[0].var((0, 2, 3)))  # type: ignore[operator]

    norms = [norm for norm in backbone.modules() if isinstance(norm, FrozenBatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(fit) for norm in norms]
    try:
        backbone(pictures)
    finally:
        for hook in hooks:
            hook.remove()


def quicken(backbone: nn.Module) -> None:
    """Folds, and lays out weights and pictures channels last."""
    fold(backbone)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backbone.register_forward_pre_hook(lambda _, given: (given[0].contiguous(memory_format=torch.channels_last),))


@torch.no_grad()
def bake(backbone: nn.Module) -> int:
    """Multiplies normalisations into the convolutions before them, once for all; returns how many. If there were any,
    weights lie channels last (beside group normalisations, which Diffusion Policy has, that is slower).
    """
    baked = 0
    for module in list(backbone.modules()):
        names = list(module._modules)
        for first, second in pairwise(names):
            conv, norm = module._modules[first], module._modules[second]
            if isinstance(conv, nn.Conv2d) and isinstance(norm, FrozenBatchNorm2d | nn.BatchNorm2d):
                module._modules[first], module._modules[second] = _fused(conv, norm), nn.Identity()
                baked += 1
    if baked:
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return baked


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
