"""The LeRobot plug-in, found by LeRobot through this distribution's name. Importing it registers the environment type."""

from lerobot_policy_trace.env import TraceBenchEnv

__all__ = ["TraceBenchEnv"]
