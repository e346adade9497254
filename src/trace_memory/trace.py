"""TRACE: memories addressed by the path signature of the robot's own trajectory. `TraceMemory` is our form,
`PaperTraceMemory` the paper's; they are made of the same parts, and differ in which ones and in what a resting robot writes.
"""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from trace_memory.config import MemoryConfig
from trace_memory.keys import Key, Keys, NormalisedKeys
from trace_memory.memory import AuxiliaryWeights, Memory, MemoryState, PathFeatures, Readout, Routing
from trace_memory.normalise import Normaliser
from trace_memory.signature import LogSignature, Signature, SignatureState, displacements
from trace_memory.slots import (
    AttentionRead,
    ClosingGate,
    CosineRoute,
    DotRoute,
    Maps,
    Read,
    Route,
    ScalarGate,
    Slots,
    WriteInputs,
)

# What our form fixes: each was tried, and docs/decisions says why it is so.
SLOTS = 4  # K
DEPTH = 3  # p
IDENTITY = 0.5  # lambda_eta
FADE = 32.0  # path length over which the signature forgets, in standardised units
BOUND = 10.0  # of standardised signatures
READ_GAIN = 5.0  # of W_V at the start
SLOT_SHARE = 0.3  # of the slots' own columns at the start


class PathMemory(Memory):
    """A memory that looks at the path: it keeps the path's last point and signature."""

    def __init__(self, normaliser: Normaliser, signature: Signature, *, content: int, width: int):
        super().__init__(content=content, channels=signature.channels, width=width)
        self.normaliser, self.signature = normaliser, signature

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The path's last point and signature."""
        return {"point": (self.channels,), "xi": (self.signature.state_dim,)}

    def _path(self, state: MemoryState, path: Tensor, valid: Tensor) -> PathFeatures:
        before = SignatureState(state.tensors["point"], state.tensors["xi"], state.steps)
        standard = torch.where(valid[..., None], self.normaliser.state(path), 0.0)
        after, xi, delta = self.signature.stream(standard, valid, before)
        moved, _ = displacements(standard, valid, before)
        return PathFeatures(xi, delta, moved, standard, {"point": after.point, "xi": after.value})

    def _path_step(self, state: MemoryState, robot_state: Tensor) -> PathFeatures:
        """`_path` of one step, (B, d_s)."""
        before = SignatureState(state.tensors["point"], state.tensors["xi"], state.steps)
        point = self.normaliser.state(robot_state)
        after, xi, delta = self.signature.step(before, point)
        return PathFeatures(xi, delta, point - before.point, point, {"point": after.point, "xi": after.value})

    def _path_at(self, path: Tensor, at: Tensor) -> PathFeatures:
        standard, rows = self.normaliser.state(path), torch.arange(len(path), device=path.device)[:, None]
        point = standard[rows, at]
        moved = point - standard[rows, (at - 1).clamp_min(0)]
        return PathFeatures(*self.signature.at(standard, at), moved, point, {})


class SlotMemory(PathMemory):
    """Slots addressed by the trajectory key: Algorithm 1 of the paper. Which parts it is made of is decided elsewhere."""

    def __init__(self, normaliser: Normaliser, signature: Signature, keys: Keys, slots: Slots, *, content: int):
        super().__init__(normaliser, signature, content=content, width=slots.width)
        self.keys, self.slots = keys, slots

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The slots, the path's last point and signature, and the first step's content if the key has an anchor."""
        shapes = {"slots": (self.slots.count, self.width)} | super().shapes
        return shapes | {"anchor": (self.keys.anchor,)} if self.keys.anchor else shapes

    @abstractmethod
    def write_rate(
        self, moved: Float[Tensor, "*n d_s"], point: Float[Tensor, "*n d_s"], first: Bool[Tensor, "*n"]
    ) -> Float[Tensor, "*n"]:
        """How much of a write each step is, 0 to 1: from how far the path has `moved` and where it is now; `first` is true
        at an episode's first step.
        """

    def _step(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[dict[str, Tensor], Readout]:
        return self.one(state, content, robot_state, self.slots.maps())

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        return self.fold(state, contents, path, valid, self.slots.maps())

    def one(
        self, state: MemoryState, content: Tensor, robot_state: Tensor, maps: Maps
    ) -> tuple[dict[str, Tensor], Readout]:
        """One step, with the maps of the slots as they are arranged."""
        path, first, tensors = self._path_step(state, robot_state), state.steps == 0, dict[str, Tensor]()
        if self.keys.anchor:
            tensors["anchor"] = torch.where(first[:, None], content, state.tensors["anchor"])
        key, inputs = self._inputs(content, path, tensors.get("anchor"), first, maps)
        m, omega, beta = self.slots.write(state.tensors["slots"], inputs, maps)
        readout = self._readout(m, key, inputs, omega, beta.detach().mean(-1))
        return tensors | path.tensors | {"slots": m}, readout

    def fold(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor, maps: Maps
    ) -> tuple[dict[str, Tensor], Readout]:
        """Many steps: the same, but that only writes come one after the other."""
        assert path is not None
        first, tensors, anchor = state.steps[:, None] + valid.long().cumsum(1) == 1, dict[str, Tensor](), None
        if self.keys.anchor:
            tensors["anchor"] = self._anchor(state, contents, valid)
            anchor = tensors["anchor"][:, None].expand(-1, contents.shape[1], -1)
        key, inputs = self._inputs(contents, path, anchor, first, maps)
        m, slots, omegas, betas = state.tensors["slots"], [], [], []
        for now, ok in zip(inputs.steps(), valid.unbind(1), strict=True):
            written = self.slots.write(m, now, maps)
            m = torch.where(ok[:, None, None], written.slots, m)
            slots.append(m)
            omegas.append(written.omega)
            betas.append(written.beta.detach().mean(-1))
        readout = self._readout(torch.stack(slots, 1), key, inputs, torch.stack(omegas, 1), torch.stack(betas, 1))
        return tensors | {"slots": m}, readout

    def _inputs(
        self, content: Tensor, path: PathFeatures, anchor: Tensor | None, first: Tensor, maps: Maps
    ) -> tuple[Key, WriteInputs]:
        """Algorithm 1 up to the write."""
        key = self.keys(self.normaliser.xi(path.xi), self.normaliser.delta(path.delta), anchor)
        return key, self.slots.prepare(content, key, self.write_rate(path.moved, path.point, first), maps)

    def _readout(self, slots: Tensor, key: Key, inputs: WriteInputs, omega: Tensor, beta: Tensor) -> Readout:
        """Algorithm 1 after the write."""
        z, alpha = self.slots.read(slots, inputs)
        return Readout(slots, z, key.g, key.dg, alpha, Routing(omega, beta, inputs.u))

    def _anchor(self, state: MemoryState, contents: Tensor, valid: Tensor) -> Tensor:
        """Content of each row's first step, now or as remembered."""
        first = contents[torch.arange(len(valid), device=valid.device), valid.long().argmax(1)]
        return torch.where((state.steps == 0)[:, None], first, state.tensors["anchor"])


class TraceMemory(SlotMemory):
    """Our form of TRACE. Writes scale with arc length: a robot at rest writes nothing, so that nobody can tell from its
    slots how long it has waited. Signatures forget over a length of path, keys and routes are normalised, gates close for
    good, and the first step's content is part of the key.

    Args:
        normaliser: of robot states and signatures.
        signature: of the standardised path.
        keys: from signatures to addresses.
        slots: what is written and read.
        content: width of what is seen in a step.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, TraceMemory
        >>> memory = TraceMemory.from_config(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> memory.normaliser.fit([torch.randn(50, 7), torch.randn(60, 7)], memory.signature).frames.item()
        110
    """

    @classmethod
    def from_config(cls, config: MemoryConfig) -> "TraceMemory":
        """Our form in the sizes of a configuration, with new weights."""
        return cls.made_of(config)

    @classmethod
    def made_of(
        cls,
        config: MemoryConfig,
        *,
        delta: type[nn.Module] | None = None,
        route: Route | None = None,
        read: Read | None = None,
    ) -> "TraceMemory":
        """Our form with another phi_delta, route or read; the ablations are made so."""
        c = config
        signature = Signature(c.channels, DEPTH, FADE)
        others = {} if delta is None else {"delta": delta}
        keys = NormalisedKeys(signature.dim, c.width, c.hidden, anchor=c.content, dropout=c.dropout, **others)
        q = 2 * c.width + c.content
        route, read = route or CosineRoute(c.width), read or AttentionRead(c.width)
        slots = Slots(
            SLOTS, c.width, c.hidden, c.content, q, ClosingGate(), route, read, identity=IDENTITY, read_gain=READ_GAIN
        )
        _content_first(slots, c.content)
        normaliser = Normaliser(c.channels, signature.dim, BOUND, c.velocity_channels)
        return cls(normaliser, signature, keys, slots, content=c.content)

    def write_rate(
        self, moved: Float[Tensor, "*n d_s"], point: Float[Tensor, "*n d_s"], first: Bool[Tensor, "*n"]
    ) -> Float[Tensor, "*n"]:
        """As far as the robot has moved; an episode's first step is written whole."""
        return torch.where(first, 1.0, self.normaliser.write_rate(moved, point))


class PaperTraceMemory(SlotMemory):
    """TRACE as the paper has it, with the paper's options; 11,905,025 parameters at its sizes. Every step is a write.

    Args:
        normaliser: of robot states and signatures.
        signature: of the standardised path.
        keys: from signatures to addresses.
        slots: what is written and read.
        content: width of what is seen in a step.
        auxiliary: weights of the three losses it is trained with.

    Example:
        >>> from trace_memory import MemoryConfig, PaperTraceMemory
        >>> memory = PaperTraceMemory.from_config(MemoryConfig(name="paper"))
        >>> sum(parameter.numel() for parameter in memory.parameters())
        11905025
    """

    def __init__(
        self,
        normaliser: Normaliser,
        signature: Signature,
        keys: Keys,
        slots: Slots,
        *,
        content: int,
        auxiliary: AuxiliaryWeights,
    ):
        super().__init__(normaliser, signature, keys, slots, content=content)
        self._auxiliary = auxiliary

    @property
    def auxiliary(self) -> AuxiliaryWeights:
        """lambda_bal, lambda_ent, lambda_cons."""
        return self._auxiliary

    @classmethod
    def from_config(cls, config: MemoryConfig) -> "PaperTraceMemory":
        """The paper's form in the sizes of a configuration, with new weights as PyTorch draws them."""
        c, paper = config, config.paper
        signature = (LogSignature if paper.log_signature else Signature)(c.channels, paper.depth)
        anchor = c.content if paper.anchor else 0
        keys = Keys(signature.dim, c.width, c.hidden, anchor=anchor, dropout=c.dropout)
        route, read = DotRoute(c.width, paper.tau), AttentionRead(c.width)
        slots = Slots(
            paper.slots, c.width, c.hidden, c.content, 2 * c.width + anchor, ScalarGate(), route, read,
            identity=paper.identity,
        )  # fmt: skip
        for part in (keys, slots):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
        auxiliary = AuxiliaryWeights(paper.balance, paper.entropy, paper.consistency)
        normaliser = Normaliser(c.channels, signature.dim)
        return cls(normaliser, signature, keys, slots, content=c.content, auxiliary=auxiliary)

    def write_rate(
        self, moved: Float[Tensor, "*n d_s"], point: Float[Tensor, "*n d_s"], first: Bool[Tensor, "*n"]
    ) -> Float[Tensor, "*n"]:
        """All of one, at every step."""
        return torch.ones_like(moved[..., 0])


class DeployedMemory(Memory):
    """A slot memory with each of its maps as one layer. It computes the same, faster; what its weights become afterwards is
    not noticed.
    """

    def __init__(self, memory: SlotMemory):
        super().__init__(content=memory.content, channels=memory.channels, width=memory.width)
        self.memory, self.layers = memory, nn.ModuleDict(memory.slots.layers())
        self.to(memory._like)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The memory's own."""
        return self.memory.shapes

    @property
    def maps(self) -> Maps:
        """The maps of the slots, a layer each."""
        return Maps(**self.layers)

    def _step(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[dict[str, Tensor], Readout]:
        return self.memory.one(state, content, robot_state, self.maps)

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        return self.memory.fold(state, contents, path, valid, self.maps)

    def _path(self, state: MemoryState, path: Tensor, valid: Tensor) -> PathFeatures:
        return self.memory._path(state, path, valid)

    def _path_at(self, path: Tensor, at: Tensor) -> PathFeatures:
        return self.memory._path_at(path, at)


def deployed(memory: Memory) -> Memory:
    """A memory that computes the same, arranged for speed. For frozen copies: it shares its weights with the one given, but
    not what later becomes of them.
    """
    return DeployedMemory(memory) if isinstance(memory, SlotMemory) else memory


@torch.no_grad()
def _content_first(slots: Slots, content: int) -> None:
    """What is written starts as what is seen, and the slots' own columns start small, so that the recurrence is calm.

    The columns of g and dg in phi_w and the rho columns of phi_m and phi_beta start at zero: keys vary with every wiggle of
    the path, and drown the cue. An anchor was seen, and starts as what is seen does.
    """
    slots.phi_w.first.weight[:, content : content + 2 * slots.width].zero_()
    for phi in (slots.phi_m, slots.phi_beta):
        phi.first.weight[:, : slots.width].mul_(SLOT_SHARE)
        phi.first.weight[:, 2 * slots.width :].zero_()
