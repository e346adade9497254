"""What a task is built from: floor, light, the robot, furniture, props that can be carried, spots they can rest on.
A Scene is the plan; `trace_bench.world` compiles it and makes it move.
"""

from dataclasses import dataclass, field
from typing import Any

import mujoco

from trace_bench.robot import HANDS, PINCH, Box, add_robot

Colour = tuple[float, float, float, float]
Point = tuple[float, float, float]

TABLE = 0.55  # height of every table top, metres
DISTRACTORS = 3
FURNITURE: dict[str, Any] = {"contype": 2, "conaffinity": 1}
PROP: dict[str, Any] = {"contype": 1, "conaffinity": 2}
GHOST: dict[str, Any] = {"contype": 0, "conaffinity": 0}  # seen, never touched
DOWN, FORWARD = (0.5**0.5, 0.0, -(0.5**0.5), 0.0), (1.0, 0.0, 0.0, 0.0)  # a prop upright in a hand pointing that way


@dataclass(frozen=True)
class Spot:
    """A place where certain props rest: a prop let go within `radius` of it settles there."""

    site: str
    accepts: tuple[str, ...]
    radius: float


@dataclass
class Scene:
    """The plan of a task's world, under construction."""

    moving: bool
    spec: mujoco.MjSpec = field(default_factory=mujoco.MjSpec)
    props: list[str] = field(default_factory=list)
    spots: dict[str, Spot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        spec.option.iterations, spec.option.ls_iterations = 20, 10
        spec.visual.quality.shadowsize = 0
        spec.visual.quality.offsamples = 0
        spec.visual.map.znear, spec.visual.map.zfar = 0.01, 30.0
        spec.visual.global_.offwidth, spec.visual.global_.offheight = 1280, 960
        spec.visual.headlight.ambient, spec.visual.headlight.diffuse = [0.35] * 3, [0.35] * 3
        spec.visual.headlight.specular = [0.0] * 3
        spec.worldbody.add_light(
            name="sun", type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, dir=[0.2, 0.3, -1.0], pos=[0, 0, 4],
            diffuse=[0.5] * 3, specular=[0.0] * 3, castshadow=False,
        )  # fmt: skip
        spec.worldbody.add_geom(
            name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[8, 8, 0.1], rgba=[0.46, 0.47, 0.50, 1], **FURNITURE
        )
        add_robot(spec, moving=self.moving)
        for index in range(DISTRACTORS):  # hidden until an episode dresses them
            body = spec.worldbody.add_body(name=f"distractor_{index}", pos=[0, 0, -2])
            body.add_geom(name=f"distractor_{index}", type=Box, size=[0.03, 0.03, 0.03], **GHOST)

    def table(self, name: str, centre: Point, half: tuple[float, float], colour: Colour) -> None:
        """A slab whose top is at centre[2]."""
        body = self.spec.worldbody.add_body(name=name, pos=[centre[0], centre[1], centre[2] - 0.02])
        body.add_geom(name=name, type=Box, size=[*half, 0.02], rgba=colour, **FURNITURE)
        body.add_geom(type=Box, size=[half[0] * 0.8, half[1] * 0.8, 0.02], pos=[0, 0, -0.04], rgba=colour, **GHOST)

    def fixture(self, name: str, position: Point, parts: list[dict[str, Any]]) -> None:
        """Something fixed that a prop can touch, made of geoms; an episode may shift it as a whole."""
        body = self.spec.worldbody.add_body(name=name, pos=position)
        for part in parts:
            body.add_geom(**FURNITURE | part)

    def spot(self, name: str, fixture: str, offset: Point, accepts: tuple[str, ...], radius: float = 0.08) -> None:
        """A spot on a fixture."""
        self.spec.body(fixture).add_site(name=name, pos=offset, size=[0.004, 0, 0], rgba=[0, 0, 0, 0])
        self.spots[name] = Spot(name, accepts, radius)

    def prop(self, name: str, parts: list[dict[str, Any]], grip: Point = (0, 0, 0), *, forward: bool = False) -> None:
        """Something to carry. Its origin is what the fingers close on; `grip` shifts it along the fingers."""
        body = self.spec.worldbody.add_body(name=name)
        body.add_freejoint(name=name)
        for part in parts:
            body.add_geom(**PROP | {"mass": 0.02} | part)
        self.props.append(name)
        for owner in (*(f"{hand}_palm" for hand in HANDS), "world"):
            weld = self.spec.add_equality(name=f"{name}@{owner}", type=mujoco.mjtEq.mjEQ_WELD, active=False)
            weld.objtype = mujoco.mjtObj.mjOBJ_BODY
            weld.name1, weld.name2 = owner, name
            at = (0, 0, 0) if owner == "world" else (PINCH - 0.08 + grip[0], grip[1], grip[2])
            weld.data = [0, 0, 0, *at, *(FORWARD if forward or owner == "world" else DOWN), 1.0]
            weld.solref = [0.02, 1.0]


def box(half: Point, colour: Colour, at: Point = (0, 0, 0), **more: Any) -> dict[str, Any]:
    """A box for a fixture or a prop."""
    return {"type": Box, "size": list(half), "pos": list(at), "rgba": colour, **more}


def cylinder(radius: float, half: float, colour: Colour, at: Point = (0, 0, 0), **more: Any) -> dict[str, Any]:
    """An upright cylinder for a fixture or a prop."""
    kind = mujoco.mjtGeom.mjGEOM_CYLINDER
    return {"type": kind, "size": [radius, half, 0], "pos": list(at), "rgba": colour, **more}


def ball(radius: float, colour: Colour, at: Point = (0, 0, 0), **more: Any) -> dict[str, Any]:
    """A ball for a fixture or a prop."""
    return {"type": mujoco.mjtGeom.mjGEOM_SPHERE, "size": [radius, 0, 0], "pos": list(at), "rgba": colour, **more}


def pan(half: Point, colour: Colour, rim: float = 0.012) -> list[dict[str, Any]]:
    """An open box (tray, drawer, basket): a floor and four low walls."""
    x, y, z = half
    return [
        box((x, y, 0.006), colour),
        *(box((rim / 2, y, z), colour, (sign * x, 0, z)) for sign in (1, -1)),
        *(box((x, rim / 2, z), colour, (0, sign * y, z)) for sign in (1, -1)),
    ]
