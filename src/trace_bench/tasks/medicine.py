"""Medicine: a dish with a pill comes from one of three trays. After a shared carry to the bedside the pill goes into the box
of that tray, and, after another pause, the empty dish goes back to the tray it came from.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import Episode, dress, recolour, shift
from trace_bench.expert import CLEARANCE, Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import Vector
from trace_bench.scene import GHOST, TABLE, Scene, ball, box, cylinder, pan
from trace_bench.task import MARGINS, Profile, Task
from trace_bench.world import World

TRAYS = ("tray 1", "tray 2", "tray 3")
BOXES = ("box 1", "box 2", "box 3")


class Medicine(Task):
    """Three cues, two reads: which box, which tray."""

    name = "Medicine"
    instruction = "Bring the pill to the bedside, put it into its box and return the dish to its tray."
    cues = ("outer tray", "middle tray", "inner tray")
    seconds = 31.0
    paper = Profile(30, 337, 1.5)
    lamps = (1, 4)
    clock = (9.8, 14.8)

    def scene(self) -> Scene:
        """Trays left, boxes right, the intake near the robot, the bedside in the middle."""
        scene = Scene(moving=False)
        scene.table("table", (0.52, 0, TABLE), (0.28, 0.62), (0.7, 0.6, 0.5, 1))
        for tray, y in zip(TRAYS, (0.50, 0.32, 0.14), strict=True):
            scene.fixture(tray, (0.58, y, TABLE), pan((0.07, 0.07, 0.012), (0.75, 0.78, 0.82, 1)))
            scene.spot(tray, tray, (0, 0, 0.04), ("dish",))
        for name, y in zip(BOXES, (-0.14, -0.32, -0.50), strict=True):
            slot = box((0.025, 0.025, 0.002), (0.1, 0.1, 0.1, 1), (0, 0, 0.041), **GHOST)
            scene.fixture(name, (0.58, y, TABLE), [box((0.05, 0.05, 0.02), (0.25, 0.55, 0.45, 1), (0, 0, 0.02)), slot])
            scene.spot(name, name, (0, 0, 0.09), ())
        for pad, x, y, colour in (
            ("intake", 0.36, 0.26, (0.85, 0.85, 0.80, 1)),
            ("bedside", 0.45, 0, (0.95, 0.9, 0.55, 1)),
        ):
            scene.fixture(pad, (x, y, TABLE), [box((0.065, 0.065, 0.003), colour)])
            scene.spot(pad, pad, (0, 0, 0.04), ("dish",))
        china = (0.95, 0.95, 0.98, 1)
        rim = [cylinder(0.045, 0.006, china, (0, 0, -0.028)), box((0.008, 0.045, 0.012), china, (0, 0, -0.012))]
        pill = ball(0.017, (0.90, 0.15, 0.15, 1), (0.022, 0, -0.012), name="pill")
        scene.prop("dish", [*rim, pill])
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """The dish on its tray, everything else the same for all cues."""
        dress(world, episode, ("table",), MARGINS)
        for fixture in (*TRAYS, *BOXES, "intake", "bedside"):
            shift(world, episode, fixture)
        for name in BOXES:
            recolour(world, name, 1.0, episode.instance("box")[1])
        world.place({"dish": TRAYS[episode.cue]})

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """Dispense, then return."""
        return (
            Subtask(
                "dispense",
                (
                    Stage("dish at the bedside", lambda w: w.resting["dish"] == "bedside"),
                    Stage("right box reached", choice=lambda w: w.marks.get("pill", w.first_near("dish", BOXES))),
                    Stage("pill in it", lambda w: "pill" in w.marks),
                    Stage("dish back at the bedside", lambda w: w.resting["dish"] == "bedside"),
                ),
            ),
            Subtask(
                "return",
                (
                    Stage("dish taken", lambda w: "dish" in w.held.values()),
                    Stage("right tray reached", choice=lambda w: w.first_near("dish", TRAYS)),
                    Stage("dish on it", lambda w: w.resting["dish"] in TRAYS),
                    Stage("hands back", lambda w: w.hands_back()),
                ),
            ),
        )

    def tick(self, world: World) -> None:
        """The intake shows that it has the dish. A dish held low over a box, once the lamp allows it, loses its pill into
        it.
        """
        self.tick_intake(world)
        below = world.first_near("dish", BOXES, 0.05)
        if below is not None and world.lamp and "pill" not in world.marks and "dish" in world.held.values():
            world.marks["pill"] = below
            world.model.geom("pill").rgba[3] = 0.0

    def answers(self, cue: int) -> tuple[int, ...]:
        """The box of the tray, and the tray."""
        return (cue, cue)

    def ready(self, world: World, phase: int) -> bool:
        """Hands back, the dish at the bedside, the pill still in it the first time."""
        return world.hands_back() and world.resting["dish"] == "bedside" and ("pill" in world.marks) == (phase > 0)

    def hidden(self, world: World) -> bool:
        """The dish has left its tray and stands where every dish does."""
        return world.resting["dish"] in {"intake", "bedside"} and world.hands_back()

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Fetch, carry (the same for all), dispense, return."""
        yield from self.bring(expert, "left", "dish", "bedside")
        expert.section("dispense")
        yield from expert.pick("right", "dish")
        over = expert.world.spot(BOXES[cue])
        yield from expert.reach("right", over, CLEARANCE)
        yield from expert.reach("right", over + np.array([0, 0, 0.01]))
        yield from expert.hold(0.4)
        yield from expert.reach("right", over, CLEARANCE)
        yield from expert.place("right", "bedside")
        yield from expert.home("right")
        yield from expert.wait_for_lamp(2)
        expert.section("return")
        yield from expert.pick("left", "dish")
        yield from expert.place("left", TRAYS[cue])
        yield from expert.home("left")
