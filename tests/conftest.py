"""Shapes are checked in every test run: jaxtyping annotations of the memory become assertions here, and only here.
Tests draw without a screen, whichever of them imports mujoco first. A small dataset serves all who need a real one.
"""

import os
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

os.environ.setdefault("MUJOCO_GL", "egl")
install_import_hook("trace_memory", "beartype.beartype")


LONG = ("test_commands", "test_train", "test_demo", "test_features", "test_compare")  # few tests, or long ones


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: begun last, one of them would be waited for by all other processes."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(autouse=True)
def exact():
    """On a GPU: what a training in one test has switched on must not make another compare rounded products."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Two episodes of Cable, 64 px."""
    from trace_lab.cli import main

    out = tmp_path_factory.mktemp("data") / "cable"
    assert main(["collect", "Cable", "--episodes", "2", "--size", "64", "--workers", "1", "--out", str(out)]) == 0
    return out
