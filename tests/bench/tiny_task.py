"""The smallest task that keeps the suite's contract: a card shows a colour until a hand touches it; later the plate must be
pressed on the left if the card was red, on the right if it was green. test_contract.py registers it and checks it like the
others.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import Episode
from trace_bench.expert import Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import Hand, Vector
from trace_bench.scene import GHOST, TABLE, Scene, box
from trace_bench.task import Profile, Task
from trace_bench.world import World

COLOURS = {"red": (0.9, 0.1, 0.1, 1), "green": (0.1, 0.7, 0.1, 1)}
SHOWN, AWAY = (0.60, 0.22, TABLE), (0.60, 0.22, -1.0)
NEAR, DOWN = 0.10, 0.07  # metres between the fingers and what they are over, what they touch
ASIDE = np.array([[0.0, 0.18, 0.0], [0.0, -0.18, 0.0]])  # of each cue: metres from the middle of the plate


class Tiny(Task):
    """Two cues, one branch."""

    name = "Tiny"
    instruction = "Remember the card, wait, and press its side of the plate."
    cues = tuple(COLOURS)
    seconds = 10.0
    paper = Profile(30, 60)
    lamps = (1,)
    clock = (4.0,)

    def scene(self) -> Scene:
        """Two cards and the plate."""
        scene = Scene(moving=False)
        scene.table("table", (0.52, 0, TABLE), (0.28, 0.62), (0.7, 0.6, 0.5, 1))
        for name, colour in COLOURS.items():
            scene.fixture(name, AWAY, [box((0.1, 0.1, 0.004), colour, (0, 0, 0.004), **GHOST)])
        scene.fixture("plate", (0.55, -0.2, TABLE), [box((0.09, 0.30, 0.006), (0.9, 0.9, 0.9, 1), (0, 0, 0.006))])
        scene.spot("plate", "plate", (0, 0, 0.05), ())
        scene.fixture("board", SHOWN, [box((0.13, 0.13, 0.003), (0.9, 0.9, 0.9, 1))])
        scene.spot("board", "board", (0, 0, 0.05), ())
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """The card of this episode's colour lies in sight; where exactly is drawn."""
        at = np.array(SHOWN) + np.append(episode.rng("card").uniform(-0.02, 0.02, 2), 0.0)
        world.model.body(self.cues[episode.cue]).pos[:] = at
        world.place({})

    def tick(self, world: World) -> None:
        """The card goes when it is touched."""
        if np.linalg.norm(world.pinch("left") - world.spot("board")) < DOWN:
            world.marks["touched"] = 1
            for name in self.cues:
                world.model.body(name).pos[:] = AWAY

    def hidden(self, world: World) -> bool:
        """The card was touched."""
        return "touched" in world.marks

    def ready(self, world: World, phase: int) -> bool:
        """The card is gone, both hands wait."""
        return self.hidden(world) and world.hands_back()

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """One, of four stages; the second is the branch."""
        stages = (
            Stage("card touched", self.hidden),
            Stage("side chosen", choice=lambda world: self.side(world, NEAR)),
            Stage("plate pressed", lambda world: self.side(world, DOWN) is not None),
            Stage("hands back", lambda world: world.hands_back()),
        )
        return (Subtask("answer", stages),)

    @staticmethod
    def side(world: World, height: float) -> int | None:
        """The side of the plate that the right hand is over, at most so high."""
        x, y, z = world.pinch("right") - world.spot("plate")
        return int(y < 0) if abs(x) < 0.09 and abs(y) < 0.3 and z < height else None

    def answers(self, cue: int) -> tuple[int, ...]:
        """Red left, green right."""
        return (cue,)

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Touch the card, wait, press."""
        expert.section("shared")
        yield from self.touch(expert, "left", expert.world.spot("board"))
        yield from expert.wait_for_lamp(1)
        expert.section("press")
        yield from self.touch(expert, "right", expert.world.spot("plate") + ASIDE[cue])

    @staticmethod
    def touch(expert: Expert, hand: Hand, point: Vector) -> Iterator[Vector]:
        """Down, up again, and back."""
        for above in (0.08, 0.0, 0.08):
            yield from expert.reach(hand, point, above)
        yield from expert.home(hand)
