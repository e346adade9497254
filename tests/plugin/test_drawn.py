"""Checkpoints that leave out what a seed draws: the same weights to the bit, or an error; and those the project ships."""

from pathlib import Path

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from safetensors.torch import load_file, save_file

from lerobot_policy_trace import MemoryOptions, TraceActConfig, TraceActPolicy
from lerobot_policy_trace.loading import SEED, is_lean, leave_out
from trace_errors import CheckpointError
from trace_lab.cli import main
from trace_lab.results import read

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"


def begun(seed: int) -> TraceActPolicy:
    """A small policy as a training with this seed begins."""
    pictures = {"observation.images.overhead": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}
    config = TraceActConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (17,)), **pictures},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (17,))},
        memory=MemoryOptions(width=32, hidden=32), pretrained_backbone_weights=None, device="cpu", use_vae=False,
        dim_model=32, n_heads=2, dim_feedforward=32, n_encoder_layers=1, chunk_size=8, n_action_steps=3,
    )  # fmt: skip
    torch.manual_seed(seed)
    return TraceActPolicy(config)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A policy of which all but the encoder has learnt something, and its lean checkpoint."""
    policy, folder = begun(3), tmp_path_factory.mktemp("lean")
    with torch.no_grad():
        for name, x in policy.named_parameters():
            if ".backbone." not in name:
                x.add_(0.1)
    policy.save_pretrained(folder)
    whole = (folder / WEIGHTS).stat().st_size
    left = leave_out(policy, 3, folder / WEIGHTS)
    assert left > 11_000_000
    assert (folder / WEIGHTS).stat().st_size < whole - 4 * left + 50_000
    return policy, folder


def test_what_is_loaded_is_the_same_to_the_bit(packed):
    policy, folder = packed
    before = torch.get_rng_state()
    with torch.random.fork_rng([]):
        torch.manual_seed(99)
        again = TraceActPolicy.from_pretrained(folder, strict=True).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert again.keys() == policy.state_dict().keys()
    assert all(torch.equal(x, again[name]) for name, x in policy.state_dict().items())


def test_another_draw_is_refused(packed, tmp_path):
    policy, folder = packed
    policy.config.save_pretrained(tmp_path)
    save_file(load_file(folder / WEIGHTS), tmp_path / WEIGHTS, {SEED: "4"})
    with pytest.raises(CheckpointError, match=r"model.backbone.conv1.weight was left out because seed 4 draws it"):
        TraceActPolicy.from_pretrained(tmp_path)


def test_an_encoder_that_has_learnt_is_kept(tmp_path):
    policy = begun(3)
    with torch.no_grad():
        policy.model.backbone.conv1.weight[0, 0, 0, 0] += 1e-3
    leave_out(policy, 3, tmp_path / WEIGHTS)
    assert "model.backbone.conv1.weight" in load_file(tmp_path / WEIGHTS)


def test_a_whole_checkpoint_is_none_of_this(tmp_path):
    begun(0).save_pretrained(tmp_path)
    assert not is_lean(tmp_path / WEIGHTS)


def test_the_projects_checkpoints_are_small():
    files = [path for path in (ROOT / "checkpoints").rglob("*") if path.is_file() and "evaluation" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 25e6
    assert len([path for path in files if path.name == WEIGHTS]) == 2


def test_the_projects_checkpoint_chooses_as_its_published_lines_say(tmp_path, capsys):
    """Two episodes with either card; to the step they are the same on one machine only."""
    words = ["--delay", "20", "--episodes", "2", "--workers", "1", "--device", "cpu", "--out", str(tmp_path / "tried")]
    assert main(["eval", str(ROOT / "checkpoints/signal/trace"), *words]) == 0
    lines = [
        {
            each.record.seed: (each.record.cue, each.record.decisions[0].choice, each.record.outcome)
            for each in read(place).rollouts
            if (each.method, each.training_seed) == (("act", "trace"), 0)
        }
        for place in (tmp_path / "tried", ROOT / "results/signal.parquet")
    ]
    assert lines[0] == {seed: lines[1][seed] for seed in (0, 1)}
    assert {cue for cue, _, _ in lines[0].values()} == {0, 1}
