"""Cable: a plug comes from the left or the right reel and is threaded through a clip. Later it goes into the device of its
side. The clip gives a little under the cable's pull, so that the side remains partly readable, as in the paper.
"""

from collections.abc import Iterator

import numpy as np

from trace_bench.episode import Episode, dress, recolour, shift
from trace_bench.expert import Expert
from trace_bench.referee import Stage, Subtask
from trace_bench.robot import HANDS, Vector
from trace_bench.scene import GHOST, TABLE, Scene, box, cylinder
from trace_bench.task import MARGINS, Profile, Task
from trace_bench.world import World

DEVICES = ("device A", "device B")
PULL, LOOSE = 0.12, 0.20  # radians: how far a cable turns the clip, and how loosely the clip sits


class Cable(Task):
    """Two cues, one read."""

    name = "Cable"
    instruction = "Thread the cable through the clip and plug it into the device of its side."
    cues = ("left reel", "right reel")
    seconds = 17.0
    paper = Profile(30, 787, 2.0)
    lamps = (1,)
    partly_readable = True
    clock = (10.4,)

    def scene(self) -> Scene:
        """Reels at the sides, intake and clip in the middle, devices at the back."""
        scene = Scene(moving=False)
        scene.table("table", (0.52, 0, TABLE), (0.28, 0.62), (0.7, 0.6, 0.5, 1))
        for side, y in (("left", 0.46), ("right", -0.46)):
            drum = [
                cylinder(0.065, 0.012, (0.25, 0.25, 0.28, 1), (0, 0, 0.012)),
                cylinder(0.02, 0.02, (0.6, 0.6, 0.6, 1), (0, 0, 0.02)),
            ]
            scene.fixture(f"{side} reel", (0.40, y, TABLE), drum)
            scene.spot(f"{side} reel", f"{side} reel", (0, 0, 0.075), ("plug",))
        scene.fixture("intake", (0.36, 0, TABLE), [box((0.06, 0.06, 0.003), (0.85, 0.85, 0.80, 1))])
        scene.spot("intake", "intake", (0, 0, 0.045), ("plug",))
        jaws = [box((0.05, 0.008, 0.012), (0.95, 0.9, 0.55, 1), (0, s * 0.03, 0.012)) for s in (1, -1)]
        scene.fixture("clip", (0.48, 0, TABLE), jaws)
        scene.spot("clip", "clip", (0, 0, 0.045), ("plug",))
        for device, y, colour in zip(
            DEVICES, (0.16, -0.16), ((0.20, 0.35, 0.65, 1), (0.55, 0.30, 0.55, 1)), strict=True
        ):
            body = [
                box((0.05, 0.06, 0.025), colour, (0, 0, 0.025)),
                box((0.02, 0.02, 0.002), (0.05, 0.05, 0.05, 1), (0, 0, 0.051), **GHOST),
            ]
            scene.fixture(device, (0.56, y, TABLE), body)
            scene.spot(device, device, (0, 0, 0.085), ("plug",))
        shell = (0.95, 0.75, 0.10, 1)
        scene.prop(
            "plug",
            [
                box((0.035, 0.016, 0.014), shell, (0, 0, -0.02)),
                box((0.055, 0.006, 0.006), (0.1, 0.1, 0.1, 1), (-0.02, 0, -0.025)),
            ],
        )
        return scene

    def arrange(self, world: World, episode: Episode) -> None:
        """The plug on its reel; the clip's looseness, with a pull to the side of the cue."""
        dress(world, episode, ("table",), MARGINS)
        for fixture in ("left reel", "right reel", "intake", "clip", *DEVICES):
            shift(world, episode, fixture)
        recolour(world, "plug", *episode.instance("plug"))
        side = 1.0 - 2.0 * episode.cue
        yaw = episode.rng("clip").normal(0.0, LOOSE) + side * PULL
        world.model.body("clip").quat[:] = (np.cos(yaw / 2), 0, 0, np.sin(yaw / 2))
        world.place({"plug": self.cues[episode.cue]})

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """One subtask."""
        return (
            Subtask(
                "connect",
                (
                    Stage("plug in the clip", lambda w: w.resting["plug"] == "clip"),
                    Stage("right device reached", choice=lambda w: w.first_near("plug", DEVICES)),
                    Stage("plugged in", lambda w: w.resting["plug"] in DEVICES),
                    Stage("hands back", lambda w: w.hands_back()),
                ),
            ),
        )

    def tick(self, world: World) -> None:
        """The intake shows that it has the plug."""
        self.tick_intake(world)

    def answers(self, cue: int) -> tuple[int, ...]:
        """The device of the side."""
        return (cue,)

    def ready(self, world: World, phase: int) -> bool:
        """Hands back, the plug in the clip."""
        return world.hands_back() and world.resting["plug"] == "clip"

    def hidden(self, world: World) -> bool:
        """The plug has left its reel; what the clip's turn tells remains."""
        return world.resting["plug"] in {"intake", "clip"} and world.hands_back()

    def script(self, expert: Expert, cue: int) -> Iterator[Vector]:
        """Fetch, thread (the same for both), connect."""
        yield from self.bring(expert, HANDS[cue], "plug", "clip")
        expert.section("connect")
        yield from expert.pick("right", "plug")
        yield from expert.place("right", DEVICES[cue])
        yield from expert.home("right")
