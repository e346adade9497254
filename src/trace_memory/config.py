"""Numbers for memories: one frozen configuration, the presets, and the builder that turns a name and numbers into modules.
Modules never see a configuration.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from trace_memory import ablations, rivals
from trace_memory.gates import ClosingGate, Gate, ScalarGate
from trace_memory.keys import Keys
from trace_memory.losses import AuxiliaryWeights
from trace_memory.memory import Memory, TraceMemory
from trace_memory.normalise import Normaliser
from trace_memory.signature import LogSignature, Signature
from trace_memory.slots import Slots

NO_AUXILIARY = AuxiliaryWeights()
SLOT_SHARE = 0.3  # of the slots' own columns at the start. The paper is silent; docs/decisions/0003
SIGNATURES: dict[str, type[Signature]] = {"signature": Signature, "logsignature": LogSignature}
GATES: dict[str, Callable[[], Gate]] = {
    "closing": ClosingGate,
    "channel": lambda: ClosingGate(margin=0.0),
    "scalar": ScalarGate,
}


@dataclass(frozen=True)
class MemoryConfig:
    """Everything that decides a memory's shape and behaviour. `content` is the width of e_t = [v, p]."""

    name: str = "trace"
    channels: int = 17  # d_s
    content: int = 1024
    width: int = 512  # d
    hidden: int = 512
    slots: int = 4  # K
    depth: int = 3  # p
    key: str = "signature"  # or "logsignature"
    path: str = "mixes"  # the key is also written and told, as in the paper; "writes": not told; "routes": neither
    clock: str = "time"  # every step is a write, as in the paper; or "path": only way made is, not waiting
    rates: tuple[int, ...] = ()  # channels that are velocities, for the path's clock: at rest they are zero
    fade: float = 32.0  # path length over which the key forgets, in standardised units
    bound: float = 10.0  # of standardised keys, whose embeddings and routes are then level; inf: as large as they come
    gate: str = "closing"  # or "channel", "scalar": see gates.py
    tau: float = 1.0
    identity: float = 0.5  # lambda_eta
    start: str = "content"  # or "pytorch", which draws gate and W_V plainly too
    read_gain: float = 5.0  # of W_V at the start
    dropout: float = 0.1
    anchor: bool = False  # append the first frame's content to the key
    auxiliary: AuxiliaryWeights = NO_AUXILIARY

    def __post_init__(self) -> None:
        """Refuses impossible numbers and unknown words by name; the ablation without auxiliary losses has none."""
        if self.name == "no-auxiliary":
            object.__setattr__(self, "auxiliary", NO_AUXILIARY)
        words = {"key": list(SIGNATURES), "gate": list(GATES), "start": ["content", "pytorch"]}
        words |= {"path": ["routes", "writes", "mixes"], "clock": ["path", "time"], "name": list(MEMORIES)}
        for field, known in words.items():
            value = getattr(self, field)
            if value not in known:
                near = difflib.get_close_matches(str(value), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
                raise ValueError(f"memory {field}: {value!r} is not known; {hint}")
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.channels for i in self.rates):
            raise ValueError(f"memory rates: {self.rates!r}, expected numbers of channels, 0 to {self.channels - 1}")
        for field in ("channels", "content", "width", "hidden", "slots", "depth", "fade", "bound", "tau", "read_gain"):
            value = getattr(self, field)
            if isinstance(value, str) or not value > 0:
                raise ValueError(f"memory {field}: {value!r}, expected a positive number")

    def to_dict(self) -> dict[str, object]:
        """For JSON, which has no infinity: that becomes the word "inf"."""
        values = asdict(self) | {"auxiliary": self.auxiliary._asdict()}
        return {n: "inf" if v == math.inf else v for n, v in values.items()}


def _signature(c: MemoryConfig) -> Signature:
    return SIGNATURES[c.key](c.channels, c.depth, c.fade)


def _keys(c: MemoryConfig, signature: Signature, kind: type[Keys]) -> Keys:
    anchor = c.content if c.anchor else 0
    return kind(signature.dim, c.width, c.hidden, anchor=anchor, dropout=c.dropout, level=c.bound < math.inf)


def _gate(c: MemoryConfig) -> Gate:
    return GATES[c.gate]()


@torch.no_grad()
def _content_first(slots: Slots) -> None:
    """What is written starts as what is seen, and the slots' own columns start small, so that the recurrence is calm.

    Where the path mixes with it, the columns of g and dg in phi_w and the rho columns of phi_m and phi_beta start at zero:
    keys vary with every wiggle of the path, and drown the cue. An anchor was seen, and starts as what is seen does.
    """
    content = slots.phi_w.first.in_features - slots.q
    slots.phi_w.first.weight[:, content : content + slots.q - slots.anchor] = 0.0
    for phi in (slots.phi_m, slots.phi_beta):
        phi.first.weight[:, : slots.width] *= SLOT_SHARE
        phi.first.weight[:, 2 * slots.width :] = 0.0


def _as_pytorch(module: nn.Module) -> None:
    """Every linear map as PyTorch draws it."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


def _trace(slots: type[Slots] = Slots, keys: type[Keys] = Keys) -> Callable[[MemoryConfig], Memory]:
    def build_trace(c: MemoryConfig) -> Memory:
        signature = _signature(c)
        key = _keys(c, signature, keys)
        q = 2 * c.width + key.anchor
        bank = slots(
            c.slots, c.width, c.hidden, c.content, q, _gate(c), tau=c.tau, identity=c.identity, read_gain=c.read_gain,
            mixes=c.path != "routes", level=key.level,
        )  # fmt: skip
        normaliser = Normaliser(c.channels, signature.dim, c.bound, c.rates)
        if c.start == "pytorch":
            _as_pytorch(key)
            _as_pytorch(bank)
        else:
            _content_first(bank)
        timed, tells = c.clock == "time", c.path == "mixes"
        return TraceMemory(normaliser, signature, key, bank, content=c.content, timed=timed, tells=tells)

    return build_trace


def _signature_only(c: MemoryConfig) -> Memory:
    signature = _signature(c)
    normaliser = Normaliser(c.channels, signature.dim, c.bound, c.rates)
    keys = _keys(replace(c, anchor=False), signature, Keys)
    if c.start == "pytorch":
        _as_pytorch(keys)
    return ablations.SignatureOnly(normaliser, signature, keys, content=c.content)


def _plain(kind: Callable[..., Memory]) -> Callable[[MemoryConfig], Memory]:
    return lambda c: kind(content=c.content, channels=c.channels, width=c.width)


MEMORIES: dict[str, Callable[[MemoryConfig], Memory]] = {
    "trace": _trace(),
    "none": _plain(rivals.NoMemory),
    "gru": _plain(rivals.GRUMemory),
    "transformer": _plain(rivals.TransformerContext),
    "lru": _plain(rivals.LRUMemory),
    "retrieval": _plain(rivals.RetrievalPrompt),
    "current": _plain(ablations.CurrentObservation),
    "signature-only": _signature_only,
    "unrouted": _trace(slots=ablations.UnroutedSlots),
    "no-delta": _trace(keys=ablations.NoDeltaKeys),
    "mean-read": _trace(slots=ablations.MeanReadSlots),
    "no-auxiliary": _trace(),
}


PRESETS: dict[str, MemoryConfig] = {
    "default": MemoryConfig(),
    "paper": MemoryConfig(
        gate="scalar",
        start="pytorch",
        read_gain=1.0,
        fade=math.inf,
        bound=math.inf,
        auxiliary=AuxiliaryWeights(0.05, 0.01, 0.002),
    ),
    "tiny": MemoryConfig(width=64, hidden=64, content=128),
}


def build(config: MemoryConfig) -> Memory:
    """The memory a configuration names."""
    return MEMORIES[config.name](config)
