"""Commands as people type them: every one that README and docs print, each after those that make what it needs; and
LeRobot's own, unmodified: train, stop, resume, evaluate, roll out, and go on from an attached checkpoint.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from printed import NOT_RUN, Reader, commands
from trace_lab.cli import main

MEMORY = "--policy.memory.name=paper --policy.memory.width=32 --policy.memory.hidden=32 --policy.memory.paper.depth=2"
MEMORY += " --policy.memory.history_frames=4 --policy.memory.paper.balance=0.01"
SMALL = {
    "act": "--policy.dim_model=64 --policy.n_heads=4 --policy.dim_feedforward=64 --policy.n_encoder_layers=1 "
    "--policy.n_vae_encoder_layers=1 --policy.chunk_size=12 --policy.n_action_steps=4",
    "diffusion": "--policy.horizon=16 --policy.n_action_steps=4 --policy.down_dims=[32,64] --policy.crop_shape=[60,60] "
    "--policy.num_inference_steps=2 --policy.noise_scheduler_type=DDIM",
}
COMMON = "--policy.device=cpu --policy.push_to_hub=false --policy.pretrained_backbone_weights=null"


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader"))


@pytest.mark.parametrize(
    "command", [each for each in commands() if not each.matching(NOT_RUN)], ids=lambda each: each.line
)
def test_a_printed_command_runs(command, reader):
    reader.run(command)


def test_an_attached_policy_acts_as_before_and_trains(reader, monkeypatch):
    """The README's three lines: train ACT, attach a memory, train both."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    act, attach, train = (
        next(each for each in commands() if re.match(start, each.line))
        for start in ("lerobot-train --policy.type=act ", "tracemem attach ", "lerobot-train --policy.path=")
    )
    reader.run(train)
    monkeypatch.setenv("TORCH_HOME", reader.environment["TORCH_HOME"])
    last = "checkpoints/last/pretrained_model"
    actions = []
    for path in (reader.folder / act.makes / last, reader.folder / attach.makes):
        config = PreTrainedConfig.from_pretrained(path)
        policy = get_policy_class(config.type).from_pretrained(path).eval()
        before, after = make_pre_post_processors(config, pretrained_path=str(path))
        generator, rows = torch.Generator().manual_seed(0), []
        for _ in range(config.n_action_steps + 2):
            row = {key: torch.rand(each.shape, generator=generator) for key, each in config.input_features.items()}
            rows.append(after(policy.select_action(before(row))))
        actions.append(torch.cat(rows))
    assert torch.equal(*actions)
    weights = load_file(reader.folder / train.makes / last / "model.safetensors")
    assert weights["memory_head.frames"] > 0
    assert weights["memory_head.adapter.attention.out_proj.weight"].abs().max() > 0


def lerobot(command: str, words: str, cwd: Path) -> subprocess.Popen:
    """One of LeRobot's console scripts."""
    script = Path(sys.executable).with_name(f"lerobot-{command}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [script, *words.split()], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(*processes: subprocess.Popen) -> list[str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return outputs


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory) -> dict[str, Path]:
    """Both policies with the paper's memory trained for two steps, stopped, resumed for one more."""
    root = tmp_path_factory.mktemp("runs")
    data = f"--dataset.repo_id=local/cable --dataset.root={dataset} --batch_size=2 --num_workers=0"
    begin = f"{COMMON} {data} --steps=2 --save_freq=1 --wandb.enable=false --log_freq=1"
    words = {kind: f"--policy.type=trace_{kind} --output_dir={kind} {MEMORY} {SMALL[kind]} {begin}" for kind in SMALL}
    finish(*(lerobot("train", words[kind], root) for kind in SMALL))
    last = "checkpoints/last/pretrained_model"
    finish(
        *(
            lerobot("train", f"--config_path={root / kind / last}/train_config.json --resume=true --steps=3", root)
            for kind in SMALL
        )
    )
    return {kind: root / kind / last for kind in SMALL}


@pytest.mark.parametrize("kind", SMALL)
def test_training_stops_and_resumes(kind, trained):
    step = json.loads((trained[kind].parent / "training_state/training_step.json").read_text())
    assert step["step"] == 3
    weights, size = load_file(trained[kind] / "model.safetensors"), (trained[kind] / "model.safetensors").stat().st_size
    assert weights["memory_head.frames"] > 0
    assert weights["memory_head.memory.normaliser.frames"] == weights["memory_head.frames"]
    assert size == pytest.approx(sum(x.numel() * x.element_size() for x in weights.values()), rel=0.02)


def test_statistics_are_kept_beside_the_dataset(trained, dataset):
    assert len(list((dataset / "meta/trace_memory").glob("Signature-2-*-1-v5-*.safetensors"))) == 1


def test_evaluation_and_rollout(trained, tmp_path):
    evaluate = (
        "--env.type=trace_bench --env.task=Cable --env.size=64 --env.limit=12 --eval.n_episodes=2 --eval.batch_size=2"
    )
    evaluate += " --eval.use_async_envs=false --policy.device=cpu"
    both = [
        lerobot("eval", f"--policy.path={trained[kind]} {evaluate} --output_dir={tmp_path / kind}", tmp_path)
        for kind in SMALL
    ]
    finish(*both)
    for kind in SMALL:
        assert json.loads((tmp_path / kind / "eval_info.json").read_text())["overall"]["n_episodes"] == 2
    robot = "--robot.type=trace_bench --robot.task=Cable --robot.size=64 --fps=10 --duration=2 --task=plug --device=cpu"
    start = "--strategy.type=base --play_sounds=false"
    outputs = finish(*(lerobot("rollout", f"{start} --policy.path={trained[k]} {robot}", tmp_path) for k in SMALL))
    for output in outputs:
        assert "Cable: other, progress 0.00" in output
        assert "Could not return" not in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no config.json there"),
        (["{trained}"], "of type 'trace_act', expected one of act, diffusion"),
        (["{trained}", "--memory", "none"], "memory: got 'none', which is the policy you have"),
    ],
)
def test_attach_names_what_is_wrong(words, message, trained, tmp_path, capsys):
    words = [word.format(trained=trained["act"]) for word in words]
    assert main(["attach", *words, "--out", str(tmp_path / "x")]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_attach_overwrites_nothing(trained, tmp_path):
    assert main(["attach", str(trained["act"]), "--out", str(tmp_path)]) == 2
