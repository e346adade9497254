"""The suite inside LeRobot: its options, its batches, and the stock evaluation command from end to end."""

import json
import subprocess
import sys

import numpy as np
import pytest
from draccus.utils import DecodingError
from lerobot.envs.configs import EnvConfig
from lerobot.envs.factory import make_env
from lerobot.envs.utils import NEW_ROLLOUT_OPTION, close_envs, env_to_policy_features
from lerobot.utils.import_utils import register_third_party_plugins

from trace_bench.tasks import of_suite


def config(**options):
    register_third_party_plugins()
    return EnvConfig.get_choice_class("trace_bench")(**{"task": "Cable", "size": 32, **options})


def test_policies_see_the_state_and_three_cameras():
    features = env_to_policy_features(config(task="bOOK", size=48))
    assert {name: feature.shape for name, feature in features.items()} == {
        "action": (17,),
        "observation.state": (17,),
        "observation.images.overhead": (3, 48, 48),
        "observation.images.left_wrist": (3, 48, 48),
        "observation.images.right_wrist": (3, 48, 48),
    }


def test_the_features_follow_an_option_changed_after_saving():
    saved = config()
    shapes = {feature.shape for feature in config(size=16, features=saved.features).features.values()}
    assert shapes == {(17,), (16, 16, 3)}


def test_names_of_tasks():
    assert config(task="bOOK").task == "Book"
    assert config(task="cable, TOOL,cable").task == "Cable,Tool"
    assert config(task="all").task == ",".join(of_suite())


@pytest.mark.parametrize(("profile", "fps"), [("default", 10), ("paper", 30)])
def test_fps_is_the_profiles(profile, fps):
    assert config(profile=profile).fps == config(profile=profile, fps=fps).fps == fps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "Bok"}, "there is no task 'Bok'; did you mean 'Book'?"),
        ({"task": "Cable,Bok"}, "there is no task 'Bok'; did you mean 'Book'?"),
        ({"split": "test"}, "split: got 'test', expected one of train, heldout"),
        ({"profile": "papr"}, "profile: got 'papr', expected one of default, paper"),
        ({"size": 4}, "size: got 4"),
        ({"delay": -1}, "delay: got -1"),
        ({"fps": 30}, "fps: got 30, expected 10, the rate of profile 'default'"),
        ({"limit": 0}, "limit: got 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(options, message):
    with pytest.raises(DecodingError) as error:  # what LeRobot's commands print as "error: ..."
        config(**options)
    assert str(error.value).startswith(message)


def test_the_delay_reaches_the_environments():
    envs = make_env(config(delay=7))
    assert envs["Cable"][0].get_attr("delay") == (7,)
    close_envs(envs)


def rollout(env, actions):
    """Everything LeRobot could see of a rollout: observations, rewards, ends, successes, score sheets."""
    observation, info = env.reset(seed=[3, 4], options={NEW_ROLLOUT_OPTION: True})
    seen = [(observation, None, None, None, info["scoring"]["record"])]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(np.stack([action, -action]))
        seen.append((observation, reward, terminated | truncated, info["is_success"], info["scoring"]["record"]))
    return seen


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return np.array_equal(left, right)


def test_workers_see_what_one_process_sees():
    options = config(limit=4)
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 17)).astype(np.float32)
    results = []
    for use_async_envs in (False, True):
        envs = make_env(options, n_envs=2, use_async_envs=use_async_envs)
        assert list(envs) == ["Cable"]
        first = rollout(envs["Cable"][0], actions)
        again = rollout(envs["Cable"][0], actions)
        assert all(same(*pair) for a, b in zip(first, again, strict=True) for pair in zip(a, b, strict=True))
        assert envs["Cable"][0].call("_max_episode_steps") == (4, 4)
        close_envs(envs)
        results.append(first)
    sync, workers = results
    for step, pair in enumerate(zip(sync, workers, strict=True)):
        assert all(same(*values) for values in zip(*pair, strict=True)), step

    assert sync[0][0]["agent_pos"].shape == (2, 17)
    assert sync[0][0]["pixels"]["overhead"].shape == (2, 32, 32, 3)
    assert not same(sync[0][0]["pixels"]["overhead"][0], sync[0][0]["pixels"]["overhead"][1])
    assert [bool(ends.all()) for _, _, ends, _, _ in sync[1:]] == [False, False, False, True, True, True]
    for observation, reward, _, _, records in sync[4:]:  # an ended row stands still, pays nothing, and keeps its sheet
        assert observation["episode_step"].tolist() == [[4], [4]]
        assert reward.tolist() == [0.0, 0.0]
        assert [json.loads(record)["seed"] for record in records] == [3, 4]


def test_the_sum_of_rewards_is_the_progress():
    envs = make_env(config(size=8, delay=0))
    env = envs["Cable"][0]
    env.reset(seed=[0], options={NEW_ROLLOUT_OPTION: True})
    progress, ended = [0.0], False
    for action in env.envs[0].unwrapped.expert():
        _, reward, terminated, truncated, info = env.step(action[None].astype(np.float32))
        progress.append(progress[-1] + reward[0])
        assert info["scoring"]["progress"][0] == pytest.approx(progress[-1])
        ended = bool(terminated[0] | truncated[0])
        if ended:
            break
    assert ended
    assert progress[-1] == pytest.approx(1.0)
    assert info["final_info"]["is_success"].tolist() == [True]  # where LeRobot looks
    assert json.loads(info["scoring"]["record"][0])["outcome"] == "success"
    close_envs(envs)


@pytest.fixture
def checkpoint(tmp_path):
    """A stock ACT policy that has learnt nothing."""
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    features = env_to_policy_features(config())
    policy = ACTPolicy(
        ACTConfig(
            output_features={"action": features.pop("action")},
            input_features=features,
            chunk_size=20,
            n_action_steps=20,
            dim_model=32,
            n_heads=2,
            dim_feedforward=32,
            n_encoder_layers=1,
            n_vae_encoder_layers=1,
            latent_dim=4,
            pretrained_backbone_weights=None,
            device="cpu",
        )
    )
    folder = tmp_path / "policy"
    for part in (policy, *make_pre_post_processors(policy.config)):
        part.save_pretrained(folder)
    return folder


def test_the_stock_command_evaluates_a_stock_policy(checkpoint, tmp_path):
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_eval", f"--policy.path={checkpoint}"]
    command += ["--env.type=trace_bench", "--env.task=Cable", "--env.size=32", "--env.limit=25"]
    command += ["--eval.n_episodes=2", "--eval.batch_size=2", "--eval.use_async_envs=false"]
    done = subprocess.run([*command, f"--output_dir={tmp_path}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "eval_info.json").read_text())
    assert results["overall"]["n_episodes"] == 2
    assert list(results["per_group"]) == ["Cable"]
    assert 0.0 <= results["overall"]["avg_sum_reward"] <= 1.0
    assert results["overall"]["pc_success"] == 0.0


BLOCKED = """
import sys
for name in ("mujoco", "mink", "ray"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
"""


def without_simulator(code):
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, check=False)


def test_the_policies_need_no_simulator():
    """On a robot there is none: the plug-in is imported by LeRobot, a policy is made and takes a step."""
    done = without_simulator("""
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.import_utils import register_third_party_plugins
register_third_party_plugins()
from lerobot.policies.factory import get_policy_class
import lerobot_policy_trace as plugin
from lerobot_policy_trace.processor_trace import RAW_STATE

config = plugin.TraceActConfig(
    input_features={
        "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
        "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
    },
    output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
    chunk_size=4, n_action_steps=4, dim_model=16, n_heads=2, dim_feedforward=16, n_encoder_layers=1,
    n_vae_encoder_layers=1, latent_dim=4, pretrained_backbone_weights=None, device="cpu",
)
policy = get_policy_class("trace_act")(config).eval()
batch = {"observation.state": torch.zeros(1, 3), "observation.images.front": torch.zeros(1, 3, 32, 32)}
batch[RAW_STATE] = batch["observation.state"]
print(tuple(policy.select_action(batch).shape))
loaded = sorted(name for name in ("mujoco", "mink", "ray", "trace_bench") if sys.modules.get(name))
sys.exit(str(loaded) if loaded else 0)
""")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(1, 3)" in done.stdout


def test_asking_for_the_suite_without_a_simulator_says_what_to_install():
    done = without_simulator("""
from draccus.utils import DecodingError
from trace_errors import UsageError
from lerobot_policy_trace.env import TraceBenchEnv
from lerobot_policy_trace.robot import TraceBenchRobot, TraceBenchRobotConfig
for make, error in ((TraceBenchEnv, DecodingError), (lambda: TraceBenchRobot(TraceBenchRobotConfig()), UsageError)):
    try:
        make()
    except error as found:
        print(found)
""")
    assert done.returncode == 0, done.stderr[-3000:]
    line = (
        "trace_bench, the simulated suite, needs mujoco, which is not installed; "
        "pip install 'lerobot_policy_trace[sim]'"
    )
    assert [line, line] == done.stdout.strip().splitlines()
