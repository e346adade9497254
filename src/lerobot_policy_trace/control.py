"""The control step, made for speed (`policy.compile_for_control()`): a frozen copy of a policy whose every step is the same
few launches. All that a step reads or changes lies in buffers that never move; on a GPU a step is one CUDA graph, on a CPU
the same function is called. What a step computes is the policy's own code; the eager policy is the reference.

A step is taken in as a whole or not at all: the device itself keeps the new state only if everything that came in and went
out is finite, and says so with the action, which is the only thing the host waits for.
"""

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor

from lerobot_policy_trace.frozen import PRECISIONS, captured, choose, computing, exactly, frozen, lasting, version
from lerobot_policy_trace.processor_trace import RAW_STATE
from lerobot_policy_trace.schedule import ControlError, DeviceError, ObservationError, Schedule, Turn
from trace_memory.memory import MemoryState, Readout

if TYPE_CHECKING:
    from lerobot_policy_trace.remembering import Remembering

IDLE = 50  # steps after which a memory should hold something
COMPARED = 8  # observations on which another precision is compared with float32
TOLERANCE = 0.05  # of normalised actions: how far other precisions may be from float32


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
        self.rows, self.precision = rows, precision
        self.fuse = cuda if fuse is None else fuse
        wrong = {"tf32": "cpu", "fp16": "cuda"}.get(precision)
        if self.device.type == wrong:
            raise ControlError(f"precision: {precision!r} is not for {wrong}; {PRECISIONS[precision]}")
        if not policy.config.image_features:
            raise ControlError(
                "input_features: no pictures; a policy without cameras has nothing that compiling would speed up"
            )
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
        self.lasts = torch.full((rows,), self.every, device=self.device)  # actions of the chunk that are carried out
        self.draws = hasattr(self.policy, "diffusion")  # whether a chunk takes random numbers
        names = [*self.given, "memory", "action"]
        self.names, self.verdict = names, torch.zeros(len(names) + rows, device=self.device)
        self._verdict = torch.zeros(len(self.verdict), pin_memory=self.device.type == "cuda")
        self.error = 0.0  # of actions against float32, as measured here
        self.act = self._make(see=True, act=True)
        self.watch = self._make(see=True, act=False) if self.policy.recall is not None else None
        self.wait = self._make(see=False, act=False)
        self.idle = self.interrupted = False  # told that nothing is ever written; stopped half-way through a step
        remembers = self.policy.recall is not None
        like = {key: tuple(x.shape) for key, x in self.given.items()}
        self.schedule = Schedule(like, rows, self.every, config.memory.update_every, late, remembers=remembers)
        self.reset()
        if precision != "float32":
            self._compare(policy)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a policy is not compiled: buffers and graphs are of one policy."""

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

        if self.device.type != "cuda":
            return program
        with torch.cuda.device(self.device):
            return captured(program)

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
        chunk, lasts, said_now = self.chunk, self.lasts, self.chunk
        if act and maps is not None:
            with policy._recalling(lambda: says), policy._encoded():
                self.predicted = policy._act(seen | dict(zip(self.cameras, maps, strict=True))).float()
            new = self.predicted[:, : self.every]
            chunk, said_now = choose(want, new, chunk), self.predicted
            lasts = choose(want, lasting(new, self.config.rest_action_steps), lasts)
        action = chunk[torch.arange(self.rows, device=self.device), position]
        whole = [*now.values(), carried, said_now]
        size = torch.stack([torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.sum() for x in whole])
        self.verdict.copy_(torch.cat([size, lasts.to(size)]))
        good = torch.isfinite(self.verdict).all()
        kept = ((self.carried, carried), (self.chunk, chunk), (self.lasts, lasts), (self.action, action))
        for buffer, value in kept:
            if buffer is not value:
                torch.where(good, value, buffer, out=buffer)
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
        if self.interrupted and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.interrupted = False
        self.schedule.reset()
        if self._ensembled:
            self.policy.temporal_ensembler.reset()

    def select(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The next action of every row, as the policy's `select_action`."""
        refuse(kwargs)
        turn = self.schedule.look(batch)
        if self._ensembled and any(turn.fresh) and not all(turn.fresh):
            raise ObservationError(
                "temporal_ensemble_coeff: rows that begin at different times cannot share an ensemble"
            )
        self._step(batch, turn, act=any(turn.want))
        if self._ensembled:
            if any(turn.fresh):
                self.policy.temporal_ensembler.reset()
            action: Tensor = self.policy.temporal_ensembler.update(self.predicted.clone())
            return action
        self.schedule.acted(turn)
        return self.action.clone()

    def observe(self, batch: dict[str, Any]) -> None:
        """Shows the memory an observation for which no action is wanted."""
        self._aside(self.schedule.look(batch), batch, act=False)

    def predict(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """Actions from here on; counts as one observation."""
        refuse(kwargs)
        self._aside(self.schedule.look(batch), batch, act=True)
        return self.predicted.clone()

    def _aside(self, turn: Turn, batch: dict[str, Any], *, act: bool) -> None:
        """A step from which no queued action is taken."""
        self._step(batch, turn, act=act)
        if self._ensembled and any(turn.fresh):
            self.policy.temporal_ensembler.reset()

    def _step(self, batch: dict[str, Any], turn: Turn, *, act: bool) -> None:
        """Hands the observation over, lets the device do the step, and waits for its word that all was well."""
        if self.interrupted:
            raise ControlError("the last step was interrupted half-way: call reset() before the next")
        program = self.act if act else self.watch if self.watch is not None and any(turn.due) else self.wait
        noise = self._noise() if act and self.draws else None
        try:
            self.interrupted = True
            self._launch(batch, turn, program)
        except Exception as error:
            self._noise(noise)
            self.interrupted = False
            raise DeviceError(f"{self.device}: {(str(error) or repr(error)).splitlines()[0]}") from error
        verdict = self._verdict.tolist()
        bad = [name for name, x in zip(self.names, verdict, strict=False) if not math.isfinite(x)]
        if bad := [name for name in bad if name in self.given] or bad:
            self._noise(noise)
            self.interrupted = False
            raise ObservationError(f"{', '.join(bad)}: has a NaN or infinite value, expected finite numbers")
        self.schedule.keep(turn, [int(x) for x in verdict[len(self.names) :]])
        self.interrupted = False
        if IDLE in self.schedule.taken and not self.idle:
            slots = self._cells().get("slots")
            if slots is not None and not bool(slots.any()):
                self.idle = True
                warnings.warn(f"nothing was written to the memory in {IDLE} steps: all gates are closed", stacklevel=5)

    def _launch(self, batch: dict[str, Any], turn: Turn, program: Callable[[], None]) -> None:
        self._marks.numpy()[:] = (turn.fresh, turn.due, turn.want, turn.position, turn.taken)
        given = [batch[key] for key in self.given]
        if self.device.type != "cuda":
            torch._foreach_copy_([*self.given.values()], given)
            program()
            return
        with torch.cuda.device(self.device):
            torch._foreach_copy_([*self.given.values()], given, non_blocking=True)
            program()
            torch.cuda.current_stream().synchronize()

    def _noise(self, state: Tensor | None = None) -> Tensor | None:
        """The state of the random numbers that a chunk takes; put back, if one is given."""
        cuda = self.device.type == "cuda"
        if state is not None:
            torch.cuda.set_rng_state(state, self.device) if cuda else torch.set_rng_state(state)
            return None
        return torch.cuda.get_rng_state(self.device) if cuda else torch.get_rng_state()

    def _cells(self) -> dict[str, Tensor]:
        """The memory's cells, as they are carried."""
        recall = self.policy.recall
        names = list(recall.memory.cell_shapes) if recall is not None else []
        parts = zip(self.carried.split(self._sizes(), 1), self._shapes(), strict=True) if names else ()
        return {name: part.unflatten(1, shape) for name, (part, shape) in zip(names, parts, strict=False)}

    def _compare(self, policy: "Remembering") -> None:
        """How far this precision is from float32, on noise pictures; refused if too far."""
        exact = Control(policy, rows=self.rows, precision="float32", fuse=False)
        generator, late, self.schedule.late = torch.Generator().manual_seed(0), self.schedule.late, None
        for number in range(COMPARED):
            batch = {key: torch.rand(x.shape, generator=generator).to(x) for key, x in self.given.items()}
            chunks = []
            for each in (exact, self):
                torch.manual_seed(number)
                chunks.append(each.predict(batch))
            self.error = max(self.error, float((chunks[0] - chunks[1]).abs().max()))
        self.schedule.late = late
        self.reset()
        del exact, each
        gc.collect()  # another copy of the policy was in there
        if self.error > TOLERANCE:
            raise ControlError(
                f"precision: {self.precision} actions differ from float32 ones by up to {self.error:.3g}, expected "
                f"{TOLERANCE} at most (of normalised actions)"
            )


def refuse(kwargs: dict[str, Any]) -> None:
    """Options of a call are for the eager policy."""
    if kwargs:
        raise ControlError(
            f"{', '.join(kwargs)}: not known to a compiled policy; set policy.control = None to use them"
        )
