"""What a user may choose: LeRobot's own ACT and Diffusion configurations, each with one nested `memory`. The stock fields
keep their names and meaning; `--policy.memory.name=none` is the stock policy.
"""

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

from trace_errors import UsageError
from trace_memory import config as memory_config
from trace_memory.config import MemoryConfig, PaperOptions
from trace_memory.registry import METHODS, of_policies

FAR = 1_000_000  # frames back: farther than any episode's first, to which LeRobot clamps it
ATTACH = ("tokens", "residual")
RENAMED = memory_config.RENAMED | {  # names of version 0.1, and what stands in their place
    "update_every": "is now period",
    "budget": "is now history_frames",
    "stride": "is now history_stride",
    "adapter_lr": "is now lr, which memory and adapter share",
    "grid": "is not an option any more: our form keeps 3 x 3 places, the paper's their mean",
}


@dataclass
class MemoryOptions:
    """Which memory a policy has, how large it is, how it is trained and how it joins the policy.

    Args:
        name: of the memory: trace, paper, or another that `tracemem params` lists; none is the stock policy.
        width: of what is written and read.
        hidden: width of the memory's inner layers.
        attach: ACT only: `tokens` beside the encoder's, as in the paper, or a `residual` in them that is zero at the start.
        period: control steps from one memory step to the next; more than 1 needs `tracemem train`.
        history_frames: lerobot-train only: frames of history that a target sees: the first, a strided tail, the present one.
        history_stride: lerobot-train only: frames between two of that tail.
        lr: learning rate of the memory, and of what joins it to the policy.
        dropout: in the maps from signatures to keys.
        velocity_channels: numbers of the state channels that are velocities: at rest they are zero.
        paper: what the paper names, for its own form (name=paper).

    Raises:
        UsageError: a value makes no sense; the message names it.

    Example:
        >>> from lerobot_policy_trace import MemoryOptions, TraceActConfig
        >>> config = TraceActConfig(memory=MemoryOptions(width=256, period=3))
        >>> config.memory.config(channels=7).width
        256
    """

    name: str = "trace"
    width: int = 512
    hidden: int = 512
    attach: str = "tokens"
    period: int = 1
    history_frames: int = 32
    history_stride: int = 4
    lr: float = 1e-4
    dropout: float = 0.1
    velocity_channels: list[int] = field(default_factory=list)
    paper: PaperOptions = field(default_factory=PaperOptions)

    def __post_init__(self) -> None:
        """Refuses what makes no sense, by name."""
        if self.attach not in ATTACH:
            raise UsageError(f"memory.attach: got {self.attach!r}, expected one of {', '.join(ATTACH)}")
        for name, least in (("width", 1), ("hidden", 1), ("period", 1), ("history_frames", 2), ("history_stride", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"memory.{name}: got {value!r}, expected {least} or more")
        if self.name in METHODS and self.name not in of_policies():
            raise UsageError(
                f"memory.name: got {self.name!r}, which takes in a map of the picture, and policies have none for it; "
                f"expected one of {', '.join(of_policies())}. tracemem probe tries this one"
            )
        channels = self.velocity_channels
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in channels):
            raise UsageError(
                f"memory.velocity_channels: got {channels!r}, expected a list of numbers of channels, 0 or more"
            )
        self.config(channels=1 + max(channels, default=0))

    def config(self, channels: int) -> MemoryConfig:
        """The memory's own configuration for a state of so many channels. Its content is [v, p], both of its width."""
        return MemoryConfig(
            name=self.name,
            channels=channels,
            content=2 * self.width,
            width=self.width,
            hidden=self.hidden,
            dropout=self.dropout,
            velocity_channels=tuple(self.velocity_channels),
            paper=self.paper,
        )

    @property
    def history(self) -> list[int]:
        """Frames a target of lerobot-train sees, relative to it: I_{L,r}(t) of the paper."""
        return [-FAR, *(-self.history_stride * back for back in range(self.history_frames - 2, -1, -1))]


@PreTrainedConfig.register_subclass("trace_act")
@dataclass
class TraceActConfig(ACTConfig):
    """ACT's configuration with a memory.

    Args:
        memory: which memory, and how it joins. All else is LeRobot's `ACTConfig`.

    Example:
        >>> from lerobot_policy_trace import MemoryOptions, TraceActConfig
        >>> TraceActConfig(chunk_size=40, n_action_steps=10, memory=MemoryOptions(name="none")).observation_delta_indices
    """

    memory: MemoryOptions = field(default_factory=MemoryOptions)

    @property
    def observation_delta_indices(self) -> list[int] | None:
        """The history; the last entry is the current frame."""
        return None if self.memory.name == "none" else self.memory.history


@PreTrainedConfig.register_subclass("trace_diffusion")
@dataclass
class TraceDiffusionConfig(DiffusionConfig):
    """Diffusion Policy's configuration with a memory.

    Args:
        memory: which memory, and how it joins. All else is LeRobot's `DiffusionConfig`.

    Example:
        >>> from lerobot_policy_trace import TraceDiffusionConfig
        >>> TraceDiffusionConfig(horizon=32, n_action_steps=8).memory.name
        'trace'
    """

    memory: MemoryOptions = field(default_factory=MemoryOptions)

    @property
    def observation_delta_indices(self) -> list[int]:
        """The stock policy's earlier frames, then the history; the last entry is the current frame."""
        stock: list[int] = super().observation_delta_indices
        return stock if self.memory.name == "none" else [*stock[:-1], *self.memory.history]
