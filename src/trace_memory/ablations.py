"""TRACE with one part taken away (paper, table of ablations): our form with another part in its place, or a memory of its
own where slots are gone.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trace_memory import addresses
from trace_memory.config import MemoryConfig
from trace_memory.events import EventMemory
from trace_memory.keys import MLP, Keys, NormalisedKeys
from trace_memory.memory import Memory, MemoryState, PathFeatures, Readout
from trace_memory.normalise import Normaliser
from trace_memory.signature import Signature
from trace_memory.slots import Read, Route
from trace_memory.trace import BOUND, DEPTH, FADE, PaperTraceMemory, PathMemory, TraceMemory


class CurrentObservation(Memory):
    """The present content through a map as wide as TRACE's readout, and nothing of the past."""

    def __init__(self, *, content: int, channels: int, width: int):
        super().__init__(content=content, channels=channels, width=width)
        self.map = nn.Linear(content, width)

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        return {}, self._empty(self.map(contents))


class SignatureOnly(PathMemory):
    """The trajectory key alone: where the robot has been, nothing of what it saw."""

    def __init__(self, normaliser: Normaliser, signature: Signature, keys: Keys, *, content: int):
        super().__init__(normaliser, signature, content=content, width=keys.width)
        self.keys = keys

    @classmethod
    def from_config(cls, config: MemoryConfig) -> "SignatureOnly":
        """Keys of our form without an anchor, which was seen."""
        signature = Signature(config.channels, DEPTH, FADE)
        keys = NormalisedKeys(signature.dim, config.width, config.hidden, dropout=config.dropout)
        normaliser = Normaliser(config.channels, signature.dim, BOUND, config.velocity_channels)
        return cls(normaliser, signature, keys, content=config.content)

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        assert path is not None
        key = self.keys(self.normaliser.xi(path.xi), self.normaliser.delta(path.delta))
        return {}, self._empty(torch.zeros_like(key.g))._replace(g=key.g, dg=key.dg)


class EvenRoute(Route):
    """Every write goes to all slots alike."""

    def forward(self, route: Float[Tensor, "B d"], m_bar: Float[Tensor, "B K d"]) -> Float[Tensor, "B K"]:
        """omega = 1/K."""
        return torch.full_like(m_bar[..., 0], 1 / m_bar.shape[-2])


class MeanRead(Read):
    """Every slot is read alike."""

    def forward(self, query: Float[Tensor, "*n d"], m_bar: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
        """alpha = 1/K."""
        return torch.full_like(m_bar[..., 0], 1 / m_bar.shape[-2])


class NoDelta(nn.Module):
    """In the place of phi_delta: the key knows where the path has led, not which way it is going."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float = 0.0):
        super().__init__()
        MLP(inputs, hidden, outputs, dropout)  # drawn and dropped, so that all other maps start as TRACE's do
        self.width = outputs

    def forward(self, delta: Float[Tensor, "*n D"]) -> Float[Tensor, "*n d"]:
        """dg = 0."""
        return delta.new_zeros(*delta.shape[:-1], self.width)


def unrouted(config: MemoryConfig) -> TraceMemory:
    """TRACE whose writes go to all slots alike."""
    return TraceMemory.made_of(config, route=EvenRoute())


def mean_read(config: MemoryConfig) -> TraceMemory:
    """TRACE whose slots are read alike."""
    return TraceMemory.made_of(config, read=MeanRead())


def no_delta(config: MemoryConfig) -> TraceMemory:
    """TRACE whose key has no dg."""
    return TraceMemory.made_of(config, delta=NoDelta)


def no_auxiliary(config: MemoryConfig) -> PaperTraceMemory:
    """The paper's form, trained without its three losses."""
    paper = replace(config.paper, balance=0.0, entropy=0.0, consistency=0.0)
    return PaperTraceMemory.from_config(replace(config, paper=paper))


def by_seen(config: MemoryConfig) -> EventMemory:
    """The memory of events, found by what was seen alone."""
    return EventMemory.from_config(config, addresses.SEEN)


def by_state(config: MemoryConfig) -> EventMemory:
    """By what was seen and the robot's state."""
    return EventMemory.from_config(config, addresses.STATE)


def by_steps(config: MemoryConfig) -> EventMemory:
    """By what was seen and how many steps it had been."""
    return EventMemory.from_config(config, addresses.STEPS)


def by_clock(config: MemoryConfig) -> EventMemory:
    """By what was seen and the event clock."""
    return EventMemory.from_config(config, addresses.CLOCK)


def by_signature(config: MemoryConfig) -> EventMemory:
    """By what was seen and the signature of the path."""
    return EventMemory.from_config(config, addresses.SIGNATURE)


def by_log_signature(config: MemoryConfig) -> EventMemory:
    """By what was seen and the log-signature of the path."""
    return EventMemory.from_config(config, addresses.LOG_SIGNATURE)


def by_rotations(config: MemoryConfig) -> EventMemory:
    """By what was seen and a linear differential equation that the path controls."""
    return EventMemory.from_config(config, addresses.ROTATION)


def by_clock_signature(config: MemoryConfig) -> EventMemory:
    """By what was seen, the event clock and the signature of the path."""
    return EventMemory.from_config(config, addresses.CLOCK_SIGNATURE)
