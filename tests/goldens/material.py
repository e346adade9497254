"""What goldens are made of: weights and inputs that depend on a name and a shape only, random draws that are fed in, and
digests in place of big tensors. Nothing here knows how a memory or a policy is made.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

CHANNELS, ACTIONS, ENVIRONMENT = 6, 5, 3
CAMERAS = ("observation.images.front", "observation.images.side")
HEIGHT, WIDTH = 48, 80  # feature maps of 2 x 3
VELOCITIES = [0]  # of the channels
LENGTHS = (14, 10, 12)  # frames of the episodes
HOLD = 1e-3  # what is this much smaller than the largest of its kind is compared with that share of it


def uniform(name: str, *shape: int) -> Tensor:
    """Numbers in [-1, 1), the same on every machine: a function of the name and the shape."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {shape}".encode()).digest()[:8], "little")
    drawn = np.random.Generator(np.random.PCG64(seed)).random(math.prod(shape))
    return torch.from_numpy(2 * drawn - 1).view(shape)


def normal(name: str, *shape: int) -> Tensor:
    """Numbers of mean 0 and variance 1."""
    return uniform(name, *shape) * math.sqrt(3)


def value(name: str, like: Tensor) -> Tensor | None:
    """What a weight or buffer of this (old) name becomes; None: what it is."""
    shape, last = tuple(like.shape), name.rpartition(".")[2]
    if last == "mask":
        return torch.arange(len(like)) < len(like) - 1
    if last == "frames":
        return torch.full_like(like, 100)
    if not like.is_floating_point() or last in ("_like", "pos_grid"):
        return None
    drawn = uniform(name, *shape)
    if last in ("running_var", "std", "stride") or last.endswith("_std"):
        return 1 + drawn / 2
    if last in ("running_mean", "mean") or last.endswith("_mean"):
        return drawn * 0.3
    if name.endswith("phi_beta.last.bias"):
        return drawn * 1.5 - 2.5  # some gates are closed
    if len(shape) < 2:
        return 1 + drawn / 5 if last == "weight" else drawn / 10
    return drawn * math.sqrt(3 / math.prod(shape[1:]))


@torch.no_grad()
def fill(named: Mapping[str, Tensor], only: str = "") -> None:
    """Gives tensors the numbers of their (old) names."""
    for name, x in named.items():
        if name.startswith(only) and (filled := value(name, x)) is not None:
            x.copy_(filled)


class StepEmbedding(nn.Module):
    """Diffusion Policy's sinusoids of the denoising step, in float64: LeRobot makes them in float32 in every policy."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        rate = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10000) / (half - 1)))
        angle = x[..., None].double() * rate
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Positions(nn.Module):
    """ACT's positions in a feature map (1, 2 n, h, w), in float64, for the same reason."""

    def __init__(self, dimension: int):
        super().__init__()
        self.dimension = dimension

    def forward(self, x: Tensor) -> Tensor:
        rate = 10000 ** (2 * (torch.arange(self.dimension) // 2).double() / self.dimension)
        planes = []
        for dim in (-2, -1):
            size = x.shape[dim]
            along = (torch.arange(size, dtype=torch.float64) + 1) / size * 2 * math.pi
            angle = along[:, None] / rate
            wave = torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], dim=-1).flatten(1)  # (size, n)
            grid = wave[:, None, :] if dim == -2 else wave[None, :, :]
            planes.append(grid.expand(x.shape[-2], x.shape[-1], -1))
        return torch.cat(planes, dim=-1).permute(2, 0, 1)[None].to(x)


@contextmanager
def drawn(seed: object, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile torch.randn, torch.randn_like and torch.randint give numbers that depend on this seed and the shape only: in
    which order or number format somebody draws does not matter.
    """

    def shaped(*size: object, **more: object) -> tuple[int, ...]:
        first = more.get("size", size[0] if len(size) == 1 else size)
        return (first,) if isinstance(first, int) else tuple(first)  # type: ignore[arg-type]

    def randn(*size: object, **more: object) -> Tensor:
        shape = shaped(*size, **more)
        return normal(f"randn {seed}", *shape).to(more.get("dtype") or dtype)  # type: ignore[call-overload]

    def randn_like(x: Tensor, **_: object) -> Tensor:
        return normal(f"randn {seed}", *x.shape).to(x)

    def randint(low: int, high: int, size: tuple[int, ...], **_: object) -> Tensor:
        found = (uniform(f"randint {seed}", *size) + 1) / 2 * (high - low) + low
        return found.floor().long().clamp(low, high - 1)

    with mock.patch.multiple(torch, randn=randn, randn_like=randn_like, randint=randint):
        yield


# -- inputs ------------------------------------------------------------------------------------------------------------


def path(name: str, steps: int) -> Tensor:
    """(steps, CHANNELS) float32 raw states: a walk that rests twice, where the velocity channel is zero."""
    moves = normal(f"moves {name}", steps, CHANNELS) * 0.4
    rests = torch.zeros(steps, dtype=torch.bool)
    rests[4:6], rests[9:10] = True, True
    moves[rests] = 0.0
    states = moves.cumsum(0)
    states[:, VELOCITIES] = moves[:, VELOCITIES]
    return states.float()


def paths() -> tuple[Tensor, Tensor, Tensor]:
    """States, starts and ends of some episodes."""
    states = [path(f"episode {number}", length) for number, length in enumerate(LENGTHS)]
    ends = torch.tensor(LENGTHS).cumsum(0)
    return torch.cat(states), ends - torch.tensor(LENGTHS), ends


def pictures(camera: str, *numbers: int) -> Tensor:
    """(N, 3, H, W), normalised, of frames by number."""
    return torch.stack([normal(f"{camera} {number}", 3, HEIGHT, WIDTH) for number in numbers])


def observation(rows: list[tuple[int, int]], dtype: torch.dtype, *, environment: bool = False) -> dict[str, Tensor]:
    """What a robot loop hands to a policy, of rows at (episode, frame)."""
    states, starts, _ = paths()
    numbers = [int(starts[episode]) + frame for episode, frame in rows]
    batch = {
        "observation.state": torch.stack([normal(f"state {number}", CHANNELS) for number in numbers]),
        "observation.raw_state": states[numbers],
        **{camera: pictures(camera, *numbers) for camera in CAMERAS},
    }
    if environment:
        batch["observation.environment_state"] = torch.stack([normal(f"env {n}", ENVIRONMENT) for n in numbers])
    batch = {key: x.to(dtype) for key, x in batch.items()}
    return batch | {"observation.episode_step": torch.tensor([[frame] for _, frame in rows])}


# -- digests -----------------------------------------------------------------------------------------------------------


def digest(name: str, x: Tensor) -> Tensor:
    """(4,): norm and three projections of a tensor, each about as large as the norm."""
    flat = x.detach().double().flatten()
    if not len(flat):
        return torch.zeros(4, dtype=torch.float64)
    by = uniform(f"digest {name.rpartition(' ')[2]}", 3, len(flat))
    return torch.cat([flat.norm()[None], by @ flat])


def digests(found: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    """Names in order, and (n, 4)."""
    names = sorted(found)
    return names, torch.stack([digest(name, found[name]) for name in names])


def differences(names: list[str], expected: Tensor, mine: Tensor, tolerance: float) -> list[str]:
    """What differs, in words. Names are "kind what"; what is tiny is measured by the largest of its kind."""
    largest: dict[str, float] = {}
    for name, norm in zip(names, expected[:, 0].tolist(), strict=True):
        kind = name.partition(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), norm)
    found = []
    for name, old, new in zip(names, expected, mine, strict=True):
        scale = max(float(old[0]), HOLD * largest[name.partition(" ")[0]], 1e-300)
        off = float((old - new).abs().max()) / scale
        if not off <= tolerance:
            found.append(f"{name}: off by {off:.2e} of its norm {float(old[0]):.4g} (now {float(new[0]):.4g})")
    return found
