"""Robot, world, referee and episodes on their own."""

from types import SimpleNamespace

import mink
import numpy as np
import pytest

from trace_bench.episode import INSTANCES, SPLITS, Episode, draw_cue
from trace_bench.referee import Decision, Outcome, Record, Referee, Stage, Subtask, classify, progress
from trace_bench.robot import ARM, CHANNELS, GRIPPER, HANDS, HIGH, LOW, READY, kinematics, pose, ready_posture
from trace_bench.task import PROFILES
from trace_bench.tasks import TASKS, load
from trace_bench.world import World
from trace_errors import ControlError, SimulationError, UsageError


@pytest.fixture(scope="module")
def world() -> World:
    return World(load("Laundry").scene(), 10)


def record(stages: list[int | None], **more) -> Record:
    named = {str(index): step for index, step in enumerate(stages)}
    return Record("Tool", 0, "train", 0, 60, named, [Decision("first", 1, **more)])


# -- robot ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hand", HANDS)
def test_kinematics_against_mujoco(hand):
    """The joints mink finds put the fingertips where they were asked to be, pointing down."""
    solver, target = kinematics(), pose((0.5, 0.1 if hand == "left" else -0.1, 0.65))
    configuration = mink.Configuration(solver.model, q=solver.posture.copy())
    configuration.data.qpos[solver.columns[hand]] = solver.solve({hand: target})[hand]
    configuration.update()
    found = configuration.get_transform_frame_to_world(f"{hand}_pinch", "site")
    np.testing.assert_allclose(found.translation(), target.translation(), atol=2e-3)
    np.testing.assert_allclose(found.rotation().as_matrix()[:, 0], (0, 0, -1), atol=0.02)


def test_out_of_reach_says_by_how_much():
    with pytest.raises(ControlError, match=r"left hand cannot reach \[2.0, 0.0, 0.6\].*mm short"):
        kinematics().solve({"left": pose((2.0, 0.0, 0.6))})


def test_equal_targets_give_equal_joints():
    solver = kinematics()
    solver.solve({"right": pose((0.6, -0.4, 0.6))})
    twice = [solver.solve({"left": pose((0.5, 0.2, 0.7))})["left"] for _ in range(2)]
    np.testing.assert_array_equal(*twice)


def test_ready_posture_is_within_limits():
    ready = ready_posture()
    assert ready.shape == (17,) == (len(CHANNELS),)
    assert ((ready >= LOW) & (ready <= HIGH)).all()


# -- world ----------------------------------------------------------------------------------------------------------


def settle(world: World, action: np.ndarray, steps: int = 15) -> None:
    for _ in range(steps):
        world.step(action)


def test_state_follows_action(world):
    world.reset()
    world.place({"garment": "work", "brush": "brush rest", "board": "board rest"})
    action = ready_posture().copy()
    action[ARM["left"]] += 0.1
    action[GRIPPER["right"]] = 0.5
    settle(world, action)
    np.testing.assert_allclose(world.state(), action, atol=2e-3)


def test_a_closing_gripper_holds_what_is_near_and_lets_go(world):
    world.reset()
    world.place({"garment": "work", "brush": "brush rest", "board": "board rest"})
    action = ready_posture().copy()
    settle(world, np.where(np.arange(17) == GRIPPER["left"], 0.0, action))
    assert world.held["left"] is None  # nothing near
    settle(world, action)
    solver, spot = kinematics(), world.spot("work")
    action[ARM["left"]] = solver.solve({"left": pose(spot)})["left"]
    settle(world, action)
    action[GRIPPER["left"]] = 0.0
    settle(world, action)
    assert world.held == {"left": "garment", "right": None}
    assert world.resting["garment"] is None
    action[ARM["left"]] = solver.solve({"left": pose(READY["left"])})["left"]
    settle(world, action, 25)
    np.testing.assert_allclose(world.position("garment"), world.pinch("left"), atol=0.01)
    action[GRIPPER["left"]] = 1.0
    settle(world, action, 25)
    assert world.held["left"] is None
    assert world.resting["garment"] is None
    assert world.drops == 1
    assert world.position("garment")[2] < 0.62  # it fell onto the table, or below


def test_no_picture_says_what_to_install(monkeypatch):
    blind = World(load("Cable").scene(), 10)

    def fail(*_: object) -> None:
        raise ImportError("libEGL.so.1: cannot open shared object file")

    monkeypatch.setattr("mujoco.Renderer", fail)
    with pytest.raises(SimulationError, match=r"libEGL\.so\.1.*apt-get install -y libegl1"):
        blind.render("overhead", 32, 32)


def test_mujoco_imported_first_without_a_screen_is_refused(monkeypatch):
    """It would crash the process."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("mujoco.GLContext", type("GLContext", (), {"__module__": "mujoco.glfw"}))
    with pytest.raises(SimulationError, match="MUJOCO_GL=egl, or import trace_bench first"):
        World(load("Cable").scene(), 10).render("overhead", 32, 32)


# -- referee --------------------------------------------------------------------------------------------------------


def test_progress_is_the_papers_equation():
    """100 / (N T S) times the number of stages that succeeded, written out."""
    sheets = [record([1, 2, None, None]), record([1, 2, 3, 4]), record([None] * 4)]
    assert progress(sheets) == pytest.approx(100 / (3 * 1 * 4) * (2 + 4 + 0))
    with pytest.raises(UsageError, match="at least one record"):
        progress([])


@pytest.mark.parametrize(
    ("stages", "decision", "drops", "timed_out", "outcome"),
    [
        ([1, 2], {"frame": 1, "step": 2, "choice": 1}, 0, False, Outcome.SUCCESS),
        ([1, None], {"frame": 1, "step": 2, "choice": 0}, 0, False, Outcome.WRONG),
        ([1, None], {"frame": 1, "step": 2, "choice": 0}, 3, False, Outcome.WRONG),
        ([1, None], {}, 0, True, Outcome.PREBRANCH),
        ([1, None], {"frame": 1}, 0, True, Outcome.TIMEOUT),
        ([1, None], {"frame": 1, "step": 2, "choice": 1}, 0, True, Outcome.TIMEOUT),
        ([1, None], {"frame": 1, "step": 2, "choice": 1}, 1, True, Outcome.EXECUTION),
        ([1, None], {"frame": 1, "step": 2, "choice": 1}, 0, False, Outcome.OTHER),
    ],
)
def test_failure_classes(stages, decision, drops, timed_out, outcome):
    sheet = record(stages, **decision)
    sheet.drops = drops
    assert classify(sheet, timed_out=timed_out) is outcome


def follow(choices: list[int | None], drops: list[int] | None = None, *, answer: int = 1) -> Referee:
    """A referee over a made-up world: one branch whose lamp lights at once, one stage after it."""
    made_up = SimpleNamespace(lamp=0, drops=0, choice=None)
    made_up.set_lamp = lambda phase: setattr(made_up, "lamp", phase)
    made_up.dim_lamp = lambda: None
    branch, after = Stage("choose", choice=lambda w: w.choice), Stage("finish", lambda w: False)
    sheet = Record("Tool", 0, "train", 0, 0, {"s: choose": None, "s: finish": None}, [Decision("s: choose", answer)])
    referee = Referee(sheet, (Subtask("s", (branch, after)),), (0,), (0,), lambda w: True, lambda w, phase: True, 4.0)
    for index, choice in enumerate(choices):
        made_up.choice, made_up.drops = choice, drops[index] if drops else 0
        referee.watch(made_up)
    return referee


BEFORE_LAMP = 8 * [None]  # it lights after 1.5 s at rest, on a grid of 2 s


def test_a_choice_must_last_half_a_second():
    assert follow([*BEFORE_LAMP, 1, None, 1, None]).record.decisions[0].choice is None
    assert follow([*BEFORE_LAMP, 0, 1, 1]).record.decisions[0].correct is True


def test_a_choice_before_the_lamp_is_none():
    assert follow([0, 0, 0, 0]).record.decisions[0].choice is None


def test_whoever_changes_to_the_wrong_option_has_chosen_it():
    assert follow([*BEFORE_LAMP, 1, 1, None, 0, None]).record.wrong is False
    assert follow([*BEFORE_LAMP, 1, 1, None, 0, 0]).record.wrong is True


def test_losses_before_the_first_decision_do_not_count():
    assert follow([*BEFORE_LAMP, 1, 1, None], [*8 * [0], 2, 2, 2]).record.drops == 0
    assert follow([*BEFORE_LAMP, 1, 1, None], [*8 * [0], 2, 2, 3]).record.drops == 1


# -- episodes -------------------------------------------------------------------------------------------------------


def test_streams_do_not_know_the_cue():
    one, other = Episode(3, "train", 0, 60), Episode(3, "train", 2, 60)
    assert one.shift("table") == other.shift("table")
    assert one.instance("book") == other.instance("book")
    assert one.rng("a").random() != one.rng("b").random()


def test_splits_share_no_instance_and_no_draw():
    assert not set(INSTANCES["train"]) & set(INSTANCES["heldout"])
    seen = {split: {Episode(seed, split, 0, 60).instance("book") for seed in range(60)} for split in SPLITS}
    assert {split: len(found) for split, found in seen.items()} == {"train": 6, "heldout": 3}
    assert not seen["train"] & seen["heldout"]
    assert Episode(0, "train", 0, 60).shift("x") != Episode(0, "heldout", 0, 60).shift("x")


@pytest.mark.parametrize("options", [2, 3])
def test_cues_are_balanced_but_not_periodic(options):
    cues = [draw_cue("Book", seed, "train", options) for seed in range(40 * options)]
    assert {cues.count(cue) for cue in range(options)} == {40}
    assert cues[:options] * 40 != cues


def test_tasks_are_complete():
    for name in TASKS:
        task = load(name.upper())
        assert task.name == name
        assert len(task.clock) == len(task.lamps) == len(task.answers(0))
        assert len({task.answers(cue) for cue in range(len(task.cues))}) == len(task.cues)
    assert PROFILES["default"].rate == 10
