"""TRACE with one part taken away, each a class of its own (paper, table of ablations). "No auxiliary losses" is TRACE
itself trained with AuxiliaryWeights() of zero, and has no class.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trace_memory.keys import Keys
from trace_memory.memory import Memory, MemoryState, Readout, TraceMemory, Track
from trace_memory.normalise import Normaliser
from trace_memory.signature import Signature
from trace_memory.slots import Slots


class CurrentObservation(Memory):
    """The present content through a map as wide as TRACE's readout, and nothing of the past."""

    def __init__(self, *, content: int, channels: int, width: int):
        super().__init__(content=content, channels=channels, width=width)
        self.map = nn.Linear(content, width)

    def _run(
        self, state: MemoryState, contents: Tensor, track: Track | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        return {}, self._empty(self.map(contents))


class SignatureOnly(TraceMemory):
    """The trajectory key alone: where the robot has been, nothing of what it saw."""

    def __init__(self, normaliser: Normaliser, signature: Signature, keys: Keys, *, content: int):
        Memory.__init__(self, content=content, channels=signature.channels, width=keys.width)
        self.normaliser, self.signature, self.keys = normaliser, signature, keys

    @property
    def cell_shapes(self) -> dict[str, tuple[int, ...]]:
        """The path's last point and signature."""
        return {"point": (self.channels,), "xi": (self.signature.state_dim,)}

    def _run(
        self, state: MemoryState, contents: Tensor, track: Track | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        assert track is not None
        key = self.keys(self.normaliser.xi(track.xi), self.normaliser.delta(track.delta))
        return {}, self._empty(torch.zeros_like(key.g))._replace(g=key.g, dg=key.dg)

    _once = Memory._once  # not TRACE's: there are no slots


class UnroutedSlots(Slots):
    """Every write goes to all slots alike."""

    def route(self, route: Float[Tensor, "B d"], m_bar: Float[Tensor, "B K d"]) -> Float[Tensor, "B K"]:
        """omega = 1/K."""
        return torch.full_like(m_bar[..., 0], 1 / self.count)


class MeanReadSlots(Slots):
    """Every slot is read alike."""

    def read_weights(self, query: Float[Tensor, "*n d"], m: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
        """alpha = 1/K."""
        return torch.full_like(m[..., 0], 1 / self.count)


class NoDeltaKeys(Keys):
    """The key knows where the path has led, not which way it is going."""

    def __init__(self, signature_dim: int, width: int, hidden: int, **options: Any):
        super().__init__(signature_dim, width, hidden, **options)
        del self.phi_delta

    def embed_delta(self, delta: Float[Tensor, "*n D"]) -> Float[Tensor, "*n d"]:
        """dg = 0."""
        return delta.new_zeros(*delta.shape[:-1], self.width)
