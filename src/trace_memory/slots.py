"""The slot memory: route, write, read. Knows no time: the order of writes is trace.py's business.

`prepare` computes, for any number of steps at once, everything that does not depend on the slots; `write` is the one
recurrent step; `read` looks at slots after writing. How writes are routed (`Route`), how far they go (`Gate`) and how slots
are read (`Read`) are parts, in which our form, the paper's and the ablations differ.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_memory.keys import MLP, Key

Map = Callable[[Tensor], Tensor]
TINY = 1e-4  # added to the square of a norm


class WriteInputs(NamedTuple):
    """What a step brings to the slots, whatever they hold."""

    route: Float[Tensor, "*n d"]  # W_K^T W_Q rho; its direction, where routes are cosines
    hidden: Float[Tensor, "*n H"]  # first layers of phi_m and phi_beta, without their slot part
    query: Float[Tensor, "*n d"]  # W_K^r^T phi_r(e, rho)
    u: Float[Tensor, "*n d"]
    rate: Float[Tensor, "*n"]  # how much of a write this step is: 1, or less where the robot hardly moves

    def steps(self) -> "Iterator[WriteInputs]":
        """Those of a scan (B, T), step by step."""
        return (WriteInputs(*now) for now in zip(*(x.unbind(1) for x in self), strict=True))


class Maps(NamedTuple):
    """The linear maps of a step as they are computed, some of them several of the paper's at once."""

    route: Map  # rho -> W_K^T W_Q rho
    step: Map  # [u, rho] -> first layers of phi_m and phi_beta
    query: Map  # phi_r's hidden layer -> W_K^r^T phi_r(e, rho)
    slot: Map  # m_bar -> the rest of phi_m's and phi_beta's first layers
    proposal: Map  # phi_m's last layer
    strength: Map  # phi_beta's last layer


class Written(NamedTuple):
    """Slots after a write, with the route and the gate that wrote them."""

    slots: Float[Tensor, "B K d"]
    omega: Float[Tensor, "B K"]
    beta: Float[Tensor, "B K C"]  # C = 1, or d for a gate per channel


class Route(nn.Module, ABC):
    """omega in Eq. (slot_route): how a write is shared out over the slots."""

    def address(self, route: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What of W_K^T W_Q rho is compared with slots: all of it, unless a route says otherwise."""
        return route

    @abstractmethod
    def forward(self, route: Float[Tensor, "B d"], m_bar: Float[Tensor, "B K d"]) -> Float[Tensor, "B K"]:
        """omega."""


class DotRoute(Route):
    """The paper's: a softmax over scaled dot products."""

    def __init__(self, width: int, tau: float = 1.0):
        super().__init__()
        self.scale = tau * math.sqrt(width)

    def forward(self, route: Float[Tensor, "B d"], m_bar: Float[Tensor, "B K d"]) -> Float[Tensor, "B K"]:
        """Eq. (slot_route)."""
        return torch.softmax(_dots(route, m_bar) / self.scale, dim=-1)


class CosineRoute(Route):
    """Ours: told by the angle between key and slot, not by how large either is, and so softly that no slot is ever beyond
    the reach of the gradient.
    """

    def __init__(self, width: int):
        super().__init__()
        self.sharp = 0.25 * math.sqrt(width)  # cosines of strangers are as small as 1 / sqrt(width)

    def address(self, route: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Its direction."""
        return _direction(route)

    def forward(self, route: Float[Tensor, "B d"], m_bar: Float[Tensor, "B K d"]) -> Float[Tensor, "B K"]:
        """Eq. (slot_route), with a cosine times `sharp` for the scaled dot product."""
        cosine = (_direction(m_bar) * route[:, None]).sum(-1)  # not a matrix product: compilers fuse this
        return torch.softmax(cosine * self.sharp, dim=-1)


class Read(nn.Module, ABC):
    """alpha in Eq. (slot_readout): how much of each slot is read."""

    @abstractmethod
    def forward(self, query: Float[Tensor, "*n d"], m_bar: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
        """alpha."""


class AttentionRead(Read):
    """The paper's: attention over the slots."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = math.sqrt(width)

    def forward(self, query: Float[Tensor, "*n d"], m_bar: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
        """Eq. (slot_readout)."""
        return torch.softmax(_dots(query, m_bar) / self.scale, dim=-1)


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
    """Ours: a gate per channel that can close for good, and that is choosy from the start.

    The logistic curve is stretched below zero and cut there, so that a closed gate writes exactly nothing and a slot keeps
    its content over any number of steps; a plain sigmoid leaks a little at every one. Biases spread from `ajar` to `shut`
    and the weights start `gain` times larger than usual: each channel then opens wide for some inputs and is closed to the
    others, so that among many channels a few already single out any cue.
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


def slot_identity(count: int, width: int) -> Float[Tensor, "K d"]:
    """eta: a sinusoid of k + 1, less its mean over the slots, each then scaled to norm sqrt(width)."""
    rate = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angle = torch.arange(1, count + 1)[:, None] * rate
    eta = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]
    eta = eta - eta.mean(0, keepdim=True)
    return eta * (math.sqrt(width) / eta.norm(dim=1, keepdim=True).clamp_min(1e-6))


class Slots(nn.Module):
    """K slots of width d, addressed by the trajectory key; `key` is the width of q."""

    eta: Float[Tensor, "K d"]

    def __init__(
        self,
        count: int,
        width: int,
        hidden: int,
        content: int,
        key: int,
        gate: Gate,
        route: Route,
        read: Read,
        *,
        identity: float = 0.5,
        read_gain: float = 1.0,
    ):
        super().__init__()
        self.count, self.width, self.identity = count, width, identity
        self.W_Q = nn.Linear(width, width, bias=False)
        self.W_K = nn.Linear(width, width, bias=False)
        self.phi_w = MLP(content + key, hidden, width)
        self.phi_m = MLP(3 * width, hidden, width)
        self.phi_beta = MLP(3 * width, hidden, gate.channels(width))
        self.phi_r = MLP(content + width, hidden, width)
        self.W_K_read = nn.Linear(width, width, bias=False)
        self.W_V_read = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.W_V_read.weight.mul_(read_gain)  # at first a slot holds little of any one frame
        self.gate, self.omega, self.alpha = gate, route, read
        gate.start(self.phi_beta.last)
        self.register_buffer("eta", slot_identity(count, width), persistent=False)

    def maps(self) -> Maps:
        """The maps of `prepare` and `write`, arranged once a scan."""
        d, both = self.width, (self.phi_m.first, self.phi_beta.first)
        of_step, bias = torch.cat([first.weight[:, d:] for first in both]), torch.cat([first.bias for first in both])
        return Maps(
            route=lambda rho: self.W_Q(rho) @ self.W_K.weight,
            step=partial(F.linear, weight=of_step, bias=bias),
            query=lambda hidden: self.phi_r.last(hidden) @ self.W_K_read.weight,
            slot=partial(F.linear, weight=torch.cat([first.weight[:, :d] for first in both])),
            proposal=self.phi_m.last,
            strength=self.phi_beta.last,
        )

    @torch.no_grad()
    def layers(self) -> dict[str, nn.Linear]:
        """Each of the maps as one layer with weights of today, for deployment."""
        made = {"proposal": self.phi_m.last, "strength": self.phi_beta.last}
        d, eta = self.width, self.eta
        for name, inputs in (("route", d), ("step", 2 * d), ("query", self.phi_r.last.in_features), ("slot", d)):
            f = getattr(self.maps(), name)
            zero = f(eta.new_zeros(1, inputs))
            layer = nn.Linear(inputs, zero.shape[1], device=eta.device, dtype=eta.dtype)
            layer.weight.copy_((f(torch.eye(inputs, device=eta.device, dtype=eta.dtype)) - zero).T)
            layer.bias.copy_(zero[0])
            made[name] = layer
        return made

    def prepare(self, content: Float[Tensor, "*n c"], key: Key, rate: Float[Tensor, "*n"], maps: Maps) -> WriteInputs:
        """Everything about these steps that does not depend on the slots."""
        u = self.phi_w(torch.cat([content, key.q], dim=-1))  # u = phi_w(e, q)
        query = maps.query(self.phi_r.hidden(torch.cat([content, key.rho], dim=-1)))
        hidden = maps.step(torch.cat([u, key.rho], dim=-1))
        return WriteInputs(self.omega.address(maps.route(key.rho)), hidden, query, u, rate)

    def write(self, m: Float[Tensor, "B K d"], inputs: WriteInputs, maps: Maps) -> Written:
        """One write. Eq. (slot_route), Eq. (slot_update)."""
        m_bar = m + self.identity * self.eta
        omega = self.omega(inputs.route, m_bar)
        hidden = F.gelu(maps.slot(m_bar) + inputs.hidden[:, None])
        for_m, for_beta = hidden.chunk(2, dim=-1)
        proposal = torch.tanh(maps.proposal(for_m))
        beta = (inputs.rate[:, None] * omega)[..., None] * self.gate(maps.strength(for_beta))
        return Written(torch.lerp(m, proposal, beta.expand_as(m)), omega, beta)

    def read(
        self, m: Float[Tensor, "*n K d"], inputs: WriteInputs
    ) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*n K"]]:
        """z and alpha. Eq. (slot_readout); the sum over slots is taken before W_V, which is linear."""
        alpha = self.alpha(inputs.query, m + self.identity * self.eta)
        return self.W_V_read((alpha[..., None, :] @ m)[..., 0, :]), alpha


def _direction(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Of norm one, but for what is nearly nothing, whose direction would be a matter of rounding and its gradient huge."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + TINY)


def _dots(a: Float[Tensor, "*n d"], m: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
    return (m @ a[..., None])[..., 0]
