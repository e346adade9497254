"""What is changed at random in the data before a policy learns from it: the light of an episode's pictures (`Jitter`), and
the path that addresses its memory (`PathSwap`). Draws come from generators that the caller seeds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lerobot_policy_trace.paths import Paths

TINY = 1e-9  # an arc length that is none


class Jitter:
    """Changes brightness and contrast, alike in all pictures that have the same owner."""

    def __init__(self, share: float):
        self.share = share

    def __call__(self, pictures: Tensor, owner: Tensor, draw: torch.Generator) -> Tensor:
        """(N, ..., 3, H, W) in [0, 1] of (N,) owners, any numbers; the same draw changes the same owners alike."""
        if not self.share:
            return pictures
        kinds, of = owner.cpu().unique(return_inverse=True)
        change = ((torch.rand(2, len(kinds), generator=draw) * 2 - 1) * self.share)[:, of]
        gain, light = change.to(pictures.device, non_blocking=True).view(2, -1, *[1] * (pictures.ndim - 1))
        return ((pictures - 0.5) * (1 + gain) + 0.5 + light).clamp(0, 1)


def arc_lengths(paths: Paths, velocity_channels: Sequence[int]) -> Tensor:
    """(N,) float64: how far the robot has gone since its episode began, in standard deviations of the states. Channels that
    are velocities count by their value, the others by their change.
    """
    std = paths.states.std(0)
    states = torch.where(std > 1e-6, paths.states / std, 0.0).double()
    steps, velocities = states.diff(dim=0, prepend=states[:1]), list(velocity_channels)
    steps[:, velocities] = states[:, velocities]
    steps[paths.starts] = 0.0
    gone = torch.linalg.vector_norm(steps, dim=1).cumsum(0)
    frame = torch.arange(len(gone))
    return gone - gone[paths.starts[torch.searchsorted(paths.starts, frame, right=True) - 1]]


class PathSwap:
    """The path of one episode, followed at the pace of another: as far along its arc length as that one is along its own.
    Who rests on the one path rests on the other, or a memory whose writes scale with the arc length could tell the time.
    """

    def __init__(self, paths: Paths, velocity_channels: Sequence[int], period: int):
        self.paths, self.period, self.arc = paths, period, arc_lengths(paths, velocity_channels)
        channels = torch.arange(paths.states.shape[1])
        self.velocity = torch.isin(channels, torch.tensor(list(velocity_channels), dtype=torch.int64))  # (d,) bool

    def places(self, written: Tensor, own: int, other: int) -> Tensor:
        """(T,) float64: for steps that are frames (T,) of one episode, where they are on the other's path, between rows."""
        starts, ends = self.paths.starts, self.paths.ends
        theirs = self.arc[starts[other] : ends[other]]
        gone = self.arc[written] / self.arc[ends[own] - 1].clamp_min(TINY) * theirs[-1]
        after = torch.searchsorted(theirs, gone).clamp_max(len(theirs) - 1)
        before = (after - 1).clamp_min(0)
        part = (gone - theirs[before]) / (theirs[after] - theirs[before]).clamp_min(TINY)
        return starts[other] + before + part

    def path(self, written: Tensor, own: int, other: int) -> Tensor:
        """(T, d): states on the other's path. Velocities are as many times slower as the robot gets on slower there."""
        states, places = self.paths.states, self.places(written, own, other)
        row, part = places.long(), places.frac().to(states.dtype)
        path = torch.lerp(states[row], states[(row + 1).clamp_max(len(states) - 1)], part[:, None])
        pace = (places.diff(prepend=places[:1] - self.period) / self.period).clamp_max(1.0).to(states.dtype)
        return torch.where(self.velocity, path * pace[:, None], path)
