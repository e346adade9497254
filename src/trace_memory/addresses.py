"""By what the memory of events finds an event: what is seen, the robot's state, the event clock, how many steps it has been,
or the path that was taken. Each is a class or a choice of columns, so that one can be tried in the place of another; what is
done with an address is in events.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from trace_memory.config import MemoryConfig
from trace_memory.memory import MemoryState, PathFeatures
from trace_memory.normalise import Normaliser
from trace_memory.signature import LogSignature, Signature, SignatureState, displacements

ROTATIONS = 4  # of `RotationTrail`
BOUND = 3.0  # of standardised signatures


class Trail(nn.Module, ABC):
    """Numbers for where in its way a robot is, of every step.

    Args:
        width: how many.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that is kept from step to step, for one row."""
        return {}

    @abstractmethod
    def forward(
        self, state: MemoryState, path: Float[Tensor, "B T d"], valid: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T w"], dict[str, Tensor]]:
        """The numbers of raw robot states, and what is kept after the last."""

    def fit(self, paths: list[Tensor]) -> None:
        """Learns what is common from paths (T, d) of the training data."""
        del paths

    def features(self, state: MemoryState, path: Tensor, valid: Tensor) -> PathFeatures:
        """The same as features of a path, for `Memory._path`."""
        found, tensors = self(state, path, valid)
        nothing = path[..., :0]
        return PathFeatures(found, nothing, nothing, nothing, tensors)


class StepTrail(Trail):
    """How many steps it has been."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(
        self, state: MemoryState, path: Float[Tensor, "B T d"], valid: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T w"], dict[str, Tensor]]:
        """On a straight and on a logarithmic scale, and as a phase."""
        n = (state.steps[:, None] + valid.cumsum(1)).to(path.dtype)
        return torch.stack([n / 100, n.log1p() / 3, (n / 5).sin(), (n / 5).cos()], dim=-1), {}


class PathTrail(Trail):
    """Along the standardised path of robot states: its last point is kept."""

    def __init__(self, width: int, normaliser: Normaliser, signature: Signature):
        super().__init__(width)
        self.normaliser, self.signature = normaliser, signature

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The last point."""
        return {"point": (self.signature.channels,)}

    def fit(self, paths: list[Tensor]) -> None:
        """Statistics of the states, and of the signature."""
        self.normaliser.fit(paths, self.signature)

    def _standard(self, path: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid[..., None], self.normaliser.state(path), 0.0)


class SignatureTrail(PathTrail):
    """The path's signature to depth 2, standardised and bounded softly."""

    def __init__(self, normaliser: Normaliser, signature: Signature):
        super().__init__(signature.dim, normaliser, signature)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The last point, and the signature."""
        return super().shapes | {"xi": (self.signature.state_dim,)}

    def forward(
        self, state: MemoryState, path: Float[Tensor, "B T d"], valid: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T w"], dict[str, Tensor]]:
        """xi of every step."""
        before = SignatureState(state.tensors["point"], state.tensors["xi"], state.steps)
        after, xi, _ = self.signature.stream(self._standard(path, valid), valid, before)
        return self.normaliser.xi(xi), {"point": after.point, "xi": after.value}


class RotationTrail(PathTrail):
    """A linear differential equation that the path controls: unit quaternions that turn as the robot moves, by exp(w dx).
    Turns about different axes do not commute, so they know the order of moves; their size never changes.
    """

    def __init__(self, normaliser: Normaliser, signature: Signature):
        super().__init__(4 * ROTATIONS, normaliser, signature)
        self.axes = nn.Parameter(torch.randn(ROTATIONS, 3, signature.channels) / signature.channels**0.5)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The last point, and how far from no turn."""
        return super().shapes | {"turn": (ROTATIONS, 4)}

    def forward(
        self, state: MemoryState, path: Float[Tensor, "B T d"], valid: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T w"], dict[str, Tensor]]:
        """The quaternions of every step; products compose, so log T rounds do."""
        nothing = path[:, 0, :0]
        dx, after = displacements(
            self._standard(path, valid), valid, SignatureState(state.tensors["point"], nothing, state.steps)
        )
        spin = torch.einsum("rcd,btd->btrc", self.axes, dx)
        angle = spin.square().sum(-1, keepdim=True).add(1e-24).sqrt()
        turns = torch.cat([angle.cos(), spin * (angle.sin() / angle)], dim=-1)
        reach = 1
        while reach < path.shape[1]:
            turns = torch.cat([turns[:, :reach], multiply(turns[:, :-reach], turns[:, reach:])], dim=1)
            reach *= 2
        still = turns.new_tensor([1.0, 0.0, 0.0, 0.0])
        turns = multiply((state.tensors["turn"] + still)[:, None].expand_as(turns), turns)
        return turns.flatten(-2), {"point": after.point, "turn": turns[:, -1] - still}


def multiply(a: Float[Tensor, "*n 4"], b: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 4"]:
    """The product of quaternions."""
    (r, u), (s, v) = (x.split([1, 3], dim=-1) for x in (a, b))
    return torch.cat([r * s - (u * v).sum(-1, keepdim=True), r * v + s * u + torch.linalg.cross(u, v)], dim=-1)


@dataclass(frozen=True)
class Address:
    """By what events are found.

    Args:
        half: only what is seen, which is the first half of a content; the other is the robot's state.
        clock: whether places in the order of events are asked for.
        trail: the numbers of it that join the key; "", "steps", "signature", "log-signature" or "rotations".
    """

    half: bool = False
    clock: bool = True
    trail: str = ""

    def columns(self, embedded: int) -> int:
        """How many columns of an embedding of this width are looked at."""
        return embedded // 2 if self.half else embedded

    def make_trail(self, config: MemoryConfig) -> Trail | None:
        """The trail, in the sizes of a configuration."""
        if not self.trail:
            return None
        if self.trail == "steps":
            return StepTrail()
        signature = (LogSignature if self.trail == "log-signature" else Signature)(config.channels, 2)
        normaliser = Normaliser(config.channels, signature.dim, BOUND, config.velocity_channels)
        return (RotationTrail if self.trail == "rotations" else SignatureTrail)(normaliser, signature)


SEEN = Address(half=True, clock=False)
STATE = Address(clock=False)
STEPS = replace(SEEN, trail="steps")
CLOCK = replace(SEEN, clock=True)
SIGNATURE, LOG_SIGNATURE = replace(SEEN, trail="signature"), replace(SEEN, trail="log-signature")
ROTATION = replace(SEEN, trail="rotations")
CLOCK_SIGNATURE = replace(CLOCK, trail="signature")
