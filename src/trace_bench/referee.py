"""Scoring: ordered stages, branch decisions, progress (the paper's equation stage_progress) and the class of a failure.
The referee watches a world through predicates; nothing it knows is shown to a policy, except the lamp it switches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_errors import UsageError

if TYPE_CHECKING:
    from trace_bench.world import World

SURE = 0.5  # seconds for which an option must be taken before it counts as decided
REST = 1.5  # seconds for which the robot must have been ready before a lamp lights
GRID = 2.0  # seconds: a lamp that has missed its clock waits for the next of these
SOON = 20  # the same in steps of the default profile


@dataclass(frozen=True)
class Stage:
    """A stage succeeds when `done`. A branch stage asks `choice` instead: which option was taken, None while undecided."""

    name: str
    done: "Callable[[World], bool] | None" = None
    choice: "Callable[[World], int | None] | None" = None


@dataclass(frozen=True)
class Subtask:
    """Stages in the order in which they must succeed."""

    name: str
    stages: tuple[Stage, ...]


def named(subtasks: tuple[Subtask, ...]) -> list[tuple[str, Stage]]:
    """All stages in order, each with its full name."""
    return [(f"{subtask.name}: {stage.name}", stage) for subtask in subtasks for stage in subtask.stages]


class Outcome(StrEnum):
    """What became of a rollout; the paper's failure taxonomy, for every task."""

    SUCCESS = "success"
    EXECUTION = "correct branch with execution loss"
    WRONG = "wrong branch"
    TIMEOUT = "timeout"
    PREBRANCH = "pre-branch failure"
    OTHER = "other"


@dataclass
class Decision:
    """One branch: when the lamp allowed it, what was chosen when, and what the cue asked for."""

    name: str
    answer: int
    frame: int | None = None
    step: int | None = None
    choice: int | None = None

    @property
    def correct(self) -> bool | None:
        """None while undecided."""
        return None if self.choice is None else self.choice == self.answer


@dataclass
class Record:
    """The score sheet of one rollout. A time is the number of control steps taken when it happened; None means never."""

    task: str
    seed: int
    split: str
    cue: int
    delay: int
    stages: dict[str, int | None]
    decisions: list[Decision]
    cue_gone: int | None = None
    steps: int = 0
    drops: int = 0  # losses of a prop after the first branch
    outcome: Outcome = Outcome.OTHER

    @property
    def progress(self) -> float:
        """Share of stages that succeeded, 0 to 1."""
        return sum(step is not None for step in self.stages.values()) / len(self.stages)

    @property
    def wrong(self) -> bool:
        """A branch was decided against the cue."""
        return any(decision.correct is False for decision in self.decisions)

    @property
    def complete(self) -> bool:
        """Every stage succeeded."""
        return self.progress == 1.0

    def to_dict(self) -> dict[str, Any]:
        """For a json line."""
        row = asdict(self) | {"progress": self.progress, "outcome": str(self.outcome)}
        row["decisions"] = [asdict(decision) | {"correct": decision.correct} for decision in self.decisions]
        return row


def progress(records: Iterable[Record]) -> float:
    """Eq. (stage_progress): percentage of stages that succeeded over all rollouts of a task."""
    shares = [record.progress for record in records]
    if not shares:
        raise UsageError("progress of no rollouts: expected at least one record")
    return 100.0 * sum(shares) / len(shares)


def classify(record: Record, *, timed_out: bool) -> Outcome:
    """The class of an ended rollout."""
    if record.complete:
        return Outcome.SUCCESS
    if record.wrong:
        return Outcome.WRONG
    if not timed_out:
        return Outcome.OTHER
    if record.decisions[0].frame is None:
        return Outcome.PREBRANCH
    decided = any(decision.correct for decision in record.decisions)
    return Outcome.EXECUTION if decided and record.drops else Outcome.TIMEOUT


@dataclass
class Referee:
    """Follows one rollout: call `watch` after every control step."""

    record: Record
    subtasks: tuple[Subtask, ...]
    lamps: tuple[int, ...]  # index of the stage before which each lamp lights
    clock: tuple[int, ...]  # control steps before which it does not: from the start, then from the lamp before
    hidden: "Callable[[World], bool]"
    ready: "Callable[[World, int], bool]"
    rate: float  # control steps a second, at an unhurried pace
    stages: list[tuple[str, Stage]] = field(init=False)
    current: int = 0  # the stage that must succeed next
    waited: int = 0  # steps the robot has been ready for the next lamp
    leaning: tuple[int | None, int] = (None, 0)  # an option and for how many steps it has been taken
    branch: tuple[Decision, Stage] | None = None  # the last one decided
    lost_before: int = 0  # drops before the first decision

    def __post_init__(self) -> None:
        self.stages = named(self.subtasks)

    def watch(self, world: "World") -> float:
        """Scores the new state, switches the lamp, returns the progress made."""
        record, before = self.record, self.current
        record.steps += 1
        if record.cue_gone is None and self.hidden(world):
            record.cue_gone = record.steps
        self._reconsider(world)
        while self.current < len(self.stages) and not record.wrong and not self._dark(world):
            name, stage = self.stages[self.current]
            if not self._succeeds(name, stage, world):
                break
            record.stages[name] = record.steps
            self.current, self.leaning = self.current + 1, (None, 0)
        self._light(world)
        if record.decisions[0].step is None:
            self.lost_before = world.drops
        record.drops = world.drops - self.lost_before
        return (self.current - before) / len(self.stages)

    def _dark(self, world: "World") -> bool:
        """Whether the stage that is next waits for a lamp: what is done before it lights counts for nothing."""
        return self.current in self.lamps and world.lamp <= self.lamps.index(self.current)

    def _succeeds(self, name: str, stage: Stage, world: "World") -> bool:
        if stage.choice is None:
            return stage.done is not None and stage.done(world)
        choice = self._sure(stage.choice(world))
        if choice is None:
            return False
        decision = next(d for d in self.record.decisions if d.name == name)
        decision.choice, decision.step = choice, self.record.steps
        self.branch = (decision, stage)
        world.dim_lamp()
        return choice == decision.answer

    def _reconsider(self, world: "World") -> None:
        """Whoever decides right and then does the other thing has decided wrong."""
        waiting = self.current < len(self.stages) and self.stages[self.current][1].choice is not None
        if self.branch is None or waiting:  # at the next branch that one is watched
            return
        decision, stage = self.branch
        assert stage.choice is not None
        choice = self._sure(stage.choice(world))
        if choice not in {None, decision.choice}:
            decision.choice, decision.step = choice, self.record.steps

    def _sure(self, choice: int | None) -> int | None:
        """An option once it has been taken for long enough."""
        self.leaning = (choice, self.leaning[1] + 1 if choice == self.leaning[0] else 1)
        return choice if self.leaning[1] >= SURE * self.rate else None

    def _light(self, world: "World") -> None:
        """The next lamp lights when its stage is next and the robot is at rest, but not before the delay is over, nor before
        a clock that knows nothing of the cue: otherwise the time would tell what the picture does not.
        """
        phase, gone, steps = world.lamp, self.record.cue_gone, self.record.steps
        if phase == len(self.lamps) or self.current != self.lamps[phase] or not self.ready(world, phase):
            self.waited = 0
            return
        self.waited += 1
        before = (self.record.decisions[phase - 1].frame or 0) if phase else self.record.delay
        early = phase == 0 and (gone is None or steps - gone < self.record.delay)
        late = steps - before - self.clock[phase]
        if self.waited >= REST * self.rate and not early and late >= 0 and late % round(GRID * self.rate) == 0:
            self.record.decisions[phase].frame = steps
            world.set_lamp(phase + 1)
            self.waited = 0


def waits(records: Sequence[Record]) -> list[tuple[bool, bool]]:
    """Of one task's records, whoever's they are: is the delay drawn in their longest quarter, and does the first lamp
    light in time? It lights only where robots are at rest, so whoever leaves early sees it late or never.
    """
    lit = [frame - each.delay for each in records if (frame := each.decisions[0].frame) is not None]
    limit, long = min(lit, default=0) + SOON, np.quantile([each.delay for each in records], 0.75)
    frames = [each.decisions[0].frame for each in records]
    return [
        (bool(each.delay > long), frame is not None and frame - each.delay <= limit)
        for each, frame in zip(records, frames, strict=True)
    ]
