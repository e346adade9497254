"""What every task of the suite promises, checked on all of them."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from trace_bench.env import LONGEST, WAIT, BenchEnv, make
from trace_bench.expert import ASIDE, ASKANCE, NEARBY, Expert
from trace_bench.referee import Outcome
from trace_bench.robot import CAMERAS, CHANNELS, HIGH, LOW
from trace_bench.tasks import TASKS, load, of_suite, register
from trace_bench.tasks.book import HUB, TURNED
from trace_errors import ControlError, SimulationError, UsageError

SHAPE = {"Tool": (2, 4), "Book": (3, 4), "Laundry": (2, 4), "Cable": (1, 4), "Medicine": (2, 4)}  # the paper's table
HORIZON = {"Tool": 2910, "Book": 1392, "Laundry": 2220, "Cable": 1770, "Medicine": 1759}  # frames at 30 Hz, ditto
EXTRA = {"Signal": (1, 4)}  # short, for first steps; not the paper's
ALL = pytest.mark.parametrize("task", [*SHAPE, *EXTRA])


def run(env: BenchEnv, seed: int, **options) -> BenchEnv:
    """Lets the expert do one episode."""
    env.reset(seed=seed, options=options)
    for action in env.expert():
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return env


def at_branches(env: BenchEnv, seed: int, cue: int) -> list[dict]:
    """What a policy sees when each lamp lights."""
    env.reset(seed=seed, options={"cue": cue})
    seen: list[dict] = []
    for action in env.expert():
        env.cameras = ()
        _, _, terminated, truncated, _ = env.step(action)
        env.cameras = CAMERAS
        if env.world.lamp > len(seen):
            seen.append(env._observation())
        if terminated or truncated:
            assert env.record.complete
            return seen


def test_the_suite_is_the_papers():
    assert set(of_suite()) == set(SHAPE)
    assert set(TASKS) == {*SHAPE, *EXTRA}
    assert len(CHANNELS) == 17
    assert CHANNELS[:4] == ("base_vx", "base_vy", "base_yaw_rate", "left_waist")
    assert CHANNELS[9::7] == ("left_gripper", "right_gripper")


@ALL
def test_gymnasium_accepts_it(task):
    env = gymnasium.make(f"trace_bench/{task}-v{TASKS[task].version}", size=24).unwrapped
    check_env(env, skip_render_check=True)
    assert env.render().shape == (256, 384, 3)
    count, stages = (SHAPE | EXTRA)[task]
    assert len(env.bench.subtasks) == count
    assert {len(subtask.stages) for subtask in env.bench.subtasks} == {stages}
    env.close()


@ALL
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_expert_completes_every_stage_in_order(task, split):
    env = make(task, split=split, cameras=())
    for seed in range(3):
        record = run(env, seed).record
        times = list(record.stages.values())
        assert record.outcome is Outcome.SUCCESS
        assert None not in times
        assert times == sorted(times)
        assert all(decision.correct for decision in record.decisions)
        assert (150 if task in SHAPE else 90) <= record.steps <= 420
        assert record.decisions[0].frame - record.cue_gone >= 60


@ALL
def test_same_seed_same_episode(task):
    """Bit for bit, pictures included, and whatever the environment did before."""
    fresh, used = make(task, size=32), make(task, size=32)
    run(used, 3)
    for env in (fresh, used):
        env.first, _ = env.reset(seed=11)
        env.trail = []
        for step, action in enumerate(env.expert()):
            env.cameras = CAMERAS if step % 40 == 0 else ()
            observation, reward, terminated, *_ = env.step(action)
            env.trail.append((action, observation, reward))
            if terminated:
                break
    assert fresh.record == used.record
    np.testing.assert_equal(fresh.first, used.first)
    np.testing.assert_equal(fresh.trail, used.trail)
    for env in (fresh, used):
        env.close()


@ALL
def test_seeds_differ_and_cues_are_balanced(task):
    env = make(task, cameras=())
    count = len(env.bench.cues)
    cues, states = [], []
    for seed in range(2 * count):
        env.reset(seed=seed)
        cues.append(env.episode.cue)
        states.append(env.world.model.body_pos.tobytes())
    assert sorted(cues) == sorted(2 * list(range(count)))
    assert len(set(states)) == (2 * count if task in SHAPE else count)  # in Signal only the card is elsewhere


@ALL
def test_the_cue_is_gone_at_every_branch(task):
    """With everything else equal, a policy sees the same for all cues, up to stray pixels at edges: less than a joint
    encoder's step would change (0.01 grey levels, `tracemem probe-task` measures it).
    """
    env = make(task)
    pairs = [at_branches(env, seed=21, cue=cue) for cue in range(len(env.bench.cues))]
    assert {len(seen) for seen in pairs} == {len(env.bench.lamps)}
    for seen in zip(*pairs, strict=True):
        for other in seen[1:]:
            assert other["episode_step"] == seen[0]["episode_step"]
            np.testing.assert_allclose(other["agent_pos"], seen[0]["agent_pos"], atol=2e-4)
            gap = np.mean([np.abs(other["pixels"][c].astype(int) - seen[0]["pixels"][c]).mean() for c in CAMERAS])
            if env.bench.partly_readable:
                assert gap > 0.1  # the cable's pull on the clip
            else:
                assert gap < 0.005
    env.close()


@ALL
def test_the_cue_is_there_at_the_start_and_nowhere_else(task):
    """It changes the first picture; state, step, instruction, reward and the keys of info do not tell it."""
    env = make(task)
    starts = []
    for cue in range(len(env.bench.cues)):
        observation, info = env.reset(seed=4, options={"cue": cue})
        starts.append(observation)
        assert set(info) == {"is_success", "scoring"}
        assert set(observation) == {"agent_pos", "episode_step", "pixels"}
        assert info["scoring"]["cue"] == cue
        assert env.task_description == env.bench.instruction
    for other in starts[1:]:
        np.testing.assert_array_equal(other["agent_pos"], starts[0]["agent_pos"])
        assert np.abs(other["pixels"]["overhead"].astype(int) - starts[0]["pixels"]["overhead"]).max() > 30
    env.close()


@ALL
def test_a_longer_delay_postpones_the_branch(task):
    env = make(task, cameras=(), delay=200)
    record = run(env, 0).record
    assert record.complete
    assert 200 <= record.delay <= 200 + LONGEST * WAIT * 10
    assert record.decisions[0].frame - record.cue_gone >= 200


def test_having_waited_does_not_tell_how_long_it_will_take():
    """Delays beyond the least are exponential: what is left of them is as long on average, however long one has waited."""
    env, extra = make("Signal", cameras=(), delay=7), []
    for seed in range(2000):
        env.reset(seed=seed)
        extra.append(env.record.delay - 7)
    mean, drawn = WAIT * 10, np.array(extra)
    assert (drawn.min(), drawn.max()) == (0, LONGEST * mean)
    free = drawn[drawn < LONGEST * mean]
    assert 1 - len(free) / len(drawn) == pytest.approx(np.exp(-LONGEST), abs=0.015)
    for waited in (0, 10, 20):
        assert np.mean(drawn >= waited + 10) / np.mean(drawn >= waited) == pytest.approx(np.exp(-10 / mean), abs=0.05)


@ALL
def test_the_expert_takes_a_moment_to_see_the_lamp(task):
    env = make(task, cameras=())
    env.reset(seed=1)
    moves, before = [], None
    for action in env.expert():
        moves.append(
            before is not None and bool(np.abs(action - before).max() > 0.005)
        )  # less is the base keeping its place
        before = action
        *_, terminated, _, _ = env.step(action)
        if terminated:
            break
    for decision in env.record.decisions:
        first = moves.index(True, decision.frame)  # the action after the picture that shows the lamp
        assert 2 <= first - decision.frame <= 7


@pytest.mark.parametrize("task", list(SHAPE))
def test_paper_profile_has_the_papers_horizon(task):
    env = make(task, cameras=(), profile="paper")
    lengths = [run(env, seed).record.steps for seed in range(3)]
    assert env.metadata["render_fps"] == 30
    assert np.mean(lengths) == pytest.approx(HORIZON[task], rel=0.1)


@ALL
def test_following_another_cue_is_a_wrong_branch(task):
    env = make(task, cameras=())
    env.reset(seed=0)
    first = env.record.decisions[0]
    first.answer = (first.answer + 1) % len(env.bench.cues)  # the cue asked for something else
    for action in env.expert():
        _, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    assert terminated
    assert env.record.outcome is Outcome.WRONG
    assert first.correct is False
    assert not info["is_success"]
    assert env.record.progress <= 2 / len(env.record.stages)
    assert json.loads(info["scoring"]["record"])["outcome"] == "wrong branch"
    assert info["scoring"]["branch_frame"] == first.frame < first.step


def held_height(env: BenchEnv) -> float:
    held = env.world.held["right"]
    return 0.0 if held is None else env.world.position(held)[2]


def test_losing_the_tool_after_a_right_choice_is_an_execution_loss():
    env = make("Tool", cameras=())
    env.reset(seed=0)
    script, truncated = env.expert(), False
    while env.record.decisions[0].step is None or held_height(env) < 0.70:  # taken and lifted
        env.step(action := next(script))
    while not truncated:
        _, _, terminated, truncated, _ = env.step(action := np.where(np.isin(np.arange(17), (9, 16)), 1.0, action))
        assert not terminated
    assert env.record.drops == 1
    assert env.record.outcome is Outcome.EXECUTION


def test_lifting_the_cover_again_shows_nothing():
    env = make("Tool", cameras=())
    env.reset(seed=0)
    shown = env.bench.cues[env.episode.cue]
    assert env.world.position(shown)[2] > 0.5
    for action in env.expert():
        env.step(action)
        if env.record.cue_gone:
            break
    env.step(action)
    assert max(env.world.position(name)[2] for name in env.bench.cues) < 0


def test_the_pill_stays_in_the_dish_until_the_lamp_lights():
    env = make("Medicine", cameras=())
    env.reset(seed=0)
    world, address = env.world, env.world.model.joint("dish").qposadr[0]
    world.held["right"] = "dish"
    world.data.qpos[address : address + 3] = world.spot("box 2")
    mujoco.mj_forward(world.model, world.data)
    env.bench.tick(world)
    assert world.marks == {}
    world.set_lamp(1)
    env.bench.tick(world)
    assert world.marks == {"pill": 1}
    assert world.model.geom("pill").rgba[3] == 0
    env.reset(seed=0)
    assert world.marks == {}
    assert world.model.geom("pill").rgba[3] == 1


@pytest.mark.parametrize("yaw", [np.pi, -np.pi])
def test_books_hub_may_be_faced_by_either_turn(yaw):
    env = make("Book", cameras=())
    env.reset(seed=0)
    world = env.world
    world.held["right"] = "book"
    world.data.qpos[:3] = (-0.75, 0.0, yaw)
    mujoco.mj_forward(world.model, world.data)
    assert env.bench.hidden(world)
    assert env.bench.ready(world, 0)


def test_books_experts_stand_near_the_hub_wherever_the_book_was():
    """Otherwise nobody shows how to make up for being elsewhere."""
    env, stands = make("Book", cameras=()), []
    for seed, cue in ((0, 0), (0, 2), (1, 0), (2, 0)):
        env.reset(seed=seed, options={"cue": cue})
        script = env.expert()
        while env.record.decisions[0].frame is None:
            env.step(next(script))
        stands.append(env.world.base)
    np.testing.assert_allclose(stands[0], stands[1], atol=1e-3)
    off = np.abs(np.array(stands[1:]) - (*HUB, TURNED))
    assert (off < np.array([NEARBY, NEARBY, ASKANCE]) + 0.005).all()
    assert (off.max(0) > 0.02).all()


def test_nobody_drives_straight_and_all_arrive():
    env, aside = make("Book", cameras=()), []
    for seed in range(4):
        env.reset(seed=seed)
        x, y, yaw = env.world.base
        expert = Expert(env.world, env.episode, env.profile.rate, env.profile.pace)
        beside = []
        for action in expert.drive(x - 1.0, y, yaw):
            env.step(action)
            beside.append(env.world.base[1] - y)
        aside.append(max(beside, key=abs))
        np.testing.assert_allclose(env.world.base, (x - 1.0, y, yaw), atol=0.03)
    assert max(map(abs, aside)) < ASIDE + 0.05
    assert np.ptp(aside) > 0.05


def test_standing_still_after_a_right_choice_is_a_timeout():
    env = make("Tool", cameras=())
    env.reset(seed=0)
    script, truncated = env.expert(), False
    while env.record.decisions[0].step is None:
        env.step(action := next(script))
    while not truncated:
        *_, truncated, _ = env.step(action)
    assert env.record.outcome is Outcome.TIMEOUT


@ALL
def test_acting_before_the_lamp_counts_for_nothing(task, monkeypatch):
    """Otherwise neither delay nor memory would be needed."""
    monkeypatch.setattr(Expert, "wait_for_lamp", lambda self, phase: iter(()))
    env = make(task, cameras=())
    for cue in range(len(env.bench.cues)):
        env.reset(seed=0, options={"cue": cue})
        for action in env.expert():
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
        assert env.record.decisions[0].step is None
        assert env.record.outcome in {Outcome.PREBRANCH, Outcome.TIMEOUT}
        assert sum(step is not None for step in env.record.stages.values()) <= env.bench.lamps[0]


@ALL
def test_doing_nothing_is_a_prebranch_failure(task):
    env = make(task, cameras=())
    env.reset(seed=0)
    still, truncated = next(env.expert()), False
    while not truncated:
        _, reward, terminated, truncated, _ = env.step(still)
        assert not terminated
        assert reward == 0
    assert env.record.steps == env.limit
    assert env.record.outcome is Outcome.PREBRANCH
    with pytest.raises(ControlError, match="call reset"):
        env.step(still)


@ALL
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(16), r"shape \(16,\), expected \(17,\)"),
        (np.zeros((1, 17)), r"shape \(1, 17\)"),
        (np.where(np.arange(17) == 9, np.nan, 0.0), "left_gripper"),
        (np.where(np.arange(17) == 2, np.inf, 0.0), "base_yaw_rate"),
        (np.array(["a"] * 17), "dtype <U1, expected real numbers"),
        (np.zeros(17, dtype=object), "dtype object"),
        (np.zeros(17, dtype=complex), "dtype complex128"),
    ],
)
def test_bad_actions_are_named_and_change_nothing(task, action, message):
    env = make(task, cameras=())
    env.reset(seed=0)
    before = env.world.data.qpos.copy(), env.record.steps
    with pytest.raises(ControlError, match=message):
        env.step(action)
    np.testing.assert_array_equal(env.world.data.qpos, before[0])
    assert env.record.steps == before[1]
    env.step(np.clip(np.full(17, 1e6), LOW, HIGH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split: got 'test', expected one of train, heldout"),
        ({"profile": "fast"}, "profile: got 'fast'"),
        ({"size": 0}, "size: got 0"),
        ({"delay": -1}, "delay: got -1"),
        ({"size": "x"}, "size: got 'x', expected 8 to 960 pixels"),
        ({"size": 1000}, "size: got 1000, expected 8 to 960 pixels"),
        ({"delay": 61.5}, "delay: got 61.5, expected 0 or more control steps"),
        ({"limit": "a"}, "limit: got 'a'"),
        ({"profile": None}, "profile: got None"),
        ({"render_mode": "human"}, "render_mode: got 'human'"),
        ({"cameras": ("top",)}, r"cameras: got \('top',\), expected a tuple of some of overhead"),
        ({"cameras": None}, "cameras: got None"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        make("Cable", **options)


def test_bad_cue_is_named():
    env = make("Cable", cameras=())
    with pytest.raises(UsageError, match=r"cue: got 2, expected 0 to 1 \(left reel, right reel\)"):
        env.reset(seed=0, options={"cue": 2})
    with pytest.raises(UsageError, match="options: got 'cues', expected only 'cue'"):
        env.reset(seed=0, options={"cues": 1})
    env.reset(seed=0, options={"cue": np.int64(1), "lerobot_new_rollout": True})
    assert env.episode.cue == 1


def test_versions_are_of_tasks():
    ids = {f"trace_bench/{task}-v{5 if task == 'Book' else 3}" for task in TASKS}
    assert ids == {name for name in gymnasium.registry if name.startswith("trace_bench/")}


def test_unknown_task_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'Medicine'"):
        make("medecine")
    with pytest.raises(UsageError, match="the tasks are Tool, Book"):
        make("qqq")


@pytest.fixture
def tiny(monkeypatch):
    """tiny_task.py beside this file, registered as CONTRIBUTING.md explains it, and forgotten afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    register("Tiny", "tiny_task:Tiny")
    monkeypatch.setitem(EXTRA, "Tiny", (1, 4))
    yield "Tiny"
    del TASKS["Tiny"], gymnasium.registry["trace_bench/Tiny-v1"]


def test_a_task_is_added_and_keeps_the_contract(tiny, monkeypatch):
    """The checks of every task hold for one that lives outside the package."""
    with pytest.raises(UsageError, match="got 'tiny', expected a name that is not yet registered"):
        register("tiny", "elsewhere:Tiny")
    assert (TASKS["Tiny"].version, TASKS["Tiny"].demonstrations) == (1, 50)
    assert "Tiny" not in of_suite()
    assert load("tINY").name == "Tiny"
    test_gymnasium_accepts_it("Tiny")
    for split in ("train", "heldout"):
        test_expert_completes_every_stage_in_order("Tiny", split)
    test_same_seed_same_episode("Tiny")
    test_the_cue_is_gone_at_every_branch("Tiny")
    test_the_cue_is_there_at_the_start_and_nowhere_else("Tiny")
    test_a_longer_delay_postpones_the_branch("Tiny")
    test_following_another_cue_is_a_wrong_branch("Tiny")
    test_doing_nothing_is_a_prebranch_failure("Tiny")
    test_acting_before_the_lamp_counts_for_nothing("Tiny", monkeypatch)


def test_vectorised():
    """Rows of a synchronous and an asynchronous vector environment see the same."""
    seen = []
    for mode, how in (("sync", {}), ("async", {"context": "forkserver"})):
        envs = gymnasium.make_vec("trace_bench/Cable-v3", 2, mode, vector_kwargs=how, size=24)
        observation, _ = envs.reset(seed=[1, 2])
        for _ in range(3):
            observation, *_ = envs.step(np.zeros((2, 17), dtype=np.float32))
        assert observation["episode_step"].tolist() == [[3], [3]]
        seen.append(observation)
        envs.close()
    np.testing.assert_equal(seen[0], seen[1])


def test_a_fork_after_drawing_is_refused(monkeypatch):
    """GL hangs in a forked child; the message says what to do instead."""
    env = make("Cable", size=24)
    monkeypatch.setattr("trace_bench.world._drawing_process", 1)
    with pytest.raises(SimulationError, match="context='forkserver'"):
        env.reset(seed=0)


DIGEST = """
import hashlib
from trace_bench.env import make
env = make("Laundry", size=48)
digest = hashlib.sha256()
observation, _ = env.reset(seed=54)
for action, _ in zip(env.expert(), range(40)):
    observation, *_ = env.step(action)
    digest.update(observation["agent_pos"].tobytes())
    for picture in observation["pixels"].values():
        digest.update(picture.tobytes())
env.close()
"""


def test_another_process_sees_the_same():
    scope: dict = {}
    exec(DIGEST, scope)
    other = subprocess.run([sys.executable, "-c", DIGEST + "print(digest.hexdigest())"], capture_output=True, text=True)
    assert other.stdout.strip() == scope["digest"].hexdigest()


def resting_moments(task: str, seed: int) -> tuple[set[object], set[object]]:
    """What can be seen while the expert's hands rest at their ready points: before it waits for a second and more, and
    before it goes by itself within half a second.
    """
    env = make(task, cameras=(), split="train")
    env.reset(seed=seed)
    world, seen, actions, home = env.world, [], [], []
    for action in env.expert():
        colours = tuple(world.model.geom_rgba[world.model.geom("lamp").id])
        seen.append((colours, frozenset(world.done), tuple(sorted(world.resting.items())), "pill" in world.marks))
        actions.append(action)
        home.append(world.hands_back())
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    waits, goes = set[object](), set[object]()
    for t, key in enumerate(seen[:-12]):
        after = [np.abs(later - actions[t]).max() > 1e-4 for later in actions[t + 1 : t + 13]]
        if home[t] and not any(after):
            waits.add(key)
        elif home[t] and home[t - 1] and any(after[:5]) and set(seen[t : t + 2 + after.index(True)]) == {key}:
            goes.add(key)
    return waits, goes


@pytest.mark.parametrize("task", ["Tool", "Laundry", "Cable", "Medicine"])
def test_what_to_do_at_rest_can_be_seen_but_for_the_cue(task):
    """Otherwise a policy without memory would lack more than the cue, and stand still for ever."""
    waits, goes = (set.union(*sets) for sets in zip(*(resting_moments(task, seed) for seed in range(6)), strict=True))
    assert waits
    assert goes
    assert not waits & goes


def test_the_lamp_is_red_again_once_it_is_obeyed():
    env = make("Cable", cameras=())
    env.reset(seed=0)
    lamp, colours = env.world.model.geom("lamp").id, []
    for action in env.expert():
        colours.append(tuple(env.world.model.geom_rgba[lamp]))
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    kinds = [colour for colour, before in zip(colours, [None, *colours], strict=False) if colour != before]
    assert len(kinds) == 3
    assert kinds[0] == kinds[2] != kinds[1]


def test_what_was_done_is_shown_and_forgotten_with_the_episode():
    env = make("Tool", cameras=())
    env.reset(seed=0)
    world = env.world
    before = world.model.geom_rgba.copy()
    world.show_done("bell")
    world.show_done("bell")
    assert not np.array_equal(world.model.geom_rgba, before)
    world.show_done("bell", done=False)
    assert np.array_equal(world.model.geom_rgba, before)
    world.show_done("bell")
    env.reset(seed=0)
    assert not world.done
    assert np.array_equal(world.model.geom_rgba, before)


@pytest.mark.parametrize("task", ["Tool", "Laundry", "Cable", "Medicine"])
def test_the_time_of_a_lamp_does_not_tell_the_cue(task):
    """Counterfactual pairs see every lamp at the same step, also the slow ones (Book is too, in `tracemem probe-task`)."""
    env = make(task, cameras=())
    for seed in (4, 23, 28, 31):  # of the first three one cue of Laundry was late in version 2
        times = set()
        for cue in range(len(env.bench.cues)):
            run(env, seed, cue=cue)
            times.add(tuple(decision.frame for decision in env.record.decisions))
        assert len(times) == 1
