"""A simulated suite of five delayed-evidence tasks in MuJoCo: scenes, experts, scoring, Gymnasium environments."""

import os

# Read by mujoco when it is first imported: without a screen only EGL or OSMesa can draw.
os.environ.setdefault("MUJOCO_GL", "egl")

from trace_bench.tasks import TASKS as TASKS  # registers the environments
