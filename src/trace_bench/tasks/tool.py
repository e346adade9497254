"""Tool: one of three objects stands on the table and is then covered. Which object it was decides which tool is used on it
first and which second. The robot's own path tells nothing: the arms do the same whatever the object is.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import Episode, dress, recolour, shift
from trace_bench.expert import Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import Vector
from trace_bench.scene import GHOST, TABLE, Scene, ball, box, cylinder
from trace_bench.task import MARGINS, Profile, Task
from trace_bench.world import World

OBJECTS = ("ball", "block", "can")
TOOLS = ("driver", "hammer", "sponge")
HIDDEN = (0.45, 0.0, -1.0)
RING, TOUCH = 0.03, 0.085  # metres: a hand so near rings the bell, a tool so low over the cover has been used


class Tool(Task):
    """Three cues, two reads: the first tool and the second."""

    name = "Tool"
    instruction = "Cover the object, then use the two tools it needs, in order."
    cues = OBJECTS
    seconds = 32.0
    paper = Profile(30, 1045, 2.0)
    lamps = (1, 4)
    clock = (8.0, 16.4)

    def scene(self) -> Scene:
        """The object in the middle, its cover and a bell left, three tools right."""
        scene = Scene(moving=False)
        scene.table("table", (0.52, 0, TABLE), (0.28, 0.62), (0.7, 0.6, 0.5, 1))
        scene.fixture("bench", (0.45, 0, TABLE), [box((0.085, 0.085, 0.003), (0.95, 0.90, 0.55, 1))])
        scene.spot("bench", "bench", (0, 0, 0.13), ("cover",))
        shapes = (
            [ball(0.045, (0.85, 0.15, 0.12, 1), (0, 0, 0.05))],
            [box((0.04, 0.04, 0.04), (0.12, 0.30, 0.85, 1), (0, 0, 0.045))],
            [
                cylinder(0.03, 0.045, (0.10, 0.60, 0.20, 1), (0, 0, 0.05)),
                box((0.012, 0.05, 0.01), (0.1, 0.6, 0.2, 1), (0, 0, 0.05)),
            ],
        )
        for name, parts in zip(OBJECTS, shapes, strict=True):
            scene.fixture(name, HIDDEN, [part | GHOST for part in parts])
        scene.fixture("cover rest", (0.45, 0.36, TABLE), [box((0.085, 0.085, 0.003), (0.6, 0.6, 0.62, 1))])
        scene.spot("cover rest", "cover rest", (0, 0, 0.13), ("cover",))
        shade = (0.82, 0.80, 0.76, 1)
        scene.prop(
            "cover", [box((0.065, 0.065, 0.052), shade, (0, 0, -0.07)), cylinder(0.015, 0.012, shade, (0, 0, -0.008))]
        )
        scene.fixture("bell", (0.62, 0.20, TABLE), [cylinder(0.04, 0.012, (0.85, 0.70, 0.15, 1), (0, 0, 0.012))])
        scene.spot("bell", "bell", (0, 0, 0.05), ())
        colours = ((0.90, 0.55, 0.10, 1), (0.55, 0.20, 0.60, 1), (0.10, 0.65, 0.70, 1))
        heads = (
            cylinder(0.009, 0.035, (0.5, 0.5, 0.5, 1), (0, 0, -0.05)),
            box((0.018, 0.05, 0.018), (0.4, 0.4, 0.4, 1), (0, 0, -0.05)),
            box((0.035, 0.045, 0.02), (0.95, 0.9, 0.4, 1), (0, 0, -0.05)),
        )
        for tool, y, colour, head in zip(TOOLS, (-0.13, -0.31, -0.49), colours, heads, strict=True):
            scene.fixture(f"{tool} rest", (0.58, y, TABLE), [box((0.055, 0.07, 0.004), (0.3, 0.3, 0.33, 1))])
            scene.spot(f"{tool} rest", f"{tool} rest", (0, 0, 0.09), (tool,))
            scene.prop(tool, [cylinder(0.016, 0.03, colour, (0, 0, -0.015)), head])
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """This episode's object on the bench, the others out of the world."""
        dress(world, episode, ("table",), MARGINS)
        for fixture in ("bench", "cover rest", "bell", *(f"{tool} rest" for tool in TOOLS)):
            shift(world, episode, fixture)
        shown = OBJECTS[episode.cue]
        world.model.body(shown).pos[:] = world.model.body("bench").pos
        recolour(world, shown, *episode.instance("object"))
        world.place({"cover": "cover rest", **{tool: f"{tool} rest" for tool in TOOLS}})

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """The first tool, then the second."""
        return (
            Subtask(
                "first tool",
                (
                    Stage("object covered", lambda w: w.resting["cover"] == "bench"),
                    Stage("right first tool taken", choice=lambda w: w.first_held(TOOLS)),
                    Stage("used", self._used),
                    Stage("put back", self._back),
                ),
            ),
            Subtask(
                "second tool",
                (
                    Stage("right second tool taken", choice=lambda w: w.first_held(TOOLS)),
                    Stage("used", self._used),
                    Stage("put back", self._back),
                    Stage("hands back", lambda w: w.hands_back()),
                ),
            ),
        )

    @staticmethod
    def _used(world: World, height: float = 0.12) -> bool:
        tool = world.first_held(TOOLS)
        if tool is None or world.resting["cover"] != "bench":
            return False
        apart = world.position(TOOLS[tool]) - world.spot("bench")
        return bool(np.hypot(apart[0], apart[1]) < 0.06 and apart[2] < height)

    @staticmethod
    def _back(world: World) -> bool:
        return all(world.resting[tool] == f"{tool} rest" for tool in TOOLS)

    def tick(self, world: World) -> None:
        """The bench swallows what is covered on it: lifting the cover again shows nothing. The bell shows that it was rung,
        and the cover, until the tool is back, that it was used.
        """
        if world.resting["cover"] == "bench":
            for name in OBJECTS:
                world.model.body(name).pos[:] = HIDDEN
            if np.linalg.norm(world.pinch("left") - world.spot("bell")) < RING:
                world.show_done("bell")
        if self._used(world, TOUCH):
            world.show_done("cover")
        elif self._back(world):
            world.show_done("cover", done=False)

    def answers(self, cue: int) -> tuple[int, ...]:
        """Tool i, then the next one round."""
        return (cue, (cue + 1) % len(TOOLS))

    def ready(self, world: World, phase: int) -> bool:
        """Hands back, the object covered, all tools at rest."""
        return world.hands_back() and world.resting["cover"] == "bench" and self._back(world)

    def hidden(self, world: World) -> bool:
        """The object is covered."""
        return world.resting["cover"] == "bench"

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Cover, ring (the same for all), then the two tools."""
        yield from expert.pick("left", "cover")
        yield from expert.place("left", "bench")
        yield from expert.home("left")
        expert.section("shared")
        yield from expert.reach("left", expert.world.spot("bell"), 0.08)
        yield from expert.reach("left", expert.world.spot("bell"))
        yield from expert.reach("left", expert.world.spot("bell"), 0.08)
        yield from expert.home("left")
        for phase, tool in enumerate(self.answers(cue), start=1):
            yield from expert.wait_for_lamp(phase)
            expert.section(f"tool {phase}")
            yield from expert.pick("right", TOOLS[tool])
            yield from expert.reach("right", expert.world.spot("bench"), 0.18)
            yield from expert.reach("right", expert.world.spot("bench"), 0.07)
            yield from expert.place("right", f"{TOOLS[tool]} rest")
            if phase == 1:  # home by the same way from all three, since a choice follows
                yield from expert.reach("right", expert.world.spot("bench"), 0.18)
            yield from expert.home("right")
