"""LeRobot's own commands, unmodified: train, stop, resume, evaluate, roll out; and attaching to what they made."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trace_lab.cli import main

MEMORY = "--policy.memory.preset=tiny --policy.memory.depth=2 --policy.memory.budget=4 --policy.memory.balance=0.01"
SMALL = {
    "act": "--policy.dim_model=64 --policy.n_heads=4 --policy.dim_feedforward=64 --policy.n_encoder_layers=1 "
    "--policy.n_vae_encoder_layers=1 --policy.chunk_size=12 --policy.n_action_steps=4",
    "diffusion": "--policy.horizon=16 --policy.n_action_steps=4 --policy.down_dims=[32,64] --policy.crop_shape=[60,60] "
    "--policy.num_inference_steps=2 --policy.noise_scheduler_type=DDIM",
}
README = (Path(__file__).parents[2] / "README.md").read_text()
COMMON = "--policy.device=cpu --policy.push_to_hub=false --policy.pretrained_backbone_weights=null"


def lerobot(command: str, words: str, cwd: Path) -> subprocess.Popen:
    """One of LeRobot's console scripts."""
    script = Path(sys.executable).with_name(f"lerobot-{command}")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [script, *words.split()], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def readme(start: str) -> str:
    """The words of the README's one command that begins so, without the program."""
    (line,) = (line.split("#")[0].strip() for line in README.splitlines() if line.startswith(start))
    return line.partition(" ")[2]


def finish(*processes: subprocess.Popen) -> list[str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return outputs


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory) -> dict[str, Path]:
    """Both policies trained for two steps, stopped, resumed for one more; and a stock ACT."""
    root = tmp_path_factory.mktemp("runs")
    data = f"--dataset.root={dataset} --batch_size=2 --num_workers=0"
    begin = f"{COMMON} {data} --steps=2 --save_freq=1 --wandb.enable=false --log_freq=1"
    said = readme("lerobot-train --policy.type=trace_act")
    words = {k: said.replace("trace_act", f"trace_{k}").replace("outputs/run", k) for k in SMALL}
    finish(*(lerobot("train", f"{words[k]} {MEMORY} {SMALL[k]} {begin}", root) for k in SMALL))
    last = "checkpoints/last/pretrained_model"
    finish(
        *(
            lerobot("train", f"--config_path={root / k / last}/train_config.json --resume=true --steps=3", root)
            for k in SMALL
        )
    )
    stock = f"--policy.type=act {SMALL['act']} {begin} --dataset.repo_id=trace_bench/cable --output_dir=outputs/act"
    finish(lerobot("train", stock, root))
    return {name: root / name / last for name in SMALL} | {"stock": root / "outputs/act" / last}


@pytest.mark.parametrize("kind", SMALL)
def test_training_stops_and_resumes(kind, trained):
    step = json.loads((trained[kind].parent / "training_state/training_step.json").read_text())
    assert step["step"] == 3
    weights, size = load_file(trained[kind] / "model.safetensors"), (trained[kind] / "model.safetensors").stat().st_size
    assert weights["recall.frames"] > 0
    assert weights["recall.memory.normaliser.frames"] == weights["recall.frames"]
    assert size == pytest.approx(sum(x.numel() * x.element_size() for x in weights.values()), rel=0.02)


def test_statistics_are_kept_beside_the_dataset(trained, dataset):
    assert len(list((dataset / "meta/trace_memory").glob("Signature-2-*-1-v4-*.safetensors"))) == 1


def test_evaluation_and_rollout(trained, tmp_path):
    evaluate = (
        "--env.type=trace_bench --env.task=Cable --env.size=64 --env.limit=12 --eval.n_episodes=2 --eval.batch_size=2"
    )
    evaluate += " --eval.use_async_envs=false --policy.device=cpu"
    both = [
        lerobot(
            "eval",
            f"--policy.path={trained[k]} {evaluate} --output_dir={tmp_path / k}",
            tmp_path,
        )
        for k in SMALL
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


def test_attached_checkpoint_acts_as_before_and_trains(trained, dataset, tmp_path, capsys):
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    root, out = trained["act"].parents[3], trained["act"].parents[3] / "outputs/act_with_memory"
    with contextlib.chdir(root):
        assert main([*readme("tracemem attach").split(), "--preset", "tiny"]) == 0
    assert "every action as before" in capsys.readouterr().out
    assert main(["attach", str(trained["stock"]), "--out", str(out)]) == 2
    data = LeRobotDataset("trace_bench/cable", root=dataset)
    actions = []
    for path in (trained["stock"], out):
        config = PreTrainedConfig.from_pretrained(path)
        policy = get_policy_class(config.type).from_pretrained(path).eval()
        before, after = make_pre_post_processors(config, pretrained_path=str(path))
        wanted = [key for key in data.features if key.startswith("observation.")]
        rows = [before({key: data[t][key] for key in wanted}) for t in range(60)]
        actions.append(torch.cat([after(policy.select_action(row)) for row in rows]))
    assert torch.equal(*actions)
    words = f"{readme('lerobot-train --policy.path')} --policy.device=cpu --policy.push_to_hub=false"
    words += f" --dataset.root={dataset} --batch_size=2 --num_workers=0 --steps=2 --wandb.enable=false"
    finish(lerobot("train", f"{words} --output_dir={tmp_path / 'on'}", root))
    weights = load_file(tmp_path / "on/checkpoints/last/pretrained_model/model.safetensors")
    assert weights["recall.frames"] > 0
    assert weights["recall.adapter.attention.out_proj.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no config.json there"),
        (["{trained}"], "of type 'trace_act', expected 'act' or 'diffusion'"),
        (["{trained}", "--memory", "none"], "memory: got 'none', which is the policy you have"),
    ],
)
def test_attach_names_what_is_wrong(words, message, trained, tmp_path, capsys):
    words = [word.format(trained=trained["act"]) for word in words]
    assert main(["attach", *words, "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
