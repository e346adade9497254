"""Write gates: how the last number of phi_beta becomes a write strength, and where it starts. docs/decisions/0003."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Gate(nn.Module, ABC):
    """sigma in Eq. (slot_update): from a logit to a strength in [0, 1]."""

    @abstractmethod
    def channels(self, width: int) -> int:
        """How many gates a slot of this width has."""

    @abstractmethod
    def start(self, last: nn.Linear) -> None:
        """Initialises phi_beta's last layer in place."""

    @abstractmethod
    def forward(self, logit: Float[Tensor, "*n C"]) -> Float[Tensor, "*n C"]:
        """The strength."""


class ScalarGate(Gate):
    """The paper's gate: one logistic gate a slot, half open at the start."""

    def channels(self, width: int) -> int:
        """One."""
        return 1

    def start(self, last: nn.Linear) -> None:
        """Left as every map starts."""

    def forward(self, logit: Float[Tensor, "*n C"]) -> Float[Tensor, "*n C"]:
        """The logistic function."""
        return torch.sigmoid(logit)


class ClosingGate(Gate):
    """A gate per channel that can close for good, and that is choosy from the start.

    The logistic curve is stretched below zero and cut there, so that a closed gate writes exactly nothing and a slot
    keeps its content over any number of steps; with `margin` 0 it is a plain sigmoid and leaks a little at every one.
    Biases spread from `ajar` to `shut` and the weights start `gain` times larger than usual: each channel then opens wide
    for some inputs and is closed to the others, so that among many channels a few already single out any cue.
    """

    def __init__(self, ajar: float = -3.0, shut: float = -5.0, gain: float = 6.0, margin: float = 0.05):
        super().__init__()
        self.ajar, self.shut, self.gain, self.margin = ajar, shut, gain, margin

    def channels(self, width: int) -> int:
        """One a channel."""
        return width

    @torch.no_grad()
    def start(self, last: nn.Linear) -> None:
        """Larger weights, spread biases."""
        last.weight.mul_(self.gain)
        last.bias.copy_(torch.linspace(self.ajar, self.shut, len(last.bias)))

    def forward(self, logit: Float[Tensor, "*n C"]) -> Float[Tensor, "*n C"]:
        """Stretched to (-margin, 1), cut at 0."""
        return ((1 + self.margin) * torch.sigmoid(logit) - self.margin).clamp_min(0.0)
