"""Batches: every frame its turn, the same after a restart; whole episodes give the memory that deployment gives."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from lerobot.policies.factory import get_policy_class
from lerobot.utils.constants import ACTION, OBS_STATE

from lerobot_policy_trace.learning import EPISODES
from trace_lab.batches import Augment, Batches, generator, order_of, padding, spread
from trace_lab.frames import open_dataset, open_frames
from trace_lab.policy import configuration, pipelines
from trace_lab.recipe import RecipeError, recipe

SMALL = {
    "act": {
        "policy.dim_model": 32, "policy.n_heads": 2, "policy.dim_feedforward": 32, "policy.n_encoder_layers": 1,
        "policy.n_vae_encoder_layers": 1, "policy.chunk_size": 12, "policy.n_action_steps": 4,
    },
    "diffusion": {"policy.horizon": 16, "policy.n_action_steps": 4, "policy.down_dims": [32, 64]},
}  # fmt: skip
BOTH = pytest.mark.parametrize("policy", ["act", "diffusion"])


@pytest.fixture(scope="module")
def store(dataset):
    """Its first forty frames of each episode, so that whole episodes are quick."""
    whole = open_frames(open_dataset(dataset), "cpu")
    whole.paths.ends = whole.paths.starts + torch.tensor([40, 33])
    whole.__post_init__()
    return whole


def ready(store, policy: str, seed: int = 0, **changes):
    """A policy as after some training (nothing in it is zero any more), its batches and its preprocessor."""
    small = SMALL[policy] | {"memory.depth": 2, "episodes": 2, "targets": 5, "borrowed": 0.0}
    made = recipe("tiny", policy, "trace", small | changes)
    config = configuration(made, store.meta, "cpu")
    torch.manual_seed(seed)
    learner = get_policy_class(config.type)(config, dataset_meta=store.meta)
    learner.recall.fit(learner.paths)
    for p in learner.recall.adapter.parameters():
        torch.nn.init.normal_(p, std=0.05)
    before, _ = pipelines(config, store.meta)
    return learner.eval(), Batches(store, config, before, made, seed=3), before


def deployed(store, learner, before, episode: int) -> list:
    """What the memory says at each step of an episode, when the robot lives through it."""
    learner.reset()
    said = []
    for row in range(int(store.starts[episode]), int(store.ends[episode])):
        seen = {camera: store.pictures(camera, torch.tensor([row])) for camera in store.cameras}
        seen |= {name: column[row : row + 1] for name, column in store.columns.items() if name == OBS_STATE}
        learner.select_action(before(seen))
        said.append(learner._held)
    return said


@BOTH
@pytest.mark.parametrize("every", [1, 3])
def test_the_episode_scan_gives_the_memory_of_deployment(store, policy, every):
    learner, batches, before = ready(store, policy, **{"memory.update_every": every})
    episodes, times = batches.targets(0)
    batch, weight = next(iter(batches.at(0)))
    with torch.no_grad():
        _, readout = learner._scan_episodes(batch, {})
    assert weight == 1.0
    assert (episodes[:, None].expand_as(times) >= 0).all()
    said = {int(episode): deployed(store, learner, before, int(episode)) for episode in episodes}
    for place, (episode, t) in enumerate(zip(episodes.repeat_interleave(5), times.flatten(), strict=True)):
        now = said[int(episode)][int(t)]
        for name in ("slots", "z", "g", "dg", "alpha"):
            torch.testing.assert_close(getattr(readout, name)[place], getattr(now, name)[0], rtol=1e-4, atol=1e-5)
    different = said[int(episodes[0])]
    assert (different[0].z - different[-1].z).abs().max() > 1e-3  # not all the same, so equality means something


@BOTH
def test_loss_of_whole_episodes_is_that_of_a_budget_that_sees_every_frame(store, policy):
    learner, batches, _ = ready(store, policy, **{"memory.budget": 45, "memory.stride": 1})
    budget = copy.copy(batches)
    budget.whole = False
    episodes, times = batches.targets(0)
    budget.targets = lambda _: (episodes.repeat_interleave(5), times.flatten()[:, None])
    losses = []
    for each in (batches, budget):
        torch.manual_seed(1)  # diffusion's noise
        batch, _ = next(iter(each.at(0)))
        losses.append(learner(batch)[0])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)


@BOTH
def test_pieces_of_episodes_remember_what_came_before(store, policy):
    learner, whole, _ = ready(store, policy, borrowed=0.5)
    _, pieces, _ = ready(store, policy, borrowed=0.5, truncate=7)
    assert whole._lenders(0, 2).tolist() == [0, 0]  # one has the other's path, in every piece
    batch, _ = next(iter(whole.at(0)))
    with torch.no_grad():
        _, expected = learner._scan_episodes(batch, {})
    order, found, total = [], [], 0.0
    for part, weight in pieces.at(0):
        with torch.no_grad():
            stock, readout = learner._scan_episodes(part, {})
        total += weight
        if weight:
            order += [
                (int(r), tuple(x.flatten().tolist())) for r, x in zip(part[EPISODES].row, part["action"], strict=True)
            ]
            found.append(readout.z)
            assert stock["observation.state"].shape[0] == len(readout.z)
    assert total == pytest.approx(1.0)
    same = [(int(r), tuple(x.flatten().tolist())) for r, x in zip(batch[EPISODES].row, batch["action"], strict=True)]
    z = torch.cat(found)
    for place, key in enumerate(same):
        torch.testing.assert_close(z[order.index(key)], expected.z[place], rtol=1e-4, atol=1e-5)


def test_pieces_cut_the_gradient_and_the_whole_does_not(store):
    learner, whole, _ = ready(store, "act", targets=1)
    learner.train()

    def reach(batches) -> float:
        """Gradient that a target at the end of an episode sends to the first frame's pictures."""
        batches.targets = lambda _: (torch.tensor([0, 1]), torch.tensor([[39], [32]]))
        sent = 0.0
        for batch, weight in batches.at(0):
            first = batch[EPISODES].pictures[0]
            first.requires_grad_()
            loss = learner(batch)[0]
            (gradient,) = torch.autograd.grad(loss * weight, first, allow_unused=True)
            here = batch[EPISODES].written[0, 0]
            sent += 0.0 if gradient is None else float(gradient[here].abs().sum())
            break  # the piece with the first frame
        return sent

    _, pieces, _ = ready(store, "act", targets=1, truncate=7)
    assert reach(whole) > 0
    assert reach(pieces) == 0


def test_a_share_of_frames_teaches_what_all_teach(store):
    """Two complementary halves, each weighing double: their mean is the whole gradient."""
    learner, batches, _ = ready(store, "act")
    batch, _ = next(iter(batches.at(0)))
    now = batch[EPISODES]
    parameters = [p for backbone in learner.backbones for p in backbone.parameters()]

    def gradient(taught):
        now.taught, now.state = taught, None
        said = learner._scan_episodes(batch, {})[1]
        return torch.autograd.grad(said.z.pow(2).sum(), parameters, allow_unused=True)

    half = (torch.arange(len(now.states)) % 2).float() * 2
    seen = now.seen.flatten()
    halves = []
    for weight in (half, 2 - half):
        weight = weight.clone()
        weight[seen] = 1.0
        halves.append(gradient(weight))
    apart = []
    for a, b, full in zip(*halves, gradient(None), strict=True):
        if full is not None:
            apart.append(float((a - b).norm() / full.norm()))
            assert float(((a + b) / 2 - full).norm() / full.norm()) < 1e-4
    assert max(apart) > 1e-2


def test_the_lucky_share_is_weighed_by_its_chance(store):
    _, batches, _ = ready(store, "act", taught=0.25)
    torch.manual_seed(0)
    seen = torch.tensor([[3], [4]])
    drawn = torch.stack([batches._taught(torch.arange(40), seen) for _ in range(2000)])
    assert set(drawn.unique().tolist()) == {0.0, 1.0, 4.0}
    assert (drawn[:, [3, 4]] == 1).all()
    others = torch.cat([drawn[:, :3], drawn[:, 5:]], 1)
    torch.testing.assert_close(others.mean(), torch.tensor(1.0), rtol=0.03, atol=0.0)


def test_episodes_borrow_paths_and_nothing_else(store):
    """What is seen stays one's own; all of it, or a share, is addressed by the path of another episode of the batch."""
    (_, own, _), (_, other, _) = ready(store, "act"), ready(store, "act", borrowed=1.0)
    a, b = (next(iter(batches.at(0)))[0][EPISODES] for batches in (own, other))
    assert torch.equal(a.path, a.states[a.written])
    assert torch.equal(b.path, a.path.flip(0))
    assert torch.equal(a.states, b.states)
    assert torch.equal(a.written, b.written)
    _, some, _ = ready(store, "act", borrowed=0.3)
    borrow = torch.stack([some._lenders(step, 8) != torch.arange(8) for step in range(400)]).float()
    assert float(borrow.mean()) == pytest.approx(0.3, abs=0.03)
    assert some._lenders(0, 1).tolist() == [0]


def test_who_rests_rests_on_a_borrowed_way_too(store, monkeypatch):
    """A lender's way is walked at one's own pace, from its beginning to its end; where nobody gets on, nothing drives."""
    states = store.paths.states.clone()
    states[:, :3] = 0.1
    states[10:20] = states[10]
    states[10:20, :3] = 0.0
    monkeypatch.setattr(store.paths, "states", states)
    monkeypatch.setitem(store.columns, OBS_STATE, states)
    _, batches, _ = ready(store, "act", borrowed=1.0, walk="way", **{"memory.rates": [0, 1, 2]})
    shown = batches._shown(0, *batches.targets(0))
    mine = shown.episodes.tolist().index(0)
    frames = shown.walked[mine] - store.paths.starts[1]
    assert [float(frames[0]), float(frames[39])] == pytest.approx([0, 32])
    assert (frames[10:20] == frames[10]).all()
    assert (shown.pace[mine, 11:20] == 0).all()
    gets_on = torch.cat([frames[:11], frames[20:]]).diff()
    assert (gets_on > 0).all()  # who moves on the one way moves on the other
    assert (frames % 1 != 0).any()
    path = next(iter(batches.at(0)))[0][EPISODES].path[mine]
    assert (path[11:20, :3] == 0).all()
    torch.testing.assert_close(path[1:11, 0], 0.1 * frames[:11].diff().clamp_max(1).float())
    low, high = (shown.walked[mine].floor().long(), shown.walked[mine].ceil().long())
    between = states[low] + (frames % 1)[:, None].float() * (states[high] - states[low])
    torch.testing.assert_close(path[:, 3:], between[:, 3:])


def test_who_never_moves_borrows_a_beginning(store, monkeypatch):
    states = store.paths.states.clone()
    states[:40] = states[0]
    monkeypatch.setattr(store.paths, "states", states)
    monkeypatch.setitem(store.columns, OBS_STATE, states)
    _, batches, _ = ready(store, "act", borrowed=1.0, walk="way")
    shown = batches._shown(0, *batches.targets(0))
    still = shown.episodes.tolist().index(0)
    assert (shown.walked[still] == store.paths.starts[1]).all()
    assert (shown.walked[1 - still] == store.paths.starts[0]).all()


@pytest.fixture
def restful(store):
    """A store in which the robot of the first episode rests: at 10 Hz frames 5 to 19 have a second of rest after them."""
    action = store.columns[ACTION]
    store.columns[ACTION] = torch.arange(len(action)).float()[:, None].repeat(1, action.shape[1])
    store.columns[ACTION][5:30] = 5.0
    yield store
    store.columns[ACTION] = action


@pytest.mark.parametrize(("least", "most"), [(39, 47), (22, 29), (1, 1), (77, 93), (30, 400), (200, 2_000)])
def test_captured_scans_have_few_lengths_and_few_steps_that_only_fill_up(least, most):
    unit = padding(least, most)
    padded = {-(-steps // unit) * unit for steps in range(least, most + 1)}
    assert len(padded) <= 9
    assert unit <= max(8, (most - least) / 8 + 8)


def test_pauses_lengthen_rests_for_the_memory_and_nothing_else(restful):
    learner, batches, _ = ready(restful, "act", pauses=1.2, **{"memory.update_every": 3})
    longest, among = set(), set()
    for step in range(200):
        shown = batches._shown(step, *batches.targets(step))
        for e, episode in enumerate(shown.episodes.tolist()):
            frames = (shown.written[e] - restful.starts[episode])[shown.valid[e]]
            kinds, often = frames.unique_consecutive(return_counts=True)
            assert kinds.tolist() == list(range(0, int(restful.lengths[episode]), 3))
            assert kinds[often > 1].tolist() in ([], [3])  # where the rest begins, as far as the eye can tell
            assert int(often.max()) == 1 or episode == 0
            longest.add(int(often.max()))
            assert frames[shown.known[e]].tolist() == (shown.times[e] // 3 * 3).tolist()  # what a target has seen last
            among |= set(shown.known[e][shown.times[e] // 3 == 1].tolist()) if episode == 0 else set()
        assert shown.valid.shape[1] in batches.lengths()
    assert longest == {1, 2, 3, 4, 5}  # up to 1.2 s more, at 3 frames a step
    assert among == {1, 2, 3, 4, 5}
    batch, _ = next(iter(batches.at(0)))
    now = batch[EPISODES]
    with torch.no_grad():
        _, said = learner._scan_episodes(batch, {})
        state = learner.recall.memory.init(2)
        for step in range(now.written.shape[1]):  # the memory lives through what it was shown
            frame = now.written[:, step]
            content = learner.recall.content(learner._encode([x[frame] for x in now.pictures]), now.states[frame])
            state, readout = learner.recall.memory.step(state, content, now.path[:, step])
            for place in ((now.time == step).nonzero()[:, 0]).tolist():
                torch.testing.assert_close(said.z[place], readout.z[now.row[place]], rtol=1e-4, atol=1e-5)
    with pytest.raises(RecipeError, match=r"pauses: got 0\.01 s, which is nothing here: the memory looks every 3"):
        ready(restful, "act", pauses=0.01, **{"memory.update_every": 3})


def test_each_frame_is_encoded_once(store):
    learner, batches, _ = ready(store, "act")
    count = []
    learner.model.backbone.register_forward_hook(lambda _, given, __: count.append(len(given[0])))
    batch, _ = next(iter(batches.at(0)))
    learner(batch)
    assert sum(count) == 3 * (40 + 33)


def test_every_thing_has_its_turn_once_an_epoch():
    for count, size in ((10, 5), (10, 3), (2, 8), (7, 7)):
        for epoch in (0, 1):
            drawn = order_of(count, size, epoch, seed=1)
            assert drawn.shape == (-(-count // size), size)
            assert set(drawn.flatten().tolist()) == set(range(count))
    assert not torch.equal(order_of(100, 50, 0, seed=1), order_of(100, 50, 0, seed=2))
    assert not torch.equal(order_of(100, 50, 0, seed=1), order_of(100, 50, 1, seed=1))
    assert torch.equal(order_of(100, 50, 3, seed=1), order_of(100, 50, 3, seed=1))


def test_batches_do_not_depend_on_what_came_before(store):
    _, batches, _ = ready(store, "act")
    _, fresh, _ = ready(store, "act")
    walked = [batches.targets(step) for step in range(5)]
    for step in (4, 0, 2):
        for a, b in zip(walked[step], fresh.targets(step), strict=True):
            assert torch.equal(a, b)


def test_episodes_of_similar_length_come_together():
    lengths = torch.randint(100, 1000, (64,), generator=torch.Generator().manual_seed(0))

    def waste(given):
        return sum(int(lengths[each].max() * 8 - lengths[each].sum()) for each in order_of(64, 8, 0, 5, given))

    assert waste(lengths) < 0.4 * waste(None)


def test_times_are_uniform_and_apart():
    usable = torch.tensor([7, 400, 1])
    drawn = torch.stack([spread(usable, 4, torch.Generator().manual_seed(i)).long() for i in range(3000)])
    assert (drawn >= 0).all()
    assert (drawn < usable[:, None]).all()
    counts = drawn[:, 0].flatten().bincount(minlength=7) / drawn[:, 0].numel()
    torch.testing.assert_close(counts, torch.full((7,), 1 / 7), rtol=0, atol=0.01)
    assert (drawn[:, 1].diff(dim=1) > 0).all()


@pytest.mark.parametrize("truncate", [0, 7, 36])
def test_processes_share_a_batch(store, truncate):
    _, batches, before = ready(store, "act", truncate=truncate)
    alone = list(batches.at(4))
    parts = [list(Batches(store, batches.config, before, batches.recipe, 3, share, 2).at(4)) for share in (0, 1)]
    assert len(parts[0]) == len(parts[1]) == len(alone)  # one backward pass each, also when an episode is over
    for (batch, weight), *both in zip(alone, *parts, strict=True):
        assert weight == pytest.approx(sum(share for _, share in both) / 2)
        if weight:
            mine = torch.cat([part["action"] for part, share in both if share])
            assert sorted(mine.sum((1, 2)).tolist()) == pytest.approx(sorted(batch["action"].sum((1, 2)).tolist()))
    with pytest.raises(RecipeError, match="episodes: got 2, expected a multiple of the 3 processes"):
        Batches(store, batches.config, before, batches.recipe, 3, 0, 3)


@BOTH
def test_a_piece_without_targets_is_passed(store, policy):
    learner, batches, _ = ready(store, policy, truncate=36)
    batches.targets = lambda _: (torch.tensor([1, 0]), torch.tensor([[3], [5]]))
    pieces = list(batches.at(0))
    assert [weight for _, weight in pieces] == [1.0, 0.0]
    for batch, _ in pieces:  # the second begins after one of the episodes has ended
        assert torch.isfinite(learner(batch)[0])


def test_diffusion_that_looks_at_one_frame(store):
    learner, batches, _ = ready(store, "diffusion", **{"policy.n_obs_steps": 1})
    batch, _ = next(iter(batches.at(0)))
    assert torch.isfinite(learner(batch)[0])


def test_pictures_of_one_owner_are_changed_alike():
    torch.manual_seed(0)
    picture = torch.rand(1, 3, 16, 16).expand(6, -1, -1, -1)
    owner = torch.tensor([7, 7, 7, 2, 2, 9])
    change = Augment(shift=3, jitter=0.2)
    out = change(picture, owner, generator(1))
    assert torch.equal(change(picture, owner, generator(1)), out)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[3], out[4])
    assert not torch.equal(out[0], out[3])
    assert out.min() >= 0
    assert out.max() <= 1
    assert torch.equal(Augment(0, 0.0)(picture, owner, generator(1)), picture)
    moved = Augment(shift=3, jitter=0.0)(picture, owner, generator(1))
    for dy in range(-3, 4):
        for dx in range(-3, 4):
            rows, cols = (torch.arange(16) + dy).clamp(0, 15), (torch.arange(16) + dx).clamp(0, 15)
            if torch.equal(moved[0], picture[0][:, rows][:, :, cols]):
                return
    pytest.fail("not a shift")


@pytest.mark.parametrize("memory", ["trace", "none"])
def test_frames_before_which_the_robot_rests_are_drawn_less_often(restful, memory):
    _, batches, before = ready(restful, "act")
    asked = replace(batches.recipe, still=0.1, memory=memory, episodes=2, targets=8)
    drawn = Batches(restful, batches.config, before, asked, seed=3)
    counts = torch.zeros(2, 40)
    for step in range(600):
        episodes, times = drawn.targets(step)
        counts.index_put_((episodes[:, None].expand_as(times), times), torch.ones(times.shape), accumulate=True)
    share = counts[0] / counts[0, 20:].mean()  # the last second of an episode ends with its last action
    resting = torch.zeros(40, dtype=torch.bool)
    resting[5:20] = True
    torch.testing.assert_close(share[resting].mean(), torch.tensor(0.1), atol=0.03, rtol=0)
    torch.testing.assert_close(share[~resting & (torch.arange(40) < 39)].mean(), torch.tensor(1.0), atol=0.1, rtol=0)
    assert (counts[1, 33:] == 0).all()


@pytest.mark.parametrize("memory", ["trace", "none"])
def test_frames_with_which_the_robot_sets_off_after_a_rest_are_drawn_more_often(restful, memory):
    _, batches, before = ready(restful, "act")
    asked = replace(batches.recipe, still=0.5, starts=4.0, memory=memory, episodes=2, targets=8)
    drawn = Batches(restful, batches.config, before, asked, seed=3)
    mine = drawn.starts[: restful.paths.ends[0]]
    assert mine.nonzero()[:, 0].tolist() == list(range(28, 36))  # it moves from 30 on; the end begins with 36
    assert not drawn.starts[restful.paths.ends[0] :].any()  # nobody rests there
    counts = torch.zeros(2, 40)
    for step in range(600):
        episodes, times = drawn.targets(step)
        counts.index_put_((episodes[:, None].expand_as(times), times), torch.ones(times.shape), accumulate=True)
    share = counts[0] / counts[0, 20:28].mean()
    torch.testing.assert_close(share[5:20].mean(), torch.tensor(0.5), atol=0.1, rtol=0)
    torch.testing.assert_close(share[28:36].mean(), torch.tensor(4.0), atol=0.3, rtol=0)


@pytest.mark.parametrize("memory", ["trace", "none"])
def test_frames_that_the_policy_leaves_out_are_never_targets(store, memory):
    _, batches, before = ready(store, "diffusion", **{"policy.drop_n_last_frames": 7})
    dropped = batches.config.drop_n_last_frames
    assert dropped == 7
    drawn = Batches(store, batches.config, before, replace(batches.recipe, still=0.3, memory=memory), seed=3)
    seen = set()
    for step in range(200):
        episodes, times = drawn.targets(step)
        seen |= set(zip(episodes[:, None].expand_as(times).flatten().tolist(), times.flatten().tolist(), strict=True))
    assert seen == {(e, t) for e in (0, 1) for t in range(int(store.lengths[e]) - dropped)}


@pytest.mark.parametrize("memory", ["trace", "none"])
def test_frames_before_a_choice_that_nothing_shows_need_not_teach_the_encoder(store, memory, tmp_path):
    _, batches, before = ready(store, "act")
    ahead = max(batches.config.action_delta_indices)
    (tmp_path / "meta").mkdir()
    sheet, root = tmp_path / "meta" / "trace_bench.jsonl", store.meta.root
    lamps = [[(ahead + 2, ahead + 16)], [(3, 12), (30, 60)]]  # lit, decided
    lines = [json.dumps({"decisions": [{"frame": lit, "step": step} for lit, step in each]}) for each in lamps]
    asked = replace(batches.recipe, branches=0.0, memory=memory, episodes=2, targets=8)
    try:
        store.meta.root = tmp_path
        with pytest.raises(RecipeError, match="tells of 0 episodes, expected 2"):
            Batches(store, batches.config, before, asked, seed=3)
        sheet.write_text("\n".join(lines) + "\n")
        drawn = Batches(store, batches.config, before, asked, seed=3)
    finally:
        store.meta.root = root
    seen = set()
    for step in range(300):
        episodes, times = drawn.targets(step)
        seen |= set(zip(episodes[:, None].expand_as(times).flatten().tolist(), times.flatten().tolist(), strict=True))
    hidden = [{t for lit, step in each for t in range(lit - ahead, step - 5)} for each in lamps]  # at 10 Hz
    every = {(e, t) for e in (0, 1) for t in range(int(store.lengths[e]))}
    shown = {(e, t) for e, t in every if t not in hidden[e]}
    assert seen == (shown if memory == "none" else every)
    if memory != "none":  # they are learnt from, and teach the encoder nothing
        first = store.starts.tolist()
        rows = torch.tensor([first[e] + t for e, t in sorted(every)])
        taught = drawn._taught(rows, torch.arange(len(rows)))
        assert taught.tolist() == [float(each in shown) for each in sorted(every)]
        drawn.recipe = replace(asked, branches=0.5, taught=0.25)
        weights = drawn._taught(rows, rows[:1])  # but for one, no frame is looked at
        unseen = torch.tensor([each not in shown for each in sorted(every)])
        assert set(weights[1:][unseen[1:]].tolist()) == {0.0, 2.0}
        assert set(weights[1:][~unseen[1:]].tolist()) == {0.0, 4.0}
    with pytest.raises(RecipeError, match=r"branches: got 2.0, expected 0 to 1"):
        replace(batches.recipe, branches=2.0)
    for change in ({"backbone": "frozen"}, {"scan": "budget", "memory": "trace"}):  # nothing to teach; not told where
        with pytest.raises(RecipeError, match=r"branches: got 0.5 with backbone=\w+ and scan=\w+, expected 1"):
            replace(batches.recipe, branches=0.5, **change)
