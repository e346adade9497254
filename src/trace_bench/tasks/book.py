"""Book: a book is fetched from one of three shelves and carried to a hub. From there the shelf decides the lane to the
return desk, the chute it goes into, and the lane back. The chutes swallow the book, so nothing in sight tells which it was.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import Episode, dress, recolour, shift
from trace_bench.expert import Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import READY, Vector, pose
from trace_bench.scene import GHOST, Point, Scene, box, cylinder
from trace_bench.task import Profile, Task
from trace_bench.world import World

SHELVES = ("shelf 1", "shelf 2", "shelf 3")
CHUTES = ("inside chute 1", "inside chute 2", "inside chute 3")
LANES = (0.45, 0.0, -0.45)  # distance from the middle line, to the left of a robot that faces them
BAYS = (0.32, 0.0, -0.32)  # the same for shelves and chutes
REACH = 0.22  # the right hand works this far to the right of the robot's middle
GRIP = 0.82  # height of the hand with the book
HUB, DESK, TURNED = (-0.75, 0.0), (-2.75, 0.0), np.pi
CARRY = pose((0.40, -0.22, GRIP), forward=True)
GATE, EXIT = -1.35, -2.15  # where a lane begins and ends
NEAR, ASKEW = 0.30, 0.20  # metres from hub or desk, and sine of half an angle, with which one still stands there


class Book(Task):
    """Three cues, three reads: the lane, the chute, the lane back."""

    name = "Book"
    instruction = "Take the book from its shelf to its return chute by its lane, and come back the same way."
    cues = ("left shelf", "middle shelf", "right shelf")
    seconds = 32.0
    paper = Profile(30, 185, 1.2)
    moving = True
    lamps = (2, 5, 9)
    clock = (12.0, 7.8, 9.2)

    def scene(self) -> Scene:
        """A rack ahead, behind the robot three lanes between posts, and a desk with three chutes beyond them."""
        scene = Scene(moving=True)
        rack, slate = (0.55, 0.45, 0.36, 1), (0.35, 0.40, 0.45, 1)
        for name, y in zip(SHELVES, BAYS, strict=True):
            walls = [box((0.10, 0.01, 0.14), rack, (0, s * 0.13, 0.0), **GHOST) for s in (1, -1)]
            board = box((0.10, 0.14, 0.012), rack, (0, 0, -0.14))
            scene.fixture(name, (0.70, y, 0.80), [*walls, board, box((0.01, 0.14, 0.14), slate, (0.10, 0, 0), **GHOST)])
            scene.spot(name, name, (-0.03, 0, GRIP - 0.80), ("book",), radius=0.06)
        scene.fixture("rack foot", (0.72, 0, 0.32), [box((0.05, 0.46, 0.32), rack, name="rack foot")])
        for row, x in enumerate((-1.45, -1.75, -2.05)):
            for column, y in enumerate((0.69, 0.23, -0.23, -0.69)):
                post = cylinder(0.05, 0.20, (0.85, 0.80, 0.25, 1), (0, 0, 0.20))
                scene.fixture(f"post {row} {column}", (x, y, 0), [post])
        for lane, y in enumerate(LANES):
            stripe = box((0.45, 0.10, 0.002), (0.30 + 0.05 * lane, 0.45, 0.60, 1), (0, 0, 0.002), **GHOST)
            scene.fixture(f"lane {lane}", (-1.75, -y, 0), [stripe])
        scene.fixture("desk", (-3.55, 0, 0.35), [box((0.12, 0.55, 0.35), (0.5, 0.5, 0.55, 1), name="desk")])
        for name, y in zip(CHUTES, BAYS, strict=True):
            mouth = box((0.004, 0.10, 0.10), (0.08, 0.08, 0.10, 1), (0.124, 0, 0), **GHOST)
            roof = box((0.12, 0.14, 0.13), (0.5, 0.5, 0.55, 1), **GHOST)
            scene.fixture(name, (-3.55, -y, 0.83), [roof, mouth])
            scene.spot(name, name, (0, 0, 0), ("book",), radius=0.30)
        cover = (0.75, 0.15, 0.15, 1)
        scene.prop("book", [box((0.07, 0.022, 0.09), cover, (0.03, 0, 0))], forward=True)
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """The book on its shelf, everything else the same for all cues."""
        margins: tuple[Point, ...] = tuple((x, y, 0.0) for x in (-1.3, -2.4) for y in (-1.0, 1.0))
        dress(world, episode, ("rack foot", "desk"), (*margins, (0.72, 0.62, 0.0), (0.72, -0.62, 0.0)))
        for fixture in SHELVES:
            shift(world, episode, fixture, 0.01)
        recolour(world, "book", *episode.instance("book"))
        world.place({"book": SHELVES[episode.cue]})

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """Fetch, return, come back."""
        return (
            Subtask(
                "fetch",
                (
                    Stage("book taken", lambda w: w.held["right"] == "book" and w.base[0] < -0.15),
                    Stage("at the hub", lambda w: self._near(w, HUB) and w.held["right"] == "book"),
                    Stage("right lane entered", choice=lambda w: self._lane(w, EXIT, GATE - 0.15)),
                    Stage("lane passed", lambda w: bool(w.base[0] < EXIT)),
                ),
            ),
            Subtask(
                "return",
                (
                    Stage("at the desk", lambda w: self._near(w, DESK)),
                    Stage("right chute reached", choice=self._chute),
                    Stage("book in it", lambda w: w.resting["book"] in CHUTES),
                    Stage("arm withdrawn", lambda w: w.ready("right")),
                ),
            ),
            Subtask(
                "come back",
                (
                    Stage("back at the middle", lambda w: self._near(w, DESK)),
                    Stage("right lane back entered", choice=lambda w: self._lane(w, EXIT + 0.15, GATE)),
                    Stage("lane passed again", lambda w: bool(w.base[0] > GATE)),
                    Stage("at the hub again", lambda w: self._near(w, HUB)),
                ),
            ),
        )

    @staticmethod
    def _near(world: World, place: tuple[float, float]) -> bool:
        return bool(np.hypot(*(world.base[:2] - place)) < NEAR)

    @staticmethod
    def _lane(world: World, low: float, high: float) -> int | None:
        """The lane the robot is in, between these."""
        inside = low < world.base[0] < high
        return int(np.argmin(np.abs(-world.base[1] - np.array(LANES)))) if inside else None

    @staticmethod
    def _chute(world: World) -> int | None:
        """The chute in front of which a book is held close."""
        ahead = world.position("book")
        if ahead[0] > DESK[0] - 0.54:
            return None
        return int(np.argmin([abs(ahead[1] - world.spot(chute)[1]) for chute in CHUTES]))

    def answers(self, cue: int) -> tuple[int, ...]:
        """Lane, chute and lane of the shelf."""
        return (cue, cue, cue)

    def ready(self, world: World, phase: int) -> bool:
        """At the hub with the book, at the desk with it, at the desk without; looking at the lanes' far end."""
        turned = abs(np.sin((world.base[2] - TURNED) / 2)) < ASKEW
        laden = world.held["right"] == "book" if phase < 2 else world.ready("right")
        return bool(turned and laden and self._near(world, DESK if phase else HUB)) and world.ready("left")

    def hidden(self, world: World) -> bool:
        """Back on the middle line with the book, the rack out of sight."""
        return world.held["right"] == "book" and self._near(world, HUB) and np.cos(world.base[2]) < 0

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Fetch, carry to the hub and turn (the same for all), lane, chute, lane."""
        yield from expert.drive(0.0, BAYS[cue] + REACH, 0.0)
        yield from expert.move({"right": CARRY})
        yield from expert.pick("right", "book", forward=True, back=0.20)
        yield from expert.move({"right": CARRY})
        yield from expert.drive(-0.35, BAYS[cue] + REACH, 0.0, tolerance=0.06)
        yield from expert.drive(*HUB, 0.0, tolerance=0.005)
        expert.section("shared")
        yield from expert.drive(*expert.near(*HUB, TURNED), tolerance=0.003)
        yield from expert.wait_for_lamp(1)
        expert.section("lane")
        yield from expert.drive(GATE + 0.1, -LANES[cue], TURNED, tolerance=0.06)
        yield from expert.drive(EXIT - 0.1, -LANES[cue], TURNED, tolerance=0.08)
        yield from expert.drive(*expert.near(*DESK, TURNED), tolerance=0.003)
        yield from expert.wait_for_lamp(2)
        expert.section("chute")
        yield from expert.drive(DESK[0], -BAYS[cue] - REACH, TURNED)
        spot = expert.world.spot(CHUTES[cue])
        yield from expert.reach("right", np.array([DESK[0] - 0.60, spot[1], GRIP]), forward=True)
        yield from expert.hold(0.3)
        yield from expert.grip("right", 1.0)
        yield from expert.move({"right": CARRY})
        yield from expert.move({"right": pose(READY["right"])})
        yield from expert.drive(*expert.near(*DESK, TURNED), tolerance=0.003)
        yield from expert.wait_for_lamp(3)
        expert.section("lane back")
        yield from expert.drive(EXIT - 0.1, -LANES[cue], TURNED, tolerance=0.06)
        yield from expert.drive(GATE + 0.1, -LANES[cue], TURNED, tolerance=0.08)
        yield from expert.drive(*HUB, TURNED)
