"""The control step, made for speed (`policy.compile_for_control()`): a frozen copy of a policy whose every step is the same
few launches. All that a step reads or changes lies in buffers that never move; on a GPU a step is one CUDA graph, on a CPU
the same function is called. What a step computes is the policy's own code; the eager policy is the reference.

A step is taken in as a whole or not at all: the device itself keeps the new state only if everything that came in and went
out is finite, and says so with the action, which is the only thing the host waits for.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor, nn

from lerobot_policy_trace.backbone import bake
from lerobot_policy_trace.processor_trace import RAW_STATE
from trace_memory.memory import MemoryState, Readout

if TYPE_CHECKING:
    from lerobot_policy_trace.remembering import Remembering

EPISODE_STEP = "observation.episode_step"
TIMESTAMP = "observation.timestamp"  # seconds, of time.time(), when the observation was made
PRECISIONS = {
    "float32": "everything; what a CPU does if not told otherwise",
    "tf32": "GPU: the policy's convolutions and matrix products in TF32; what a GPU does if not told otherwise",
    "bf16": "the policy in bfloat16, the memory in float32",
    "fp16": "CPU: the memory's weights kept in float16, computed in float32",
}
WARM_UP = 3  # calls before a graph is captured
COMPARED = 8  # observations on which another precision is compared with float32
TOLERANCE = 0.05  # of normalised actions: how far other precisions may be from float32


class ControlError(RuntimeError):
    """A step was not taken; memory and queues are as they were before it."""


class ObservationError(ControlError, ValueError):
    """An observation was refused; the message names the field, what came and what was expected."""


class LateObservationError(ObservationError):
    """An observation is too old, or older than one that was taken in already."""


class DeviceError(ControlError):
    """The device could not do the step."""


@dataclass(frozen=True)
class Turn:
    """What a step does, row by row, and what the host knows after it."""

    fresh: list[bool]  # an episode begins
    due: list[bool]  # the memory takes the observation in
    want: list[bool]  # a new chunk of actions is needed
    position: list[int]  # the action of the chunk that is next
    taken: list[int]  # observations in the memory before
    seen: list[int]  # observations of the episode, with this one
    clock: list[int] | None
    stamp: float | None


class Control:
    """One robot's control loop, or that of several in step; made by `compile_for_control`."""

    def __init__(
        self,
        policy: "Remembering",
        *,
        rows: int = 1,
        precision: str | None = None,
        late: float | None = None,
        fuse: bool | None = None,
    ) -> None:
        self.device = next(policy.parameters()).device
        cuda = self.device.type == "cuda"
        precision = precision or ("tf32" if cuda else "float32")
        if rows < 1 or precision not in PRECISIONS or (late is not None and not late > 0):
            raise ControlError(
                f"rows, precision, late: got {rows}, {precision!r}, {late}; expected 1 or more, one of "
                f"{', '.join(PRECISIONS)}, and seconds or None"
            )
        self.rows, self.precision, self.late = rows, precision, late
        self.fuse = cuda if fuse is None else fuse
        wrong = {"tf32": "cpu", "fp16": "cuda"}.get(precision)
        if self.device.type == wrong:
            raise ControlError(f"precision: {precision!r} is not for {wrong}; {PRECISIONS[precision]}")
        self.version = version(policy)
        self.policy, self.last = frozen(policy, precision)
        if self.policy.recall is not None:
            self.remember = self.fused(self.policy.recall.memory.advance)
            if self.fuse:
                self.policy.recall.adapter.forward = self.fused(self.policy.recall.adapter.forward)
        self.config = config = self.policy.config
        if self.policy.recall is not None and not int(self.policy.recall.frames):
            warnings.warn("the memory has no statistics yet: this policy was not trained", stacklevel=3)
        self.cameras = list(config.image_features)
        shapes = {key: tuple(feature.shape) for key, feature in config.input_features.items()}
        if self.policy.recall is not None:
            shapes[RAW_STATE] = shapes[OBS_STATE]
        self.given = {key: self._buffer(shape) for key, shape in shapes.items()}
        before = config.n_obs_steps - 1  # observations that the stock policy looks back at
        wanted = [key for key in self.given if before and key != RAW_STATE]
        self.past = {key: self.given[key].new_zeros(rows, before, *shapes[key]) for key in wanted}
        self._marks = torch.zeros(5, rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.marks = torch.zeros(5, rows, dtype=torch.int64, device=self.device)
        self.carried = torch.zeros(rows, sum(self._sizes()), device=self.device)
        self.every = config.n_action_steps if not self._ensembled else 1
        width = config.action_feature.shape[0]
        self.chunk = torch.zeros(rows, self.every, width, device=self.device)
        self.action = torch.zeros(rows, width, device=self.device)
        names = [*self.given, "memory", "action"]
        self.names, self.verdict = names, torch.zeros(len(names), device=self.device)
        self._verdict = torch.zeros(len(names), pin_memory=self.device.type == "cuda")
        self.error = 0.0  # of actions against float32, as measured here
        self.act = self._make(see=True, act=True)
        self.watch = self._make(see=True, act=False) if self.policy.recall is not None else None
        self.wait = self._make(see=False, act=False)
        self.reset()
        if precision != "float32":
            self._compare(policy)

    # -- the step, as a function of the buffers --------------------------------------------------------------------------

    def _buffer(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(self.rows, *shape, device=self.device)

    def fused(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose small operations are joined into few kernels (torch.compile), if that was asked for."""
        if not self.fuse:
            return call
        # The option also joins products of a matrix and a vector with what follows.
        return torch.compile(call, dynamic=False, options={"coordinate_descent_tuning": True})

    def _shapes(self) -> list[tuple[int, ...]]:
        """What is carried from step to step: the memory's cells, then what it said last."""
        recall = self.policy.recall
        if recall is None:
            return []
        memory = recall.memory
        if not hasattr(self, "_said"):
            with torch.no_grad():
                row = memory.init(1)
                raw = torch.zeros(1, memory.channels, device=self.device)
                _, said = memory.step(row, torch.zeros(1, memory.content, device=self.device), raw)
            self._said = [tuple(x.shape[1:]) for x in said[:5]]
        return [*memory.cell_shapes.values(), *self._said]

    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self._shapes()]

    def _make(self, *, see: bool, act: bool) -> Callable[[], None]:
        def program() -> None:
            with torch.no_grad(), computing(self.device, self.precision):
                self._advance(see=see, act=act)

        return captured(program) if self.device.type == "cuda" else program

    def _advance(self, *, see: bool, act: bool) -> None:
        """One step, from buffers to buffers. Nothing here depends on what the host knows but which of the three it is."""
        policy, recall = self.policy, self.policy.recall
        self.marks.copy_(self._marks, non_blocking=True)
        fresh, due, want, position, taken = self.marks
        fresh, due, want = fresh.bool(), due.bool(), want.bool()
        now = self.given
        seen = {key: x[:, None] for key, x in now.items()}
        for key, past in self.past.items():
            seen[key] = torch.cat([choose(fresh, seen[key].expand_as(past), past), seen[key]], dim=1)
        carried, says, maps = self.carried, None, None
        if see:
            maps = self._encode([seen[key] if act else seen[key][:, -1:] for key in self.cameras])
        if recall is not None and maps is not None:
            base = self.carried * ~fresh[:, None]
            parts = [p.unflatten(1, s) for p, s in zip(base.split(self._sizes(), 1), self._shapes(), strict=True)]
            names = list(recall.memory.cell_shapes)
            cells, held = dict(zip(names, parts, strict=False)), Readout(*parts[len(names) :])
            raw = now[RAW_STATE]
            content = recall.content([each[:, -1] for each in maps], raw)
            with exactly():
                state, said = self.remember(MemoryState(taken, cells), content.to(raw), raw)
            new = torch.cat([x.flatten(1) for x in (*(state.cells[name] for name in names), *said[:5])], dim=1)
            carried = choose(due, new, base)
            says = said._replace(routing=None).either(due, held)
        chunk = self.chunk
        if act and maps is not None:
            with policy._recalling(lambda: says), policy._encoded():
                self.predicted = policy._act(seen | dict(zip(self.cameras, maps, strict=True))).float()
            chunk = choose(want, self.predicted[:, : self.every], chunk)
        action = chunk[torch.arange(self.rows, device=self.device), position]
        whole = [*now.values(), carried, chunk]
        self.verdict.copy_(
            torch.stack([torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.sum() for x in whole])
        )
        good = torch.isfinite(self.verdict).all()
        for old, new in ((self.carried, carried), (self.chunk, chunk), (self.action, action)):
            if old is not new:
                torch.where(good, new, old, out=old)
        for key, old in self.past.items():
            torch.where(good, seen[key][:, 1:], old, out=old)
        self._verdict.copy_(self.verdict, non_blocking=True)

    def _encode(self, pictures: list[Tensor]) -> list[Tensor]:
        """Feature maps (rows, steps, C, h, w) of pictures, one tensor a camera; all cameras at once where that can be."""
        steps, count = pictures[0].shape[1], len(pictures)
        flat = [each.flatten(0, 1) for each in pictures]
        if self.last:
            flat = [each.contiguous(memory_format=torch.channels_last) for each in flat]
        if len(self.policy.backbones) == 1 and len({each.shape for each in flat}) == 1:
            maps = list(self.policy._encode([torch.cat(flat)])[0].chunk(count))
        else:
            maps = self.policy._encode(flat)
        return [each.unflatten(0, (self.rows, steps)) for each in maps]

    # -- what the host does ----------------------------------------------------------------------------------------------

    @property
    def _ensembled(self) -> bool:
        return getattr(self.config, "temporal_ensemble_coeff", None) is not None

    def reset(self) -> None:
        """A new episode in every row."""
        self.seen, self.taken = [0] * self.rows, [0] * self.rows
        self.position: list[int] = [self.every] * self.rows
        self.clock: list[int] | None = None
        self.stamp: float | None = None
        self.begun, self.missed = False, False
        if self._ensembled:
            self.policy.temporal_ensembler.reset()

    def select(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The next action of every row, as the policy's `select_action`."""
        refuse(kwargs)
        turn = self._turn(batch)
        if self._ensembled and any(turn.fresh) and not all(turn.fresh):
            raise ObservationError(
                "temporal_ensemble_coeff: rows that begin at different times cannot share an ensemble"
            )
        self._step(batch, turn, act=any(turn.want))
        if self._ensembled:
            if any(turn.fresh):
                self.policy.temporal_ensembler.reset()
            return self.policy.temporal_ensembler.update(self.predicted.clone())
        self.position = [position + 1 for position in turn.position]
        return self.action.clone()

    def observe(self, batch: dict[str, Any]) -> None:
        """Shows the memory an observation for which no action is wanted."""
        self._aside(self._turn(batch), batch, act=False)

    def predict(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """Actions from here on; counts as one observation."""
        refuse(kwargs)
        self._aside(self._turn(batch), batch, act=True)
        return self.predicted.clone()

    def _aside(self, turn: Turn, batch: dict[str, Any], *, act: bool) -> None:
        """A step from which no queued action is taken. Rows that began in it need a new chunk at the next."""
        self._step(batch, turn, act=act)
        self.position = [self.every if fresh else at for fresh, at in zip(turn.fresh, self.position, strict=True)]

    def _turn(self, batch: dict[str, Any]) -> Turn:
        """Looks at an observation, and says what is to be done with it. Changes nothing."""
        self._check(batch)
        clock = batch[EPISODE_STEP].reshape(self.rows).tolist() if EPISODE_STEP in batch else None
        before = self.clock if self.begun else None
        nobody = [False] * self.rows
        fresh, again = [not self.begun] * self.rows, nobody
        if clock is not None and before is not None:
            fresh = [a < b for a, b in zip(clock, before, strict=True)]
            again = [a == b for a, b in zip(clock, before, strict=True)]
            if (
                self.policy.recall is not None
                and not self.missed
                and any(a > b + 1 for a, b in zip(clock, before, strict=True))
            ):
                self.missed = True
                warnings.warn(
                    f"the memory missed observations: episode_step went from {before} to {clock}", stacklevel=4
                )
        stamp = self._on_time(batch, begins=any(fresh))
        seen = [0 if new else count for new, count in zip(fresh, self.seen, strict=True)]
        taken = [0 if new else count for new, count in zip(fresh, self.taken, strict=True)]
        rate = self.config.memory.update_every
        due = [not same and count % rate == 0 for same, count in zip(again, seen, strict=True)]
        want = [new or at >= self.every for new, at in zip(fresh, self.position, strict=True)]
        position = [0 if new else at for new, at in zip(want, self.position, strict=True)]
        return Turn(
            fresh,
            due,
            want,
            position,
            taken,
            [n + (not same) for n, same in zip(seen, again, strict=True)],
            clock,
            stamp,
        )

    def _check(self, batch: dict[str, Any]) -> None:
        """Every input is there and has its shape."""
        for key, like in self.given.items():
            if key not in batch:
                found = ", ".join(sorted(name for name in batch if name.startswith("observation."))) or "nothing"
                hint = "; the policy's own preprocessor must run before it" if key == RAW_STATE else ""
                raise ObservationError(f"{key}: is missing, got {found}; expected {tuple(like.shape)}{hint}")
            x = batch[key]
            if not isinstance(x, Tensor) or x.shape != like.shape or not x.is_floating_point():
                got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ObservationError(
                    f"{key}: got {got}, expected {tuple(like.shape)} of floats, as this policy was compiled for "
                    "(compile_for_control(rows=...) again for another number of rows)"
                )

    def _on_time(self, batch: dict[str, Any], *, begins: bool) -> float | None:
        """When the observation was made, if it says so; refused if it is too old."""
        if TIMESTAMP not in batch:
            if self.late is not None:
                raise ObservationError(
                    f"{TIMESTAMP}: is missing, expected seconds of time.time(): late is {self.late} s"
                )
            return None
        given = batch[TIMESTAMP]
        if isinstance(given, Tensor) and given.dtype != torch.float64:
            raise ObservationError(
                f"{TIMESTAMP}: got {given.dtype}, expected float64, which alone can tell such times apart"
            )
        stamp = float(torch.as_tensor(given, dtype=torch.float64).min())
        age = time.time() - stamp
        if self.late is not None and age > self.late:
            raise LateObservationError(f"{TIMESTAMP}: {age:.3f} s old, expected at most {self.late} s")
        if self.stamp is not None and not begins and stamp < self.stamp:
            raise LateObservationError(
                f"{TIMESTAMP}: {self.stamp - stamp:.3f} s before the observation taken in last, expected a later one"
            )
        return stamp

    def _step(self, batch: dict[str, Any], turn: Turn, *, act: bool) -> None:
        """Hands the observation over, lets the device do the step, and waits for its word that all was well."""
        see = self.watch if self.watch is not None and any(turn.due) else self.wait
        try:
            self._marks.numpy()[:] = (turn.fresh, turn.due, turn.want, turn.position, turn.taken)
            torch._foreach_copy_([*self.given.values()], [batch[key] for key in self.given], non_blocking=True)
            (self.act if act else see)()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except ControlError:
            raise
        except RuntimeError as error:
            raise DeviceError(f"{self.device}: {str(error).splitlines()[0]}") from error
        bad = [name for name, x in zip(self.names, self._verdict.tolist(), strict=True) if not abs(x) < float("inf")]
        if bad := [name for name in bad if name in self.given] or bad:
            raise ObservationError(f"{', '.join(bad)}: has a NaN or infinite value, expected finite numbers")
        self.taken = [n + yes for n, yes in zip(turn.taken, turn.due, strict=True)]
        self.seen, self.clock, self.stamp, self.begun = turn.seen, turn.clock, turn.stamp, True

    def _compare(self, policy: "Remembering") -> None:
        """How far this precision is from float32, on noise pictures; refused if too far."""
        exact, generator = (
            Control(policy, rows=self.rows, precision="float32", fuse=False),
            torch.Generator().manual_seed(0),
        )
        for number in range(COMPARED):
            batch: dict[str, Any] = {TIMESTAMP: time.time()}
            batch |= {key: torch.rand(x.shape, generator=generator).to(x) for key, x in self.given.items()}
            chunks = []
            for each in (exact, self):
                with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                    torch.manual_seed(number)
                    chunks.append(each.predict(batch))
            self.error = max(self.error, float((chunks[0] - chunks[1]).abs().max()))
        self.reset()
        if self.error > TOLERANCE:
            raise ControlError(
                f"precision: {self.precision} actions differ from float32 ones by up to {self.error:.3g}, expected "
                f"{TOLERANCE} at most (of normalised actions)"
            )


# -- tools -----------------------------------------------------------------------------------------------------------------


def refuse(kwargs: dict[str, Any]) -> None:
    """Options of a call are for the eager policy."""
    if kwargs:
        raise ControlError(
            f"{', '.join(kwargs)}: not known to a compiled policy; set policy.control = None to use them"
        )


def choose(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row by row one or the other."""
    return torch.where(rows.view(-1, *[1] * (max(yes.ndim, no.ndim) - 1)), yes, no)


def version(policy: nn.Module) -> int:
    """A number that grows whenever a weight is changed in place."""
    return sum(x._version for x in (*policy.parameters(), *policy.buffers()))


def frozen(policy: "Remembering", precision: str) -> tuple[Any, bool]:
    """A copy for deployment: no gradients, normalisations baked into convolutions, weights arranged once. And whether its
    convolutions want pictures channels last.
    """
    apart = {id(x): None for x in (policy.paths, policy.captured, policy.control) if x is not None}
    made = copy.deepcopy(policy, apart).eval().requires_grad_(requires_grad=False)
    made.reset()
    baked = [bake(backbone) for backbone in made.backbones]
    recall = made.recall
    if recall is not None and hasattr(recall.memory, "slots"):
        with exactly():
            recall.memory.slots.settle()
    if precision == "fp16" and recall is not None:
        halve(recall)
    if precision == "bf16":
        mine = {id(x) for x in recall.modules()} if recall is not None else set()
        for module in made.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d) and id(module) not in mine:
                module.to(torch.bfloat16)
    return made, any(baked)


class HalfLinear(nn.Module):
    """A linear layer whose weights are kept in float16 (FBGEMM): half the bytes to read, which is what a step on a CPU waits
    for. Products and sums are float32.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        bias = None if layer.bias is None else layer.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().contiguous(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's map."""
        made: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return made


def halve(module: nn.Module) -> None:
    """Puts a `HalfLinear` in the place of every linear layer."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            module._modules[name] = HalfLinear(child)
        else:
            halve(child)


@contextmanager
def computing(device: torch.device, precision: str) -> Iterator[None]:
    """The number format of everything computed meanwhile."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if device.type != "cuda":
            yield
            return
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision == "tf32"),
            exactly(exact=precision != "tf32"),
        ):
            yield


@contextmanager
def exactly(*, exact: bool = True) -> Iterator[None]:
    """Matrix products in float32, or in TF32; a memory's are always float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not exact
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def captured(program: Callable[[], None]) -> Callable[[], None]:
    """A program as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            program()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program()
    return graph.replay
