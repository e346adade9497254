"""A control loop in progress (`Session`): which rows begin an episode, whose memory is due, who needs a new chunk of
actions, which observations are refused. What a step computes is `MemoryPolicy.step`; how it is made fast is in `compiled`.
"""

import math
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lerobot.utils.constants import OBS_ENV_STATE, OBS_STATE
from torch import Tensor

from lerobot_policy_trace.processor_trace import RAW_STATE
from trace_errors import ControlError, ObservationError
from trace_memory.memory import MemoryState, Readout

if TYPE_CHECKING:
    from lerobot_policy_trace.modeling_trace import MemoryPolicy

EPISODE_STEP = "observation.episode_step"
TIMESTAMP = "observation.timestamp"  # seconds, of time.time(), when the observation was made
AHEAD = 1.0  # seconds that a clock may be ahead of ours
IDLE = 50  # steps after which a memory should hold something
Batch = dict[str, Any]


class Carry(NamedTuple):
    """What a row keeps from one control step to the next, beside what the host counts."""

    memory: dict[str, Tensor]  # the memory's state tensors
    readout: Readout | None
    past: dict[str, Tensor]  # earlier observations that the policy looks at (R, n_obs_steps - 1, ...)
    chunk: Tensor  # (R, n_action_steps, a)


class Marks(NamedTuple):
    """What is to be done, row by row, on the device."""

    fresh: Tensor  # (R,) bool: an episode begins
    due: Tensor  # (R,) bool: the memory takes the observation in
    want: Tensor  # (R,) bool: a new chunk of actions is needed
    position: Tensor  # (R,) int: the action of the chunk that is next
    taken: Tensor  # (R,) int: observations in the memory before


def choose(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row by row one or the other."""
    return torch.where(spread(rows, yes), yes, no)


def spread(rows: Tensor, x: Tensor) -> Tensor:
    """(R,) in the form of x (R, ...)."""
    return rows.view(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class Turn:
    """What a step does, row by row, and what the host knows after it."""

    fresh: list[bool]
    due: list[bool]
    want: list[bool]
    position: list[int]
    taken: list[int]
    seen: list[int]  # observations of the episode, with this one
    clock: list[int] | None
    stamp: list[float] | None

    def marks(self, device: torch.device) -> Marks:
        """The same on a device."""
        rows = torch.tensor([self.fresh, self.due, self.want, self.position, self.taken], device=device)
        return Marks(rows[0].bool(), rows[1].bool(), rows[2].bool(), rows[3], rows[4])


class Session:
    """The control loop of one robot, or of several in step. A step is taken in as a whole or not at all: what is refused, or
    fails half-way, leaves memory and queues as they were.

    Args:
        policy: whose actions are asked for.
        rows: robots at once.
        late: seconds; older observations are refused.
    """

    fragile = False  # whether a step that is interrupted half-way may have changed something

    def __init__(self, policy: "MemoryPolicy", rows: int, late: float | None = None):
        self.policy, self.rows, self.late, self.error = policy, rows, late, 0.0
        config = policy.config
        like = next(policy.parameters())
        self.device, self.dtype = like.device, like.dtype
        self.ensembled = getattr(config, "temporal_ensemble_coeff", None) is not None
        self.every = 1 if self.ensembled else config.n_action_steps
        features = {key: tuple(config.input_features[key].shape) for key in (*policy.measured, *config.image_features)}
        self.shapes = {key: (rows, *shape) for key, shape in features.items()}
        self.remembers = policy.memory_head is not None
        if self.remembers:
            self.shapes[RAW_STATE] = self.shapes[OBS_STATE]
        self.idle = self.interrupted = False
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a policy begins a session of its own."""

    # -- what a user calls -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A new episode in every row."""
        rows = self.rows
        self.seen, self.taken, self.position = [0] * rows, [0] * rows, [self.every] * rows
        self.clock: list[int] | None = None
        self.stamp: list[float] | None = None
        self.begun = self.missed = self.interrupted = False
        self.begin()
        if self.ensembled:
            self.policy.temporal_ensembler.reset()

    def select(self, batch: Batch, noise: Tensor | None = None) -> Tensor:
        """The next action of every row."""
        turn = self.look(batch)
        if self.ensembled and any(turn.fresh) and not all(turn.fresh):
            raise ObservationError(
                "temporal_ensemble_coeff: rows that begin at different times cannot share an ensemble"
            )
        predicted = self._take(batch, turn, act=any(turn.want), noise=noise)
        if self.ensembled:
            self._ensemble_begins(turn)
            assert predicted is not None
            action: Tensor = self.policy.temporal_ensembler.update(predicted.clone())
            return action
        self.position = [position + 1 for position in turn.position]
        return self.action(turn)

    def observe(self, batch: Batch) -> None:
        """Shows the memory an observation for which no action is wanted."""
        turn = self.look(batch)
        self._take(batch, turn, act=False, noise=None)
        self._ensemble_begins(turn)

    def predict(self, batch: Batch, noise: Tensor | None = None) -> Tensor:
        """Actions from here on; counts as one observation."""
        turn = self.look(batch)
        predicted = self._take(batch, turn, act=True, noise=noise)
        self._ensemble_begins(turn)
        assert predicted is not None
        return predicted.clone()

    @property
    def state(self) -> MemoryState | None:
        """The memory's state; None without a memory."""
        if not self.remembers:
            return None
        return MemoryState(torch.tensor(self.taken, device=self.device), self.carried().memory)

    @property
    def readout(self) -> Readout | None:
        """What was read last, and how it was written; None before the first observation, or without a memory."""
        return self.carried().readout if self.begun else None

    # -- how a step is computed; `compiled` has another way ----------------------------------------------------------------

    def begin(self) -> None:
        """Nothing is carried yet."""
        head, config = self.policy.memory_head, self.policy.config
        memory = {} if head is None else head.memory.init(self.rows).tensors
        back, like = config.n_obs_steps - 1, {"dtype": self.dtype, "device": self.device}
        keys = [key for key in self.shapes if back and key != RAW_STATE]
        past = {key: torch.zeros(self.rows, back, *self.shapes[key][1:], **like) for key in keys}
        chunk = torch.zeros(self.rows, self.every, config.action_feature.shape[0], **like)
        self._carry = Carry(memory, None, past, chunk)

    def carried(self) -> Carry:
        """What the rows keep now."""
        return self._carry

    def action(self, turn: Turn) -> Tensor:
        """The action of each row's chunk that is next."""
        rows = torch.arange(self.rows, device=self.device)
        return self._carry.chunk[rows, torch.tensor(turn.position, device=self.device)]

    def compute(self, batch: Batch, turn: Turn, *, act: bool, noise: Tensor | None) -> tuple[Tensor | None, list[str]]:
        """The prediction, if one is wanted, and names of what is not finite; nothing is kept if there are any."""
        see = act or (self.remembers and any(turn.due))
        now = {key: batch[key] for key in self.shapes}
        marks = turn.marks(self.device)
        carry, predicted = self.policy.step(self._carry, now, marks, see=see, act=act, noise=noise)
        bad = [key for key, x in now.items() if not bool(torch.isfinite(x).all())]
        made = {"memory": [*carry.memory.values(), *(carry.readout or ())[:5]], "action": [predicted] if act else []}
        bad = bad or [key for key, xs in made.items() if not all(bool(torch.isfinite(x).all()) for x in xs)]
        if not bad:
            self._carry = carry
        return predicted, bad

    # -- what the host knows ---------------------------------------------------------------------------------------------

    def _take(self, batch: Batch, turn: Turn, *, act: bool, noise: Tensor | None) -> Tensor | None:
        """Does the step, and notes that it was done if it was."""
        if self.interrupted:
            raise ControlError("the last step was interrupted half-way: call reset() before the next")
        drawn = self._random() if act and self.policy.draws_noise else None
        try:
            self.interrupted = self.fragile
            predicted, bad = self.compute(batch, turn, act=act, noise=noise)
        except Exception as error:
            self._random(drawn)
            self.interrupted = False
            if isinstance(error, torch.OutOfMemoryError | RuntimeError):
                raise ControlError(f"{self.device}: {(str(error) or repr(error)).splitlines()[0]}") from error
            raise
        self.interrupted = False
        if bad:
            self._random(drawn)
            raise ObservationError(f"{', '.join(bad)}: has a NaN or infinite value, expected finite numbers")
        self.taken = [n + yes for n, yes in zip(turn.taken, turn.due, strict=True)]
        self.seen, self.clock, self.stamp, self.begun = turn.seen, turn.clock, turn.stamp, True
        # rows that began, or whose chunk was used up, need a new one, unless an action is taken too (`select`)
        self.position = [self.every if want else at for want, at in zip(turn.want, self.position, strict=True)]
        self._warn_idle()
        return predicted

    def _random(self, state: Tensor | None = None) -> Tensor | None:
        """The state of the random numbers that a chunk takes; put back, if one is given."""
        cuda = self.device.type == "cuda"
        if state is not None:
            torch.cuda.set_rng_state(state, self.device) if cuda else torch.set_rng_state(state)
            return None
        return torch.cuda.get_rng_state(self.device) if cuda else torch.get_rng_state()

    def _ensemble_begins(self, turn: Turn) -> None:
        if self.ensembled and any(turn.fresh):
            self.policy.temporal_ensembler.reset()

    def _warn_idle(self) -> None:
        """A memory that nothing is ever written to is reported, once."""
        if self.idle or not self.remembers or IDLE not in self.taken:
            return
        slots = self.carried().memory.get("slots")
        if slots is not None and not bool(slots.any()):
            self.idle = True
            warnings.warn(f"nothing was written to the memory in {IDLE} steps: all gates are closed", stacklevel=5)

    def look(self, batch: Batch) -> Turn:
        """Looks at an observation, and says what is to be done with it. Changes nothing."""
        self._check(batch)
        rate = self.policy.config.memory.period
        clock = self._clock(batch)
        before = self.clock if self.begun else None
        fresh, again = [not self.begun] * self.rows, [False] * self.rows
        if clock is not None and before is not None:
            fresh = [a < b for a, b in zip(clock, before, strict=True)]
            again = [a == b for a, b in zip(clock, before, strict=True)]
            if self.remembers and not self.missed and any(a > b + 1 for a, b in zip(clock, before, strict=True)):
                self.missed = True
                warnings.warn(
                    f"the memory missed observations: episode_step went from {before} to {clock}. Call observe() for those "
                    "for which no action is wanted",
                    stacklevel=4,
                )
        stamp = self._on_time(batch, fresh)
        seen = [0 if new else count for new, count in zip(fresh, self.seen, strict=True)]
        taken = [0 if new else count for new, count in zip(fresh, self.taken, strict=True)]
        due = [not same and count % rate == 0 for same, count in zip(again, seen, strict=True)]
        want = [new or at >= self.every for new, at in zip(fresh, self.position, strict=True)]
        position = [0 if new else at for new, at in zip(want, self.position, strict=True)]
        seen = [count + (not same) for count, same in zip(seen, again, strict=True)]
        return Turn(fresh, due, want, position, taken, seen, clock, stamp)

    def _check(self, batch: Batch) -> None:
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
                    f"{key}: got {got}, expected {shape} of floats, as this session began "
                    "(compile_for_control(rows=...) again, or reset(), for another number of rows)"
                )

    def _clock(self, batch: Batch) -> list[int] | None:
        """The steps of the rows' episodes, if the observation tells them."""
        if EPISODE_STEP not in batch:
            return None
        x = batch[EPISODE_STEP]
        if not isinstance(x, Tensor) or x.numel() != self.rows:
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ObservationError(f"{EPISODE_STEP}: got {got}, expected {self.rows} whole numbers in a tensor")
        found = x.reshape(self.rows).tolist()
        if not all(math.isfinite(each) and each == int(each) for each in found):
            raise ObservationError(f"{EPISODE_STEP}: got {found}, expected {self.rows} whole numbers in a tensor")
        return [int(each) for each in found]

    def _on_time(self, batch: Batch, fresh: list[bool]) -> list[float] | None:
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
            raise ObservationError(f"{TIMESTAMP}: {now - oldest:.3f} s old, expected at most {self.late} s")
        for stamp, before, new in zip(stamps, self.stamp or stamps, fresh, strict=True):
            if stamp < before and not new:
                raise ObservationError(
                    f"{TIMESTAMP}: {before - stamp:.3f} s before the observation taken in last, expected a later one"
                )
        return stamps


def measured(config: Any) -> list[str]:
    """Names of a policy's inputs that are numbers, not pictures."""
    found = {OBS_STATE: config.robot_state_feature, OBS_ENV_STATE: config.env_state_feature}
    return [name for name, feature in found.items() if feature is not None]
