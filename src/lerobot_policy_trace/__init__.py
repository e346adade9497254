"""The LeRobot plug-in, found by LeRobot through this distribution's name. Importing it registers the policies `trace_act`
and `trace_diffusion`, and the suite as environment and as robot `trace_bench`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lerobot_policy_trace import env as env
from lerobot_policy_trace.configuration_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.episodes import EpisodeBatch
from lerobot_policy_trace.robot import TraceBenchRobot as TraceBenchRobot  # LeRobot looks for a robot's class here

if TYPE_CHECKING:
    from lerobot_policy_trace.loading import load_policy
    from lerobot_policy_trace.modeling_trace import TraceActPolicy, TraceDiffusionPolicy
    from lerobot_policy_trace.processor_trace import with_raw_state

__all__ = [
    "EpisodeBatch",
    "MemoryOptions",
    "TraceActConfig",
    "TraceActPolicy",
    "TraceDiffusionConfig",
    "TraceDiffusionPolicy",
    "load_policy",
    "with_raw_state",
]
LATE = {"load_policy": "loading", "with_raw_state": "processor_trace"}  # and the policies, of `modeling_trace`


def __getattr__(name: str) -> Any:
    """What is slow to import, when it is asked for: LeRobot imports this package for every command."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lerobot_policy_trace.{LATE.get(name, 'modeling_trace')}"), name)
