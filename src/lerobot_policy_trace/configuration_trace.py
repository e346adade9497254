"""What a user may choose: LeRobot's own ACT and Diffusion configurations, each with one nested `memory`. The stock fields
keep their names and meaning; `--policy.memory.name=none` is the stock policy.
"""

from dataclasses import dataclass, field, fields, replace

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

from trace_memory.config import PRESETS, MemoryConfig
from trace_memory.losses import AuxiliaryWeights

FAR = 1_000_000  # frames back: farther than any episode's first, to which LeRobot clamps it
WAYS = ("tokens", "residual")


@dataclass
class MemoryOptions:
    """Which memory, of which size, how it is trained and how it joins the policy. None keeps the preset's number."""

    name: str = "trace"
    preset: str = "default"
    attach: str = (
        "tokens"  # ACT only: tokens beside the encoder's (the paper), or a residual that is nothing at the start
    )
    budget: int = 32  # frames of history a training target sees: the first, a strided tail, the current one
    stride: int = 4  # frames between two of the tail
    update_every: int = (
        1  # control steps between two observations that the memory takes in; more needs `tracemem train`
    )
    grid: int | None = None  # what is seen is written as grid x grid places; None: 3, or 1 (their mean) in preset paper
    lr: float = 1e-4  # of the memory
    adapter_lr: float = 1e-4  # of what joins it to the policy
    width: int | None = None
    hidden: int | None = None
    slots: int | None = None
    depth: int | None = None
    key: str | None = None
    path: str | None = None
    clock: str | None = None
    rates: list[int] | None = None
    fade: float | None = None
    bound: float | None = None
    gate: str | None = None
    tau: float | None = None
    identity: float | None = None
    start: str | None = None
    read_gain: float | None = None
    dropout: float | None = None
    anchor: bool | None = None
    balance: float | None = None
    entropy: float | None = None
    consistency: float | None = None

    def __post_init__(self) -> None:
        """Refuses what makes no sense, by name."""
        if self.preset not in PRESETS:
            raise ValueError(f"memory.preset: got {self.preset!r}, expected one of {', '.join(PRESETS)}")
        if self.attach not in WAYS:
            raise ValueError(f"memory.attach: got {self.attach!r}, expected one of {', '.join(WAYS)}")
        if self.budget < 2 or self.stride < 1:
            raise ValueError(
                f"memory.budget, memory.stride: got {self.budget}, {self.stride}, expected at least 2 and 1"
            )
        if self.update_every < 1:
            raise ValueError(f"memory.update_every: got {self.update_every}, expected at least 1")
        if self.places < 1:
            raise ValueError(f"memory.grid: got {self.grid}, expected at least 1")
        if not all(isinstance(i, int) and i >= 0 for i in self.rates or ()):
            raise ValueError(f"memory.rates: got {self.rates!r}, expected a list of numbers of channels, 0 or more")
        self.config(channels=1 + max(self.rates or [0]))

    def config(self, channels: int) -> MemoryConfig:
        """The memory's own configuration. Its content is [v, p], both as wide as the memory."""
        chosen = {f.name for f in fields(MemoryConfig)} - {"channels", "content", "auxiliary"}
        changes = {name: getattr(self, name) for name in chosen if getattr(self, name) is not None}
        if self.rates is not None:
            changes["rates"] = tuple(self.rates)
        base = replace(PRESETS[self.preset], channels=channels, **changes)
        losses = {name: getattr(self, name) for name in AuxiliaryWeights._fields if getattr(self, name) is not None}
        return replace(base, content=2 * base.width, auxiliary=base.auxiliary._replace(**losses))

    @property
    def places(self) -> int:
        """On a side of the grid in which things are seen; the paper pools them."""
        return (1 if self.preset == "paper" else 3) if self.grid is None else self.grid

    @property
    def history(self) -> list[int]:
        """Frames a training target sees, relative to it: I_{L,r}(t) of the paper."""
        return [-FAR, *(-self.stride * back for back in range(self.budget - 2, -1, -1))]


def check_rest(config: "TraceActConfig | TraceDiffusionConfig") -> None:
    """Refuses numbers of actions at rest that make no sense."""
    rest, most = config.rest_action_steps, config.n_action_steps
    if rest is not None and not 1 <= rest <= most:
        raise ValueError(f"rest_action_steps: got {rest}, expected 1 to {most} (n_action_steps), or none")


@PreTrainedConfig.register_subclass("trace_act")
@dataclass
class TraceActConfig(ACTConfig):
    """ACT with a memory."""

    memory: MemoryOptions = field(default_factory=MemoryOptions)
    rest_action_steps: int | None = None  # actions carried out before it looks again while it rests; None: as always

    def __post_init__(self) -> None:
        """Checks what is ours."""
        super().__post_init__()
        check_rest(self)

    @property
    def observation_delta_indices(self) -> list[int] | None:
        """The history; the last entry is the current frame."""
        return None if self.memory.name == "none" else self.memory.history


@PreTrainedConfig.register_subclass("trace_diffusion")
@dataclass
class TraceDiffusionConfig(DiffusionConfig):
    """Diffusion Policy with a memory."""

    memory: MemoryOptions = field(default_factory=MemoryOptions)
    rest_action_steps: int | None = None  # as ACT's

    def __post_init__(self) -> None:
        """Checks what is ours."""
        super().__post_init__()
        check_rest(self)

    @property
    def observation_delta_indices(self) -> list[int]:
        """The stock policy's earlier frames, then the history; the last entry is the current frame."""
        stock = super().observation_delta_indices
        return stock if self.memory.name == "none" else [*stock[:-1], *self.memory.history]
