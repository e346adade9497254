"""What makes one episode differ from another. Every factor is drawn from its own named stream of the seed, so that changing
the cue, or adding a factor, leaves all others as they were. Training and held-out episodes draw from disjoint sets.
"""

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import mujoco
import numpy as np

from trace_bench.scene import DISTRACTORS, Colour, Point
from trace_bench.world import World

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

LIGHT = {"train": (0.80, 1.05), "heldout": (0.62, 0.78)}  # brightness
SUN = {"train": (-0.5, 0.5), "heldout": (0.6, 0.9)}  # slant of the light
TINT = {"train": (0.96, 1.04), "heldout": (0.90, 0.95)}  # red against blue
WOOD: dict[Split, tuple[Colour, ...]] = {
    "train": ((0.72, 0.60, 0.46, 1), (0.66, 0.66, 0.66, 1), (0.60, 0.52, 0.44, 1), (0.78, 0.72, 0.62, 1)),
    "heldout": ((0.68, 0.63, 0.53, 1), (0.56, 0.58, 0.55, 1)),
}
CLUTTER: dict[Split, tuple[Colour, ...]] = {
    "train": ((0.55, 0.45, 0.55, 1), (0.45, 0.52, 0.58, 1), (0.62, 0.58, 0.50, 1)),
    "heldout": ((0.50, 0.55, 0.45, 1), (0.40, 0.40, 0.46, 1)),
}
SHAPES = {
    "train": (mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_CYLINDER),
    "heldout": (mujoco.mjtGeom.mjGEOM_ELLIPSOID, mujoco.mjtGeom.mjGEOM_CAPSULE),
}
INSTANCES = {"train": tuple(range(6)), "heldout": (6, 7, 8)}
LOOKS = ((0.88, 0.80), (1.08, 1.15))  # least and largest size and shade of an object


@dataclass(frozen=True)
class Episode:
    """A seed, the split it belongs to, the cue, and how long the cue must be remembered (control steps)."""

    seed: int
    split: Split
    cue: int
    delay: int

    def rng(self, what: str) -> np.random.Generator:
        """The stream of one factor. The cue takes no part in it."""
        return np.random.default_rng([self.seed, SPLITS.index(self.split), crc32(what.encode())])

    def shift(self, what: str, reach: float = 0.015) -> Point:
        """How far a fixture stands from its nominal place."""
        x, y = self.rng(f"shift {what}").uniform(-reach, reach, size=2)
        return (float(x), float(y), 0.0)

    def instance(self, what: str) -> tuple[float, float]:
        """Size and shade (factors near 1) of this episode's instance of an object."""
        which = self.rng(f"instance {what}").choice(INSTANCES[self.split])
        size, shade = np.random.default_rng([crc32(what.encode()), int(which)]).uniform(*LOOKS)
        return float(size), float(shade)


def draw_cue(task: str, seed: int, split: Split, options: int) -> int:
    """A cue for a seed: every aligned block of `options` seeds holds each cue once, in a shuffled order."""
    block = np.random.default_rng([seed // options, SPLITS.index(split), crc32(task.encode())])
    return int(block.permutation(options)[seed % options])


def shift(world: World, episode: Episode, fixture: str, reach: float = 0.015) -> None:
    """Moves a fixture, with its spots, from its nominal place."""
    world.model.body(fixture).pos[:] += episode.shift(fixture, reach)


def recolour(world: World, body: str, size: float, shade: float) -> None:
    """Makes a body an instance of its kind: scaled and shaded."""
    model, start = world.model, world.model.body(body).geomadr[0]
    for geom in range(start, start + model.body(body).geomnum[0]):
        model.geom_size[geom] *= size
        model.geom_rgba[geom, :3] = np.clip(model.geom_rgba[geom, :3] * shade, 0, 1)


def dress(world: World, episode: Episode, surfaces: tuple[str, ...], margins: tuple[Point, ...]) -> None:
    """Light, surfaces and distractors of an episode. Distractors stand in the margins, out of everybody's way."""
    model, split = world.model, episode.split
    rng = episode.rng("light")
    level, slant, tint = rng.uniform(*LIGHT[split]), rng.uniform(*SUN[split], size=2), rng.uniform(*TINT[split])
    signs = rng.choice((-1.0, 1.0), size=2)
    model.light_dir[0] = (*(slant * signs), -1.0)
    model.light_diffuse[0] *= level * np.array([tint, 1.0, 2.0 - tint])
    model.vis.headlight.ambient *= level
    model.vis.headlight.diffuse *= level

    rng = episode.rng("surfaces")
    for surface in surfaces:
        model.geom_rgba[model.geom(surface).id] = WOOD[split][rng.integers(len(WOOD[split]))]

    rng = episode.rng("distractors")
    count = int(rng.integers(1, DISTRACTORS + 1))
    places = rng.permutation(len(margins))[:count]
    for index, place in enumerate(places):
        half = rng.uniform(0.022, 0.038, size=3)
        x, y, z = margins[place]
        body, geom = model.body(f"distractor_{index}"), model.geom(f"distractor_{index}").id
        body.pos[:] = (x + rng.uniform(-0.01, 0.01), y + rng.uniform(-0.02, 0.02), z + half[2])
        model.geom_type[geom] = SHAPES[split][rng.integers(len(SHAPES[split]))]
        model.geom_size[geom] = half
        model.geom_rgba[geom] = CLUTTER[split][rng.integers(len(CLUTTER[split]))]
