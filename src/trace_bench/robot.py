"""The bimanual mobile manipulator: its body as an MjSpec, the 17 channels of its state and action, and its inverse
kinematics by mink. Knows nothing of tasks or objects.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import mink
import mujoco
import numpy as np
from numpy.typing import NDArray

from trace_errors import ControlError

Hand = Literal["left", "right"]
Vector = NDArray[np.float64]
HANDS: tuple[Hand, ...] = ("left", "right")
CAMERAS = ("overhead", "left_wrist", "right_wrist")
JOINTS = ("waist", "shoulder", "elbow", "forearm", "wrist", "roll")

# The paper's order: base velocities, left arm and gripper, right arm and gripper.
CHANNELS = (
    *("base_vx", "base_vy", "base_yaw_rate"),
    *(f"{hand}_{joint}" for hand in HANDS for joint in (*JOINTS, "gripper")),
)
BASE = slice(0, 3)
ARM: dict[Hand, slice] = {"left": slice(3, 9), "right": slice(10, 16)}
GRIPPER: dict[Hand, int] = {"left": 9, "right": 16}

SIDE: dict[Hand, float] = {"left": 1.0, "right": -1.0}
UPPER, FORE, PINCH = 0.34, 0.32, 0.15  # metres: shoulder to elbow, elbow to wrist, wrist to between the fingertips
SHOULDER = (0.06, 0.22, 0.88)
FINGER = 0.04  # travel of one finger, metres; a gripper channel is 0 (closed) to 1 (open)
LIMITS = {
    "waist": (-2.2, 2.2),
    "shoulder": (-1.9, 1.4),
    "elbow": (0.05, 2.8),
    "forearm": (-2.2, 2.2),
    "wrist": (-2.4, 2.4),
    "roll": (-3.0, 3.0),
}
BASE_LIMIT = np.array([0.8, 0.8, 1.2])  # m/s, m/s, rad/s
LOW = np.array([*-BASE_LIMIT, *2 * [*(LIMITS[j][0] for j in JOINTS), 0.0]])
HIGH = np.array([*BASE_LIMIT, *2 * [*(LIMITS[j][1] for j in JOINTS), 1.0]])

READY = {"left": np.array([0.42, 0.26, 0.80]), "right": np.array([0.42, -0.26, 0.80])}  # pinch points, base frame

GREY, DARK, STEEL = (0.72, 0.74, 0.78, 1), (0.22, 0.24, 0.28, 1), (0.55, 0.58, 0.62, 1)
Box, Capsule, Cylinder, Sphere = (
    getattr(mujoco.mjtGeom, f"mjGEOM_{kind}") for kind in ("BOX", "CAPSULE", "CYLINDER", "SPHERE")
)


def add_robot(spec: mujoco.MjSpec, *, moving: bool) -> None:
    """Adds the robot at the origin, facing +x. A robot that does not move has no base joints: its base channels are 0."""
    spec.compiler.degree = False
    base = spec.worldbody.add_body(name="base")
    if moving:
        slide, hinge = mujoco.mjtJoint.mjJNT_SLIDE, mujoco.mjtJoint.mjJNT_HINGE
        for name, kind, axis in (("x", slide, (1, 0, 0)), ("y", slide, (0, 1, 0)), ("yaw", hinge, (0, 0, 1))):
            base.add_joint(name=f"base_{name}", type=kind, axis=axis)
            drive = spec.add_actuator(name=f"base_{name}", target=f"base_{name}")
            drive.trntype = mujoco.mjtTrn.mjTRN_JOINT
            drive.set_to_velocity(kv=3000.0)
    link = {"contype": 0, "conaffinity": 0}
    base.add_geom(type=Cylinder, size=[0.22, 0.09, 0], pos=[-0.12, 0, 0.10], rgba=DARK, mass=120.0, **link)
    base.add_geom(type=Box, size=[0.06, 0.10, 0.42], pos=[-0.06, 0, 0.55], rgba=GREY, mass=20.0, **link)
    base.add_geom(type=Box, size=[0.05, 0.24, 0.05], pos=[-0.02, 0, 0.90], rgba=DARK, mass=5.0, **link)
    base.add_geom(name="lamp", type=Box, size=[0.035, 0.05, 0.012], pos=[0.21, 0, 0.70], mass=0.01, **link)
    camera = base.add_camera(name="overhead", pos=[0.22, 0, 1.72], fovy=54)
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [0, -1, 0, 0.975, 0, 0.22]  # looks forward and down, left of the picture is left of the robot
    for hand in HANDS:
        _add_arm(spec, base, hand)


def _add_arm(spec: mujoco.MjSpec, base: mujoco.MjsBody, hand: Hand) -> None:
    parent, offset = base, (SHOULDER[0], SIDE[hand] * SHOULDER[1], SHOULDER[2])
    links = (  # joint, axis, where the next link begins, radius
        ("waist", (0, 0, 1), (0, 0, 0.02), 0.045),
        ("shoulder", (0, 1, 0), (UPPER, 0, 0), 0.036),
        ("elbow", (0, 1, 0), (0.12, 0, 0), 0.032),
        ("forearm", (1, 0, 0), (FORE - 0.12, 0, 0), 0.028),
        ("wrist", (0, 1, 0), (0.05, 0, 0), 0.026),
        ("roll", (1, 0, 0), (0.03, 0, 0), 0.026),
    )
    for joint, axis, end, radius in links:
        name = f"{hand}_{joint}"
        body = parent.add_body(name=name, pos=offset, gravcomp=1.0)
        low, high = LIMITS[joint]
        body.add_joint(name=name, axis=axis, range=[low, high], damping=2.0, armature=0.15)
        colour = STEEL if joint in {"shoulder", "forearm"} else GREY
        body.add_geom(
            type=Capsule, fromto=[0, 0, 0, *end], size=[radius, 0, 0], rgba=colour, mass=0.3, contype=0, conaffinity=0
        )
        servo = spec.add_actuator(name=name, target=name, ctrllimited=True, ctrlrange=[low, high])
        servo.trntype = mujoco.mjtTrn.mjTRN_JOINT
        servo.set_to_position(kp=300.0, kv=26.0)
        parent, offset = body, end
    palm = parent.add_body(name=f"{hand}_palm", pos=offset, gravcomp=1.0)
    free = {"contype": 0, "conaffinity": 0}
    palm.add_geom(type=Box, size=[0.012, 0.052, 0.022], pos=[0.012, 0, 0], rgba=DARK, mass=0.1, **free)
    for sign in (1, -1):
        name = f"{hand}_finger_{'near' if sign > 0 else 'far'}"
        finger = palm.add_body(name=name, pos=[0.05, sign * 0.008, 0], gravcomp=1.0)
        finger.add_joint(
            name=name, type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[0, sign, 0], range=[0, FINGER], damping=5.0, armature=0.1
        )
        finger.add_geom(type=Box, size=[0.03, 0.006, 0.012], rgba=STEEL, mass=0.05, **free)
        servo = spec.add_actuator(name=name, target=name, ctrllimited=True, ctrlrange=[0, FINGER])
        servo.trntype = mujoco.mjtTrn.mjTRN_JOINT
        servo.set_to_position(kp=60.0, kv=6.0)
    palm.add_site(name=f"{hand}_pinch", pos=[PINCH - 0.08, 0, 0], size=[0.005, 0, 0], rgba=[0, 0, 0, 0])
    camera = palm.add_camera(name=f"{hand}_wrist", pos=[-0.06, 0, 0.10], fovy=74)
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = [0, -1, 0, 0.5, 0, 0.86]  # along the fingers, tipped towards them


def pose(position: Vector | tuple[float, ...], *, yaw: float = 0.0, forward: bool = False) -> mink.SE3:
    """A target for a hand in the base frame: fingers pointing down, or forward along `yaw`."""
    turn = mink.SO3.from_z_radians(yaw)
    if not forward:
        turn = turn @ mink.SO3.from_y_radians(np.pi / 2)
    return mink.SE3.from_rotation_and_translation(turn, np.asarray(position, dtype=np.float64))


class Kinematics:
    """From hand poses to joint angles. Every solution starts from the same posture, so equal targets give equal joints."""

    def __init__(self) -> None:
        spec = mujoco.MjSpec()
        add_robot(spec, moving=False)
        self.model = spec.compile()
        self.columns = {hand: np.array([self.model.joint(f"{hand}_{j}").qposadr[0] for j in JOINTS]) for hand in HANDS}
        self.posture = self.model.qpos0.copy()
        for hand in HANDS:
            self.posture[self.columns[hand]] = (0.0, -0.9, 1.7, 0.0, 0.75, 0.0)
        self.limits = [mink.ConfigurationLimit(self.model)]

    def solve(
        self, targets: Mapping[Hand, mink.SE3], *, tolerance: float = 2e-3, rounds: int = 300
    ) -> dict[Hand, Vector]:
        """Six joint angles for each hand that has a target; a target out of reach is a ControlError."""
        tasks: list[mink.FrameTask] = []
        for hand, target in targets.items():
            task = mink.FrameTask(f"{hand}_pinch", "site", position_cost=1.0, orientation_cost=0.3)
            task.set_target(target)
            tasks.append(task)
        posture = mink.PostureTask(self.model, cost=1e-4)
        posture.set_target(self.posture)
        configuration = mink.Configuration(self.model, q=self.posture.copy())
        for _ in range(rounds):
            velocity = mink.solve_ik(configuration, [*tasks, posture], 0.1, "daqp", damping=1e-5, limits=self.limits)
            configuration.integrate_inplace(np.clip(velocity, -4.0, 4.0), 0.1)
            if all(np.linalg.norm(t.compute_error(configuration)[:3]) < tolerance / 4 for t in tasks):
                break
        for hand, task in zip(targets, tasks, strict=True):
            miss = float(np.linalg.norm(task.compute_error(configuration)[:3]))
            if miss > tolerance:
                where = np.round(targets[hand].translation(), 3).tolist()
                raise ControlError(f"the {hand} hand cannot reach {where} (base frame): {1000 * miss:.0f} mm short")
        return {hand: configuration.q[self.columns[hand]].copy() for hand in targets}


@cache
def kinematics() -> Kinematics:
    """The one solver of this process."""
    return Kinematics()


@cache
def ready_posture() -> Vector:
    """Where every episode begins and every subtask ends: both hands up, fingers down, grippers open, base at rest."""
    channels = np.zeros(len(CHANNELS))
    for hand, joints in kinematics().solve({hand: pose(READY[hand]) for hand in HANDS}).items():
        channels[ARM[hand]] = joints
        channels[GRIPPER[hand]] = 1.0
    channels.setflags(write=False)
    return channels
