"""The tasks as Gymnasium environments. An observation holds what a robot would see and measure, and the number of the step;
the cue, the branch frame and the score are in `info["scoring"]`, for evaluation only.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from numpy.typing import NDArray

from trace_bench.episode import SPLITS, Episode, Split, draw_cue
from trace_bench.expert import Expert
from trace_bench.referee import Outcome, Record, classify
from trace_bench.robot import CAMERAS, CHANNELS, HIGH, LOW, Vector
from trace_bench.task import PROFILES, Profile, Task
from trace_bench.tasks import load
from trace_bench.world import World
from trace_errors import ControlError, UsageError

Observation = dict[str, Any]
LARGEST = 960  # pixels along a side; the drawing buffer's
PATIENCE = 1.6  # a rollout may take this much longer than an unhurried expert
# Delays exceed the least by an exponential time, WAIT seconds on average and LONGEST times that at most: who has waited
# for a while knows no better than before how long it will take, so the time does not tell when to go.
WAIT, LONGEST = 2.0, 3


class BenchEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """One robot at one task. The same seed gives the same episode, bit for bit.

    `delay` is the least number of control steps between the cue's disappearance and the first branch, `limit` the number
    after which a rollout is stopped, `size` that of pixels along a side of a picture; None is the profile's or the task's.
    Pictures are rendered at control steps for which `renders` is true, and shown again in between: for policies that do not
    encode those. At the beginning of an episode it must be.
    """

    def __init__(
        self,
        task: Task,
        *,
        split: Split = "heldout",
        profile: str | Profile = "default",
        delay: int | None = None,
        limit: int | None = None,
        size: int = 96,
        cameras: tuple[str, ...] = CAMERAS,
        renders: Callable[[int], bool] | None = None,
        render_mode: str | None = "rgb_array",
    ):
        if split not in SPLITS:
            raise UsageError(f"split: got {split!r}, expected one of {', '.join(SPLITS)}")
        if not isinstance(cameras, tuple | list) or set(cameras) - set(CAMERAS):
            raise UsageError(f"cameras: got {cameras!r}, expected a tuple of some of {', '.join(CAMERAS)}")
        if not isinstance(profile, Profile):
            if profile not in PROFILES:
                raise UsageError(f"profile: got {profile!r}, expected one of {', '.join(PROFILES)}")
            profile = PROFILES[profile] or task.paper
        if render_mode not in {None, "rgb_array"}:
            raise UsageError(f"render_mode: got {render_mode!r}, expected 'rgb_array' or None")
        _integer("size", size, 8, LARGEST, "pixels")
        if renders is not None and not renders(0):
            raise UsageError("renders: got False for step 0, expected True: an episode begins with a picture")
        if delay is not None:
            _integer("delay", delay, 0, None, "control steps")
        if limit is not None:
            _integer("limit", limit, 1, None, "control steps")
        self.bench, self.split, self.profile, self.size, self.cameras = task, split, profile, size, tuple(cameras)
        self.renders = renders
        self.delay = profile.delay if delay is None else delay
        self.task, self.task_description = task.name, task.instruction  # LeRobot asks for these names
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": profile.rate}
        self.world = World(task.scene(), profile.rate)
        self.action_space = gymnasium.spaces.Box(LOW.astype(np.float32), HIGH.astype(np.float32))
        spaces: dict[str, gymnasium.Space[Any]] = {
            "agent_pos": gymnasium.spaces.Box(-4.0, 4.0, (len(CHANNELS),), np.float32),
            "episode_step": gymnasium.spaces.Box(0, np.iinfo(np.int32).max, (1,), np.int32),
        }
        if self.cameras:
            picture = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
            spaces["pixels"] = gymnasium.spaces.Dict(dict.fromkeys(self.cameras, picture))
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.limit = limit or int(PATIENCE * task.seconds * profile.pace * profile.rate + self._longest_delay)
        self._over = True

    @property
    def _max_episode_steps(self) -> int:  # the name under which LeRobot looks for it
        return self.limit

    @property
    def _longest_delay(self) -> int:
        return self.delay + round(LONGEST * WAIT * self.profile.rate)

    @property
    def record(self) -> Record:
        """The score sheet of the current episode."""
        return self.referee.record

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode. `options={"cue": i}` asks for a cue; without it, the seed chooses."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        count, asked = len(self.bench.cues), dict(options or {})
        asked.pop("lerobot_new_rollout", None)  # LeRobot's word for a reset that is meant
        cue = asked.pop("cue", None)
        if asked:
            raise UsageError(f"options: got {', '.join(map(repr, asked))}, expected only 'cue'")
        if cue is None:
            cue = draw_cue(self.bench.name, number, self.split, count)
        _integer("cue", cue, 0, count - 1, f"({', '.join(self.bench.cues)})")
        probe = Episode(number, self.split, int(cue), self.delay)
        extra = probe.rng("delay").exponential(WAIT * self.profile.rate)
        self.episode = Episode(number, self.split, int(cue), min(self.delay + int(extra), self._longest_delay))
        self.world.reset()
        self.bench.arrange(self.world, self.episode)
        self.referee = self.bench.referee(self.episode, self.profile)
        self._over = False
        return self._observation(), self._info()

    def step(self, action: NDArray[Any]) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """One control step. The reward is the share of all stages that succeeded in it."""
        if self._over:
            raise ControlError("the episode is over: call reset() before the next step()")
        action = np.asarray(action)
        if action.shape != (len(CHANNELS),):
            raise ControlError(f"action: got shape {action.shape}, expected ({len(CHANNELS)},)")
        if not np.issubdtype(action.dtype, np.floating) and not np.issubdtype(action.dtype, np.integer):
            raise ControlError(f"action: got dtype {action.dtype}, expected real numbers; the robot was not moved")
        if not (finite := np.isfinite(action)).all():
            bad = [name for name, good in zip(CHANNELS, finite, strict=True) if not good]
            raise ControlError(f"action: not a finite number in {', '.join(bad)}; the robot was not moved")
        self.world.step(action.astype(np.float64))
        self.bench.tick(self.world)
        reward = self.referee.watch(self.world)
        terminated = self.record.complete or self.record.wrong
        truncated = not terminated and self.record.steps >= self.limit
        self._over = terminated or truncated
        if self._over:
            self.record.outcome = classify(self.record, timed_out=truncated)
        return self._observation(), reward, terminated, truncated, self._info()

    def expert(self) -> Iterator[Vector]:
        """The expert's actions from here on; made for the beginning of an episode. Stays put when it has finished."""
        expert = Expert(self.world, self.episode, self.profile.rate, self.profile.pace)
        yield from self.bench.script(expert, self.episode.cue)
        while True:
            yield expert.now()

    def render(self) -> NDArray[np.uint8]:
        """The overhead picture with both wrists beside it, (256, 384, 3)."""
        wrists = [self.world.render(camera, 128, 128) for camera in CAMERAS[1:]]
        return np.concatenate([self.world.render(CAMERAS[0], 256, 256), np.concatenate(wrists)], axis=1)

    def close(self) -> None:
        """Frees the drawing contexts."""
        self.world.close()

    def _observation(self) -> Observation:
        observation: Observation = {
            "agent_pos": self.world.state(),
            "episode_step": np.array([self.record.steps], dtype=np.int32),
        }
        if self.cameras:
            if self.renders is None or self.renders(self.record.steps):
                self._seen = {name: self.world.render(name, self.size, self.size) for name in self.cameras}
            observation["pixels"] = dict(self._seen)
        return observation

    def _info(self) -> dict[str, Any]:
        record = self.record
        frame = record.decisions[0].frame
        scoring = {
            "cue": record.cue,
            "branch_frame": -1 if frame is None else frame,
            "progress": record.progress,
            "outcome": str(record.outcome) if self._over else "",
            "record": json.dumps(record.to_dict()) if self._over else "",
        }
        return {"is_success": record.complete and record.outcome == Outcome.SUCCESS, "scoring": scoring}


def _integer(name: str, value: Any, low: int, high: int | None, unit: str) -> None:
    """A UsageError unless the value is a whole number within bounds."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"{low} to {high}"
        raise UsageError(f"{name}: got {value!r}, expected {span} {unit}")


def make(task: str, **options: Any) -> BenchEnv:
    """An environment by the task's name; the options are BenchEnv's."""
    return BenchEnv(load(task), **options)
