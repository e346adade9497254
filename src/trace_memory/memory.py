"""What every memory is (`Memory`: init, step, scan, scan_at, reset), what it keeps (`MemoryState`) and what it gives
(`Readout`). A memory is a pure function of state and input: a step that raises leaves everything as it was. TRACE is in
trace.py, its ablations in ablations.py, other memories in baselines.py and recurrent.py, files of states in checkpoint.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from trace_errors import ObservationError, UsageError
from trace_memory.config import MemoryConfig


class AuxiliaryWeights(NamedTuple):
    """Weights of the paper's auxiliary losses. The authors' values differ by task: 0.01-0.1, 0-0.02, 0-0.005.

    Args:
        balance: lambda_bal.
        entropy: lambda_ent.
        consistency: lambda_cons.
        prior: keeps a gate to where it starts, of memories with a gate that starts right.

    Example:
        >>> from trace_memory import MemoryConfig, build
        >>> build(MemoryConfig(name="paper", content=64, width=32, hidden=32)).auxiliary
        AuxiliaryWeights(balance=0.05, entropy=0.01, consistency=0.002, prior=0.0)
    """

    balance: float = 0.0
    entropy: float = 0.0
    consistency: float = 0.0
    prior: float = 0.0


class MemoryState(NamedTuple):
    """What a memory keeps from step to step: a plain value, one row an episode, all tensors batch first. A row of zeros is
    an episode that has not begun.

    Args:
        steps: (B,) int64, how many steps each row has taken.
        tensors: everything else, by name; `Memory.shapes` tells their shapes.

    Example:
        >>> from trace_memory import MemoryConfig, build
        >>> state = build(MemoryConfig(name="gru", content=64, width=32)).init(2)
        >>> tuple(state.tensors["hidden"].shape)
        (2, 32)
    """

    steps: Int[Tensor, " B"]
    tensors: dict[str, Tensor]


class Routing(NamedTuple):
    """How a step was written; for auxiliary losses and pictures."""

    omega: Float[Tensor, "*n K"]
    beta: Float[Tensor, "*n K"]  # mean over channels where the gate has many
    u: Float[Tensor, "*n d"]


class Readout(NamedTuple):
    """What a policy gets from a memory, R_t of Eq. (trace_interface). Memories without slots or keys leave those empty or
    zero. A scan gives readouts with a time axis after the batch's.

    Args:
        slots: (B, K, d), the slots after writing.
        z: (B, d), what was read from them.
        g: (B, d), the trajectory key.
        dg: (B, d), its change.
        alpha: (B, K), the read weights.
        routing: how the step was written, for a memory that routes.
        counts: (B, H), how many events answer what each head asks for, for a memory of events.
        points: (B, H, V, 2), where in each view what was read is seen now: row and column, -1 to 1; for a memory with looks.
        prior: (B,), how far a gate that starts right has left its start, over the whole scan.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, build
        >>> memory = build(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> _, readouts = memory.scan(torch.zeros(2, 5, 64), torch.zeros(2, 5, 7))
        >>> tuple(readouts.z.shape), tuple(readouts.at(4).z.shape)
        ((2, 5, 32), (2, 32))
    """

    slots: Float[Tensor, "*n K d"]
    z: Float[Tensor, "*n d"]
    g: Float[Tensor, "*n d"]
    dg: Float[Tensor, "*n d"]
    alpha: Float[Tensor, "*n K"]
    routing: Routing | None = None
    counts: Float[Tensor, "*n H"] | None = None
    points: Float[Tensor, "*n H V 2"] | None = None
    prior: Float[Tensor, "*n"] | None = None

    def at(self, t: int) -> "Readout":
        """The readout of one time of a scan."""
        return self.map(lambda x: x[:, t])

    def pick(self, row: Int[Tensor, " N"], time: Int[Tensor, " N"]) -> "Readout":
        """The readouts of a scan at chosen rows and times."""
        return self.map(lambda x: x[row, time])

    def either(self, rows: Bool[Tensor, " B"], other: "Readout") -> "Readout":
        """Row by row this readout or the other."""
        return self.join([other], lambda x: torch.where(rows.view(-1, *[1] * (x[0].ndim - 1)), x[0], x[1]))

    def map(self, of: Callable[[Tensor], Tensor]) -> "Readout":
        """The readout with something done to each of its tensors."""
        return self.join([], lambda x: of(x[0]))

    def join(self, others: Sequence["Readout"], of: Callable[[list[Tensor]], Tensor]) -> "Readout":
        """One readout from several of the same memory, tensor by tensor."""

        def made(parts: list[Any]) -> Any:
            return None if any(part is None for part in parts) else of(parts)

        all_, routing = [self, *others], None
        if all(each.routing is not None for each in all_):
            routing = Routing(
                *(made(list(parts)) for parts in zip(*(each.routing or () for each in all_), strict=True))
            )
        rest = {name: made([getattr(each, name) for each in all_]) for name in self._fields if name != "routing"}
        return Readout(**rest, routing=routing)


class PathFeatures(NamedTuple):
    """What a memory that looks at the path gets of each step, and the path's own state after the last."""

    xi: Float[Tensor, "*n D"]  # raw signature
    delta: Float[Tensor, "*n D"]  # its increment
    moved: Float[Tensor, "*n d_s"]  # displacement of the standardised path
    point: Float[Tensor, "*n d_s"]  # and where it ends
    tensors: dict[str, Tensor]

    def map(self, of: Callable[[Tensor], Tensor]) -> "PathFeatures":
        """Something done to each tensor, some steps taken for instance; without a state."""
        return PathFeatures(of(self.xi), of(self.delta), of(self.moved), of(self.point), {})


class Memory(nn.Module, ABC):
    """One interface for every memory: `init`, `step`, `scan`, `scan_at`, `reset`. A memory of one's own is a subclass with
    `shapes` and `_run`; docs/memories.md shows one.

    Inputs of the public methods are checked here, by name, in production too (values only where that costs no graph or
    compiled region); their shapes stand in comments. A memory computes in its own dtype, float32 or float64, also inside
    autocast: half-precision contents are cast up, so that training and deployment give the same numbers.

    Args:
        content: width of what is seen in a step, e_t.
        channels: width of a robot state, d_s.
        width: of the readout, d.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, build
        >>> memory = build(MemoryConfig(channels=7, content=64, width=32, hidden=32))
        >>> state, readout = memory.step(memory.init(1), torch.zeros(1, 64), torch.zeros(1, 7))
        >>> state, readouts = memory.scan(torch.zeros(1, 5, 64), torch.zeros(1, 5, 7), state=state)
        >>> state.steps.tolist()
        [6]
    """

    _like: Tensor

    def __init__(self, *, content: int, channels: int, width: int):
        super().__init__()
        self.content, self.channels, self.width = content, channels, width
        self.register_buffer("_like", torch.zeros(()), persistent=False)  # the memory's device and dtype

    @classmethod
    def from_config(cls, config: MemoryConfig) -> "Memory":
        """The memory with the widths of a configuration."""
        return cls(content=config.content, channels=config.channels, width=config.width)

    # -- what a memory of one's own says ---------------------------------------------------------------------------------

    @property
    def auxiliary(self) -> AuxiliaryWeights:
        """Weights of the auxiliary losses it is trained with; none unless a memory says so."""
        return AuxiliaryWeights()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the state, for one row; none unless a memory says so."""
        return {}

    @abstractmethod
    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        """The memory's own tensors after these steps (B, T), and the readout at each; invalid steps must change nothing."""

    def _run_at(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor, at: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        """`_run` with the readouts of steps `at` (B, R) only, which some memories have cheaper."""
        tensors, readouts = self._run(state, contents, path, valid)
        rows = torch.arange(len(at), device=at.device)[:, None]
        return tensors, readouts.map(lambda x: x[rows, at])

    def _path(self, state: MemoryState, path: Tensor, valid: Tensor) -> PathFeatures | None:
        """What `_run` gets of the path (B, T, d_s); None for memories that do not look at it."""
        return None

    def _path_at(self, path: Tensor, at: Tensor) -> PathFeatures | None:
        """The same for chosen steps `at` of a path that begins here."""
        return None

    def _step(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[dict[str, Tensor], Readout]:
        """All tensors after one step, and the readout: a scan of one step, unless a memory has a shorter way."""
        valid = torch.ones_like(content[:, :1], dtype=torch.bool)
        path = self._path(state, robot_state[:, None], valid)
        tensors, readouts = self._run(state, content[:, None], path, valid)
        return tensors if path is None else tensors | path.tensors, readouts.at(0)

    # -- what all have ---------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Size of one row of the state in float32."""
        return 8 + 4 * sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def init(
        self, batch: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> MemoryState:
        """A state of rows that have not begun.

        Args:
            batch: how many rows.
            dtype: the memory's own unless told otherwise.
            device: the memory's own unless told otherwise.

        Returns:
            All zeros.

        Raises:
            ObservationError: there are no rows.
        """
        if batch < 1:
            raise ObservationError(f"batch: {batch} rows, expected at least 1")
        dtype, device = dtype or self._like.dtype, device or self._like.device
        tensors = {n: torch.zeros(batch, *s, dtype=dtype, device=device) for n, s in self.shapes.items()}
        return MemoryState(torch.zeros(batch, dtype=torch.int64, device=device), tensors)

    def step(
        self,
        state: MemoryState,
        content: Tensor,  # (B, c)
        robot_state: Tensor,  # (B, d_s), raw
    ) -> tuple[MemoryState, Readout]:
        """One step: write what is seen now, then read.

        Args:
            state: of the step before, or from `init`.
            content: (B, content), what is seen.
            robot_state: (B, channels), raw.

        Returns:
            The new state, and the readout.

        Raises:
            ObservationError: an input does not fit or is not finite; the message names it.
        """
        self._check_widths(content, robot_state, dims=2)
        self._check(content[:, None], robot_state[:, None], path_valid=None, valid=None, state=state)
        return self.advance(state, content, robot_state)

    def advance(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[MemoryState, Readout]:
        """`step` without its checks, for callers that have made sure themselves."""
        with torch.autocast(content.device.type, enabled=False):
            tensors, readout = self._step(state, content.to(robot_state.dtype), robot_state)
        return MemoryState(state.steps + 1, tensors), readout

    def scan(
        self,
        contents: Tensor,  # (B, T, c)
        path: Tensor,  # (B, T, d_s), raw robot states
        valid: Tensor | None = None,  # (B, T) bool
        state: MemoryState | None = None,
        at: Tensor | None = None,  # (B, R) steps
    ) -> tuple[MemoryState, Readout]:
        """Folded steps. What is not `valid` changes nothing.

        Args:
            contents: (B, T, content), what is seen at each step.
            path: (B, T, channels), raw robot states.
            valid: (B, T) bool, which steps are real; all, if not given.
            state: to go on from; a new one, if not given.
            at: (B, R) int64, steps whose readouts are wanted; all, if not given.

        Returns:
            The state after the last step, and the readouts, of each step that is wanted.

        Raises:
            ObservationError: an input does not fit or is not finite; the message names it.
        """
        self._check_widths(contents, path, dims=3)
        if path.shape[:2] != contents.shape[:2]:
            raise ObservationError(
                f"robot_state: {tuple(path.shape[:2])} rows and steps, expected content's {tuple(contents.shape[:2])}"
            )
        state = self.init(contents.shape[0]) if state is None else state
        valid = self._check(contents, path, path_valid=valid, valid=valid, state=state)
        with torch.autocast(contents.device.type, enabled=False):
            contents = torch.where(valid[..., None], contents.to(path.dtype), 0.0)
            features = self._path(state, path, valid)
            if at is None:
                tensors, readouts = self._run(state, contents, features, valid)
            else:
                self._check_at(at, contents.shape[:1], path.shape[1])
                tensors, readouts = self._run_at(state, contents, features, valid, at)
        tensors = tensors if features is None else tensors | features.tensors
        return MemoryState(state.steps + valid.sum(1), tensors), readouts

    def scan_at(
        self,
        contents: Tensor,  # (B, L, c)
        path: Tensor,  # (B, T, d_s)
        at: Tensor,  # (B, L) indices into path
        valid: Tensor | None = None,  # (B, L) bool
    ) -> Readout:
        """The paper's budget scan: only frames `at` are written, keyed by the whole path. Eq. (history_scan).

        Args:
            contents: (B, L, content), what is seen at the chosen steps.
            path: (B, T, channels), raw robot states of all steps.
            at: (B, L) int64, which steps of the path the contents are of, in order.
            valid: (B, L) bool, which of them are real; all, if not given.

        Returns:
            The readout after each of the L writes.

        Raises:
            ObservationError: an input does not fit or is not finite; the message names it.
        """
        self._check_widths(contents, path, dims=3)
        state = self.init(contents.shape[0])
        valid = self._check(contents, path, path_valid=None, valid=valid, state=state)
        self._check_at(at, contents.shape[:2], path.shape[1])
        with torch.autocast(contents.device.type, enabled=False):
            contents = torch.where(valid[..., None], contents.to(path.dtype), 0.0)
            return self._run(state, contents, self._path_at(path, at), valid)[1]

    def reset(self, state: MemoryState, rows: Tensor) -> MemoryState:
        """Begins chosen rows anew.

        Args:
            state: any state of this memory.
            rows: (B,) bool, which rows.

        Returns:
            The state with zeros in these rows.

        Raises:
            ObservationError: `rows` is no mask of the state's rows.
        """
        if rows.shape != state.steps.shape or rows.dtype != torch.bool or rows.device != state.steps.device:
            raise ObservationError(
                f"rows: {tuple(rows.shape)} {rows.dtype} on {rows.device}, expected a bool mask ({len(state.steps)},) "
                f"on {state.steps.device}"
            )
        tensors = {n: torch.where(rows.view(-1, *[1] * (x.ndim - 1)), 0.0, x) for n, x in state.tensors.items()}
        return MemoryState(torch.where(rows, 0, state.steps), tensors)

    def _empty(self, z: Tensor, slots: Tensor | None = None, alpha: Tensor | None = None) -> Readout:
        """A readout of a memory without keys."""
        zero = torch.zeros_like(z)
        slots = z[..., None, :][..., :0, :] if slots is None else slots
        alpha = z[..., :0] if alpha is None else alpha
        return Readout(slots, z, zero, zero, alpha)

    def _check_at(self, at: Tensor, shape: torch.Size, steps: int) -> None:
        if at.ndim != 2 or at.shape[: len(shape)] != shape or at.dtype != torch.int64 or at.device != self._like.device:
            wanted = tuple(shape) if len(shape) == 2 else f"({shape[0]}, R)"
            raise ObservationError(
                f"at: {tuple(at.shape)} {at.dtype} on {at.device}, expected {wanted} torch.int64 on {self._like.device}"
            )
        if may_sync() and not bool(((at >= 0) & (at < steps)).all()):
            raise ObservationError(f"at: from {int(at.min())} to {int(at.max())}, expected 0 to {steps - 1}")

    def _check_widths(self, content: Tensor, path: Tensor, dims: int) -> None:
        for name, x, width in (("content", content, self.content), ("robot_state", path, self.channels)):
            if x.ndim != dims or x.shape[-1] != width or 0 in x.shape:
                form = "(B, T, {})" if dims == 3 else "(B, {})"
                raise ObservationError(
                    f"{name}: shape {tuple(x.shape)}, expected {form.format(width)} with no size zero"
                )

    def _check(
        self, contents: Tensor, path: Tensor, path_valid: Tensor | None, valid: Tensor | None, state: MemoryState
    ) -> Tensor:
        """Refuses what does not fit, by name; returns the mask of contents. `path_valid` excuses padding of the path."""
        batch, length = contents.shape[:2]
        own, where = self._like.dtype, self._like.device
        if own not in (torch.float32, torch.float64):
            raise ObservationError(f"memory: parameters are {own}, expected float32 or float64")
        found = {n: tuple(c.shape[1:]) for n, c in state.tensors.items()}
        if found != self.shapes:
            raise ObservationError(f"state: tensors {found}, expected {self.shapes}")
        for name, x in (("state.steps", state.steps), *((f"state.{n}", c) for n, c in state.tensors.items())):
            if len(x) != len(state.steps) or x.device != where or (x.is_floating_point() and x.dtype != own):
                raise ObservationError(
                    f"{name}: {len(x)} rows {x.dtype} on {x.device}, expected {len(state.steps)} rows {own} on {where}"
                )
        for name, x in (("content", contents), ("robot_state", path)):
            if x.shape[0] != len(state.steps):
                raise ObservationError(f"{name}: {x.shape[0]} rows, expected the state's {len(state.steps)}")
            if x.device != where:
                raise ObservationError(f"{name}: on {x.device}, expected the memory's device {where}")
            half = name == "content" and x.dtype in (torch.bfloat16, torch.float16)
            if x.dtype != own and not half:
                raise ObservationError(f"{name}: dtype {x.dtype}, expected the memory's {own}")
        mask = torch.ones(batch, length, dtype=torch.bool, device=where) if valid is None else valid
        if mask.shape != (batch, length) or mask.dtype != torch.bool or mask.device != where:
            raise ObservationError(
                f"valid: {tuple(mask.shape)} {mask.dtype} on {mask.device}, expected bool ({batch}, {length}) on {where}"
            )
        if may_sync():
            for name, x, excused in (("content", contents, mask), ("robot_state", path, path_valid)):
                good = torch.isfinite(x).all(-1)
                if not bool((good if excused is None else good | ~excused).all()):
                    raise ObservationError(f"{name}: has a NaN or infinite value, expected finite numbers")
        return mask


def may_sync() -> bool:
    """Whether values may be looked at: not inside a CUDA graph capture or a compiled region."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and not torch.compiler.is_compiling()


def history_indices(t: Int[Tensor, " B"], frames: int, stride: int) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """I_{L,r}(t), what the paper's budget scan sees: the first frame, a tail of every `stride`-th frame up to t, and t
    itself, in causal order, with the mask of real entries.

    Entry 0 is the first frame; entry l >= 1 is t - stride * (frames - 1 - l), real only if it comes after the first
    frame. The last entry is always t: at t = 0 the first frame is the current one and stands there, once.
    """
    if frames < 2 or stride < 1:
        raise UsageError(f"history: frames={frames}, stride={stride}; expected frames >= 2 and stride >= 1")
    if bool((t < 0).any()):
        raise UsageError(f"t: minimum {int(t.min())}, expected frame indices >= 0")
    back = stride * torch.arange(frames - 1, -1, -1, device=t.device)
    indices = t[:, None] - back
    valid = indices > 0
    indices, valid = indices.clamp_min(0), valid.clone()
    indices[:, 0], valid[:, 0], valid[:, -1] = 0, t > 0, True
    return indices, valid
