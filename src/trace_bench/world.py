"""A compiled scene in motion: physics, the helped grasp, resting spots, the lamp, cameras. Holds the simulation state and
answers questions about it; what the answers mean is a task's business.
"""

import atexit
import os
import weakref

import mujoco
import numpy as np
from numpy.typing import NDArray

from trace_bench.robot import (
    ARM,
    BASE,
    BASE_LIMIT,
    CHANNELS,
    FINGER,
    GRIPPER,
    HANDS,
    HIGH,
    JOINTS,
    LOW,
    READY,
    Hand,
    Vector,
    ready_posture,
)
from trace_bench.scene import Scene
from trace_errors import SimulationError

GRASP_RADIUS = 0.06  # an object is held once a gripper closes this near to it, metres
CLOSED, OPEN = 0.45, 0.55  # gripper opening below / above which it counts as closed / open
STEP = 0.005  # longest physics step, seconds
SENSOR = np.array([*3 * [1e-3], *2 * [*6 * [1e-4], 1e-3]])  # resolution of each channel: m/s, rad/s, rad, opening
DONE = (0.20, 0.90, 0.25, 1.0)  # the colour of what has been done
LAMPS = ((0.75, 0.10, 0.08, 1.0), (0.10, 0.85, 0.20, 1.0), (0.15, 0.35, 1.0, 1.0), (0.95, 0.95, 0.95, 1.0))


_drawing_process: int | None = None  # a child forked from a process that has drawn would hang


class World:
    """One robot and its surroundings. Every quantity is read from or written to MuJoCo's own state."""

    def __init__(self, scene: Scene, rate: float):
        self.model: mujoco.MjModel = scene.spec.compile()
        self.data = mujoco.MjData(self.model)
        self.moving, self.props, self.spots = scene.moving, tuple(scene.props), scene.spots
        self.substeps = int(np.ceil(1.0 / (rate * STEP) - 1e-9))
        self.model.opt.timestep = 1.0 / (rate * self.substeps)
        self.held: dict[Hand, str | None] = dict.fromkeys(HANDS)
        self.resting: dict[str, str | None] = dict.fromkeys(self.props)
        self.drops = 0  # times a prop was let go where nothing holds it
        self.lamp = 0
        self.done: dict[
            str, NDArray[np.float32]
        ] = {}  # bodies that show that something was done, and their own colours
        self.marks: dict[str, int] = {}  # what a task wants remembered until the next reset
        self._closed = dict.fromkeys(HANDS, False)
        model = self.model
        self._joints = {hand: np.array([model.joint(f"{hand}_{j}").qposadr[0] for j in JOINTS]) for hand in HANDS}
        self._fingers = {
            hand: np.array([model.joint(f"{hand}_finger_{f}").qposadr[0] for f in ("near", "far")]) for hand in HANDS
        }
        self._arm_ctrl = {hand: np.array([model.actuator(f"{hand}_{j}").id for j in JOINTS]) for hand in HANDS}
        self._finger_ctrl = {
            hand: np.array([model.actuator(f"{hand}_finger_{f}").id for f in ("near", "far")]) for hand in HANDS
        }
        self._pinch = {hand: model.site(f"{hand}_pinch").id for hand in HANDS}
        self._lamp = model.geom("lamp").id
        self._nominal = {
            name: getattr(model, name).copy()
            for name in ("body_pos", "body_quat", "geom_rgba", "geom_size", "geom_type", "light_dir", "light_diffuse")
        }
        self._headlight = {name: getattr(model.vis.headlight, name).copy() for name in ("ambient", "diffuse")}
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}

    # -- life -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Everything as built, the robot ready. Props lie nowhere until `place` puts them somewhere."""
        for name, value in self._nominal.items():
            getattr(self.model, name)[:] = value
        for name, value in self._headlight.items():
            getattr(self.model.vis.headlight, name)[:] = value
        mujoco.mj_resetData(self.model, self.data)
        self.data.eq_active[:] = 0
        self.held, self.resting = dict.fromkeys(HANDS), dict.fromkeys(self.props)
        self._closed, self.drops, self.marks = dict.fromkeys(HANDS, False), 0, {}
        self.done = {}
        self.set_lamp(0)
        ready = ready_posture()
        for hand in HANDS:
            self.data.qpos[self._joints[hand]] = self.data.ctrl[self._arm_ctrl[hand]] = ready[ARM[hand]]
            self.data.qpos[self._fingers[hand]] = self.data.ctrl[self._finger_ctrl[hand]] = FINGER
        mujoco.mj_forward(self.model, self.data)

    def step(self, action: Vector) -> None:
        """Applies one 17-D action for one control period. The commands move linearly to the new ones."""
        action = np.clip(action, LOW, HIGH)
        before, after = self.data.ctrl.copy(), self._controls(action)
        for k in range(1, self.substeps + 1):
            self.data.ctrl[:] = before + (after - before) * (k / self.substeps)
            mujoco.mj_step(self.model, self.data)
        for hand in HANDS:
            self._grip(hand)
        mujoco.mj_forward(self.model, self.data)

    def _controls(self, action: Vector) -> Vector:
        controls = np.empty(self.model.nu)
        if self.moving:  # the base is steered in its own frame, its joints live in the world's
            period = self.substeps * self.model.opt.timestep
            yaw = self.base[2] + action[2] * period / 2
            cos, sin = np.cos(yaw), np.sin(yaw)
            controls[:3] = cos * action[0] - sin * action[1], sin * action[0] + cos * action[1], action[2]
        for hand in HANDS:
            controls[self._arm_ctrl[hand]] = action[ARM[hand]]
            controls[self._finger_ctrl[hand]] = action[GRIPPER[hand]] * FINGER
        return controls

    # -- the helped grasp -------------------------------------------------------------------------------------------

    def _grip(self, hand: Hand) -> None:
        opening = self.data.qpos[self._fingers[hand]].mean() / FINGER
        held = self.held[hand]
        if not self._closed[hand] and opening < CLOSED:
            self._closed[hand] = True
            near = [(float(np.linalg.norm(self.position(p) - self.pinch(hand))), p) for p in self._graspable()]
            distance, prop = min(near, default=(np.inf, ""))
            if distance < GRASP_RADIUS:
                self._weld(prop, f"{hand}_palm")
                self.held[hand], self.resting[prop] = prop, None
        elif self._closed[hand] and opening > OPEN:
            self._closed[hand] = False
            if held is not None:
                self.held[hand] = None
                self._let_go(held)

    def _graspable(self) -> list[str]:
        sealed = {prop for prop, spot in self.resting.items() if spot is not None and spot.startswith("inside ")}
        return [prop for prop in self.props if prop not in self.held.values() and prop not in sealed]

    def _let_go(self, prop: str) -> None:
        near = [
            (float(np.linalg.norm(self.position(prop) - self.spot(name))), name)
            for name, spot in self.spots.items()
            if prop in spot.accepts and name not in self.resting.values()
        ]
        distance, name = min(near, default=(np.inf, ""))
        if name and distance < self.spots[name].radius:
            self._fix(prop, name)
        else:
            self._weld(prop, None)
            self.drops += 1

    def place(self, spots: dict[str, str]) -> None:
        """Puts props on spots, exactly, at the beginning of an episode."""
        mujoco.mj_forward(self.model, self.data)  # fixtures may have been shifted
        for prop, spot in spots.items():
            self._fix(prop, spot)
            address, weld = self.model.joint(prop).qposadr[0], self.model.equality(f"{prop}@world").id
            self.data.qpos[address : address + 7] = self.model.eq_data[weld, 3:10]
        mujoco.mj_forward(self.model, self.data)

    def _fix(self, prop: str, spot: str) -> None:
        weld = self.model.equality(f"{prop}@world").id
        quaternion = np.empty(4)
        mujoco.mju_mat2Quat(quaternion, self.data.site(spot).xmat)
        self.model.eq_data[weld, 3:6] = self.data.site(spot).xpos
        self.model.eq_data[weld, 6:10] = quaternion
        self._weld(prop, "world")
        self.resting[prop] = spot

    def _weld(self, prop: str, owner: str | None) -> None:
        for candidate in (*(f"{hand}_palm" for hand in HANDS), "world"):
            self.data.eq_active[self.model.equality(f"{prop}@{candidate}").id] = candidate == owner

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def base(self) -> Vector:
        """x, y, yaw of the base."""
        return self.data.qpos[:3].copy() if self.moving else np.zeros(3)

    def pinch(self, hand: Hand) -> Vector:
        """The point between the fingertips, in the world."""
        return self.data.site_xpos[self._pinch[hand]].copy()

    def position(self, body: str) -> Vector:
        """Where a prop or a fixture is, in the world."""
        return self.data.body(body).xpos.copy()

    def spot(self, name: str) -> Vector:
        """Where a spot is, in the world."""
        return self.data.site(name).xpos.copy()

    def in_base(self, point: Vector) -> Vector:
        """A world point in the robot's frame."""
        x, y, yaw = self.base
        cos, sin = np.cos(yaw), np.sin(yaw)
        dx, dy = point[0] - x, point[1] - y
        return np.array([cos * dx + sin * dy, -sin * dx + cos * dy, point[2]])

    def first_held(self, props: tuple[str, ...]) -> int | None:
        """Index of the first of these props that a hand holds."""
        return next((index for index, prop in enumerate(props) if prop in self.held.values()), None)

    def first_near(self, prop: str, spots: tuple[str, ...], radius: float = 0.07) -> int | None:
        """Index of the spot that a prop has come to; passing high above it does not count."""
        gaps = [float(np.linalg.norm(self.position(prop) - self.spot(spot))) for spot in spots]
        return int(np.argmin(gaps)) if min(gaps) < radius else None

    def hands_back(self) -> bool:
        """Both hands at their ready points, open and empty."""
        return all(self.ready(hand) and self.held[hand] is None for hand in HANDS)

    def ready(self, hand: Hand, tolerance: float = 0.06) -> bool:
        """Whether a hand is back at its ready point, open."""
        near = np.linalg.norm(self.in_base(self.pinch(hand)) - READY[hand]) < tolerance
        return bool(near and self.data.qpos[self._fingers[hand]].mean() > 0.8 * FINGER)

    def state(self) -> NDArray[np.float32]:
        """The 17 channels as the robot measures them, in steps of its sensors."""
        state = np.zeros(len(CHANNELS))
        if self.moving:
            yaw, (vx, vy, rate) = self.data.qpos[2], self.data.qvel[:3]
            cos, sin = np.cos(yaw), np.sin(yaw)
            state[BASE] = np.clip([cos * vx + sin * vy, -sin * vx + cos * vy, rate], -2 * BASE_LIMIT, 2 * BASE_LIMIT)
        for hand in HANDS:
            state[ARM[hand]] = self.data.qpos[self._joints[hand]]
            state[GRIPPER[hand]] = self.data.qpos[self._fingers[hand]].mean() / FINGER
        return (np.round(state / SENSOR) * SENSOR + 0.0).astype(np.float32)  # + 0.0: no negative zeros

    def set_lamp(self, phase: int) -> None:
        """The status light: red means wait, then one colour for each go."""
        self.lamp = phase
        self.model.geom_rgba[self._lamp] = LAMPS[phase]

    def dim_lamp(self) -> None:
        """Red again: what the lamp asked for has been begun."""
        self.model.geom_rgba[self._lamp] = LAMPS[0]

    def show_done(self, body: str, *, done: bool = True) -> None:
        """A body turns green, or what it was before: what has been done can be seen, and need not be remembered."""
        start, count = self.model.body(body).geomadr[0], self.model.body(body).geomnum[0]
        colours = self.model.geom_rgba[start : start + count]
        if done and body not in self.done:
            self.done[body] = colours.copy()
            colours[:] = DONE
        elif not done and body in self.done:
            colours[:] = self.done.pop(body)

    # -- cameras ----------------------------------------------------------------------------------------------------

    def render(self, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """One picture (height, width, 3)."""
        global _drawing_process
        if _drawing_process not in {None, os.getpid()}:
            raise SimulationError(
                "this process was forked from one that had already drawn, and GL does not survive that: "
                "start workers with context='forkserver' or 'spawn'"
            )
        if (height, width) not in self._renderers:
            if "glfw" in mujoco.GLContext.__module__ and not (os.getenv("DISPLAY") or os.getenv("WAYLAND_DISPLAY")):
                raise SimulationError(
                    "mujoco was imported before trace_bench and chose to draw on a screen, but there is none: "
                    "set MUJOCO_GL=egl, or import trace_bench first"
                )
            try:
                self._renderers[height, width] = mujoco.Renderer(self.model, height, width)
                _drawing_process = os.getpid()
                atexit.register(_close, weakref.ref(self))  # before EGL itself is shut down
            except Exception as error:
                raise SimulationError(
                    f"no picture could be drawn ({type(error).__name__}: {error}). Software GL is installed by: "
                    "apt-get install -y libegl1 libgl1 libgl1-mesa-dri libosmesa6   (then MUJOCO_GL=egl or osmesa)"
                ) from error
        renderer = self._renderers[height, width]
        renderer.update_scene(self.data, camera)
        return renderer.render()

    def close(self) -> None:
        """Frees the drawing contexts."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def _close(world: "weakref.ref[World]") -> None:
    alive = world()
    if alive is not None:
        alive.close()
