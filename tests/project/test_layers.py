"""The layer rules bite: `make layers` (part of `make check`) passes on the tree and fails on each illegal import. Commands
share nouns, and do not import one another.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trace_lab.cli import COMMANDS

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


def imports_of_commands(module: str, text: str) -> set[str]:
    """The command modules that a module of trace_lab imports, anywhere in it."""
    commands = {command.target.partition(":")[0] for command in COMMANDS.values()} - {module}
    named = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(filter(None, (package, node.module)))
            named |= {source} | {f"{source}.{each.name}" for each in node.names}
    return named & commands


@pytest.mark.parametrize("path", sorted((ROOT / "src/trace_lab").glob("*.py")), ids=lambda path: path.stem)
def test_nothing_but_the_demonstration_imports_a_command(path):
    found = imports_of_commands(f"trace_lab.{path.stem}", path.read_text())
    runs = {"trace_lab.collect", "trace_lab.train", "trace_lab.evaluate"}  # the demonstration runs these, and no others
    assert found == (runs if path.stem == "demo" else set())


@pytest.mark.parametrize(
    "illegal",
    [
        "from trace_lab.collect import tell",
        "from trace_lab import dataset, collect",
        "import trace_lab.collect as other",
        "def f():\n    from .collect import tell",
        "def f():\n    from . import collect",
    ],
)
def test_a_command_that_uses_another_is_found(illegal):
    assert imports_of_commands("trace_lab.compare", illegal) == {"trace_lab.collect"}
    assert not imports_of_commands("trace_lab.collect", illegal)
