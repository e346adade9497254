"""The encoder written out is the stock one, in other words: in training, and with normalisations baked in for control."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, resnet50
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

from lerobot_policy_trace.encoder import baked, calibrate, feature_map, to_channels_last

NORMS = FrozenBatchNorm2d | nn.BatchNorm2d


def backbone(kind=resnet18, norm=FrozenBatchNorm2d) -> nn.Module:
    """As LeRobot makes it, with normalisations that do something."""
    torch.manual_seed(0)
    stock = IntermediateLayerGetter(kind(norm_layer=norm), {"layer4": "feature_map"}).double()
    for each in (module for module in stock.modules() if isinstance(module, NORMS)):
        with torch.no_grad():
            for value in (each.weight, each.bias, each.running_mean, each.running_var):
                value.copy_(torch.rand_like(value) + 0.5)
    return stock


def pictures() -> torch.Tensor:
    return torch.randn(3, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [resnet18, resnet50])
def test_same_function_same_gradients_same_names(kind):
    stock = backbone(kind)
    fast = copy.deepcopy(stock)
    to_channels_last(fast)
    assert list(fast.state_dict()) == list(stock.state_dict())
    ours, theirs = feature_map(fast, pictures()), stock(pictures())["feature_map"]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    for each in (ours, theirs):
        each.sin().sum().backward()
    for (name, a), b in zip(fast.named_parameters(), stock.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-7, msg=name)


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, nn.BatchNorm2d])
def test_baked_normalisations_are_the_same_function(norm):
    stock = backbone(norm=norm).eval()
    fast = copy.deepcopy(stock)
    assert baked(fast) == 20
    assert not any(isinstance(module, NORMS) for module in fast.modules())
    with torch.no_grad():
        theirs = stock(pictures())["feature_map"]
        torch.testing.assert_close(fast(pictures())["feature_map"], theirs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(feature_map(fast, pictures()), theirs, rtol=1e-9, atol=1e-9)


def test_a_normalisation_that_learns_is_not_folded():
    stock = backbone(norm=nn.BatchNorm2d).train()
    fast = copy.deepcopy(stock)
    torch.testing.assert_close(feature_map(fast, pictures()), stock(pictures())["feature_map"], rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(fast.buffers(), stock.buffers(), strict=True))


def test_calibrated_normalisations_have_the_statistics_of_the_pictures():
    stock = backbone()
    calibrate(stock, pictures())
    first = stock["conv1"](pictures())
    torch.testing.assert_close(stock["bn1"].running_mean, first.mean((0, 2, 3)))
    torch.testing.assert_close(stock["bn1"].running_var, first.var((0, 2, 3)))
