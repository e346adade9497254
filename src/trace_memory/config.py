"""The numbers a memory is made from (`MemoryConfig`, `PaperOptions`), and `build`, which makes it. Imports no torch: options
are checked before anything heavy is loaded. Modules never see a configuration; `from_config` hands them plain numbers.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trace_errors import UsageError
from trace_memory.registry import METHODS, paper_forms

if TYPE_CHECKING:
    import trace_memory.memory

FIXED = "is not an option any more: our form (name 'trace') and the paper's (name 'paper') each fix it"
RENAMED = {  # options of version 0.1, and what stands in their place
    "rates": "is now velocity_channels",
    "auxiliary": "is now paper.balance, paper.entropy and paper.consistency",
    "key": "is now paper.log_signature",
    **{name: f"is now paper.{name}, of the paper's form only" for name in ("slots", "depth", "tau", "identity")},
    **{name: f"is now paper.{name}" for name in ("balance", "entropy", "consistency")},
    "anchor": "is now paper.anchor, of the paper's form only; our form always has it",
    **dict.fromkeys(("path", "clock", "fade", "bound", "gate", "start", "read_gain", "preset"), FIXED),
}


def nearest(word: object, known: Iterable[str]) -> str:
    """ "did you mean 'x'?", or the list of what is known."""
    words = list(known)
    near = difflib.get_close_matches(str(word), words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(words)}"


def _whole(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}: {value!r}, expected a whole number, 1 or more")


def _number(where: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise UsageError(f"{where}: {value!r}, expected a {'number of 0 or more' if zero else 'positive number'}")


def _flag(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{where}: {value!r}, expected true or false")


@dataclass(frozen=True)
class PaperOptions:
    """What the paper lets one choose. For the paper's form only (`paper`, and `no-auxiliary`, which ignores the losses).

    Args:
        slots: K, how many slots there are.
        depth: p, of the signature.
        log_signature: keys are log-signatures.
        tau: temperature of the routing softmax.
        identity: lambda_eta, how much of the slot identities is added to slots.
        anchor: the first frame's content is appended to the key.
        balance: lambda_bal, weight of the balance loss.
        entropy: lambda_ent, weight of the entropy loss.
        consistency: lambda_cons, weight of the consistency loss.

    Raises:
        UsageError: a value makes no sense; the message names it.

    Example:
        >>> from trace_memory import MemoryConfig, PaperOptions, build
        >>> config = MemoryConfig(name="paper", width=32, hidden=32, paper=PaperOptions(slots=6))
        >>> build(config).slots.count
        6
    """

    slots: int = 4
    depth: int = 3
    log_signature: bool = False
    tau: float = 1.0
    identity: float = 0.5
    anchor: bool = False
    balance: float = 0.05
    entropy: float = 0.01
    consistency: float = 0.002

    def __post_init__(self) -> None:
        for name in ("slots", "depth"):
            _whole(f"memory paper.{name}", getattr(self, name))
        for name in ("log_signature", "anchor"):
            _flag(f"memory paper.{name}", getattr(self, name))
        _number("memory paper.tau", self.tau)
        for name in ("identity", "balance", "entropy", "consistency"):
            _number(f"memory paper.{name}", getattr(self, name), zero=True)


@dataclass(frozen=True)
class MemoryConfig:
    """Everything that decides a memory's shape and behaviour.

    Args:
        name: which memory, one of `METHODS`.
        channels: width of a robot state, d_s.
        content: width of what is seen in a step, e_t = [v, p].
        width: d, of slots, keys and readouts.
        hidden: of the maps' hidden layers.
        dropout: in the maps from signatures to keys.
        velocity_channels: channels of the state that are velocities: a robot at rest has zero there.
        map: views, features, height and width of a map of the picture that follows e_t in what is seen, for memories with
            looks; None for none.
        plain: how many of the map's last features are plain: colours and the like, which nothing learns.
        paper: options of the paper's form.

    Raises:
        UsageError: a value makes no sense; the message names it.

    Example:
        >>> from trace_memory import MemoryConfig, build
        >>> memory = build(MemoryConfig(name="trace", channels=7, content=64, width=32, hidden=32))
        >>> memory.state_bytes
        2400
    """

    name: str = "trace"
    channels: int = 17
    content: int = 1024
    width: int = 512
    hidden: int = 512
    dropout: float = 0.1
    velocity_channels: tuple[int, ...] = ()
    map: tuple[int, int, int, int] | None = None
    plain: int = 0
    paper: PaperOptions = field(default_factory=PaperOptions)

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise UsageError(f"memory name: {self.name!r} is not known; {nearest(self.name, METHODS)}")
        for name in ("channels", "content", "width", "hidden"):
            _whole(f"memory {name}", getattr(self, name))
        _number("memory dropout", self.dropout, zero=True)
        if self.dropout >= 1:
            raise UsageError(f"memory dropout: {self.dropout!r}, expected less than 1")
        good = isinstance(self.velocity_channels, tuple) and all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < self.channels for i in self.velocity_channels
        )
        if not good:
            raise UsageError(
                f"memory velocity_channels: {self.velocity_channels!r}, expected a tuple of numbers of channels, "
                f"0 to {self.channels - 1}"
            )
        self._check_map()
        if not isinstance(self.paper, PaperOptions):
            raise UsageError(f"memory paper: {self.paper!r}, expected PaperOptions")
        if self.paper != PaperOptions() and not METHODS[self.name].paper_form:
            raise UsageError(
                f"memory paper: has options for memory {self.name!r}, expected them with {' or '.join(paper_forms())} only"
            )

    @property
    def inputs(self) -> int:
        """Width of what a memory takes in at a step: the content, and the map."""
        return self.content + math.prod(self.map or (0,))

    def _check_map(self) -> None:
        good = self.map is None or (isinstance(self.map, tuple) and len(self.map) == 4)
        if not good:
            raise UsageError(f"memory map: {self.map!r}, expected views, features, height and width, or None")
        for value in self.map or ():
            _whole("memory map", value)
        features = self.map[1] if self.map else 0
        if not (isinstance(self.plain, int) and (1 <= self.plain <= features if self.map else self.plain == 0)):
            wanted = f"1 to {features}, of the map's features" if self.map else "0, as there is no map"
            raise UsageError(f"memory plain: {self.plain!r}, expected {wanted}")
        if self.map and not METHODS[self.name].looks:
            raise UsageError(f"memory map: given for memory {self.name!r}, which has no looks")

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON.

        Returns:
            What `trace_memory.checkpoint.config_from_dict` reads.
        """
        return asdict(self) | {
            "velocity_channels": list(self.velocity_channels),
            "map": list(self.map) if self.map else None,
        }


def build(config: MemoryConfig) -> "trace_memory.memory.Memory":
    """Makes the memory that a configuration names, with weights drawn from torch's random numbers.

    Args:
        config: which memory, of which size.

    Returns:
        A new memory, in training mode.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, build
        >>> memory = build(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> state, readout = memory.step(memory.init(1), torch.zeros(1, 64), torch.zeros(1, 7))
        >>> tuple(readout.slots.shape)
        (1, 4, 32)
    """
    made: trace_memory.memory.Memory = METHODS[config.name].load()(config)
    return made
