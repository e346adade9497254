"""The battery's episodes are what they claim. A decoder that knows nothing of how they are made reads the pictures, finds
the framed glyphs and the question in them, and answers it: right in every condition.
"""

import itertools
import math
import random

import pytest
import torch

from trace_errors import UsageError
from trace_lab.questions import CONDITIONS, QUESTIONS, TRAINED, Condition, Task, wilson
from trace_lab.stations import BLOCK, plan, render

COLOURS = {(1, 0, 0): 0, (0, 1, 0): 1, (0, 0, 1): 2, (1, 1, 0): 3, (1, 1, 1): "white"}
STATIONS = [q for q in QUESTIONS if q != "tmaze"]
CELLS = [Task(q, c) for q in STATIONS for c in (1, 3, 8)] + [Task("tmaze")]


def drawn(task, episodes=12, seed=0, condition=TRAINED, **kwargs):
    batch = plan(task, episodes, seed, 0, condition=condition)
    return (batch, *render(batch, **kwargs))


# -- the decoder: pictures (T, 3, 8, 8) as nested numbers, states (T, 3) ---------------------------------------------


def colour(picture, row, column):
    return COLOURS.get(tuple(float(x) for x in picture[:, row, column]))


def glyph(picture):
    """The colour inside a white frame of four by four pixels, or None."""
    if (picture == 1).all(0).sum() < 12:
        return None
    names = [[colour(picture, r, c) for c in range(8)] for r in range(8)]
    for row, column in itertools.product(range(5), repeat=2):
        square = [names[row + r][column + c] for r in range(4) for c in range(4)]
        ring = [x for i, x in enumerate(square) if i not in (5, 6, 9, 10)]
        inside = {square[i] for i in (5, 6, 9, 10)}
        if set(ring) == {"white"} and len(inside) == 1 and inside <= {0, 1, 2, 3}:
            return inside.pop()
    return None


def tour(pictures, states):
    """Glyph and mean position of each station: runs of frames with a glyph, apart from each other."""
    found, run = [], []
    for picture, state in zip([*pictures, None], [*states, None], strict=True):
        kind = None if picture is None else glyph(picture)
        if kind is None and run:
            (one,) = {k for k, _ in run}
            found.append((one, torch.stack([xy for _, xy in run]).mean(0)))
            run = []
        elif kind is not None:
            run.append((kind, state[:2]))
    return found


def bar(picture):
    """Height and colour of the column of one colour that stands on the lower right corner."""
    name = colour(picture, 7, 7)
    if name is None:
        return 0, None
    return sum(1 for _ in itertools.takewhile(lambda r: colour(picture, r, 7) == name, range(7, -1, -1))), name


def answer(question, pictures, states):
    """What somebody answers who sees the episode and forgets nothing."""
    shown, last = tour(pictures, states), pictures[-1]
    height, name = bar(last)
    if question == "count":
        return sum(kind == name for kind, _ in shown)
    if question == "tmaze":
        return shown[0][0]
    if question == "place":
        return min(shown, key=lambda each: float((each[1] - states[-1, :2]).norm()))[0]
    kind = shown[height - 1][0]
    if question != "match":
        return kind
    for quarter, (row, column) in enumerate(itertools.product((0, 4), repeat=2)):
        corners = [(row + r, column + c) for r in range(2) for c in range(2)]
        if any(all(colour(last, r + i, c + j) == kind for i in (0, 1) for j in (0, 1)) for r, c in corners):
            return quarter
    raise AssertionError("none of the options is like the cue")


@pytest.mark.parametrize("task", CELLS, ids=lambda t: f"{t.question}-{t.cues}")
def test_what_is_shown_answers_the_question(task):
    batch, images, path = drawn(task)
    assert images.shape == (12, task.steps, 3, 8, 8)
    assert path.shape == (12, task.steps, 3)
    assert [answer(task.question, i, p) for i, p in zip(images, path, strict=True)] == batch.answer.tolist()


@pytest.mark.parametrize("name", [n for n in CONDITIONS if "delay" not in n])
@pytest.mark.parametrize("question", STATIONS)
def test_it_still_does_however_time_is_sampled(question, name):
    task = Task(question, 5)
    batch, images, path = drawn(task, 3, condition=CONDITIONS[name])
    assert [answer(question, i, p) for i, p in zip(images, path, strict=True)] == batch.answer.tolist()
    for one, kinds in zip(images, batch.kind.tolist(), strict=True):
        assert [kind for kind, _ in tour(one, path[0])] == kinds  # no two of them run together, none is lost


# -- conditions change what they say, and no more --------------------------------------------------------------------


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("question", STATIONS)
def test_no_condition_changes_tour_question_or_answer(question, name):
    task = Task(question, 3)
    same, other = plan(task, 16, 4, 7), plan(task, 16, 4, 7, condition=CONDITIONS[name])
    for field in ("kind", "begin", "bar", "tint", "place", "answer", "lift"):
        assert torch.equal(getattr(same, field), getattr(other, field)), field
    assert (same.options is None) is (question != "match")
    if same.options is not None:
        assert torch.equal(same.options, other.options)
    ways = slice(0, 2 + 3)  # two points before the tour, and the stations
    assert torch.equal(same.points[:, ways], other.points[:, ways])
    assert torch.equal(same.points[:, -1], other.points[:, -1])
    assert torch.equal(same.arrive[:, ways], other.arrive[:, ways])


def test_frames_that_are_lost_or_shown_twice_are_the_same_frames():
    task = Task("order", 3)
    _, whole, way = drawn(task)
    _, lost, lost_way = drawn(task, condition=CONDITIONS["dropped"])
    kept = [t for t in range(task.steps) if (task.steps - 1 - t) % 3 != 1]
    assert torch.equal(lost, whole[:, kept])
    assert torch.equal(lost_way, way[:, kept])
    _, twice, twice_way = drawn(task, condition=CONDITIONS["repeated"])
    assert torch.equal(twice, whole.repeat_interleave(2, 1))
    assert torch.equal(twice_way, way.repeat_interleave(2, 1))


def test_a_finer_sampling_is_the_same_way_with_more_frames():
    task = Task("place", 3)
    _, images, path = drawn(task, 64)
    _, fine, fine_path = drawn(task, 64, condition=CONDITIONS["finer_8x"])
    assert fine.shape[1] == 8 * task.steps
    assert (fine_path[:, 7::8] - path).std() == pytest.approx(0.01 * math.sqrt(2), rel=0.1)  # noise of a frame's own
    assert not torch.equal(fine[:, 7::8], images)
    glyphs = [sum(glyph(p) is not None for p in one) for one in (fine[0], images[0])]
    assert glyphs == [8 * 3 * 4, 3 * 4]
    coarse = drawn(task, 64, condition=CONDITIONS["coarser_4x"])[2]
    assert coarse.shape[1] == round(task.steps / 4)
    assert (coarse.flip(1) - path.flip(1)[:, ::4][:, : coarse.shape[1]]).abs().max() < 0.1


@pytest.mark.parametrize("times", [8, 64])
def test_a_longer_delay_is_all_after_the_tour(times):
    task = Task("sign", 3)
    _, images, path = drawn(task, 4, condition=CONDITIONS[f"delay_{times}x"])
    assert images.shape[1] == task.steps + (times - 1) * task.delay
    assert all(glyph(p) is None for p in images[0, task.steps :: 16])
    assert path[:, task.steps :, :2].abs().max() > 0.8  # it goes on wandering


# -- time tells nothing ----------------------------------------------------------------------------------------------


def test_stations_come_at_times_that_are_drawn():
    task = Task("order", 5)
    begin = plan(task, 4000, 0, 0).begin.double()
    assert sorted({int(x) for x in begin[:, 0]}) == list(range(4, 4 + 16 + 2 + 1))
    gaps = begin.diff(dim=1)
    assert sorted({int(x) for x in gaps.flatten()}) == [8, 9, 10]  # four steps between two glyphs at the least
    assert task.steps - 3 - int(begin.max()) - 4 >= 8  # and some wandering before the question


@pytest.mark.parametrize(("cues", "most"), [(1, 1.0), (2, 1.0), (3, 0.9), (5, 0.8), (8, 0.75)])
def test_the_watch_does_not_answer_order(cues, most):
    """Its best is that of a simulation: take the station nearest to the best time, or guess."""
    rng, found = random.Random(0), []
    for _ in range(4000):
        begins, t = [], rng.randint(0, 16)
        for _ in range(cues):
            t += 4 + rng.randint(0, 2)
            begins.append(t)
            t += 4
        found.append(torch.tensor(begins, dtype=torch.float32))
    begin = torch.stack(found)
    times = torch.arange(-20, 120, 0.5) + 1e-3
    nearest = (begin[:, None] - times[None, :, None]).abs().argmin(-1)  # episode, time
    hit = sum(float((nearest == n).double().mean(0).max()) for n in range(cues)) / cues
    watch = Task("order", cues).watch
    assert watch == pytest.approx(hit + (1 - hit) / 4, abs=0.01)
    assert watch <= most
    assert Task("count", cues).watch is None


# -- nothing tells the answer but memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_fair_and_independent_of_what_the_question_shows(question):
    """The moments of the question: height and colour of the bar, options, their places. For each of their values every
    answer is as frequent as any other.
    """
    task = Task(question, 1 if question == "tmaze" else 3)
    batch = plan(task, 40_000, 1, 0)
    seen = [batch.bar, batch.tint, *batch.place.flatten(1).T, torch.zeros_like(batch.bar), batch.begin[:, 0]]
    seen += [] if batch.options is None else [*batch.options.T]
    for values in seen:
        for value in values.unique():
            chosen = batch.answer[values == value]
            share = torch.bincount(chosen, minlength=task.classes) / len(chosen)
            sigma = math.sqrt(task.chance * (1 - task.chance) / len(chosen))
            assert (share - task.chance).abs().max() < 4.5 * sigma


@pytest.mark.parametrize("question", [q for q in QUESTIONS if q != "place"])
def test_the_last_frame_does_not_tell_the_answer(question):
    """The mean picture of each answer is the same. In `place` the robot's position is the question; its picture is not."""
    task = Task(question, 1 if question == "tmaze" else 3)
    batch = plan(task, 6000, 2, 0)
    images, path = render(batch, batch.length - 1)
    for x in (images.flatten(1), path.flatten(1)):
        mean = torch.stack([x[batch.answer == k].mean(0) for k in range(task.classes)])
        error = x.std(0) * math.sqrt(2 * task.classes / 6000) + 1e-4
        assert ((mean - mean.mean(0)) / error).abs().max() < 5


def test_where_the_robot_returns_to_tells_the_station_and_not_its_glyph():
    task = Task("place", 3)
    batch = plan(task, 20_000, 3, 0)
    _, path = render(batch, batch.length - 1)
    for station in range(3):
        stands = batch.points[:, 2 + station].mean(0)
        here = (path[:, 0, :2] - stands).norm(dim=-1) < 0.2
        share = torch.bincount(batch.answer[here], minlength=4) / here.sum()
        assert here.float().mean() == pytest.approx(1 / 3, abs=0.02)
        assert (share - 0.25).abs().max() < 0.03


def test_a_question_of_another_kind_is_counted_right():
    """Every number of glyphs of a kind is as frequent as any other, also none and all."""
    for cues in (1, 5):
        batch = plan(Task("count", cues), 12_000, 0, 0)
        assert torch.equal((batch.kind == batch.tint[:, None]).sum(1), batch.answer)
        assert (torch.bincount(batch.answer) / 12_000 - 1 / (cues + 1)).abs().max() < 0.02


# -- a function of the key -------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_episodes_and_another_gives_others():
    task = Task("match", 3)
    one, again, other = (render(plan(task, 4, *key)) for key in ((5, 0), (5, 0), (5, 1)))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("piece", [1, 7, BLOCK, 100])
@pytest.mark.parametrize("name", ["trained", "finer_8x", "dropped", "repeated"])
def test_pieces_are_the_same_as_the_whole(name, piece):
    batch = plan(Task("match", 3), 3, 0, 0, condition=CONDITIONS[name])
    whole = render(batch)
    starts = range(0, batch.length, piece)
    pieces = zip(*(render(batch, t, t + piece) for t in starts), strict=True)
    assert all(torch.equal(torch.cat(parts, 1), x) for parts, x in zip(pieces, whole, strict=True))


def test_noise_is_even_and_does_not_repeat_itself():
    _, images, _ = drawn(Task("tmaze", 1, 200), 8)
    quiet = images[:, 1:-3].flatten(2)
    assert quiet.max() < 0.2
    assert quiet[quiet > 0].mean() == pytest.approx(0.1, abs=0.002)
    assert len({tuple(x.tolist()) for x in quiet[:, :, :8].flatten(0, 1)}) > 1500


def test_a_long_corridor_shows_its_cue_once():
    batch, start, _ = drawn(Task("tmaze", 1, 100_000), 4, begin=0, end=3)
    assert [[glyph(p) for p in one] for one in start] == [[kind, None, None] for kind in batch.answer.tolist()]
    end, _ = render(batch, 100_000 - 4)
    assert [bar(p)[0] == 8 for p in end[0]] == [False, True, True, True]


# -- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sigh", 1), "question: got 'sigh', expected one of sign, place, order, count, match, tmaze"),
        (("sign", 0), "cues: got 0, expected 1 to 8 of sign"),
        (("order", 9), "cues: got 9, expected 1 to 8 of order"),
        (("tmaze", 3), "cues: got 3, expected 1 of tmaze"),
        (("sign", 8, 39), "delay: got 39, expected 40 or more"),
        (("tmaze", 1, 7), "delay: got 7, expected 8 or more"),
    ],
)
def test_a_task_that_cannot_be_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        Task(*words)


def test_the_shortest_delay_has_room_for_everything():
    batch, images, path = drawn(Task("place", 8, 40), 32)
    assert [answer("place", i, p) for i, p in zip(images, path, strict=True)] == batch.answer.tolist()


def test_the_t_maze_is_tried_at_other_lengths():
    names = [(name, task.steps, condition) for name, task, condition in Task("tmaze").conditions((100, 1000))]
    assert names == [("trained", 64, Condition()), ("steps_100", 100, Condition()), ("steps_1000", 1000, Condition())]


@pytest.mark.parametrize("right", [0, 7, 95, 100])
def test_intervals_are_wilsons(right):
    from scipy.stats import binomtest

    expected = binomtest(right, 100).proportion_ci(method="wilson")
    assert wilson(right, 100) == pytest.approx(tuple(expected), abs=1e-12)
