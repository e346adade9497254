"""The LeRobot plug-in, found by LeRobot through this distribution's name. Importing it registers the environment type
and the policies `trace_act` and `trace_diffusion`.
"""

from lerobot_policy_trace.configuration_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.env import TraceBenchEnv

__all__ = ["MemoryOptions", "TraceActConfig", "TraceBenchEnv", "TraceDiffusionConfig"]
