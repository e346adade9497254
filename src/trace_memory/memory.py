"""What every memory is (`Memory`: init, step, scan, reset), what it keeps (`MemoryState`), what it gives (`Readout`), and
TRACE itself. A memory is a pure function of state and input: a step that raises leaves everything as it was. Rival memories
are in rivals.py, ablations of TRACE in ablations.py, files of states in checkpoint.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from trace_memory.keys import Key, Keys
from trace_memory.normalise import Normaliser
from trace_memory.signature import Signature, SignatureState, displacements
from trace_memory.slots import Slots


class MemoryInputError(ValueError):
    """An input was refused; the message names the field, what came and what was expected."""


class MemoryState(NamedTuple):
    """A plain value, one row an episode, all tensors batch first. A row of zeros is an episode that has not begun."""

    steps: Int[Tensor, " B"]
    cells: dict[str, Tensor]


class Routing(NamedTuple):
    """How a step was written; for auxiliary losses and pictures."""

    omega: Float[Tensor, "*n K"]
    beta: Float[Tensor, "*n K"]  # mean over channels where the gate has many
    u: Float[Tensor, "*n d"]


class Readout(NamedTuple):
    """R_t of Eq. (trace_interface), and the read weights. Memories without slots or keys leave those empty or zero."""

    slots: Float[Tensor, "*n K d"]
    z: Float[Tensor, "*n d"]
    g: Float[Tensor, "*n d"]
    dg: Float[Tensor, "*n d"]
    alpha: Float[Tensor, "*n K"]
    routing: Routing | None = None

    def at(self, t: int) -> "Readout":
        """The readout of one time of a scan."""
        return self._each(lambda x: x[:, t])

    def pick(self, row: Int[Tensor, " N"], time: Int[Tensor, " N"]) -> "Readout":
        """The readouts of a scan at chosen rows and times."""
        return self._each(lambda x: x[row, time])

    def either(self, rows: Bool[Tensor, " B"], other: "Readout") -> "Readout":
        """Row by row this readout or the other."""

        def mix(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(rows.view(-1, *[1] * (a.ndim - 1)), a, b)

        slots, z, g, dg, alpha = (mix(a, b) for a, b in zip(self[:5], other[:5], strict=True))
        routing = None
        if self.routing is not None and other.routing is not None:
            routing = Routing(*(mix(a, b) for a, b in zip(self.routing, other.routing, strict=True)))
        return Readout(slots, z, g, dg, alpha, routing)

    def _each(self, of: Callable[[Tensor], Tensor]) -> "Readout":
        slots, z, g, dg, alpha = (of(x) for x in self[:5])
        return Readout(slots, z, g, dg, alpha, self.routing and Routing(*(of(x) for x in self.routing)))


class Track(NamedTuple):
    """Raw signature and increment at each step, the step itself, and the path cells after the last."""

    xi: Float[Tensor, "B T D"]
    delta: Float[Tensor, "B T D"]
    moved: Float[Tensor, "B T d_s"]  # the steps of the standardised path
    point: Float[Tensor, "B T d_s"]  # and where each ends
    cells: dict[str, Tensor]


class Memory(nn.Module, ABC):
    """One interface for every memory. `content` and `width` are widths of e_t and of the readout, `channels` is d_s.

    Inputs of the public methods are checked here, by name, in production too (values only where that costs no graph or
    compiled region); their shapes stand in comments. A memory computes in its own dtype, float32 or float64, also inside
    autocast: half-precision contents are cast up, so that training and deployment give the same numbers.
    """

    _like: Tensor

    def __init__(self, *, content: int, channels: int, width: int):
        super().__init__()
        self.content, self.channels, self.width = content, channels, width
        self.register_buffer("_like", torch.zeros(()), persistent=False)  # the memory's device and dtype

    @property
    def cell_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each cell of the state, for one row; none unless a memory says so."""
        return {}

    @abstractmethod
    def _run(
        self, state: MemoryState, contents: Tensor, track: Track | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        """The memory's own cells after these steps, and the readout at each; invalid steps must change nothing."""

    def _track(self, state: MemoryState, path: Tensor, valid: Tensor) -> Track | None:
        """The trajectory key's raw material; None for memories that do not look at the path."""
        return None

    def _track_at(self, path: Tensor, at: Tensor) -> Track | None:
        return None

    @property
    def state_bytes(self) -> int:
        """Size of one row of the state in float32."""
        return 8 + 4 * sum(torch.Size(shape).numel() for shape in self.cell_shapes.values())

    def init(
        self, batch: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> MemoryState:
        """Rows that have not begun, on the memory's own device unless told otherwise."""
        if batch < 1:
            raise MemoryInputError(f"batch: {batch} rows, expected at least 1")
        dtype, device = dtype or self._like.dtype, device or self._like.device
        cells = {n: torch.zeros(batch, *s, dtype=dtype, device=device) for n, s in self.cell_shapes.items()}
        return MemoryState(torch.zeros(batch, dtype=torch.int64, device=device), cells)

    def step(
        self,
        state: MemoryState,
        content: Tensor,  # (B, c)
        robot_state: Tensor,  # (B, d_s), raw
    ) -> tuple[MemoryState, Readout]:
        """One control step: write what is seen now, then read."""
        self._check_widths(content, robot_state, dims=2)
        self._check(content[:, None], robot_state[:, None], path_valid=None, valid=None, state=state)
        return self.advance(state, content, robot_state)

    def advance(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[MemoryState, Readout]:
        """`step` without its checks, for callers that have made sure themselves."""
        with torch.autocast(content.device.type, enabled=False):
            cells, readout = self._once(state, content.to(robot_state.dtype), robot_state)
        return MemoryState(state.steps + 1, cells), readout

    def _once(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[dict[str, Tensor], Readout]:
        """All cells after one step, and the readout: a scan of one step, unless a memory has a shorter way."""
        valid = torch.ones_like(content[:, :1], dtype=torch.bool)
        track = self._track(state, robot_state[:, None], valid)
        cells, readouts = self._run(state, content[:, None], track, valid)
        return cells | (track.cells if track is not None else {}), readouts.at(0)

    def scan(
        self,
        contents: Tensor,  # (B, T, c)
        path: Tensor,  # (B, T, d_s), raw robot states
        valid: Tensor | None = None,  # (B, T) bool
        state: MemoryState | None = None,
    ) -> tuple[MemoryState, Readout]:
        """Folded steps: the state after the last, and the readout after each. What is not `valid` changes nothing."""
        self._check_widths(contents, path, dims=3)
        if path.shape[:2] != contents.shape[:2]:
            raise MemoryInputError(
                f"robot_state: {tuple(path.shape[:2])} rows and steps, expected content's {tuple(contents.shape[:2])}"
            )
        state = self.init(contents.shape[0]) if state is None else state
        valid = self._check(contents, path, path_valid=valid, valid=valid, state=state)
        with torch.autocast(contents.device.type, enabled=False):
            contents = torch.where(valid[..., None], contents.to(path.dtype), 0.0)
            track = self._track(state, path, valid)
            cells, readouts = self._run(state, contents, track, valid)
        if track is not None:
            cells = cells | track.cells
        return MemoryState(state.steps + valid.sum(1), cells), readouts

    def scan_at(
        self,
        contents: Tensor,  # (B, L, c)
        path: Tensor,  # (B, T, d_s)
        at: Tensor,  # (B, L) indices into path
        valid: Tensor | None = None,  # (B, L) bool
    ) -> Readout:
        """The paper's budget scan: only frames `at` are written, keyed by the whole path. Eq. (history_scan)."""
        self._check_widths(contents, path, dims=3)
        state = self.init(contents.shape[0])
        valid = self._check(contents, path, path_valid=None, valid=valid, state=state)
        if at.shape != contents.shape[:2] or at.dtype != torch.int64 or at.device != contents.device:
            raise MemoryInputError(
                f"at: {tuple(at.shape)} {at.dtype} on {at.device}, expected {tuple(contents.shape[:2])} torch.int64 "
                f"on {contents.device}"
            )
        if _may_sync() and not bool(((at >= 0) & (at < path.shape[1])).all()):
            raise MemoryInputError(f"at: from {int(at.min())} to {int(at.max())}, expected 0 to {path.shape[1] - 1}")
        with torch.autocast(contents.device.type, enabled=False):
            contents = torch.where(valid[..., None], contents.to(path.dtype), 0.0)
            return self._run(state, contents, self._track_at(path, at), valid)[1]

    def reset(self, state: MemoryState, rows: Tensor) -> MemoryState:
        """The state with these rows begun anew."""
        if rows.shape != state.steps.shape or rows.dtype != torch.bool or rows.device != state.steps.device:
            raise MemoryInputError(
                f"rows: {tuple(rows.shape)} {rows.dtype} on {rows.device}, expected a bool mask ({len(state.steps)},) "
                f"on {state.steps.device}"
            )
        cells = {n: torch.where(rows.view(-1, *[1] * (c.ndim - 1)), 0.0, c) for n, c in state.cells.items()}
        return MemoryState(torch.where(rows, 0, state.steps), cells)

    def _empty(self, z: Tensor, slots: Tensor | None = None, alpha: Tensor | None = None) -> Readout:
        """A readout of a memory without keys."""
        zero = torch.zeros_like(z)
        slots = z[..., None, :][..., :0, :] if slots is None else slots
        alpha = z[..., :0] if alpha is None else alpha
        return Readout(slots, z, zero, zero, alpha)

    def _check_widths(self, content: Tensor, path: Tensor, dims: int) -> None:
        for name, x, width in (("content", content, self.content), ("robot_state", path, self.channels)):
            if x.ndim != dims or x.shape[-1] != width or 0 in x.shape:
                form = "(B, T, {})" if dims == 3 else "(B, {})"
                raise MemoryInputError(
                    f"{name}: shape {tuple(x.shape)}, expected {form.format(width)} with no size zero"
                )

    def _check(
        self, contents: Tensor, path: Tensor, path_valid: Tensor | None, valid: Tensor | None, state: MemoryState
    ) -> Tensor:
        """Refuses what does not fit, by name; returns the mask of contents. `path_valid` excuses padding of the path."""
        batch, length = contents.shape[:2]
        own, where = self._like.dtype, self._like.device
        if own not in (torch.float32, torch.float64):
            raise MemoryInputError(f"memory: parameters are {own}, expected float32 or float64")
        found = {n: tuple(c.shape[1:]) for n, c in state.cells.items()}
        if found != self.cell_shapes:
            raise MemoryInputError(f"state: cells {found}, expected {self.cell_shapes}")
        for name, x in (("state.steps", state.steps), *((f"state.{n}", c) for n, c in state.cells.items())):
            if len(x) != len(state.steps) or x.device != where or (x.is_floating_point() and x.dtype != own):
                raise MemoryInputError(
                    f"{name}: {len(x)} rows {x.dtype} on {x.device}, expected {len(state.steps)} rows {own} on {where}"
                )
        for name, x in (("content", contents), ("robot_state", path)):
            if x.shape[0] != len(state.steps):
                raise MemoryInputError(f"{name}: {x.shape[0]} rows, expected the state's {len(state.steps)}")
            if x.device != where:
                raise MemoryInputError(f"{name}: on {x.device}, expected the memory's device {where}")
            half = name == "content" and x.dtype in (torch.bfloat16, torch.float16)
            if x.dtype != own and not half:
                raise MemoryInputError(f"{name}: dtype {x.dtype}, expected the memory's {own}")
        mask = torch.ones(batch, length, dtype=torch.bool, device=where) if valid is None else valid
        if mask.shape != (batch, length) or mask.dtype != torch.bool or mask.device != where:
            raise MemoryInputError(
                f"valid: {tuple(mask.shape)} {mask.dtype} on {mask.device}, expected bool ({batch}, {length}) on {where}"
            )
        if _may_sync():
            for name, x, excused in (("content", contents, mask), ("robot_state", path, path_valid)):
                good = torch.isfinite(x).all(-1)
                if not bool((good if excused is None else good | ~excused).all()):
                    raise MemoryInputError(f"{name}: has a NaN or infinite value, expected finite numbers")
        return mask


def _may_sync() -> bool:
    """Whether values may be looked at: not inside a CUDA graph capture or a compiled region."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and not torch.compiler.is_compiling()


class TraceMemory(Memory):
    """Signature-routed slots: the method of the paper."""

    def __init__(
        self,
        normaliser: Normaliser,
        signature: Signature,
        keys: Keys,
        slots: Slots,
        *,
        content: int,
        timed: bool = True,
        tells: bool = True,
    ):
        super().__init__(content=content, channels=signature.channels, width=slots.width)
        self.normaliser, self.signature, self.keys, self.slots = normaliser, signature, keys, slots
        self.timed, self.tells = timed, tells

    @property
    def cell_shapes(self) -> dict[str, tuple[int, ...]]:
        """The slots, the path's last point and signature, and the first-frame anchor if there is one."""
        shapes: dict[str, tuple[int, ...]] = {"slots": (self.slots.count, self.width)}
        shapes |= {"point": (self.channels,), "xi": (self.signature.state_dim,)}
        return shapes | {"anchor": (self.keys.anchor,)} if self.keys.anchor else shapes

    def _track(self, state: MemoryState, path: Tensor, valid: Tensor) -> Track:
        before = SignatureState(state.cells["point"], state.cells["xi"], state.steps)
        standard = torch.where(valid[..., None], self.normaliser.state(path), 0.0)
        after, xi, delta = self.signature.stream(standard, valid, before)
        moved, _ = displacements(standard, valid, before)
        return Track(xi, delta, moved, standard, {"point": after.point, "xi": after.value})

    def _track_at(self, path: Tensor, at: Tensor) -> Track:
        standard, rows = self.normaliser.state(path), torch.arange(len(path), device=path.device)[:, None]
        point = standard[rows, at]
        return Track(*self.signature.at(standard, at), point - standard[rows, (at - 1).clamp_min(0)], point, {})

    def _once(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[dict[str, Tensor], Readout]:
        """Algorithm 1, line by line."""
        before = SignatureState(state.cells["point"], state.cells["xi"], state.steps)
        point, first = self.normaliser.state(robot_state), state.steps == 0
        path, xi, delta = self.signature.step(before, point)
        cells, anchor = {"point": path.point, "xi": path.value}, None
        if self.keys.anchor:
            cells["anchor"] = anchor = torch.where(first[:, None], content, state.cells["anchor"])
        key = self.keys(self.normaliser.xi(xi), self.normaliser.delta(delta), anchor)
        maps = self.slots.maps()
        drive = self.slots.prepare(content, key, self.pace(point - before.point, point, first), maps)
        cells["slots"], omega, beta = self.slots.write(state.cells["slots"], drive, maps)
        z, alpha = self.slots.read(cells["slots"], drive)
        g, dg = self._told(key)
        return cells, Readout(cells["slots"], z, g, dg, alpha, Routing(omega, beta.detach().mean(-1), drive.u))

    def pace(
        self, moved: Float[Tensor, "*n d_s"], point: Float[Tensor, "*n d_s"], first: Bool[Tensor, "*n"]
    ) -> Float[Tensor, "*n"]:
        """How much of a write each step is: all of one, where the memory is `timed`. Else its clock is the path: a robot at
        rest writes nothing, so that nobody can tell from its slots how long it has waited; but what it sees `first`.
        """
        pace = self.normaliser.pace(moved, point)
        return torch.ones_like(pace) if self.timed else torch.where(first, 1.0, pace)

    def _told(self, key: Key) -> tuple[Tensor, Tensor]:
        """What the policy is told of the key: nothing, unless the memory `tells`."""
        return (key.g, key.dg) if self.tells else (torch.zeros_like(key.g), torch.zeros_like(key.dg))

    def _anchor(self, state: MemoryState, contents: Tensor, valid: Tensor) -> Tensor:
        """Content of each row's first step, now or as remembered."""
        first = contents[torch.arange(len(valid), device=valid.device), valid.long().argmax(1)]
        return torch.where((state.steps == 0)[:, None], first, state.cells["anchor"])

    def _run(
        self, state: MemoryState, contents: Tensor, track: Track | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        assert track is not None
        cells: dict[str, Tensor] = {}
        anchor = None
        if self.keys.anchor:
            cells["anchor"] = self._anchor(state, contents, valid)
            anchor = cells["anchor"][:, None].expand(-1, contents.shape[1], -1)
        key = self.keys(self.normaliser.xi(track.xi), self.normaliser.delta(track.delta), anchor)
        maps = self.slots.maps()
        first = state.steps[:, None] + valid.long().cumsum(1) == 1
        drive = self.slots.prepare(contents, key, self.pace(track.moved, track.point, first), maps)
        m, slots, omegas, betas = state.cells["slots"], [], [], []
        for (now, its), ok in zip(self.slots.each(drive, maps), valid.unbind(1), strict=True):
            written = self.slots.write(m, now, its)
            m = torch.where(ok[:, None, None], written.slots, m)
            slots.append(m)
            omegas.append(written.omega)
            betas.append(written.beta.detach().mean(-1))
        history = torch.stack(slots, 1)
        z, alpha = self.slots.read(history, drive)
        routing = Routing(torch.stack(omegas, 1), torch.stack(betas, 1), drive.u)
        return cells | {"slots": m}, Readout(history, z, *self._told(key), alpha, routing)


def history_indices(t: Int[Tensor, " B"], budget: int, stride: int) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """I_{L,r}(t), what the paper's budget scan sees: the first frame, a tail of every `stride`-th frame up to t, and t
    itself, in causal order, with the mask of real entries.

    Entry 0 is the first frame; entry l >= 1 is t - stride * (budget - 1 - l), real only if it comes after the first
    frame. The last entry is always t: at t = 0 the first frame is the current one and stands there, once.
    """
    if budget < 2 or stride < 1:
        raise ValueError(f"history: budget={budget}, stride={stride}; expected budget >= 2 and stride >= 1")
    if bool((t < 0).any()):
        raise ValueError(f"t: minimum {int(t.min())}, expected frame indices >= 0")
    back = stride * torch.arange(budget - 1, -1, -1, device=t.device)
    indices = t[:, None] - back
    valid = indices > 0
    indices, valid = indices.clamp_min(0), valid.clone()
    indices[:, 0], valid[:, 0], valid[:, -1] = 0, t > 0, True
    return indices, valid
