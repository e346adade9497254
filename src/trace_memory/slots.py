"""The slot memory: route, write, read. Knows no time: the order of writes is memory.py's business.

`prepare` computes, for any number of steps at once, everything that does not depend on the slots; `write` is the one
recurrent step; `read` looks at slots after writing. All three are used by step and scan alike, with the `maps` of the scan.
`each` cuts a scan into steps.

Where the path `mixes`, q and rho are part of what is written too, as the paper has it; else they only say where to write and
read, and of q only the anchor is written, which was seen. Where routes are `level`, they are told by the angle between key
and slot, not by how large either is.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_memory.gates import Gate
from trace_memory.keys import MLP, Key

Map = Callable[[Tensor], Tensor]
TINY = 1e-4  # added to the square of a norm
SHARP = 0.25  # how far the logits of a level route are apart where key and slots have nothing to do with each other


class Drive(NamedTuple):
    """What a step brings to the slots, whatever they hold."""

    route: Float[Tensor, "*n d"]  # W_K^T W_Q rho; its direction, where routes are level
    hidden: Float[Tensor, "*n H"]  # first layers of phi_m and phi_beta, without their slot part
    query: Float[Tensor, "*n d"]  # W_K^r^T phi_r(e, rho)
    u: Float[Tensor, "*n d"]
    pace: Float[Tensor, "*n"]  # how much of a write this step is: 1, or less where the robot hardly moves


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


def slot_identity(count: int, width: int) -> Float[Tensor, "K d"]:
    """eta: a sinusoid of k + 1, less its mean over the slots, each then scaled to norm sqrt(width)."""
    rate = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angle = torch.arange(1, count + 1)[:, None] * rate
    eta = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]
    eta = eta - eta.mean(0, keepdim=True)
    return eta * (math.sqrt(width) / eta.norm(dim=1, keepdim=True).clamp_min(1e-6))


class Slots(nn.Module):
    """K slots of width d, routed by the trajectory key."""

    eta: Float[Tensor, "K d"]
    settled: nn.ModuleDict | None

    def __init__(
        self,
        count: int,
        width: int,
        hidden: int,
        content: int,
        key: int,
        gate: Gate,
        *,
        tau: float = 1.0,
        identity: float = 0.5,
        read_gain: float = 1.0,
        mixes: bool = True,
        level: bool = False,
    ):
        super().__init__()
        self.count, self.width, self.tau, self.identity, self.level = count, width, tau, identity, level
        self.sharp = SHARP * math.sqrt(width)  # cosines of strangers are as small as 1 / sqrt(width)
        self.mixes, self.anchor = mixes, key - 2 * width  # q = [g, dg, anchor]
        self.q, self.rho = (key, width) if mixes else (self.anchor, 0)  # how much of the key is written: its end
        self.W_Q = nn.Linear(width, width, bias=False)
        self.W_K = nn.Linear(width, width, bias=False)
        self.phi_w = MLP(content + self.q, hidden, width)
        self.phi_m = MLP(2 * width + self.rho, hidden, width)
        self.phi_beta = MLP(2 * width + self.rho, hidden, gate.channels(width))
        self.phi_r = MLP(content + width, hidden, width)
        self.W_K_read = nn.Linear(width, width, bias=False)
        self.W_V_read = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.W_V_read.weight.mul_(read_gain)  # at first a slot holds little of any one frame
        self.gate, self.settled = gate, None
        gate.start(self.phi_beta.last)
        self.register_buffer("eta", slot_identity(count, width), persistent=False)

    def maps(self) -> Maps:
        """The maps of `prepare` and `write`, arranged once a scan (or once for all: `settle`)."""
        if self.settled is not None:
            return Maps(**self.settled)
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
    def settle(self) -> None:
        """Makes each of the maps one layer, for deployment: what is trained or loaded afterwards would not be noticed."""
        made, like = dict[str, nn.Module](), self.eta
        for name, f in self.maps()._asdict().items():
            if isinstance(f, nn.Linear):
                made[name] = f
                continue
            width = {"step": self.width + self.rho, "query": self.phi_r.last.in_features}.get(name, self.width)
            zero = f(like.new_zeros(1, width))
            layer = nn.Linear(width, zero.shape[1], device=like.device, dtype=like.dtype)
            layer.weight.copy_((f(torch.eye(width, device=like.device, dtype=like.dtype)) - zero).T)
            layer.bias.copy_(zero[0])
            made[name] = layer
        self.settled = nn.ModuleDict(made)

    def prepare(self, content: Float[Tensor, "*n c"], key: Key, pace: Float[Tensor, "*n"], maps: Maps) -> Drive:
        """Everything about these steps that does not depend on the slots."""
        u = self.phi_w(torch.cat([content, key.q[..., key.q.shape[-1] - self.q :]], dim=-1))  # u = phi_w(e, q)
        query = maps.query(self.phi_r.hidden(torch.cat([content, key.rho], dim=-1)))
        route, hidden = maps.route(key.rho), maps.step(torch.cat([u, key.rho[..., : self.rho]], dim=-1))
        return Drive(_direction(route) if self.level else route, hidden, query, u, pace)

    def route(self, route: Float[Tensor, "B d"], m_bar: Float[Tensor, "B K d"]) -> Float[Tensor, "B K"]:
        """omega. Eq. (slot_route); for level routes a cosine times `sharp`."""
        if self.level:
            cosine = (_direction(m_bar) * route[:, None]).sum(-1)  # not a matrix product: compilers fuse this
            return torch.softmax(cosine * (self.sharp / self.tau), dim=-1)
        return torch.softmax(_dots(route, m_bar) / (self.tau * math.sqrt(self.width)), dim=-1)

    def write(self, m: Float[Tensor, "B K d"], drive: Drive, maps: Maps) -> Written:
        """One write. Eq. (slot_route), Eq. (slot_update)."""
        m_bar = m + self.identity * self.eta
        omega = self.route(drive.route, m_bar)
        hidden = F.gelu(maps.slot(m_bar) + drive.hidden[:, None])
        for_m, for_beta = hidden.chunk(2, dim=-1)
        proposal = torch.tanh(maps.proposal(for_m))
        beta = (drive.pace[:, None] * omega)[..., None] * self.gate(maps.strength(for_beta))
        return Written(torch.lerp(m, proposal, beta.expand_as(m)), omega, beta)

    def each(self, drive: Drive, maps: Maps) -> Iterator[tuple[Drive, Maps]]:
        """What `write` needs at each step of a scan of (B, T) steps."""
        # step by step in memory: what a step gets looks the same in scans of any length, which compiled writes want
        steps = zip(*(x.transpose(0, 1).contiguous() for x in drive), strict=True)
        return ((Drive(*now), maps) for now in steps)

    def read_weights(self, query: Float[Tensor, "*n d"], m: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
        """alpha. Eq. (slot_readout)."""
        m_bar = m + self.identity * self.eta
        return torch.softmax(_dots(query, m_bar) / math.sqrt(self.width), dim=-1)

    def read(self, m: Float[Tensor, "*n K d"], drive: Drive) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*n K"]]:
        """z and alpha. Eq. (slot_readout); the sum over slots is taken before W_V, which is linear."""
        alpha = self.read_weights(drive.query, m)
        return self.W_V_read(_pool(alpha, m)), alpha


def _direction(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Of norm one, but for what is nearly nothing, whose direction would be a matter of rounding and its gradient huge."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + TINY)


def _dots(a: Float[Tensor, "*n d"], m: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n K"]:
    return (m @ a[..., None])[..., 0]


def _pool(alpha: Float[Tensor, "*n K"], m: Float[Tensor, "*n K d"]) -> Float[Tensor, "*n d"]:
    return (alpha[..., None, :] @ m)[..., 0, :]
