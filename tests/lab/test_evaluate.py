"""`tracemem eval` on the shortest task with small policies that have learnt nothing, and rollouts of known results."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_pre_post_processors

from lerobot_policy_trace import (
    MemoryOptions,
    TraceActConfig,
    TraceActPolicy,
    TraceDiffusionConfig,
    TraceDiffusionPolicy,
)
from trace_bench.env import make
from trace_bench.robot import CAMERAS
from trace_bench.tasks import TASKS
from trace_errors import ControlError, SimulationError, UsageError
from trace_lab import evaluate as command
from trace_lab import rollout, trained
from trace_lab.cli import main
from trace_lab.rollout import Begin, Meter, PolicyRunner, Row, Rows, play

SIZE, LIMIT = 32, 12
ACT = {
    "dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
    "chunk_size": 8, "n_action_steps": 3,
}  # fmt: skip
DIFFUSION = {
    "horizon": 8, "n_action_steps": 3, "down_dims": (16, 32), "crop_shape": None, "num_inference_steps": 2,
    "noise_scheduler_type": "DDIM", "use_separate_rgb_encoder_per_camera": False,
}  # fmt: skip
TINY = MemoryOptions(width=64, hidden=64)
KINDS = {
    "trace_act": lambda **f: TraceActPolicy(TraceActConfig(memory=TINY, **ACT, **f)),
    "no memory": lambda **f: TraceActPolicy(TraceActConfig(memory=MemoryOptions(name="none"), **ACT, **f)),
    "ensemble": lambda **f: TraceActPolicy(
        TraceActConfig(memory=TINY, **ACT | {"n_action_steps": 1}, temporal_ensemble_coeff=0.1, **f)
    ),
    "act": lambda **f: ACTPolicy(ACTConfig(**ACT, **f)),
    "diffusion": lambda **f: DiffusionPolicy(DiffusionConfig(**DIFFUSION, **f)),
    "trace_diffusion": lambda **f: TraceDiffusionPolicy(TraceDiffusionConfig(memory=TINY, **DIFFUSION, **f)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def features(size: int) -> dict:
    pictures = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, size, size)) for name in CAMERAS}
    return {
        "input_features": {"observation.state": PolicyFeature(FeatureType.STATE, (17,)), **pictures},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (17,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
    }


def save(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    policy = KINDS[kind](
        **features(64 if "diffusion" in kind else SIZE)
    )  # Diffusion's encoder wants more than one cell
    if getattr(policy, "memory_head", None) is not None:
        policy.memory_head.frames.fill_(1)  # as after training
        for p in policy.memory_head.adapter.parameters():
            torch.nn.init.normal_(p, std=0.2)
    for part in (policy, *make_pre_post_processors(policy.config)):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run folder for each kind of policy, made when first asked for."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("run")
            save(kind, made[kind] / "checkpoints/000200/pretrained_model")
            (made[kind] / "checkpoints/last").symlink_to("000200")
        return made[kind]

    return run


def loaded(run: Path) -> PolicyRunner:
    folder, _ = trained.find(run)
    return trained.runner(folder, "cpu", 0)


def words(run, out, episodes, *options, limit=LIMIT, workers="1"):
    few = ["--episodes", str(episodes), "--limit", str(limit), "--workers", workers, "--device", "cpu"]
    return ["eval", str(run), "--task", "cable", "--out", str(out), *few, *options]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "evaluation.jsonl").read_text().splitlines()]


def snapshot(out: Path) -> dict:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture
def played(monkeypatch):
    """The seeds that are played from here on."""
    seeds: list[int] = []

    def watched(rows, runner, episodes, meter):
        seeds.extend(episode.seed for episode in episodes)
        return play(rows, runner, episodes, meter)

    monkeypatch.setattr(rollout, "play", watched)
    return seeds


@pytest.fixture(scope="module")
def five(runs, tmp_path_factory):
    """Five episodes by three rows in two processes."""
    out = tmp_path_factory.mktemp("eval") / "out"
    assert main(words(runs("trace_act"), out, 5, "--rows", "3", workers="2")) == 0
    return out


# -- what is written ------------------------------------------------------------------------------------------------------


def test_a_line_is_the_score_sheet_and_whose_it_is(five):
    env = make("Cable", limit=LIMIT, cameras=())
    sheet = {}
    for line in lines(five):
        env.reset(seed=line["seed"])
        sheet = env.record.to_dict()
        assert {name: line[name] for name in ("task", "seed", "split", "cue", "delay")} == {
            name: sheet[name] for name in ("task", "seed", "split", "cue", "delay")
        }
        assert (line["steps"], line["outcome"], line["split"]) == (LIMIT, "pre-branch failure", "heldout")
        whose = {"policy": "act", "memory": "trace", "training_seed": 0, "checkpoint_step": 200}
        assert set(line) == set(sheet) | set(whose)
        assert whose.items() <= line.items()
    assert sorted(line["seed"] for line in lines(five)) == [0, 1, 2, 3, 4]
    assert len({line["cue"] for line in lines(five)}) == 2


def test_settings_and_summary(five, runs):
    content = json.loads((five / "evaluation.json").read_text())
    settings, summary = content["settings"], content["summary"]
    folder = runs("trace_act") / "checkpoints/000200/pretrained_model"
    assert settings["checkpoint"] == str(folder)
    assert settings["sha256"] == os.popen(f"sha256sum {folder}/model.safetensors").read().split()[0]
    wanted = {"task": "Cable", "episodes": 5, "first_seed": 0, "split": "heldout", "profile": "default", "delay": 60}
    assert (
        wanted | {"limit": LIMIT, "size": SIZE, "suite": TASKS["Cable"].version, "training_seed_known": False}
    ).items() <= settings.items()
    assert (summary["episodes"], summary["mean_progress"], summary["branch_accuracy"]) == (5, 0.0, None)
    assert summary["outcomes"] == {"pre-branch failure": 5}
    assert summary["env_steps"] == 5 * LIMIT
    assert summary["env_steps_per_second"] == pytest.approx(5 * LIMIT / summary["seconds"])
    assert 0 < summary["policy_ms_per_step"] < 1e3 * summary["seconds"]


def test_summary_of_known_lines():
    def line(progress, outcome, *choices):
        decisions = [{"choice": choice, "correct": None if choice is None else choice == 1} for choice in choices]
        return {"progress": progress, "outcome": outcome, "decisions": decisions}

    rows = [line(1.0, "success", 1, 1), line(0.5, "wrong branch", 1, 0), line(0.0, "pre-branch failure", None, None)]
    found = command.summary(rows)
    assert (found["mean_progress"], found["branch_accuracy"], found["decisions"]) == (0.5, 0.75, 4)
    assert found["outcomes"] == {"success": 1, "wrong branch": 1, "pre-branch failure": 1}


def test_neither_rows_nor_workers_change_the_lines(five, runs, tmp_path, capsys):
    assert main(words(runs("trace_act"), tmp_path, 5, "--rows", "1", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["episodes"] == 5
    assert sorted(lines(tmp_path), key=lambda line: line["seed"]) == sorted(lines(five), key=lambda line: line["seed"])


def test_a_run_tells_task_and_seed(runs, tmp_path, capsys):
    run = shutil.copytree(runs("act"), tmp_path / "run", symlinks=True)
    (run / "run.json").write_text(json.dumps({"task": None, "seed": 3}))
    assert main(["eval", str(run)]) == 2
    said = capsys.readouterr().err
    assert "--task: got none" in said
    assert "say which one. tracemem eval plays the tasks of the simulated suite (Tool, Book, " in said
    (run / "run.json").write_text(json.dumps({"task": "cable", "seed": 3}))
    options = ["--episodes", "3", "--rows", "2", "--limit", "4", "--workers", "1", "--device", "cpu"]
    assert main(["eval", str(run), *options]) == 0
    out = run / "evaluation/Cable"
    assert "pre-branch failure" in capsys.readouterr().out
    assert [(line["policy"], line["memory"], line["training_seed"]) for line in lines(out)] == [("act", "none", 3)] * 3
    assert json.loads((out / "evaluation.json").read_text())["settings"]["training_seed_known"] is True


@pytest.mark.parametrize("kind", ["diffusion", "trace_diffusion"])
def test_diffusion(kind, runs, tmp_path):
    assert main(words(runs(kind), tmp_path, 3, "--rows", "2", limit=5)) == 0
    memory = "none" if kind == "diffusion" else "trace"
    assert {(line["policy"], line["memory"], line["steps"]) for line in lines(tmp_path)} == {("diffusion", memory, 5)}


def test_every_episode_has_the_cue_that_was_asked_for(five, runs, tmp_path):
    assert {line["cue"] for line in lines(five)} == {0, 1}
    for cue in (0, 1):
        out = tmp_path / str(cue)
        assert main(words(runs("trace_act"), out, 3, "--cue", str(cue))) == 0
        assert [(line["cue"], line["decisions"][0]["answer"]) for line in lines(out)] == [(cue, cue)] * 3
        assert json.loads((out / "evaluation.json").read_text())["settings"]["cue"] == cue


def test_a_policy_predicts_as_often_as_its_configuration_says(runs):
    """Five steps, of a policy whose chunks last for three and are drawn in two denoising steps."""
    runner, denoised = loaded(runs("trace_diffusion")), []
    runner.policy.diffusion.unet.register_forward_hook(lambda *_: denoised.append(1))
    with Rows(partial(make, "Cable", size=64, limit=5), 1, 1) as rows:
        assert sum(len(ended) for ended in play(rows, runner, [Begin(0)], Meter())) == 1
    assert len(denoised) == 2 * 2


# -- going on -------------------------------------------------------------------------------------------------------------


def test_goes_on_where_it_was(five, runs, tmp_path, played, capsys):
    out = shutil.copytree(five, tmp_path / "out")
    whole = (out / "evaluation.jsonl").read_text().splitlines(keepends=True)
    (out / "evaluation.jsonl").write_text("".join(whole[:3]) + whole[3][:40])  # killed while writing the fourth
    left = [json.loads(line)["seed"] for line in whole[3:]]
    assert main(words(runs("trace_act"), out, 5)) == 0
    assert played == sorted(left)
    assert (out / "evaluation.jsonl").read_text().splitlines(keepends=True)[:3] == whole[:3]
    assert sorted(lines(out), key=lambda line: line["seed"]) == sorted(lines(five), key=lambda line: line["seed"])

    before = lines(out)
    assert main(words(runs("trace_act"), out, 6)) == 0  # more
    assert played == [*sorted(left), 5]
    assert lines(out)[:5] == before
    assert [line["seed"] for line in lines(out)[5:]] == [5]
    files = snapshot(out)
    capsys.readouterr()
    assert main(words(runs("trace_act"), out, 2, "--json")) == 0  # fewer: nothing to do
    assert json.loads(capsys.readouterr().out)["summary"]["episodes"] == 6
    assert played == [*sorted(left), 5]
    assert snapshot(out) == files


def test_other_settings_are_refused(five, runs, tmp_path, capsys):
    out = shutil.copytree(five, tmp_path / "out")
    before = snapshot(out)
    other = shutil.copytree(runs("trace_act"), tmp_path / "other", symlinks=True)
    for options, difference in (
        (["--split", "train"], "split: found 'heldout', asked for 'train'"),
        (["--first-seed", "7"], "first_seed: found 0, asked for 7"),
        (["--delay", "9"], "delay: found 60, asked for 9"),
        (["--cue", "1"], "cue: found None, asked for 1"),
    ):
        assert main(words(other, out, 5, *options)) == 1
        assert difference in capsys.readouterr().err
    assert main(words(runs("act"), out, 5)) == 1
    message = capsys.readouterr().err
    assert "memory: found 'trace', asked for 'none'" in message
    assert "sha256: found " in message
    folder = other / "checkpoints/000200/pretrained_model"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_action_steps": 2}))
    assert main(words(other, out, 5)) == 1
    assert "sha256_config: found " in capsys.readouterr().err
    assert snapshot(out) == before
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    assert main(words(other, out, 5)) == 0  # the same policy elsewhere

    (out / "evaluation.json").unlink()
    assert main(words(other, out, 5)) == 1
    assert "has evaluation.jsonl but no evaluation.json" in capsys.readouterr().err
    assert main(words(other, out / "evaluation.jsonl", 5)) == 1
    assert "is a file, expected a folder" in capsys.readouterr().err


def test_one_at_a_time(five, runs, tmp_path, capsys):
    out = shutil.copytree(five, tmp_path / "out")
    with command.opened(out):
        assert main(words(runs("trace_act"), out, 6)) == 1
    assert "another tracemem eval is at work in " in capsys.readouterr().err


def test_films(five, runs, tmp_path, played):
    """Also of episodes that have their line, which stays as it is."""
    out = shutil.copytree(five, tmp_path / "out")
    before = (out / "evaluation.jsonl").read_text()
    for _ in range(2):
        assert main(words(runs("trace_act"), out, 5, "--videos", "2")) == 0
        assert played == [0, 1]
    assert (out / "evaluation.jsonl").read_text() == before
    names = [path.name for path in sorted((out / "videos").iterdir())]
    assert names == ["Cable-0-pre_branch_failure.mp4", "Cable-1-pre_branch_failure.mp4"]
    env = make("Cable", cameras=())
    for seed, name in enumerate(names):
        with av.open(str(out / "videos" / name)) as video:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(int)
        assert frames.shape == (LIMIT + 1, 256, 384, 3)
        env.reset(seed=seed)
        assert np.abs(frames[0] - env.render()).mean() < 4
        assert np.abs(frames[0] - frames[-1]).mean() > 0.2
    env.close()


# -- the rows -------------------------------------------------------------------------------------------------------------


class Local:
    """Rows in this process, whose episodes have lengths of their own."""

    def __init__(self, count: int, limits: dict[int, int]):
        self.rows, self.limits, self.count = [Row(make("Cable", size=SIZE)) for _ in range(count)], limits, count
        self.seen: list = [None] * count
        self.log: list[list] = []

    def do(self, commands):
        sheets = []
        for place, (row, order) in enumerate(zip(self.rows, commands, strict=True)):
            if isinstance(order, Begin):
                row.env.limit = self.limits[order.seed]
            observation, sheet = row.do(order)
            self.seen[place] = self.seen[place] if observation is None else observation
            sheets.append(sheet)
        self.log.append(list(commands))
        self.observation = {
            name: np.stack([each[name] for each in self.seen]) for name in ("agent_pos", "episode_step")
        }
        pixels = {camera: np.stack([each["pixels"][camera] for each in self.seen]) for camera in CAMERAS}
        self.observation["pixels"] = pixels
        return sheets

    def actions(self) -> dict[int, np.ndarray]:
        """Those of each seed, in order."""
        found: dict[int, list] = {}
        for place in range(self.count):
            seed = None
            for order in (commands[place] for commands in self.log):
                if isinstance(order, Begin):
                    seed = order.seed
                elif order is not None:
                    found.setdefault(seed, []).append(order)
        return {seed: np.stack(each) for seed, each in found.items()}


def reference(runner: PolicyRunner, seed: int, limit: int) -> np.ndarray:
    """One episode in LeRobot's words, alone."""
    env, actions, over = make("Cable", size=SIZE, limit=limit), [], False
    observation, _ = env.reset(seed=seed)
    runner.policy.reset()
    while not over:
        pixels = {camera: picture[None] for camera, picture in observation["pixels"].items()}
        batch = preprocess_observation(
            {**{k: v[None] for k, v in observation.items() if k != "pixels"}, "pixels": pixels}
        )
        with torch.inference_mode():
            actions.append(runner.after(runner.policy.select_action(runner.before(batch)))[0].numpy())
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    return np.stack(actions)


LENGTHS = {0: 5, 1: 9, 2: 6, 3: 8, 4: 4}


@pytest.mark.parametrize("kind", ["trace_act", "no memory", "act", "ensemble"])
def test_rows_that_begin_and_end_at_any_time_act_as_alone(kind, runs):
    runner = loaded(runs(kind))
    assert runner.together is (kind in ("act", "ensemble"))
    rows, meter = Local(3, LENGTHS), Meter()
    sheets = [sheet for ended in play(rows, runner, map(Begin, LENGTHS), meter) for sheet in ended]
    assert {sheet["seed"]: sheet["steps"] for sheet in sheets} == LENGTHS
    assert meter.steps == sum(LENGTHS.values())
    together = rows.actions()
    for seed, length in LENGTHS.items():
        np.testing.assert_allclose(together[seed], reference(runner, seed, length), atol=1e-3)  # sensors work in steps
    assert np.ptp([each[0] for each in together.values()], axis=0).max() > 1e-2
    assert min(np.ptp(each, axis=0).max() for each in together.values()) > 1e-2
    assert meter.calls == (9 + 8 if runner.together else len(rows.log) - 1)


def test_nobody_waits_and_nobody_is_hurried():
    """Which commands rows get, with lengths known beforehand."""

    class Counted:
        count, observation = 2, {"episode_step": np.zeros((2, 1))}

        def __init__(self):
            self.left, self.log = [0, 0], []

        def do(self, commands):
            self.log.append(
                [each.seed if isinstance(each, Begin) else each if each is None else "." for each in commands]
            )
            sheets = ["", ""]
            for row, each in enumerate(commands):
                if isinstance(each, Begin):
                    self.left[row] = {7: 1, 8: 3, 9: 1}[each.seed]
                elif each is not None:
                    self.left[row] -= 1
                    sheets[row] = "" if self.left[row] else "{}"
            return sheets

    class Fake:
        def __init__(self, *, together):
            self.together, self.resets = together, 0

        def reset(self):
            self.resets += 1

        def act(self, observation):
            return np.zeros((2, 17), np.float32)

    for together, resets, log in (
        (False, 1, [[7, 8], [".", "."], [9, "."], [".", "."]]),
        (True, 2, [[7, 8], [".", "."], [None, "."], [None, "."], [9, None], [".", None]]),
    ):
        rows, fake = Counted(), Fake(together=together)
        assert sum(len(ended) for ended in play(rows, fake, map(Begin, (7, 8, 9)), Meter())) == 3
        assert (rows.log, fake.resets) == (log, resets)


@pytest.fixture(scope="module")
def experts():
    """The expert's actions and score sheets, by the first picture of the episode."""
    env, found = make("Cable", delay=0, size=16, cameras=("overhead",)), {}
    for seed in range(4):
        observation, _ = env.reset(seed=seed)
        first, actions = observation["pixels"]["overhead"].tobytes(), []
        for action in env.expert():
            actions.append(action.astype(np.float32))
            _, _, terminated, truncated, _ = env.step(actions[-1])
            if terminated or truncated:
                break
        found[first] = (actions, json.loads(json.dumps(env.record.to_dict())))
    env.close()
    return found


class Replay:
    """Recognises episodes by their first picture and does what the expert did."""

    together = False

    def __init__(self, experts):
        self.experts, self.scripts = experts, {}

    def reset(self):
        pass

    def act(self, observation):
        actions = np.full((len(observation["episode_step"]), 17), np.nan, np.float32)
        for row, step in enumerate(observation["episode_step"][:, 0]):
            if step == 0:
                self.scripts[row] = self.experts[observation["pixels"]["overhead"][row].tobytes()][0]
            if step < len(self.scripts[row]):
                actions[row] = self.scripts[row][step]  # else nobody asks any more
        return actions


def test_processes_give_what_one_environment_gives(experts):
    """Four successes of different lengths, three rows, two processes; nobody looks at what standing rows would do."""
    build = partial(make, "Cable", delay=0, size=16, cameras=("overhead",))
    with Rows(build, 3, 2) as rows:
        sheets = [sheet for ended in play(rows, Replay(experts), map(Begin, range(4)), Meter()) for sheet in ended]
    wanted = [sheet for _, sheet in experts.values()]
    assert sorted(sheets, key=lambda sheet: sheet["seed"]) == wanted
    assert {sheet["outcome"] for sheet in wanted} == {"success"}
    assert len({sheet["steps"] for sheet in wanted}) > 1
    assert not multiprocessing.active_children()


def test_a_batch_is_lerobots_own_and_a_copy(runs):
    runner, rng = loaded(runs("act")), np.random.default_rng(0)
    observation = {
        "agent_pos": rng.normal(size=(2, 17)).astype(np.float32),
        "episode_step": np.array([[3], [0]], np.int32),
        "pixels": {camera: rng.integers(0, 256, (2, SIZE, SIZE, 3), dtype=np.uint8) for camera in CAMERAS},
    }
    expected = {name: x.clone() for name, x in preprocess_observation(observation).items()}
    batch = runner.batch(observation)
    for array in (observation["agent_pos"], observation["episode_step"], *observation["pixels"].values()):
        array[:] = 0
    assert batch.keys() == expected.keys()
    for name, x in batch.items():
        assert torch.equal(x, expected[name]), name
        assert x.stride() == expected[name].stride()


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def test_actions_that_are_not_finite_are_named(runs, tmp_path, monkeypatch, capsys):
    act = PolicyRunner.act

    def broken(self, observation):
        actions = act(self, observation)
        if observation["episode_step"][1, 0] == 3:
            actions[1, 9] = np.nan
        return actions

    monkeypatch.setattr(PolicyRunner, "act", broken)
    assert main(words(runs("trace_act"), tmp_path, 2)) == 1
    message = capsys.readouterr().err
    assert "action: not finite in left_gripper (seed 1, step 3), expected finite numbers" in message
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("end", "code", "message"), [("kill", 1, "a worker died with exit code"), ("ctrl-c", 130, "stopped")]
)
def test_what_is_finished_stays(end, code, message, runs, tmp_path, monkeypatch, capsys):
    def interrupted(rows, runner, episodes, meter):
        done = 0
        for ended in play(rows, runner, episodes, meter):
            yield ended
            done += len(ended)
            if done == 2 and end == "kill":
                os.kill(rows._workers[1][0].pid, signal.SIGKILL)
            elif done == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "play", interrupted)
        assert main(words(runs("trace_act"), tmp_path, 3, "--rows", "2", limit=4, workers="2")) == code
    said = capsys.readouterr().err
    assert f"tracemem eval: {message}" in said
    assert "Finished episodes: 2. To go on, call it again with the same options" in said
    assert not multiprocessing.active_children()
    assert sorted(line["seed"] for line in lines(tmp_path)) == [0, 1]


def test_an_error_in_a_worker_is_told():
    with Rows(partial(make, "Cable", cameras=()), 1, 1) as rows:
        rows.do([Begin(0)])
        with pytest.raises(SimulationError, match=r"Error: action: got shape \(3,\), expected \(17,\)"):
            rows.do([np.zeros(3, np.float32)])
    assert not multiprocessing.active_children()


def test_a_row_that_stands_still_may_answer_nonsense():
    class Nonsense(Replay):
        def __init__(self, *, everywhere):
            self.everywhere = everywhere

        def act(self, observation):
            actions = np.zeros((2, 17), np.float32)
            actions[1 - self.everywhere :] = np.nan
            return actions

    with Rows(partial(make, "Cable", cameras=(), limit=2), 2, 1) as rows:
        assert len([*play(rows, Nonsense(everywhere=False), [Begin(0)], Meter())]) == 3
        with pytest.raises(ControlError):
            [*play(rows, Nonsense(everywhere=True), [Begin(0)], Meter())]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "cabel"], "there is no task 'cabel'; did you mean 'Cable'?"),
        ([], "--task: got none"),
        (["--task", "cable"], "--out: say where to write"),
        (["--task", "cable", "--out", "{out}", "--delay", "-1"], "delay: got -1, expected 0 or more"),
        (["--task", "cable", "--out", "{out}", "--limit", "0"], "limit: got 0, expected 1 or more"),
        (["--task", "cable", "--out", "{out}", "--cue", "2"], "--cue: got 2, expected 0 to 1 ("),
        (["--task", "cable", "--episodes", "0"], "--episodes: got 0, expected 1 or more"),
        (["--task", "cable", "--first-seed", "-1"], "--first-seed: got -1, expected 0 or more"),
        (["--task", "cable", "--rows", "0"], "--rows: got 0, expected 1 or more"),
        (["--task", "cable", "--workers", "0"], "--workers: got 0, expected 1 or more"),
    ],
)
def test_bad_options_are_named(options, message, runs, tmp_path, capsys):
    bare = shutil.copytree(runs("act") / "checkpoints/000200/pretrained_model", tmp_path / "bare")
    out = tmp_path / "out"
    assert main(["eval", str(bare), *(word.format(out=out) for word in options)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_checkpoints_that_cannot_be_used_are_named(runs, tmp_path, capsys):
    def said(folder, code=1) -> str:
        assert main(words(folder, tmp_path / "out", 1)) == code
        return capsys.readouterr().err

    message = said(tmp_path / "nowhere", 2)
    assert "nowhere: no policy there; looked for " in message
    assert "nowhere/checkpoints/last/pretrained_model/config.json" in message
    source = runs("act") / "checkpoints/000200/pretrained_model"
    config = (source / "config.json").read_text()

    def changed(**files: str | None) -> Path:
        folder = shutil.copytree(source, tmp_path / "changed", dirs_exist_ok=True)
        (folder / "config.json").write_text(files.get("config") or config)
        return folder

    assert "a policy of type 'pi0', expected one of act, " in said(changed(config=config.replace('"act"', '"pi0"')))
    message = said(changed(config=config.replace("images.overhead", "images.top")), 2)
    assert "the policy needs {'top': (3, 32, 32)}; the suite has {'overhead': (3, 32, 32)" in message
    assert "its weights do not fit. " in said(changed(config=config.replace('"dim_model": 32', '"dim_model": 64')))
    if not torch.cuda.is_available():
        assert main(["eval", str(changed()), "--task", "cable", "--out", str(tmp_path), "--device", "cuda"]) == 2
        assert "--device: got cuda, but PyTorch finds none here" in capsys.readouterr().err
    (changed() / "model.safetensors").unlink()
    assert "model.safetensors missing, expected what save_pretrained writes" in said(tmp_path / "changed")


class Same:
    """Rows of one environment in this process, as `play` wants them; keeps what was asked for."""

    def __init__(self, size: int, renders: Any):
        self.count, self.row = 1, Row(make("Cable", size=size, limit=14, renders=renders))
        self.actions: list[np.ndarray] = []
        self.drawn = 0
        draw = self.row.env.world.render
        self.row.env.world.render = lambda *how: (setattr(self, "drawn", self.drawn + 1), draw(*how))[1]

    def do(self, commands):
        self.actions += [c for c in commands if isinstance(c, np.ndarray)]
        seen, sheet = self.row.do(commands[0])
        if seen is not None:
            self.observation = {k: v[None] for k, v in seen.items() if k != "pixels"}
            self.observation["pixels"] = {k: v[None] for k, v in seen["pixels"].items()}
        return [sheet]


@pytest.mark.parametrize(
    ("kind", "drawn", "matters"),
    [
        ("trace_act", [0, 4, 6, 8, 12], 4),
        ("no memory", [0, 6, 12], 6),
        ("trace_diffusion", [0, 4, 5, 6, 8, 11, 12], 5),
    ],
)
def test_only_pictures_that_are_encoded_are_rendered(runs, kind, drawn, matters, tmp_path):
    folder = shutil.copytree(trained.find(runs(kind))[0], tmp_path / "slow")
    config = json.loads((folder / "config.json").read_text())
    config = config | {"n_action_steps": 6, "memory": config["memory"] | {"period": 4}}
    (folder / "config.json").write_text(json.dumps(config))

    def acts(choose):
        runner = trained.runner(folder, "cpu", 0)
        config = runner.policy.config
        rows = Same(trained.pictures(config)[0], choose(config))
        for _ in play(rows, runner, [Begin(0), Begin(1)], Meter()):
            pass
        rows.row.env.close()
        return np.array(rows.actions), rows.drawn / len(config.image_features)

    def but(step):
        return lambda config: lambda now: now != step and trained.rendered(config)(now)

    all_of_them, every = acts(lambda _: None)
    some, fewer = acts(trained.rendered)
    np.testing.assert_array_equal(some, all_of_them)
    assert (every, fewer) == (2 * 15, 2 * len(drawn))
    assert not np.array_equal(acts(but(matters))[0], all_of_them)  # what the policy does encode


@pytest.mark.parametrize("kind", ["ensemble", "act", "diffusion"])
def test_all_pictures_are_rendered_for_the_others(runs, kind):
    assert trained.rendered(loaded(runs(kind)).policy.config) is None


def test_an_episode_begins_with_a_picture():
    with pytest.raises(UsageError, match="renders: got False for step 0"):
        make("Cable", renders=lambda step: step > 0)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "/nowhere"],
        ["eval", "{bare}"],
        ["eval", "/nowhere", "--episodes", "0"],
        ["attach", "/nowhere", "--out", "x"],
        ["profile", "--steps", "3"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_heavy_is_imported(words, tmp_path):
    for name in trained.FILES:
        (tmp_path / name).write_text("{}")
    script = f"""
import sys
from trace_lab.cli import main
code = main({[word.format(bare=tmp_path) for word in words]!r})
print(code, [name for name in ("torch", "lerobot", "mujoco", "av", "datasets", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    code, heavy = done.stdout.strip().split("\n")[-1].split(" ", 1)
    assert (int(code) > 0, heavy) == (True, "[]"), done.stdout + done.stderr
    assert f"tracemem {words[0]}: " in done.stderr
