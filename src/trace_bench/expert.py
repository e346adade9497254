"""The scripted expert: motions a task's script is made of. A motion is a generator that yields one 17-D action for each
control step. Tempo, pauses, detours and fumbled grasps vary from episode to episode, as people's do; each section of a
script draws from its own stream, so that what follows the cue's disappearance does not depend on the cue.
"""

from collections.abc import Callable, Iterator

import mink
import numpy as np

from trace_bench.episode import Episode
from trace_bench.robot import ARM, BASE, GRIPPER, HANDS, READY, Hand, Vector, kinematics, pose, ready_posture
from trace_bench.world import World

HAND_SPEED = 0.42  # metres a second, on average over a motion
DRIVE_SPEED, TURN_SPEED, DRIVE_PUSH = 0.55, 1.0, 1.6  # m/s, rad/s, m/s^2
CLEARANCE = 0.12  # how far above a thing a hand begins and ends, metres
PAUSE, DETOUR, FUMBLE = 0.12, 0.35, 0.06  # how often, for each motion or grasp
REACTION = (0.2, 0.5)  # seconds from a lamp to the first move
ASIDE, BRISK = 0.15, (0.85, 1.2)  # how far beside the straight way one drives, metres; how fast, as a share
NEARBY, ASKANCE = 0.10, 0.15  # how far from a place one stands, in x and in y, metres; turned by, rad


class Expert:
    """Carries out a task's script in a world it may look into. `pace` > 1 makes it slower."""

    def __init__(self, world: World, episode: Episode, rate: float, pace: float = 1.0):
        self.world, self.episode, self.rate = world, episode, rate
        self.tempo = pace * episode.rng("tempo").uniform(0.88, 1.18)
        self.command = ready_posture().copy()
        self.goal, self.brisk = world.base, 1.0  # where the base is wanted: x, y, yaw; and how soon
        self.section("begin")

    def section(self, name: str) -> None:
        """From here on, variation comes from this section's own stream."""
        self.rng = self.episode.rng(f"expert {name}")

    # -- one control step -------------------------------------------------------------------------------------------

    def now(self) -> Vector:
        """The action of this step: the commanded joints, and base velocities that lead to the goal."""
        if self.world.moving:
            x, y, yaw = self.world.base
            dx, dy = self.goal[0] - x, self.goal[1] - y
            turn = self.goal[2] - yaw  # not wrapped: half a turn must not depend on rounding
            cos, sin = np.cos(yaw), np.sin(yaw)
            wanted = 5.0 * np.array([cos * dx + sin * dy, -sin * dx + cos * dy, turn])
            top = np.array([DRIVE_SPEED, DRIVE_SPEED, TURN_SPEED]) * self.brisk / self.tempo
            push = DRIVE_PUSH / self.rate
            wanted *= min(1.0, *(top / np.maximum(np.abs(wanted), 1e-9)))  # slower, in the same direction
            self.command[BASE] += np.clip(wanted - self.command[BASE], -push, push)
        return self.command.copy()

    def steps(self, seconds: float) -> int:
        """Control steps in a time."""
        return max(1, round(seconds * self.rate))

    # -- motions ----------------------------------------------------------------------------------------------------

    def hold(self, seconds: float) -> Iterator[Vector]:
        """Stays."""
        for _ in range(self.steps(seconds)):
            yield self.now()

    def until(self, condition: Callable[[], bool]) -> Iterator[Vector]:
        """Stays until something is so."""
        while not condition():
            yield self.now()

    def wait_for_lamp(self, phase: int) -> Iterator[Vector]:
        """Stays until the lamp shows this phase, and then for as long as one needs to see it."""
        yield from self.until(lambda: self.world.lamp >= phase)
        yield from self.hold(float(self.rng.uniform(*REACTION)))

    def move(self, targets: dict[Hand, mink.SE3]) -> Iterator[Vector]:
        """Brings hands to poses (base frame) along a smooth path, perhaps by a detour."""
        solver, begin = kinematics(), self.command.copy()
        end, bulge = begin.copy(), np.zeros_like(begin)
        solution = solver.solve(targets)
        distance = 0.0
        for hand, joints in solution.items():
            end[ARM[hand]] = joints
            here = self.world.in_base(self.world.pinch(hand))
            distance = max(distance, float(np.linalg.norm(targets[hand].translation() - here)))
        detour = self.rng.random() < DETOUR
        offset = self.rng.uniform(-1, 1, size=3) * (0.03, 0.03, 0.015) + (0, 0, 0.015)
        if detour and distance > 0.15:
            for hand in targets:
                bulge[ARM[hand]] = self._bulge(hand, begin, end, offset)
        span = self.rng.uniform(0.9, 1.12) * self.tempo * max(0.45, distance / HAND_SPEED + 0.25)
        count = self.steps(span)
        for k in range(1, count + 1):
            s = k / count
            smooth = s**3 * (10 - 15 * s + 6 * s * s)  # minimum jerk
            step = begin + smooth * (end - begin) + np.sin(np.pi * smooth) ** 2 * bulge
            for hand in targets:
                self.command[ARM[hand]] = step[ARM[hand]]
            yield self.now()
        if self.rng.random() < PAUSE:
            yield from self.hold(self.rng.uniform(0.2, 0.6))

    def _bulge(self, hand: Hand, begin: Vector, end: Vector, offset: Vector) -> Vector:
        """The joint offset at half way that moves the hand by `offset`, to first order."""
        solver = kinematics()
        configuration = mink.Configuration(solver.model, q=solver.posture.copy())
        configuration.data.qpos[solver.columns[hand]] = (begin[ARM[hand]] + end[ARM[hand]]) / 2
        configuration.update()
        jacobian = configuration.get_frame_jacobian(f"{hand}_pinch", "site")
        columns = [solver.model.joint(f"{hand}_{j}").dofadr[0] for j in ("waist", "shoulder", "elbow")]
        turn = configuration.get_transform_frame_to_world(f"{hand}_pinch", "site").rotation().as_matrix()
        change = np.linalg.lstsq(turn @ jacobian[:3, columns], offset, rcond=0.1)[0]
        return np.array([*np.clip(change, -0.25, 0.25), 0.0, 0.0, 0.0])

    def grip(self, hand: Hand, opening: float) -> Iterator[Vector]:
        """Opens (1) or closes (0) a gripper."""
        begin, count = self.command[GRIPPER[hand]], self.steps(0.3)
        for k in range(1, count + 1):
            self.command[GRIPPER[hand]] = begin + (opening - begin) * k / count
            yield self.now()
        yield from self.hold(0.25)

    def reach(self, hand: Hand, point: Vector, back: float = 0.0, *, forward: bool = False) -> Iterator[Vector]:
        """Brings a hand to a world point, or `back` metres short of it, fingers down or forward."""
        at = self.world.in_base(point) + ((-back, 0, 0) if forward else (0, 0, back))
        yield from self.move({hand: pose(at, forward=forward)})

    def pick(self, hand: Hand, prop: str, *, forward: bool = False, back: float = CLEARANCE) -> Iterator[Vector]:
        """Takes a prop; a grasp that misses is tried again."""
        fumble = self.rng.random() < FUMBLE
        for attempt in range(4):
            point = self.world.position(prop)
            yield from self.reach(hand, point, back, forward=forward)
            yield from self.reach(hand, point, 0.095 if fumble and attempt == 0 else 0.0, forward=forward)
            yield from self.grip(hand, 0.0)
            if self.world.held[hand] == prop:
                break
            yield from self.grip(hand, 1.0)
        yield from self.reach(hand, point, back, forward=forward)

    def place(self, hand: Hand, spot: str, *, forward: bool = False, back: float = CLEARANCE) -> Iterator[Vector]:
        """Puts what a hand holds on a spot."""
        point = self.world.spot(spot)
        yield from self.reach(hand, point, back, forward=forward)
        yield from self.reach(hand, point, forward=forward)
        yield from self.grip(hand, 1.0)
        yield from self.reach(hand, point, back, forward=forward)

    def home(self, *hands: Hand) -> Iterator[Vector]:
        """Brings hands back to their ready points, empty or not."""
        yield from self.move({hand: pose(READY[hand]) for hand in hands or HANDS})

    def near(self, x: float, y: float, yaw: float) -> tuple[float, float, float]:
        """Somewhere near a place, turned a little."""
        right, ahead, turn = self.rng.uniform(-1, 1, size=3)
        return x + NEARBY * right, y + NEARBY * ahead, yaw + ASKANCE * turn

    def drive(self, x: float, y: float, yaw: float, tolerance: float = 0.02) -> Iterator[Vector]:
        """Drives the base to a place and slows down there; it goes on correcting afterwards. Nobody drives straight: one
        comes off to a side, notices half way, and makes up for it; not on a short way, nor where the way is a turn.
        """
        begin, end = self.world.base, np.array([x, y, yaw])
        way, far = end[:2] - begin[:2], float(np.hypot(*(end - begin)[:2]))
        aside, self.brisk = self.rng.uniform(-1, 1) * min(ASIDE, 0.3 * far), self.rng.uniform(*BRISK)
        if far > 0.25 and abs(end[2] - begin[2]) < 1.0:  # metres, rad
            off = aside / far * np.array([-way[1], way[0]])
            self.goal = np.array(
                [*(begin[:2] + 0.8 * way + off), yaw]
            )  # beyond where it is noticed: no slowing down there
            yield from self.until(lambda: float((self.world.base - begin)[:2] @ way) > 0.45 * far**2)
        self.goal = end

        def there() -> bool:
            error = self.goal - self.world.base
            return bool(np.hypot(error[0], error[1]) < tolerance and abs(np.sin(error[2] / 2)) < tolerance)

        yield from self.until(there)
