"""From a readout to what a policy takes: tokens for action-chunking regression, one condition vector for diffusion.
The policies themselves are not known here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trace_memory.keys import MLP
from trace_memory.memory import Readout


class RegressionAdapter(nn.Module):
    """W_M maps each slot to a token; [z, g, dg] becomes one summary token. Tokens join the policy's attention memory."""

    def __init__(self, width: int, token: int):
        super().__init__()
        self.W_M = nn.Linear(width, token, bias=False)
        self.summary = nn.Linear(3 * width, token)

    def forward(self, readout: Readout) -> Float[Tensor, "*n S token"]:
        """K slot tokens, then the summary."""
        summary = self.summary(torch.cat([readout.z, readout.g, readout.dg], dim=-1))
        return torch.cat([self.W_M(readout.slots), summary[..., None, :]], dim=-2)


class ResidualAdapter(nn.Module):
    """For policies that are trained already: features attend to the memory's tokens, and what they find is added. The last
    map starts at zero, so that at first nothing is.
    """

    def __init__(self, width: int, token: int, heads: int = 8):
        super().__init__()
        self.tokens = RegressionAdapter(width, token)
        self.attention = nn.MultiheadAttention(token, heads, batch_first=True)
        nn.init.zeros_(self.attention.out_proj.weight)
        nn.init.zeros_(self.attention.out_proj.bias)

    def forward(self, features: Float[Tensor, "B S token"], readout: Readout) -> Float[Tensor, "B S token"]:
        """The features with what memory adds to each."""
        tokens = self.tokens(readout).to(features)
        return features + self.attention(features, tokens, tokens, need_weights=False)[0]


class Modulation(NamedTuple):
    """Features f become f * (1 + scale) + shift."""

    scale: Float[Tensor, "*n f"]
    shift: Float[Tensor, "*n f"]

    def apply(self, features: Float[Tensor, "*n f"]) -> Float[Tensor, "*n f"]:
        """The modulated features."""
        return features * (1 + self.scale) + self.shift


class FeatureModulation(nn.Module):
    """The paper's optional use of the summary token: scale and shift of policy features, the identity at the start."""

    def __init__(self, token: int, features: int):
        super().__init__()
        self.map = nn.Linear(token, 2 * features)
        nn.init.zeros_(self.map.weight)
        nn.init.zeros_(self.map.bias)

    def forward(self, summary: Float[Tensor, "*n token"]) -> Modulation:
        """Scale and shift from the summary token."""
        return Modulation(*self.map(summary).chunk(2, dim=-1))


class DiffusionAdapter(nn.Module):
    """[read-weighted pool of the slots, z, g, dg] through an MLP whose last layer starts at zero: a vector that is appended
    to the policy's global condition. Each of the policy's maps of the condition gets `columns` of its own for it.
    """

    said: Tensor  # what the policy's maps are given of it, while they compute

    def __init__(self, width: int, hidden: int, maps: Sequence[int]):
        super().__init__()
        self.width = width
        self.map = MLP(4 * width, hidden, width)
        nn.init.zeros_(self.map.last.weight)
        nn.init.zeros_(self.map.last.bias)
        self.columns = nn.ModuleList(nn.Linear(width, out, bias=False) for out in maps)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Refuses weights of the adapter that was added to the condition, whatever `strict` says."""
        if f"{prefix}map.last.weight" in state and f"{prefix}columns.0.weight" not in state:
            errors: list[str] = rest[-1]
            errors.append(
                f"{prefix}columns: none there, expected {len(self.columns)}: weights of an adapter whose vector was added "
                "to the condition, not appended (CHANGELOG). Train anew, or use the version that made them"
            )
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, readout: Readout) -> Float[Tensor, "*n width"]:
        """The vector to append."""
        pool = (readout.alpha[..., None] * readout.slots).sum(-2)
        return self.map(torch.cat([pool, readout.z, readout.g, readout.dg], dim=-1))
