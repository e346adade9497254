"""The programs under examples/ run, each on small data, and do what they say."""

import ast
import contextlib
import importlib
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALL = {
    "dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
    "chunk_size": 8, "n_action_steps": 4, "pretrained_backbone_weights": None, "device": "cpu",
}  # fmt: skip


def example(name: str) -> Callable[..., float]:
    return runpy.run_path(str(ROOT / "examples" / name))["main"]


def test_there_are_five_and_they_are_short():
    assert [path.stem[:2] for path in EXAMPLES] == ["01", "02", "03", "04", "05"]
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_they_use_public_names(file):
    """Of ours: names in `__all__`, errors, and the suite's robot, which LeRobot knows by name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(("trace_", "lerobot_policy_trace")):
            if node.module not in ("trace_errors", "lerobot_policy_trace.robot"):
                assert {each.name for each in node.names} <= set(importlib.import_module(node.module).__all__)
        elif isinstance(node, ast.Import):
            assert not [each.name for each in node.names if each.name.startswith(("trace_", "lerobot_policy_trace"))]


def test_a_memory_by_itself(tmp_path):
    assert example("01_memory.py")(updates=60, folder=str(tmp_path / "memory")) > 0.9


def test_a_memory_in_a_policy_of_ones_own():
    assert example("02_own_policy.py")(updates=2) < 1e-4


def test_training_act_writes_a_checkpoint(dataset, tmp_path):
    out = tmp_path / "run"
    assert example("03_train_act.py")(str(dataset), str(out), updates=2, **SMALL) > 0
    assert {"config.json", "model.safetensors", "policy_preprocessor.json"} <= {path.name for path in out.iterdir()}


@pytest.fixture
def stock(dataset, tmp_path) -> Path:
    """An ACT as `lerobot-train` leaves it, but for the training."""
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.factory import make_policy, make_pre_post_processors

    meta = LeRobotDatasetMetadata("trace_bench/cable", root=dataset)
    config = ACTConfig(**SMALL)
    for part in (make_policy(config, ds_meta=meta), *make_pre_post_processors(config, dataset_stats=meta.stats)):
        part.save_pretrained(tmp_path / "act")
    return tmp_path / "act"


def test_attaching_changes_no_action(stock, tmp_path):
    out = tmp_path / "attached"
    assert example("04_attach.py")(str(stock), str(out), steps=9) is True
    assert (out / "policy_preprocessor.json").exists()


def test_a_control_loop_completes_an_episode():
    with contextlib.chdir(ROOT):
        assert example("05_control.py")(fps=1e9) == 1.0
