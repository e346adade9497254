"""The suite as a LeRobot environment type: `lerobot-eval --env.type=trace_bench --env.task=Book`. Here are the options and
the batches in which LeRobot rolls policies out; the tasks are in `trace_bench`. MuJoCo is imported when options are given.
"""

import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
from draccus.utils import DecodingError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import FreezeAfterEpisodeEnd, _LazyAsyncVectorEnv
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from trace_errors import TraceError, UsageError

STATE = "agent_pos"  # the name under which LeRobot looks for the robot's state in an observation


@EnvConfig.register_subclass("trace_bench")
@dataclass
class TraceBenchEnv(EnvConfig):
    """Tasks of the suite. `task` is a name in any capitalisation, several with commas between, or `all`; each is one group
    of `eval_info.json`.

    There, `sum_reward` of an episode is its stage progress, 0 to 1, and `success` that every stage was done in order with
    the right decisions; `max_reward` is the largest share of stages done in one step and says little. The whole score sheet
    (stages, decisions, kind of failure) is a JSON string in `info["scoring"]["record"]` at the end of an episode, for
    programs that step the environments themselves: lerobot-eval does not keep it.
    """

    task: str = "Book"
    fps: int = 0  # control steps a second; 0 is the profile's, and nothing else is right
    split: str = "heldout"
    profile: str = "default"
    delay: int | None = None  # least number of control steps between cue and branch; None is the profile's
    size: int = 96  # pixels along a side of a picture
    limit: int | None = None  # control steps after which a rollout is stopped; None is the task's own

    def __post_init__(self) -> None:
        try:
            self._check()
        except TraceError as error:  # a DecodingError is what LeRobot's commands print without a traceback
            raise DecodingError((), str(error)) from error

    def _check(self) -> None:
        tasks = simulator().tasks.of_suite()
        asked = tasks if self.task.strip().lower() == "all" else self.task.split(",")
        # The environments know best what is allowed and what they give. Building one takes 10 ms.
        envs = [build(name.strip(), self.gym_kwargs) for name in asked]
        for env in envs:
            rate = env.metadata["render_fps"]
            if self.fps not in (0, rate):
                raise UsageError(f"fps: got {self.fps}, expected {rate}, the rate of profile {self.profile!r}")
            self.fps = rate
        self.task = ",".join(dict.fromkeys(env.get_wrapper_attr("task") for env in envs))
        self._describe(envs[0])

    def _describe(self, env: gymnasium.Env) -> None:
        observation: Any = env.observation_space
        self.features = {
            ACTION: PolicyFeature(FeatureType.ACTION, env.action_space.shape),
            STATE: PolicyFeature(FeatureType.STATE, observation[STATE].shape),
        }
        for camera in env.get_wrapper_attr("cameras"):
            # `eval.recording` finds pictures by the policy's name for them, the state by the environment's.
            shape = observation["pixels"][camera].shape  # (size, size, 3)
            self.features[f"{OBS_IMAGES}.{camera}"] = PolicyFeature(FeatureType.VISUAL, shape)
        self.features_map = {key: OBS_STATE if key == STATE else key for key in self.features}

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """The options of an environment."""
        names = ("split", "profile", "delay", "limit", "size")
        return {name: getattr(self, name) for name in names}

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, VectorEnv]]:  # noqa: FBT001, FBT002
        """`{task: {0: n_envs environments}}`. A row whose episode is over stands still and costs nothing."""
        groups: dict[str, dict[int, VectorEnv]] = {}
        for name in self.task.split(","):
            builders = [partial(build, name, self.gym_kwargs)] * n_envs
            if use_async_envs and n_envs > 1:
                groups[name] = {0: Workers(builders)}
            else:
                groups[name] = {0: SyncVectorEnv(builders, autoreset_mode=AutoresetMode.SAME_STEP)}
        return groups


class Workers(_LazyAsyncVectorEnv):
    """A process a row, started when first used: only the task being evaluated has any."""

    _env: AsyncVectorEnv | None

    def _ensure(self) -> None:
        if self._env is None:
            # A process that has drawn or used a GPU must not be forked; Python's fork server has done neither. LeRobot is
            # imported there once, else anew by every worker of every task: seconds to half a minute each time.
            names = (name for name in ("lerobot.scripts.lerobot_eval", __name__) if name in sys.modules)
            multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", *names])
            mode = AutoresetMode.SAME_STEP
            self._env = AsyncVectorEnv(self._env_fns, context="forkserver", autoreset_mode=mode)


def simulator() -> ModuleType:
    """`trace_bench`, with what it simulates with."""
    try:
        import trace_bench.env
    except ModuleNotFoundError as error:
        raise UsageError(
            f"trace_bench, the simulated suite, needs {error.name}, which is not installed; "
            "pip install 'lerobot_policy_trace[sim]'"
        ) from error
    return trace_bench


def build(task: str, options: Mapping[str, Any]) -> gymnasium.Env:
    """One environment, also inside a worker: importing `trace_bench` there chooses how MuJoCo draws."""
    return FreezeAfterEpisodeEnd(simulator().env.make(task, **options))
