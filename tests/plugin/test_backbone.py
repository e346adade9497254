"""The fast encoder is the stock one, in other words."""

import copy

import torch
from lerobot_policy_trace.backbone import Folded, FoldedConv2d, quicken
from torchvision.models import resnet18
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d


def test_same_function_same_gradients_same_names():
    torch.manual_seed(0)
    stock = IntermediateLayerGetter(resnet18(norm_layer=FrozenBatchNorm2d), {"layer4": "feature_map"}).double()
    for norm in (module for module in stock.modules() if isinstance(module, FrozenBatchNorm2d)):
        for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            value.copy_(torch.rand_like(value) + 0.5)
    fast = copy.deepcopy(stock)
    quicken(fast)
    assert sum(type(module) is FoldedConv2d for module in fast.modules()) == 20
    assert not any(type(module) is FrozenBatchNorm2d for module in fast.modules())
    assert sum(type(module) is Folded for module in fast.modules()) == 20
    assert list(fast.state_dict()) == list(stock.state_dict())
    pictures = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    ours, theirs = (each(pictures)["feature_map"] for each in (fast, stock))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    for each in (ours, theirs):
        each.sin().sum().backward()
    for (name, a), b in zip(fast.named_parameters(), stock.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-7, msg=name)
