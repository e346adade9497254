"""I_{L,r}(t): which frames the paper's fixed-budget training scan sees for a target at time t."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def history_indices(t: Int[Tensor, " B"], budget: int, stride: int) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """First frame, tail of every `stride`-th frame up to t, and t itself, in causal order, with the mask of real entries.

    Entry 0 is the first frame; entry l >= 1 is t - stride * (budget - 1 - l), real only if it comes after the first
    frame. The last entry is always t: at t = 0 the first frame is the current one and stands there, once.
    """
    if budget < 2 or stride < 1:
        raise ValueError(f"history: budget={budget}, stride={stride}; expected budget >= 2 and stride >= 1")
    if bool((t < 0).any()):
        raise ValueError(f"t: minimum {int(t.min())}, expected frame indices >= 0")
    back = stride * torch.arange(budget - 1, -1, -1, device=t.device)
    indices = t[:, None] - back
    valid = indices > 0
    indices, valid = indices.clamp_min(0), valid.clone()
    indices[:, 0], valid[:, 0], valid[:, -1] = 0, t > 0, True
    return indices, valid
