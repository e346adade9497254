"""Laundry: a garment comes out of the left or the right drawer. Much later the left one is brushed and goes into the basket,
the right one is pressed with the folding board and goes into the store. Cloth is a slab here: memory first.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import Episode, dress, recolour, shift
from trace_bench.expert import Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import HANDS, Vector
from trace_bench.scene import TABLE, Scene, box, cylinder, pan
from trace_bench.task import MARGINS, Profile, Task
from trace_bench.world import World

TOOLS = ("brush", "board")  # for a garment from the left, from the right
PLACES = ("basket", "store")
TOUCH = 0.08  # metres: a tool so low over the garment has been used


class Laundry(Task):
    """Two cues, two reads: which tool, which container."""

    name = "Laundry"
    instruction = "Take the laundry out of the drawer, treat it as its drawer asks and put it away."
    cues = ("left drawer", "right drawer")
    seconds = 31.6
    paper = Profile(30, 573, 1.8)
    lamps = (1, 4)
    clock = (10.6, 15.2)

    def scene(self) -> Scene:
        """Drawers at the sides, an intake and a work pad in the middle, tools right, containers left."""
        scene = Scene(moving=False)
        scene.table("table", (0.52, 0, TABLE), (0.28, 0.62), (0.7, 0.6, 0.5, 1))
        for side, y in (("left", 0.47), ("right", -0.47)):
            scene.fixture(f"{side} drawer", (0.36, y, TABLE), pan((0.085, 0.085, 0.02), (0.42, 0.32, 0.24, 1)))
            scene.spot(f"{side} drawer", f"{side} drawer", (0, 0, 0.035), ("garment",))
        for pad, x, colour in (("intake", 0.36, (0.85, 0.85, 0.80, 1)), ("work", 0.53, (0.95, 0.90, 0.55, 1))):
            scene.fixture(pad, (x, 0, TABLE), [box((0.075, 0.075, 0.003), colour)])
            scene.spot(pad, pad, (0, 0, 0.035), ("garment",))
        for tool, y, colour in (("brush", -0.16, (0.90, 0.55, 0.10, 1)), ("board", -0.36, (0.10, 0.65, 0.70, 1))):
            scene.fixture(f"{tool} rest", (0.62, y, TABLE), [box((0.05, 0.07, 0.004), (0.3, 0.3, 0.33, 1))])
            scene.spot(f"{tool} rest", f"{tool} rest", (0, 0, 0.07), (tool,))
            blade = box((0.035, 0.06, 0.012), colour, (0, 0, -0.05))
            scene.prop(tool, [cylinder(0.014, 0.03, colour, (0, 0, -0.015)), blade])
        for place, y, colour in (("basket", 0.17, (0.80, 0.75, 0.60, 1)), ("store", 0.38, (0.35, 0.45, 0.75, 1))):
            scene.fixture(place, (0.63, y, TABLE), pan((0.08, 0.08, 0.035), colour))
            scene.spot(place, place, (0, 0, 0.05), ("garment",))
        cloth = (0.80, 0.30, 0.45, 1)
        sleeves = [box((0.02, 0.02, 0.010), cloth, (0.02, s * 0.06, -0.015)) for s in (1, -1)]
        scene.prop("garment", [box((0.045, 0.045, 0.014), cloth, (0, 0, -0.015)), *sleeves])
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """The garment in its drawer, everything else the same for both cues."""
        dress(world, episode, ("table",), MARGINS)
        for fixture in ("left drawer", "right drawer", "intake", "work", "brush rest", "board rest", *PLACES):
            shift(world, episode, fixture)
        recolour(world, "garment", *episode.instance("garment"))
        world.place({"garment": self.cues[episode.cue], **{tool: f"{tool} rest" for tool in TOOLS}})

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """Treat, then put away."""
        return (
            Subtask(
                "treat",
                (
                    Stage("garment on the work pad", lambda w: w.resting["garment"] == "work"),
                    Stage("right tool taken", choice=lambda w: w.first_held(TOOLS)),
                    Stage("tool used", self._used),
                    Stage("tool put back", self._back),
                ),
            ),
            Subtask(
                "put away",
                (
                    Stage("garment taken", lambda w: "garment" in w.held.values()),
                    Stage("right container reached", choice=lambda w: w.first_near("garment", PLACES)),
                    Stage("garment in it", lambda w: w.resting["garment"] in PLACES),
                    Stage("hands back", lambda w: w.hands_back()),
                ),
            ),
        )

    @staticmethod
    def _used(world: World, height: float = 0.10) -> bool:
        tool, garment = world.first_held(TOOLS), world.position("garment")
        if tool is None:
            return False
        apart = world.position(TOOLS[tool]) - garment
        return bool(np.hypot(apart[0], apart[1]) < 0.06 and apart[2] < height)

    @staticmethod
    def _back(world: World) -> bool:
        return all(world.resting[tool] == f"{tool} rest" for tool in TOOLS)

    def tick(self, world: World) -> None:
        """The intake shows that it has the garment, and the garment that it was treated."""
        self.tick_intake(world)
        if self._used(world, TOUCH):
            world.show_done("garment")

    def answers(self, cue: int) -> tuple[int, ...]:
        """Left: brush and basket; right: board and store."""
        return (cue, cue)

    def ready(self, world: World, phase: int) -> bool:
        """Hands back, the garment on the work pad, both tools at rest."""
        return world.hands_back() and world.resting["garment"] == "work" and self._back(world)

    def hidden(self, world: World) -> bool:
        """The garment has left its drawer and lies where every garment does."""
        return world.resting["garment"] in {"intake", "work"} and world.hands_back()

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Fetch, carry (the same for all), treat, put away."""
        yield from self.bring(expert, HANDS[cue], "garment", "work")
        expert.section("treat")
        tool = TOOLS[cue]
        yield from expert.pick("right", tool)
        yield from expert.reach("right", expert.world.position("garment"), 0.16)
        for dx in (-0.02, 0.02):
            yield from expert.reach("right", expert.world.position("garment") + np.array([dx, 0, 0]), 0.065)
        yield from expert.place("right", f"{tool} rest")
        yield from expert.reach("right", expert.world.position("garment"), 0.16)  # home by the same way from both
        yield from expert.home("right")
        yield from expert.wait_for_lamp(2)
        expert.section("put away")
        yield from expert.pick("left", "garment")
        yield from expert.place("left", PLACES[cue])
        yield from expert.home("left")
