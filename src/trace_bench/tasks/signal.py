"""Signal: a card shows a colour and is gone once the bell is rung. Later the pad of that colour has to be pressed. It is
short and easy, for first steps; the paper does not have it, and it is not one of the suite's five. Its scene is always the
same: only the card's size and shade, the expert's timing and the delay differ between episodes.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import LOOKS, Episode, recolour
from trace_bench.expert import Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import Vector
from trace_bench.scene import GHOST, TABLE, Scene, box, cylinder
from trace_bench.task import Profile, Task
from trace_bench.world import World

COLOURS = {"blue": (0.10, 0.25, 0.90, 1), "orange": (0.95, 0.50, 0.05, 1)}
PADS = tuple(f"{colour} pad" for colour in COLOURS)
CARDS = tuple(f"{colour} card" for colour in COLOURS)
BOARD, HIDDEN = (0.60, 0.22, TABLE), (0.60, 0.22, -1.0)
HALF = (0.09, 0.15)  # of a pad; the two touch, so that whoever presses decides
NEAR, DOWN = 0.10, 0.07  # metres between the fingers and what they reach, what they press
WHITE = (1, 1, 1, 1)


class Signal(Task):
    """Two cues, one read: which pad."""

    name = "Signal"
    instruction = "Ring the bell, wait, and press the pad of the card's colour."
    cues = tuple(COLOURS)
    seconds = 10.0
    paper = Profile(30, 60, 1.0)
    lamps = (1,)
    clock = (4.4,)

    def scene(self) -> Scene:
        """The card on a board left, the bell near the right hand, two pads right."""
        scene = Scene(moving=False)
        scene.table("table", (0.52, 0, TABLE), (0.28, 0.62), (0.7, 0.6, 0.5, 1))
        scene.fixture("board", BOARD, [box((0.13, 0.13, 0.003), (0.93, 0.93, 0.90, 1))])
        for card, colour in zip(CARDS, COLOURS.values(), strict=True):
            scene.fixture(card, HIDDEN, [box((0.11, 0.11, 0.004), colour, (0, 0, 0.004), **GHOST)])
        scene.fixture("bell", (0.36, -0.20, TABLE), [cylinder(0.04, 0.012, (0.85, 0.75, 0.2, 1), (0, 0, 0.012))])
        scene.spot("bell", "bell", (0, 0, 0.05), ())
        for pad, y, colour in zip(PADS, (-0.06, -0.36), COLOURS.values(), strict=True):
            scene.fixture(pad, (0.58, y, TABLE), [box((*HALF, 0.006), colour, (0, 0, 0.006))])
            scene.spot(pad, pad, (0, 0, 0.05), ())
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """This episode's card on the board, the other out of the world."""
        shown = CARDS[episode.cue]
        world.model.body(shown).pos[:] = world.model.body("board").pos
        recolour(world, shown, *episode.rng("card").uniform(*LOOKS))
        world.place({})

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """One: ring, then answer."""
        return (
            Subtask(
                "answer",
                (
                    Stage("bell rung", lambda w: "rung" in w.marks),
                    Stage("right pad reached", choice=lambda w: self._pad(w, NEAR)),
                    Stage("pad pressed", lambda w: self._pad(w, DOWN) is not None),
                    Stage("hands back", lambda w: w.hands_back()),
                ),
            ),
        )

    @staticmethod
    def _pad(world: World, height: float) -> int | None:
        """The pad that the right hand is over, at most so high."""
        for number, pad in enumerate(PADS):
            x, y, z = np.abs(world.pinch("right") - world.spot(pad))
            if x < HALF[0] and y <= HALF[1] and z < height:
                return number
        return None

    def tick(self, world: World) -> None:
        """The bell takes the card away, and a pad that is pressed when it is time turns white."""
        if np.linalg.norm(world.pinch("right") - world.spot("bell")) < DOWN:
            world.marks["rung"] = 1
            for card in CARDS:
                world.model.body(card).pos[:] = HIDDEN
        pad = self._pad(world, DOWN) if world.lamp else None
        if pad is not None:
            world.model.geom_rgba[world.model.body(PADS[pad]).geomadr[0]] = WHITE

    def answers(self, cue: int) -> tuple[int, ...]:
        """The pad of the card's colour."""
        return (cue,)

    def ready(self, world: World, phase: int) -> bool:
        """Hands back, the bell rung."""
        return world.hands_back() and "rung" in world.marks

    def hidden(self, world: World) -> bool:
        """The card is gone."""
        return "rung" in world.marks

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Ring (the same for both), then press."""
        expert.section("shared")
        yield from self._press(expert, "bell")
        yield from expert.wait_for_lamp(1)
        expert.section("press")
        yield from self._press(expert, PADS[cue])

    @staticmethod
    def _press(expert: Expert, spot: str) -> Iterator[Vector]:
        for back in (0.08, 0.0, 0.08):
            yield from expert.reach("right", expert.world.spot(spot), back)
        yield from expert.home("right")
