"""The battery's model and training: every memory trains, what is told of a readout is all that it says, pieces of an episode
are the whole, and a small version of the learning claim runs here, in about half a minute.
"""

import itertools
from typing import NamedTuple

import pytest
import torch

from trace_lab import battery
from trace_lab.battery import FIT, MAP, PIECE, PLAIN, TEST, Model, Progress, Training, batches, reached, start, train
from trace_lab.questions import STRIDES, TRAINED, Condition, Task
from trace_lab.stations import plan, render
from trace_memory.registry import METHODS
from trace_memory.trace import PathMemory

SHORT = 26  # the shortest delay of one cue


@pytest.mark.parametrize("name", METHODS)
def test_every_memory_trains_a_step(name):
    torch.manual_seed(0)
    model = Model(name, 4)
    model.loss(plan(Task("sign", 1, SHORT), 4, 0, 0)).backward()
    grads = [p.grad for layer in (model.first, model.second, model.see, model.feel) for p in layer.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(("question", "cues", "classes"), [("count", 5, 6), ("match", 3, 4), ("tmaze", 1, 2)])
def test_there_are_as_many_answers_as_the_question_has(question, cues, classes):
    model = start(Training("none", Task(question, cues, 40)))
    readout = model.memory.step(model.memory.init(3), torch.zeros(3, 128), torch.zeros(3, 3))[1]
    assert model.classify(readout, torch.zeros(3, 128)).shape == (3, classes)


def test_the_losses_of_a_memory_are_added():
    torch.manual_seed(0)
    paper = Model("paper", 4)
    batch = plan(Task("sign", 1, SHORT), 4, 0, 0)
    contents = paper.contents(*render(batch))
    _, readouts = paper.memory.scan(contents, render(batch)[1])
    answer = torch.nn.functional.cross_entropy(paper.classify(readouts.at(-1), contents[:, -1]), batch.answer)
    assert (paper.loss(batch) - answer).item() > 1e-3
    unpunished = Model("no-auxiliary", 4)
    unpunished.load_state_dict(paper.state_dict())
    assert unpunished.loss(batch).item() == pytest.approx(answer.item(), abs=1e-6)


class Says(NamedTuple):
    z: torch.Tensor
    g: torch.Tensor
    dg: torch.Tensor
    counts: torch.Tensor | None = None
    points: torch.Tensor | None = None


def test_all_that_a_readout_says_is_classified():
    z, g, dg = (torch.randn(2, 5) for _ in range(3))
    counts, points = torch.randn(2, 4), torch.randn(2, 4, 1, 2)
    assert torch.equal(Model._parts(Says(z, g, dg)), torch.cat([z, g, dg], 1))
    assert torch.equal(
        Model._parts(Says(z, g, dg, counts, points)), torch.cat([z, g, dg, counts, points.flatten(1)], 1)
    )


def test_the_map_of_a_picture_ends_with_its_plain_colours():
    torch.manual_seed(0)
    model = Model("none", 4)
    model.looks = True
    images, path = render(plan(Task("match", 3), 2, 0, 0))
    contents = model.contents(images, path)
    assert contents.shape[-1] == 128 + torch.Size(MAP).numel()
    looks = contents[..., 128:].unflatten(-1, MAP)  # B T views features h w
    quarters = images.unflatten(-1, (2, 4)).unflatten(-3, (2, 4)).mean((-1, -3))
    assert torch.allclose(looks[:, :, 0, -PLAIN:], 2 * quarters, atol=1e-6)
    assert torch.equal(contents[..., :128], Model.contents(plain(model), images, path))


def plain(model):
    model.looks = False
    return model


@pytest.mark.parametrize("name", ["gru", "trace", "retrieval"])
def test_pieces_of_an_episode_give_the_answer_of_the_whole(name):
    torch.manual_seed(0)
    model = start(Training(name, Task("order", 3))).eval()
    batch = plan(Task("order", 3), 32, 0, 0)
    assert batch.length > PIECE
    with torch.no_grad():
        contents = model.contents(*render(batch))
        _, readouts = model.memory.scan(contents, render(batch)[1])
        whole = model.classify(readouts.at(-1), contents[:, -1]).argmax(-1)
    assert model.right(batch) == int((whole == batch.answer).sum())


def test_paths_are_known_before_learning_begins():
    training = Training("trace", Task("sign", 3))
    model = start(training)
    assert isinstance(model.memory, PathMemory)
    path = render(plan(training.task, 64, training.seed, FIT, 0))[1]
    standard = model.memory.normaliser.state(path).flatten(0, 1)
    assert standard.mean(0).abs().max() < 0.05
    assert (standard.std(0) - 1).abs().max() < 0.05


# -- training --------------------------------------------------------------------------------------------------------


def test_batches_are_sampled_at_every_stride_and_are_a_function_of_the_seed():
    task = Task("sign", 1)
    found = [b.length for b in itertools.islice(batches(Training("none", task, batch=1)), 80)]
    assert set(found) == {round(task.steps * stride) for stride in STRIDES}
    again = [b.length for b in itertools.islice(batches(Training("none", task, batch=1)), 80)]
    other = [b.length for b in itertools.islice(batches(Training("none", task, batch=1, seed=1)), 80)]
    assert found == again != other


def test_the_t_maze_is_trained_at_up_to_64_steps():
    found = {b.length for b in itertools.islice(batches(Training("none", Task("tmaze"), batch=1)), 600)}
    assert found == set(range(8, 65))


def rates(training, accuracies, monkeypatch):
    """The learning rate of every update, were validations to find these accuracies."""
    used, told = [], iter(accuracies)
    model = start(training)
    monkeypatch.setattr(Model, "accuracy", lambda *_, **__: next(told))
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: used.append(self.param_groups[0]["lr"]) or step(self))
    return used, list(train(training, model))


def test_the_rate_rises_and_falls(monkeypatch):
    monkeypatch.setattr(battery, "SETTLE", 40)
    training = Training("none", Task("sign", 1, SHORT), updates=110, batch=1, rate=0.5)
    used, curve = rates(training, itertools.repeat(0.5), monkeypatch)
    assert len(used) == 110
    assert used[:50] == pytest.approx([0.5 * u / 50 for u in range(1, 51)])
    assert used[50:70] == [0.5] * 20
    assert used[70:] == pytest.approx([0.5 * left / 40 for left in range(40, 0, -1)])
    assert [each.update for each in curve] == [25, 50, 75, 100, 110]


def test_it_ends_early_only_after_two_good_validations_in_a_row(monkeypatch):
    monkeypatch.setattr(battery, "SETTLE", 30)
    training = Training("none", Task("sign", 1, SHORT), updates=500, batch=1)
    used, curve = rates(training, [0.99, 0.98, 0.995, 0.99, 0.2, 0.1], monkeypatch)
    assert [each.update for each in curve] == [25, 50, 75, 100, 125, 130]
    assert len(used) == 130


def test_updates_to_an_accuracy_are_those_of_the_first_validation_that_has_it():
    curve = [Progress(25, 1.0, 0.5), Progress(50, 1.0, 0.95), Progress(75, 1.0, 0.9), Progress(100, 1.0, 0.97)]
    assert [reached(curve, x) for x in (0.95, 0.96, 0.99)] == [50, 100, None]


def test_trials_count_right_answers_in_every_condition(monkeypatch):
    asked = []

    def accuracy(self, task, episodes, *key, condition=TRAINED):
        asked.append((task, condition, key))
        return 0.5

    monkeypatch.setattr(Model, "accuracy", accuracy)
    model = Model("none", 4)
    assert [*battery.trials(model, Task("sign", 3), 200, 40)] == [
        ("trained", 100, 200), ("delay_8x", 100, 200), ("delay_64x", 20, 40), ("finer_8x", 100, 200),
        ("coarser_4x", 100, 200), ("dropped", 100, 200), ("repeated", 100, 200),
    ]  # fmt: skip
    assert {key for _, _, key in asked} == {(TEST,)}  # the same episodes for every memory and seed
    assert asked[2][1] == Condition(longer=64)
    assert [*battery.trials(model, Task("tmaze"), 200, 40, (100, 10_000))] == [
        ("trained", 100, 200), ("steps_100", 100, 200), ("steps_10000", 20, 40)
    ]  # fmt: skip


def test_accuracy_is_the_share_of_right_answers_on_the_same_episodes():
    model = start(Training("none", Task("sign", 1, SHORT)))
    once, again = (model.accuracy(Task("sign", 1, SHORT), 150, TEST) for _ in range(2))
    assert once == again
    assert model.training  # as it was
    right = sum(
        model.eval().right(plan(Task("sign", 1, SHORT), rows, TEST, number)) for number, rows in enumerate((128, 22))
    )
    assert once == right / 150


def test_trace_learns_and_no_memory_cannot(monkeypatch):
    """One cue, a short delay: TRACE answers, also after eight times that delay; the same model without memory does not."""
    monkeypatch.setattr(battery, "SETTLE", 100)
    task, found = Task("sign", 1, SHORT), {}
    for name, updates in (("trace", 400), ("none", 100)):
        training = Training(name, task, updates=updates, batch=32, rate=2e-3)
        model = start(training)
        curve = list(train(training, model))
        assert curve[-1].update <= updates
        found[name] = [model.accuracy(task, 256, TEST, condition=Condition(longer=k)) for k in (1, 8)]
    assert min(found["trace"]) >= 0.95
    assert max(found["none"]) <= 0.4
