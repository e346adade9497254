"""The LeRobot plug-in, found by LeRobot through this distribution's name. Importing it registers the policies `trace_act`
and `trace_diffusion`, and the suite as environment and as robot `trace_bench`.
"""

from lerobot_policy_trace.configuration_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.env import TraceBenchEnv
from lerobot_policy_trace.robot import TraceBenchRobot, TraceBenchRobotConfig

__all__ = [
    "MemoryOptions",
    "TraceActConfig",
    "TraceBenchEnv",
    "TraceBenchRobot",
    "TraceBenchRobotConfig",
    "TraceDiffusionConfig",
]
