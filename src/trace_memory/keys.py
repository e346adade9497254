"""From signatures to addresses: g, dg and the routing state rho. What is stored under an address is not known here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Key(NamedTuple):
    """The trajectory key and its parts."""

    g: Float[Tensor, "*n d"]
    dg: Float[Tensor, "*n d"]
    q: Float[Tensor, "*n Q"]
    rho: Float[Tensor, "*n d"]


class MLP(nn.Module):
    """Linear - GELU - Linear, the form of every map of the paper, started so that it passes on the variance it is given.

    PyTorch's own start shrinks the variance severalfold a map, and a cue passes five of them on its way into a slot.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float = 0.0):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.first.weight, std=inputs**-0.5)
        nn.init.normal_(self.last.weight, std=(0.425 * hidden) ** -0.5)  # E[gelu(x)^2] = 0.425 for a standard normal x
        nn.init.zeros_(self.first.bias)
        nn.init.zeros_(self.last.bias)

    def hidden(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n h"]:
        """All of it but the last layer."""
        return self.dropout(F.gelu(self.first(x)))

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """The map."""
        return self.last(self.hidden(x))


class Keys(nn.Module):
    """phi_g, phi_delta and phi_rho, as the paper has them. `anchor` is the width of a first-frame content appended to q
    (0: none); `delta` makes phi_delta.
    """

    def __init__(
        self,
        signature_dim: int,
        width: int,
        hidden: int,
        *,
        anchor: int = 0,
        dropout: float = 0.1,
        delta: Callable[[int, int, int, float], nn.Module] = MLP,
    ):
        super().__init__()
        self.width, self.anchor = width, anchor
        self.phi_g = MLP(signature_dim, hidden, width, dropout)
        self.phi_delta = delta(signature_dim, hidden, width, dropout)
        self.phi_rho = MLP(2 * width + anchor, hidden, width)
        self.norm: nn.Module = nn.Identity()

    def forward(
        self, xi: Float[Tensor, "*n D"], delta: Float[Tensor, "*n D"], anchor: Float[Tensor, "*n a"] | None = None
    ) -> Key:
        """Standardised signature and increment to the key. Eq. (delta_signature), Eq. (trajectory_key)."""
        g, dg = self.norm(self.phi_g(xi)), self.norm(self.phi_delta(delta))
        q = torch.cat([g, dg] if anchor is None else [g, dg, anchor], dim=-1)
        return Key(g, dg, q, self.phi_rho(q))


class NormalisedKeys(Keys):
    """Keys whose g and dg are normalised, without weights: a signature has thousands of coordinates, and a small change of
    every weight is a large one of their sum.
    """

    def __init__(self, signature_dim: int, width: int, hidden: int, **options: Any):
        super().__init__(signature_dim, width, hidden, **options)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
