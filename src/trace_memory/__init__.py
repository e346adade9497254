"""Memories for robot policies: TRACE, its ablations and baselines, behind one interface. Torch only; knows no robot and no
LeRobot. The public names are loaded when they are first used, so that `import trace_memory` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trace_memory.adapters import ConditionAdapter, RegressionAdapter, ResidualAdapter
    from trace_memory.checkpoint import load_memory, load_state, save_memory, save_state
    from trace_memory.config import MemoryConfig, PaperOptions, build
    from trace_memory.losses import auxiliary_losses
    from trace_memory.memory import AuxiliaryWeights, Memory, MemoryState, Readout
    from trace_memory.normalise import Normaliser
    from trace_memory.registry import METHODS, Method, register
    from trace_memory.signature import LogSignature, Signature
    from trace_memory.trace import PaperTraceMemory, TraceMemory

__all__ = [
    "METHODS",
    "AuxiliaryWeights",
    "ConditionAdapter",
    "LogSignature",
    "Memory",
    "MemoryConfig",
    "MemoryState",
    "Method",
    "Normaliser",
    "PaperOptions",
    "PaperTraceMemory",
    "Readout",
    "RegressionAdapter",
    "ResidualAdapter",
    "Signature",
    "TraceMemory",
    "auxiliary_losses",
    "build",
    "load_memory",
    "load_state",
    "register",
    "save_memory",
    "save_state",
]

_HOMES = {
    "adapters": ("ConditionAdapter", "RegressionAdapter", "ResidualAdapter"),
    "checkpoint": ("load_memory", "load_state", "save_memory", "save_state"),
    "config": ("MemoryConfig", "PaperOptions", "build"),
    "losses": ("auxiliary_losses",),
    "memory": ("AuxiliaryWeights", "Memory", "MemoryState", "Readout"),
    "normalise": ("Normaliser",),
    "registry": ("METHODS", "Method", "register"),
    "signature": ("LogSignature", "Signature"),
    "trace": ("PaperTraceMemory", "TraceMemory"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Loads a public name from the file it is written in."""
    if name not in _HOME:
        raise AttributeError(f"module 'trace_memory' has no attribute {name!r}")
    return getattr(import_module(f"trace_memory.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
