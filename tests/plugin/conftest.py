"""A small dataset of the suite for the plug-in's tests, and small policies on it."""

from pathlib import Path

import pytest

from trace_lab.cli import main


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Two episodes of Cable, 64 px."""
    out = tmp_path_factory.mktemp("data") / "cable"
    assert main(["collect", "Cable", "--episodes", "2", "--size", "64", "--workers", "1", "--out", str(out)]) == 0
    return out
