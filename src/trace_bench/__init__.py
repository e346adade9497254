"""A simulated suite of five delayed-evidence tasks in MuJoCo: scenes, experts, scoring, Gymnasium environments."""

import os

# Read by mujoco when it is first imported: without a screen only EGL or OSMesa can draw.
os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium

from trace_bench.registry import EVERY, VERSIONS
from trace_bench.registry import TASKS as TASKS

for _name in EVERY:
    _id = f"trace_bench/{_name}-v{VERSIONS[_name]}"
    gymnasium.register(_id, entry_point="trace_bench.env:make", kwargs={"task": _name})
