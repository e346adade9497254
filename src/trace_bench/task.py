"""What every task must say about itself. One file a task lives in `trace_bench/tasks/`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trace_bench.episode import Episode
from trace_bench.expert import CLEARANCE, Expert
from trace_bench.referee import Decision, Record, Referee, Subtask, named
from trace_bench.robot import READY, Hand, Vector, pose
from trace_bench.scene import TABLE, Point, Scene
from trace_bench.world import World

ROOM = np.array([0.0, -0.06, 0.10])  # how far a hand moves to make room, metres
MARGINS: tuple[Point, ...] = tuple((0.755, y, TABLE) for y in (-0.5, -0.3, -0.1, 0.1, 0.3, 0.5))


@dataclass(frozen=True)
class Profile:
    """How fast time runs: control steps a second, the least number of them between cue and branch, the expert's pace."""

    rate: int
    delay: int
    pace: float = 1.0


PROFILES: dict[str, Profile | None] = {"default": Profile(10, 60), "paper": None}  # None: each task's own


class Task(ABC):
    """A delayed-evidence task: a cue that disappears, a shared segment, branches that depend on the cue."""

    name: ClassVar[str]
    instruction: ClassVar[str]  # the same for every cue
    cues: ClassVar[tuple[str, ...]]
    seconds: ClassVar[float]  # what an unhurried expert needs, without the delay
    paper: ClassVar[Profile]  # 30 Hz and the paper's horizon
    moving: ClassVar[bool] = False
    partly_readable: ClassVar[bool] = False  # something at the branch still tells of the cue, as in the paper's Cable
    lamps: ClassVar[tuple[int, ...]]  # index of the stage before which each branch's lamp lights
    clock: ClassVar[tuple[float, ...]]  # seconds before which it does not (see the referee)

    @abstractmethod
    def scene(self) -> Scene:
        """The world's plan."""

    @abstractmethod
    def arrange(self, world: World, episode: Episode) -> None:
        """Sets the stage of an episode in a world just reset."""

    @property
    @abstractmethod
    def subtasks(self) -> tuple[Subtask, ...]:
        """Ordered subtasks of four stages each."""

    @abstractmethod
    def answers(self, cue: int) -> tuple[int, ...]:
        """The right option at each branch."""

    @abstractmethod
    def hidden(self, world: World) -> bool:
        """Whether nothing in sight tells the cue any more."""

    @abstractmethod
    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """The expert's way to do it, one action a control step."""

    def bring(self, expert: Expert, hand: Hand, prop: str, pad: str) -> Iterator[Vector]:
        """What several scripts begin with: a hand fetches the prop to the intake, then, the same for every cue, the left one
        carries it to a pad, the right one makes room meanwhile, and both come back and wait for the first lamp. Both have
        then done the same whatever the cue was, so that no hand is a little off where only one cue has sent it.
        """
        yield from expert.pick(hand, prop)
        yield from expert.place(hand, "intake")
        yield from expert.home(hand)
        yield from expert.until(lambda: self.hidden(expert.world))
        expert.section("shared")
        yield from expert.pick("left", prop)
        over = expert.world.in_base(expert.world.spot(pad)) + np.array([0, 0, CLEARANCE])
        yield from expert.move({"left": pose(over), "right": pose(READY["right"] + ROOM)})
        yield from expert.place("left", pad)
        yield from expert.home()
        yield from expert.wait_for_lamp(1)

    def tick_intake(self, world: World) -> None:
        """The intake turns green once it has what was brought and the hands are back: a hand above it that must not take it
        yet, and one that must, would otherwise look alike.
        """
        if self.hidden(world):
            world.show_done("intake")

    @abstractmethod
    def ready(self, world: World, phase: int) -> bool:
        """Whether robot and things are where this branch begins."""

    def tick(self, world: World) -> None:  # noqa: B027
        """What the scene does by itself after a control step; by default nothing."""

    def referee(self, episode: Episode, profile: Profile) -> Referee:
        """A referee with an empty score sheet."""
        stages: dict[str, int | None] = {name: None for name, _ in named(self.subtasks)}
        branches = [name for name, stage in named(self.subtasks) if stage.choice is not None]
        decisions = [Decision(name, answer) for name, answer in zip(branches, self.answers(episode.cue), strict=True)]
        record = Record(self.name, episode.seed, episode.split, episode.cue, episode.delay, stages, decisions)
        rate = profile.pace * profile.rate
        clock = tuple(round(seconds * rate) for seconds in self.clock)
        return Referee(record, self.subtasks, self.lamps, clock, self.hidden, self.ready, rate)
