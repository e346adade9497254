"""The suite as a LeRobot robot, so that `lerobot-rollout` can be tried from end to end without hardware. One episode; when
it is over the robot stands still. The score is logged when it is disconnected.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig

from lerobot_policy_trace.env import simulator
from trace_errors import ControlError

logger = logging.getLogger(__name__)


@RobotConfig.register_subclass("trace_bench")
@dataclass
class TraceBenchRobotConfig(RobotConfig):
    """Which task and which episode."""

    task: str = "Cable"
    seed: int = 0
    split: str = "heldout"
    profile: str = "default"
    size: int = 96


class TraceBenchRobot(Robot):
    """The simulated bimanual mobile robot at one task."""

    config_class = TraceBenchRobotConfig
    name = "trace_bench"

    def __init__(self, config: TraceBenchRobotConfig):
        super().__init__(config)
        bench = simulator()
        self.config, self.camera_names = config, bench.robot.CAMERAS
        # lerobot-rollout takes only numbers with these endings for state and action
        self.channels = [f"{name}.{'vel' if name.startswith('base') else 'pos'}" for name in bench.robot.CHANNELS]
        self.env = bench.env.make(config.task, split=config.split, profile=config.profile, size=config.size)
        self.cameras: dict[str, Any] = {}  # none of LeRobot's: the pictures come with the observation
        self.observation: dict[str, Any] | None = None
        self.over = False

    @property
    def observation_features(self) -> dict[str, Any]:
        """A number for each channel, a picture for each camera."""
        size = (self.config.size, self.config.size, 3)
        return dict.fromkeys(self.channels, float) | dict.fromkeys(self.camera_names, size)

    @property
    def action_features(self) -> dict[str, Any]:
        """A number for each channel."""
        return dict.fromkeys(self.channels, float)

    @property
    def is_connected(self) -> bool:
        """An episode has begun."""
        return self.observation is not None

    def connect(self, calibrate: bool = True) -> None:  # noqa: FBT001, FBT002
        """Begins the episode."""
        self.observation, _ = self.env.reset(seed=self.config.seed)
        self.over = False

    @property
    def is_calibrated(self) -> bool:
        """Always."""
        return True

    def calibrate(self) -> None:
        """Nothing to do."""

    def configure(self) -> None:
        """Nothing to do."""

    def get_observation(self) -> dict[str, Any]:
        """What the robot sees and measures now."""
        if self.observation is None:
            raise ControlError("robot: got get_observation() before connect(), expected connect() first")
        state = zip(self.channels, self.observation["agent_pos"].tolist(), strict=True)
        return dict(state) | self.observation["pixels"]

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """One control step, unless the episode is over."""
        if not self.over and self.observation is not None:
            now = dict(zip(self.channels, self.observation["agent_pos"].tolist(), strict=True))
            rest = {
                name: 0.0 if name.endswith(".vel") else value for name, value in now.items()
            }  # what is not asked for
            command = np.array([float(action.get(name, rest[name])) for name in self.channels])
            self.observation, _, terminated, truncated, _ = self.env.step(command)
            self.over = terminated or truncated
        return action

    def disconnect(self) -> None:
        """Ends the episode and says how it went."""
        if self.observation is not None:
            record = self.env.record
            logger.info("%s: %s, progress %.2f in %d steps", record.task, record.outcome, record.progress, record.steps)
        self.observation = None
        self.env.close()
