"""Shapes are checked in every test run: jaxtyping annotations of the memory become assertions here, and only here.
Tests draw without a screen, whichever of them imports mujoco first.
"""

import os

from jaxtyping import install_import_hook

os.environ.setdefault("MUJOCO_GL", "egl")
install_import_hook("trace_memory", "beartype.beartype")
