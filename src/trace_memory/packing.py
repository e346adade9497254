"""Valid steps first: a scan whose invalid steps come anywhere, as sequences whose invalid steps come last, and back.
Memories that compute many steps at once use it; what they compute is in recurrent.py and baselines.py.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trace_memory.memory import may_sync


class Packing:
    """Where the valid steps of a scan are.

    Packed, step t of a row is its t-th valid one; `real` tells which packed steps there are, and no step after them may
    reach a state.
    """

    real: Bool[Tensor, "B T"]

    def __init__(self, valid: Bool[Tensor, "B T"]):
        self.whole = may_sync() and bool(valid.all())  # nothing is to be moved
        self.real = valid
        if not self.whole:
            self.order = torch.argsort(~valid, dim=1, stable=True)
            self.upto = valid.cumsum(1)
            self.real = torch.arange(valid.shape[1], device=valid.device) < self.upto[:, -1:]

    def pack(self, x: Float[Tensor, "B T ..."]) -> Float[Tensor, "B T ..."]:
        """Valid steps first, in their order."""
        return x if self.whole else _along(x, self.order)

    def unpack(self, x: Float[Tensor, "B T ..."], before: Float[Tensor, "B ..."]) -> Float[Tensor, "B T ..."]:
        """Packed results at the scan's own times. An invalid step has that of the last valid one, or what was `before`;
        the last time has that of the last valid step.
        """
        return x if self.whole else _along(torch.cat([before[:, None], x], dim=1), self.upto)

    def newest(self, kept: Float[Tensor, "B K c"], x: Float[Tensor, "B T c"]) -> Float[Tensor, "B K c"]:
        """The last K of what was kept and of the packed steps that are real, newest last."""
        size, both = kept.shape[1], torch.cat([kept, x], dim=1)
        if self.whole:
            return both[:, both.shape[1] - size :]
        return _along(both, self.real.sum(1, keepdim=True) + torch.arange(size, device=x.device))


def _along(x: Tensor, index: Tensor) -> Tensor:
    """The steps `index` (B, N) of each row of x (B, T, ...)."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
