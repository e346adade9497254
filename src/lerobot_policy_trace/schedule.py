"""Who does what at a control step, as far as the host knows: which rows begin an episode, whose memory is due, who needs a
new chunk of actions; and which observations are refused. Knows no device and no model.
"""

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lerobot_policy_trace.processor_trace import RAW_STATE

EPISODE_STEP = "observation.episode_step"
TIMESTAMP = "observation.timestamp"  # seconds, of time.time(), when the observation was made
AHEAD = 1.0  # seconds that a clock may be ahead of ours


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
    stamp: list[float] | None


class Schedule:
    """The rows of a compiled policy. `look` says what is to be done and changes nothing; `keep` notes that it was done."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],  # of every input, rows first
        rows: int,
        every: int,  # actions of a chunk that are carried out, at most
        rate: int,  # observations between two that the memory takes in
        late: float | None,
        *,
        remembers: bool,
    ):
        self.shapes, self.rows, self.every, self.rate, self.late = shapes, rows, every, rate, late
        self.remembers = remembers
        self.reset()

    def reset(self) -> None:
        """A new episode in every row."""
        self.seen, self.taken = [0] * self.rows, [0] * self.rows
        self.position, self.lasts = [self.every] * self.rows, [self.every] * self.rows
        self.clock: list[int] | None = None
        self.stamp: list[float] | None = None
        self.begun, self.missed = False, False

    def keep(self, turn: Turn, lasts: list[int]) -> None:
        """The step is done, and of each row's chunk so many actions are carried out. Rows that began in it, or whose chunk
        was used up, need a new one, unless an action was taken too (`acted`).
        """
        self.lasts = lasts
        self.taken = [n + yes for n, yes in zip(turn.taken, turn.due, strict=True)]
        self.seen, self.clock, self.stamp, self.begun = turn.seen, turn.clock, turn.stamp, True
        self.position = [self.every if want else at for want, at in zip(turn.want, self.position, strict=True)]

    def acted(self, turn: Turn) -> None:
        """The next action of the chunk was carried out."""
        self.position = [position + 1 for position in turn.position]

    def look(self, batch: dict[str, Any]) -> Turn:
        """Looks at an observation, and says what is to be done with it. Changes nothing."""
        self._check(batch)
        clock = self._clock(batch)
        before = self.clock if self.begun else None
        fresh, again = [not self.begun] * self.rows, [False] * self.rows
        if clock is not None and before is not None:
            fresh = [a < b for a, b in zip(clock, before, strict=True)]
            again = [a == b for a, b in zip(clock, before, strict=True)]
            if self.remembers and not self.missed and any(a > b + 1 for a, b in zip(clock, before, strict=True)):
                self.missed = True
                warnings.warn(
                    f"the memory missed observations: episode_step went from {before} to {clock}", stacklevel=4
                )
        stamp = self._on_time(batch, fresh)
        seen = [0 if new else count for new, count in zip(fresh, self.seen, strict=True)]
        taken = [0 if new else count for new, count in zip(fresh, self.taken, strict=True)]
        due = [not same and count % self.rate == 0 for same, count in zip(again, seen, strict=True)]
        want = [new or at >= last for new, at, last in zip(fresh, self.position, self.lasts, strict=True)]
        position = [0 if new else at for new, at in zip(want, self.position, strict=True)]
        seen = [count + (not same) for count, same in zip(seen, again, strict=True)]
        return Turn(fresh, due, want, position, taken, seen, clock, stamp)

    def _check(self, batch: dict[str, Any]) -> None:
        """Every input is there and has its shape."""
        for key, shape in self.shapes.items():
            if key not in batch:
                found = ", ".join(sorted(name for name in batch if name.startswith("observation."))) or "nothing"
                hint = "; the policy's own preprocessor must run before it" if key == RAW_STATE else ""
                raise ObservationError(f"{key}: is missing, got {found}; expected {shape}{hint}")
            x = batch[key]
            if not isinstance(x, Tensor) or tuple(x.shape) != shape or not x.is_floating_point():
                got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise ObservationError(
                    f"{key}: got {got}, expected {shape} of floats, as this policy was compiled for "
                    "(compile_for_control(rows=...) again for another number of rows)"
                )

    def _clock(self, batch: dict[str, Any]) -> list[int] | None:
        """The steps of the rows' episodes, if the observation tells them."""
        if EPISODE_STEP not in batch:
            return None
        x = batch[EPISODE_STEP]
        if not isinstance(x, Tensor) or x.numel() != self.rows or x.is_floating_point():
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ObservationError(f"{EPISODE_STEP}: got {got}, expected {self.rows} whole numbers in a tensor")
        found: list[int] = x.reshape(self.rows).tolist()
        return found

    def _on_time(self, batch: dict[str, Any], fresh: list[bool]) -> list[float] | None:
        """When the rows' observations were made, if they say so; refused if one is too old."""
        if TIMESTAMP not in batch:
            if self.late is not None:
                raise ObservationError(
                    f"{TIMESTAMP}: is missing, expected seconds of time.time(): late is {self.late} s"
                )
            return self.stamp
        given, now = batch[TIMESTAMP], time.time()
        exact = given.dtype == torch.float64 if isinstance(given, Tensor) else type(given) is float
        stamps = (torch.as_tensor(given, dtype=torch.float64).flatten().tolist() if exact else []) or [math.nan]
        stamps = stamps * self.rows if len(stamps) == 1 else stamps
        if len(stamps) != self.rows or not all(stamp < now + AHEAD for stamp in stamps):
            got = given.dtype if isinstance(given, Tensor) and not exact else given
            raise ObservationError(
                f"{TIMESTAMP}: got {got}, expected seconds of time.time() as a float or a float64 tensor, now or before"
            )
        oldest = min(stamps)
        if self.late is not None and now - oldest > self.late:
            raise LateObservationError(f"{TIMESTAMP}: {now - oldest:.3f} s old, expected at most {self.late} s")
        for stamp, before, new in zip(stamps, self.stamp or stamps, fresh, strict=True):
            if stamp < before and not new:
                raise LateObservationError(
                    f"{TIMESTAMP}: {before - stamp:.3f} s before the observation taken in last, expected a later one"
                )
        return stamps
