"""Where a memory's weights start. The paper is silent; docs/decisions/0003 has the measurements."""

import torch
from torch import nn

from trace_memory.slots import Slots

SLOT_SHARE = 0.3


@torch.no_grad()
def content_first(slots: Slots) -> None:
    """What is written starts as what is seen, and the slots' own columns start small, so that the recurrence is calm.

    Where the path mixes with it, the columns of g and dg in phi_w and the rho columns of phi_m and phi_beta start at zero:
    keys vary with every wiggle of the path, and drown the cue. An anchor was seen, and starts as what is seen does.
    """
    content = slots.phi_w.first.in_features - slots.q
    slots.phi_w.first.weight[:, content : content + slots.q - slots.anchor] = 0.0
    for phi in (slots.phi_m, slots.phi_beta):
        phi.first.weight[:, : slots.width] *= SLOT_SHARE
        phi.first.weight[:, 2 * slots.width :] = 0.0


def as_pytorch(module: nn.Module) -> None:
    """Every linear map as PyTorch draws it."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
