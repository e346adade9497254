"""Where raw robot states become numbers of order one: mask the channels, standardise, (signature), standardise again.

The statistics are buffers, so they travel in the checkpoint and are the same in training and deployment. Fitting reads each
episode of the training split once. The policy's own normalisation is another matter and is not touched.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from trace_errors import DatasetError
from trace_memory.signature import Signature

STD_FLOOR = 1e-6
WHOLE = 0.5  # of a mean step: from there on a step is written whole


class Moments:
    """Mean and standard deviation of rows that arrive in pieces, in float64 (Chan's update)."""

    def __init__(self, width: int):
        self.count = 0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.squares = torch.zeros(width, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "N width"]) -> None:
        """Takes in a piece."""
        rows = rows.detach().to("cpu", torch.float64)
        shift = rows.mean(0) - self.mean
        total = self.count + len(rows)
        self.squares += ((rows - rows.mean(0)) ** 2).sum(0) + shift**2 * (self.count * len(rows) / total)
        self.mean = self.mean + shift * (len(rows) / total)
        self.count = total

    @property
    def std(self) -> Float[Tensor, " width"]:
        """Standard deviation over all rows so far, floored."""
        return (self.squares / max(self.count, 1)).sqrt().clamp_min(STD_FLOOR)


class Normaliser(nn.Module):
    """Standardises states, signatures and deltas by train-split statistics and bounds the last two softly.

    A standardised key x becomes x / hypot(1, x / bound): itself while small, never beyond ±bound (inf: no bound).

    Args:
        channels: width of a robot state.
        dim: width of a signature.
        bound: see above.
        velocity_channels: channels that are velocities, of a driving base for instance: there a robot at rest is zero.

    Example:
        >>> import torch
        >>> from trace_memory import Normaliser, Signature
        >>> signature = Signature(channels=2, depth=2)
        >>> normaliser = Normaliser(2, signature.dim).fit([torch.randn(50, 2)], signature)
        >>> tuple(normaliser.state(torch.zeros(1, 2)).shape)
        (1, 2)
    """

    mask: Bool[Tensor, " d"]
    velocities: Bool[Tensor, " d"]
    state_mean: Float[Tensor, " d"]
    state_std: Float[Tensor, " d"]
    xi_mean: Float[Tensor, " D"]
    xi_std: Float[Tensor, " D"]
    delta_mean: Float[Tensor, " D"]
    delta_std: Float[Tensor, " D"]
    stride: Float[Tensor, ""]
    frames: Tensor

    def __init__(self, channels: int, dim: int, bound: float = math.inf, velocity_channels: Sequence[int] = ()):
        super().__init__()
        self.bound = bound
        self.register_buffer("mask", torch.ones(channels, dtype=torch.bool))
        self.register_buffer("velocities", torch.zeros(channels, dtype=torch.bool), persistent=False)
        self.velocities[list(velocity_channels)] = True
        for name, width in (("state", channels), ("xi", dim), ("delta", dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(width))
            self.register_buffer(f"{name}_std", torch.ones(width))
        self.register_buffer("stride", torch.ones(()))  # mean length of a step
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))  # 0: not fitted, the identity

    def state(self, s: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Masked and standardised state. Algorithm 1, line 1."""
        return (torch.where(self.mask, s, 0.0) - self.state_mean) / self.state_std

    def xi(self, xi: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Standardised signature."""
        return self._soft((xi - self.xi_mean) / self.xi_std)

    def delta(self, delta: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Standardised signature increment."""
        return self._soft((delta - self.delta_mean) / self.delta_std)

    def write_rate(self, moved: Float[Tensor, "*n d"], point: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
        """How much of a write a step is, by the arc length it adds to the standardised path: none at rest, all from half a
        mean step on.
        """
        return (self._arc_length(moved, point) / (WHOLE * self.stride)).clamp_max(1.0)

    def _arc_length(self, moved: Tensor, point: Tensor) -> Tensor:
        gone = torch.where(self.velocities, point + self.state_mean / self.state_std, moved)
        return torch.linalg.vector_norm(gone, dim=-1)

    def _soft(self, x: Tensor) -> Tensor:
        return x if math.isinf(self.bound) else x / torch.hypot(torch.ones_like(x), x / self.bound)

    @torch.no_grad()
    def fit(
        self, episodes: Iterable[Tensor], signature: Signature, mask: Bool[Tensor, " d"] | None = None
    ) -> "Normaliser":
        """Computes every statistic from raw state paths, reading each once; states are kept meanwhile, signatures not.

        Without a `mask`, channels that never move in the training split are masked: they carry nothing, and a wobble in
        deployment would be divided by the floor.

        Args:
            episodes: raw state paths (T, channels), one an episode.
            signature: what the keys are made of.
            mask: (channels,) bool, which channels to use.

        Returns:
            Itself.

        Raises:
            DatasetError: an episode does not fit or is not finite; nothing was changed.
        """
        channels = len(self.mask)
        paths: list[Tensor] = []
        for number, path in enumerate(episodes):
            if path.ndim != 2 or path.shape[0] == 0 or path.shape[1] != channels:
                raise DatasetError(f"episodes[{number}]: shape {tuple(path.shape)}, expected (T >= 1, {channels})")
            if not torch.isfinite(path).all():
                raise DatasetError(f"episodes[{number}]: has a NaN or infinite state, expected finite numbers")
            paths.append(path.detach().to("cpu", torch.float64))
        if not paths:
            raise DatasetError("episodes: none came, expected at least one state path")
        states = Moments(channels)
        for path in paths:
            states.add(path)
        if mask is None:
            mask = states.std > STD_FLOOR
        mean, std = torch.where(mask, states.mean, 0.0), torch.where(mask, states.std, STD_FLOOR)
        xis, deltas, strides = Moments(signature.dim), Moments(signature.dim), Moments(1)
        for path in paths:
            standard = (torch.where(mask, path, 0.0) - mean) / std
            _, xi, delta = signature.stream(standard[None])
            xis.add(xi[0])
            deltas.add(delta[0])
        self.mask.copy_(mask)
        values = ((mean, std), (xis.mean, xis.std), (deltas.mean, deltas.std))
        for name, (centre, spread) in zip(("state", "xi", "delta"), values, strict=True):
            getattr(self, f"{name}_mean").copy_(centre)
            getattr(self, f"{name}_std").copy_(spread)
        for path in paths:
            standard = self.state(path.to(self.state_mean))
            if len(path) > 1:
                strides.add(self._arc_length(standard.diff(dim=0), standard[1:])[:, None])
        if strides.count:
            self.stride.copy_(strides.mean[0].clamp_min(STD_FLOOR))
        self.frames.fill_(states.count)
        return self
