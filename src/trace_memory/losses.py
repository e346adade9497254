"""The auxiliary losses of Eq. (memory_regularizers): balance, entropy, consistency. Means run over valid steps only."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trace_memory.memory import AuxiliaryWeights, Readout


def balance_loss(omega: Float[Tensor, "*n K"], valid: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Penalises uneven average routing."""
    mean = _mean(omega, valid)
    return ((mean - 1 / omega.shape[-1]) ** 2).mean()


def entropy_loss(omega: Float[Tensor, "*n K"], valid: Bool[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Penalises diffuse routing at each step; 1 for uniform routing, 0 for one slot."""
    if omega.shape[-1] == 1:
        return omega.sum() * 0.0
    omega = torch.where(valid[..., None], omega, 1.0)
    # clamped inside the log: routing may reach exactly 0, where the gradient of entr() is infinite
    entropy = -(omega * omega.clamp_min(1e-12).log()).sum(-1) / math.log(omega.shape[-1])
    return _mean(entropy, valid)


def consistency_loss(
    z: Float[Tensor, "*n d"], u: Float[Tensor, "*n d"], valid: Bool[Tensor, "*n"]
) -> Float[Tensor, ""]:
    """Aligns the bounded readout with the write proposal."""
    z, u = (torch.where(valid[..., None], x, 0.0) for x in (z, u))
    return _mean(((torch.tanh(z) - torch.tanh(u)) ** 2).mean(-1), valid)


def auxiliary_losses(readout: Readout, valid: Bool[Tensor, "*n"]) -> dict[str, Float[Tensor, ""]]:
    """The losses of a memory's kind, unweighted, by name.

    Args:
        readout: of a scan.
        valid: which of its steps are real.

    Returns:
        "balance", "entropy" and "consistency" of a memory that routes, "prior" of a memory of events, else none.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, auxiliary_losses, build
        >>> memory = build(MemoryConfig(name="paper", channels=7, content=64, width=32, hidden=32))
        >>> _, readouts = memory.scan(torch.zeros(2, 5, 64), torch.zeros(2, 5, 7))
        >>> sorted(auxiliary_losses(readouts, torch.ones(2, 5, dtype=torch.bool)))
        ['balance', 'consistency', 'entropy']
    """
    if readout.prior is not None:
        return {"prior": _mean(readout.prior, valid)}
    if readout.routing is None:
        return {}
    return {
        "balance": balance_loss(readout.routing.omega, valid),
        "entropy": entropy_loss(readout.routing.omega, valid),
        "consistency": consistency_loss(readout.z, readout.routing.u, valid),
    }


def weighted(losses: dict[str, Tensor], weights: AuxiliaryWeights) -> Tensor | float:
    """What is added to the policy's own loss. Eq. (total_loss)."""
    return sum((getattr(weights, name) * loss for name, loss in losses.items() if getattr(weights, name)), start=0.0)


def _mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid steps; what stands at padding does not matter, not even NaN."""
    keep = valid if x.ndim == valid.ndim else valid[..., None]
    total = torch.where(keep, x, 0.0).flatten(0, valid.ndim - 1).sum(0)
    return total / valid.sum().clamp_min(1)
