"""From a readout to what a policy takes: tokens for action-chunking regression, one condition vector for diffusion.
The policies themselves are not known here.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trace_memory.keys import MLP
from trace_memory.memory import Readout


class RegressionAdapter(nn.Module):
    """W_M maps each slot to a token; [z, g, dg] becomes one summary token. Tokens join the policy's attention memory.

    Args:
        width: of the readout.
        token: of a token.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, RegressionAdapter, build
        >>> memory = build(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> _, readout = memory.step(memory.init(1), torch.zeros(1, 64), torch.zeros(1, 7))
        >>> tuple(RegressionAdapter(32, 128)(readout).shape)
        (1, 5, 128)
    """

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

    Args:
        width: of the readout.
        token: of a feature.
        heads: of the attention.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, ResidualAdapter, build
        >>> memory = build(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> _, readout = memory.step(memory.init(1), torch.zeros(1, 64), torch.zeros(1, 7))
        >>> features = torch.randn(1, 10, 128)
        >>> bool((ResidualAdapter(32, 128)(features, readout) == features).all())
        True
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


class ConditionAdapter(nn.Module):
    """For diffusion policies: [read-weighted pool of the slots, z, g, dg] through an MLP to one condition vector. Each block
    of the policy has columns of its own for it, which start at zero; they belong to the policy.

    Args:
        width: of the readout.
        hidden: of the MLP.

    Example:
        >>> import torch
        >>> from trace_memory import ConditionAdapter, MemoryConfig, build
        >>> memory = build(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> _, readout = memory.step(memory.init(1), torch.zeros(1, 64), torch.zeros(1, 7))
        >>> tuple(ConditionAdapter(32, 48)(readout).shape)
        (1, 32)
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.map = MLP(4 * width, hidden, width)

    def forward(self, readout: Readout) -> Float[Tensor, "*n width"]:
        """The condition vector. Eq. (adapter_interface)"""
        pool = (readout.alpha[..., None] * readout.slots).sum(-2)
        return self.map(torch.cat([pool, readout.z, readout.g, readout.dg], dim=-1))
