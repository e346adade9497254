"""The policy's picture encoder, computed faster: frozen normalisations are folded into the convolutions before them, and
tensors lie the way GPUs like them. The function, its weights and their names stay what they are; rounding differs.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
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


def quicken(backbone: nn.Module) -> None:
    """Folds, and lays out weights and pictures channels last."""
    fold(backbone)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backbone.register_forward_pre_hook(lambda _, given: (given[0].contiguous(memory_format=torch.channels_last),))
