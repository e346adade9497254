"""The layer rules bite: `make layers` (part of `make check`) passes on the tree and fails on each illegal import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make_layers(tree: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "layers", f"BIN={Path(sys.executable).parent}"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_tree_keeps_the_rules(tree):
    run = make_layers(tree)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("package", "illegal"),
    [
        ("trace_memory", "import lerobot"),
        ("trace_memory", "import trace_bench"),
        ("trace_bench", "import lerobot"),
        ("trace_bench", "import torch"),
        ("trace_memory", "def f():\n    import lerobot_policy_trace"),
        ("lerobot_policy_trace", "import trace_lab"),
        ("lerobot_policy_trace", "import ray"),
        ("lerobot_policy_trace", "from trace_bench.env import make"),
        ("trace_errors", "import trace_memory"),
    ],
)
def test_an_illegal_import_fails(tree, package, illegal):
    (tree / "src" / package / "illegal.py").write_text(illegal + "\n")
    run = make_layers(tree)
    assert run.returncode != 0
    assert f"{package}.illegal" in run.stdout


@pytest.mark.parametrize("illegal", ["from trace_bench.tasks import load", "from trace_lab.collect import tell"])
def test_training_that_knows_the_suite_fails(tree, illegal):
    """Neither itself nor through another module."""
    sampling = tree / "src/trace_lab/sampling.py"
    sampling.write_text(sampling.read_text() + f"\n\ndef f():\n    {illegal}\n")
    run = make_layers(tree)
    assert run.returncode != 0
    assert "training knows nothing of the suite BROKEN" in run.stdout
