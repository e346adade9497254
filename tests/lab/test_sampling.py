"""Sampling: every frame its turn, the same after a restart; whole episodes give the memory that deployment gives."""

from dataclasses import replace

import pytest
import torch
from lerobot.policies.factory import get_policy_class
from lerobot.utils.constants import ACTION, OBS_STATE

from lerobot_policy_trace import EpisodeBatch
from lerobot_policy_trace.paths import Paths
from trace_errors import UsageError
from trace_lab.frames import open_dataset, open_frames
from trace_lab.policy import configuration, pipelines
from trace_lab.recipe import recipe
from trace_lab.sampling import Batches, Jitter, PathSwap, arc_lengths, generator, order_of, padding, spread

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
    paths = whole.paths
    return replace(whole, paths=Paths(paths.states, paths.starts, paths.starts + torch.tensor([40, 33]), paths.index))


def sampled(store, policy: str = "act", memory: str = "trace", **changes) -> Batches:
    """Batches of a store."""
    small = SMALL[policy] | {"episodes": 2, "targets": 5, "path_swap": 0.0}
    made = recipe("tiny", policy, memory, small | changes)
    config = configuration(made, store.meta, "cpu")
    return Batches(store, config, pipelines(config, store.meta)[0], made, seed=3)


def learner_for(batches: Batches):
    """A policy as after some training: nothing in it is zero any more."""
    torch.manual_seed(0)
    learner = get_policy_class(batches.config.type)(batches.config, dataset_meta=batches.store.meta)
    if learner.memory_head is not None:
        learner.memory_head.fit(learner.paths)
        for name, p in learner.named_parameters():
            if "memory_head.adapter" in name or "memory_encoder" in name:
                torch.nn.init.normal_(p, std=0.05)
    return learner.eval()


def readouts(learner, batch: EpisodeBatch):
    """Of every target of a batch, as the loss gets them."""
    with torch.no_grad():
        return learner._whole(batch, {}).readout


def deployed(store, learner, before, episode: int) -> list:
    """What the memory says at each step of an episode, when the robot lives through it."""
    learner.reset()
    said = []
    for row in range(int(store.starts[episode]), int(store.ends[episode])):
        seen = {camera: store.pictures(camera, torch.tensor([row])) for camera in store.cameras}
        seen |= {name: column[row : row + 1] for name, column in store.columns.items() if name == OBS_STATE}
        learner.select_action(before(seen))
        said.append(learner.readout)
    return said


# -- whole episodes --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("period", [1, 3])
def test_the_episode_scan_gives_the_memory_of_deployment(store, policy, period):
    batches = sampled(store, policy, **{"memory.period": period})
    learner = learner_for(batches)
    episodes, times = batches.targets(0)
    readout = readouts(learner, batches.at(0))
    assert (times >= 0).all()
    said = {int(episode): deployed(store, learner, batches.prepare, int(episode)) for episode in episodes}
    for place, (episode, t) in enumerate(zip(episodes.repeat_interleave(5), times.flatten(), strict=True)):
        now = said[int(episode)][int(t)]
        for name in ("slots", "z", "g", "dg", "alpha"):
            torch.testing.assert_close(getattr(readout, name)[place], getattr(now, name)[0], rtol=1e-4, atol=1e-5)
    different = said[int(episodes[0])]
    assert (different[0].z - different[-1].z).abs().max() > 1e-3  # not all the same, so equality means something


@BOTH
def test_loss_of_whole_episodes_is_that_of_a_budget_that_sees_every_frame(store, policy):
    seen = {"memory.history_frames": 45, "memory.history_stride": 1, "memory.paper.depth": 2}
    whole = sampled(store, policy, "paper", **seen)
    budget = sampled(store, policy, "paper", scan="budget", **seen)
    learner = learner_for(whole)
    episodes, times = whole.targets(0)
    budget.targets = lambda _: (episodes.repeat_interleave(5), times.flatten()[:, None])
    losses = []
    for each in (whole, budget):
        torch.manual_seed(1)  # diffusion's noise
        losses.append(learner(each.at(0))[1])
    for name in losses[0].keys() - {"memory_balance", "memory_entropy", "memory_consistency"}:  # these are of all steps
        torch.testing.assert_close(float(losses[0][name]), losses[1][name], rtol=1e-4, atol=1e-6)
    assert losses[0].keys() == losses[1].keys()


@BOTH
def test_without_a_memory_the_loss_is_that_of_lerobots_batch(store, policy):
    """The same frames, in the same light, whichever way they come."""
    pieces = sampled(store, policy, "none", jitter=0.2)
    stock = sampled(store, policy, "none", jitter=0.2, scan="budget")
    learner = learner_for(pieces)
    batch = pieces.at(0)
    assert isinstance(batch, EpisodeBatch)
    assert batch.memory is None
    assert isinstance(stock.at(0), dict)
    losses = []
    for each in (batch, stock.at(0)):
        torch.manual_seed(1)
        losses.append(learner(each)[0])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


@BOTH
def test_each_frame_comes_once(store, policy):
    batch = sampled(store, policy).at(0)
    assert [len(each) for each in batch.frames] == [40 + 33] * 3
    assert len(batch.memory.states) == 40 + 33
    assert not batch.encoded
    sparse = sampled(store, policy, **{"memory.period": 10}).at(0)
    assert sparse.memory.written.shape == (2, 4)
    used = torch.cat([sparse.seen.flatten(), sparse.memory.written.flatten()]).unique()
    assert used.tolist() == list(range(len(sparse.frames[0])))  # and none that nobody needs


def test_a_batch_is_a_function_of_the_update(store):
    """Nothing depends on what was asked for before, and nobody changes a batch."""
    batches, fresh = (sampled(store, path_swap=0.5, jitter=0.1) for _ in range(2))
    walked = [batches.at(step) for step in range(5)]
    learner_for(batches)(walked[0])
    for step in (4, 0, 2):
        again = fresh.at(step)
        for name in ("frames", "seen", "actions", "action_is_pad"):
            for a, b in zip(getattr(walked[step], name), getattr(again, name), strict=True):
                assert torch.equal(a, b)
        for name in ("states", "written", "path", "valid", "row", "time"):
            assert torch.equal(getattr(walked[step].memory, name), getattr(again.memory, name))


def test_diffusion_that_sees_one_frame(store):
    batches = sampled(store, "diffusion", **{"policy.n_obs_steps": 1})
    assert torch.isfinite(learner_for(batches)(batches.at(0))[0])


def test_processes_share_a_batch(store):
    whole = sampled(store, path_swap=0.5)
    parts = [
        Batches(store, whole.config, whole.prepare, whole.recipe, 3, share=share, shares=2).at(4) for share in (0, 1)
    ]
    alone = whole.at(4)
    mine = torch.cat([part.actions for part in parts])
    assert sorted(mine.sum((1, 2)).tolist()) == pytest.approx(sorted(alone.actions.sum((1, 2)).tolist()))
    for share, part in enumerate(parts):  # whose path it is is drawn for all
        steps = int(part.memory.valid.sum())
        assert torch.equal(part.memory.path[0, :steps], alone.memory.path[share, :steps])
    with pytest.raises(UsageError, match="episodes: got 2, expected a multiple of the 3 processes"):
        Batches(store, whole.config, whole.prepare, whole.recipe, 3, shares=3)


# -- another's path --------------------------------------------------------------------------------------------------------


def moving(store, rest: slice | None = None):
    """The store with made-up velocities, and a rest in the first episode."""
    states = store.paths.states.clone()
    states[:, :3] = 0.1
    if rest is not None:
        states[rest] = states[rest.start]
        states[rest, :3] = 0.0
    paths = Paths(states, store.paths.starts, store.paths.ends, store.paths.index)
    return replace(store, paths=paths, columns=store.columns | {OBS_STATE: states})


def test_a_swapped_path_is_another_ones_and_nothing_else_changes(store):
    """What is seen stays one's own; all of it, or a share, is addressed by the path of another episode of the batch."""
    own, other = sampled(store), sampled(store, path_swap=1.0)
    a, b = own.at(0), other.at(0)
    assert torch.equal(a.memory.path, a.memory.states[a.memory.written])
    assert not torch.equal(a.memory.path, b.memory.path)
    assert torch.equal(a.memory.states, b.memory.states)
    assert torch.equal(a.memory.written, b.memory.written)
    assert all(torch.equal(x, y) for x, y in zip(a.frames, b.frames, strict=True))
    ends = store.paths.states[store.paths.ends - 1]
    for row, steps in enumerate(b.memory.valid.sum(1).tolist()):  # it goes all of the other's way
        episode = other.targets(0)[0].tolist()[row]
        torch.testing.assert_close(b.memory.path[row, steps - 1, 3:], ends[1 - episode, 3:])
    some, eight = sampled(store, path_swap=0.3), torch.arange(8)
    swapped = torch.stack([some.path_owners(step, eight) != eight for step in range(400)]).float()
    assert float(swapped.mean()) == pytest.approx(0.3, abs=0.03)
    assert some.path_owners(0, torch.tensor([5])).tolist() == [5]


def test_who_rests_rests_on_a_swapped_path_too(store):
    """Another's path is followed at one's own pace, from its beginning to its end; at rest velocities are zero there."""
    rested = moving(store, slice(10, 20))
    states, paths = rested.paths.states, rested.paths
    assert sampled(rested).config.memory.velocity_channels == [0, 1, 2]  # told by the dataset's names
    swap = PathSwap(paths, [0, 1, 2], period=1)
    written = torch.arange(40)
    frames = swap.places(written, 0, 1) - paths.starts[1]
    assert [float(frames[0]), float(frames[39])] == pytest.approx([0, 32])
    assert (frames[10:20] == frames[10]).all()
    gets_on = torch.cat([frames[:11], frames[20:]]).diff()
    assert (gets_on > 0).all()  # who moves on the one path moves on the other
    assert (frames % 1 != 0).any()
    path = swap.path(written, 0, 1)
    assert (path[11:20, :3] == 0).all()
    torch.testing.assert_close(path[1:11, 0], 0.1 * frames[:11].diff().clamp_max(1).float())
    places = frames + paths.starts[1]
    low, high = places.floor().long(), places.ceil().long()
    between = states[low] + (frames % 1)[:, None].float() * (states[high] - states[low])
    torch.testing.assert_close(path[:, 3:], between[:, 3:])
    drawn = sampled(rested, path_swap=1.0)
    mine = drawn.targets(0)[0].tolist().index(0)
    torch.testing.assert_close(drawn.at(0).memory.path[mine, :40], path)


def test_who_never_moves_stays_at_the_beginning_of_a_swapped_path(store):
    still = moving(store, slice(0, 40)).paths
    swap = PathSwap(still, [0, 1, 2], period=1)
    assert (swap.places(torch.arange(40), 0, 1) == still.starts[1]).all()
    towards = swap.places(torch.arange(int(still.starts[1]), int(still.ends[1])), 1, 0)
    assert (towards == still.starts[0]).all()


def test_arc_length_counts_velocities_by_value_and_places_by_change():
    states = torch.tensor([[0.0, 5.0], [0.0, 5.0], [1.0, 5.0], [0.0, 9.0], [2.0, 9.0], [2.0, 9.0]])
    paths = Paths(states, torch.tensor([0, 3]), torch.tensor([3, 6]))
    std = states.std(0).tolist()
    gone = arc_lengths(paths, [])
    assert gone.tolist() == pytest.approx([0, 0, 1 / std[0], 0, 2 / std[0], 2 / std[0]])
    gone = arc_lengths(paths, [0])
    assert gone.tolist() == pytest.approx([0, 0, 1 / std[0], 0, 2 / std[0], 4 / std[0]])


# -- whose turn it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "most"), [(39, 47), (22, 29), (1, 1), (77, 93), (30, 400), (200, 2_000)])
def test_captured_scans_have_few_lengths_and_few_steps_that_only_fill_up(least, most):
    unit = padding(least, most)
    padded = {-(-steps // unit) * unit for steps in range(least, most + 1)}
    assert len(padded) <= 9
    assert unit <= max(8, (most - least) / 8 + 8)


def test_batches_have_the_lengths_that_were_announced(store):
    batches = sampled(store, **{"memory.period": 3})
    batches.pad = 8
    assert {batches.at(step).memory.valid.shape[1] for step in range(6)} <= set(batches.lengths())
    assert batches.at(0).memory.valid.sum(1).sort().values.tolist() == [11, 14]


def test_every_thing_has_its_turn_once_an_epoch():
    for count, size in ((10, 5), (10, 3), (2, 8), (7, 7)):
        for epoch in (0, 1):
            drawn = order_of(count, size, epoch, seed=1)
            assert drawn.shape == (-(-count // size), size)
            assert set(drawn.flatten().tolist()) == set(range(count))
    assert not torch.equal(order_of(100, 50, 0, seed=1), order_of(100, 50, 0, seed=2))
    assert not torch.equal(order_of(100, 50, 0, seed=1), order_of(100, 50, 1, seed=1))
    assert torch.equal(order_of(100, 50, 3, seed=1), order_of(100, 50, 3, seed=1))


def test_episodes_of_similar_length_come_together():
    lengths = torch.randint(100, 1000, (64,), generator=torch.Generator().manual_seed(0))

    def waste(given):
        return sum(int(lengths[each].max() * 8 - lengths[each].sum()) for each in order_of(64, 8, 0, 5, given))

    assert waste(lengths) < 0.4 * waste(None)
    assert set(order_of(64, 8, 0, 5, lengths).flatten().tolist()) == set(range(64))


def test_times_are_uniform_and_apart():
    usable = torch.tensor([7, 400, 1])
    drawn = torch.stack([spread(usable, 4, torch.Generator().manual_seed(i)).long() for i in range(3000)])
    assert (drawn >= 0).all()
    assert (drawn < usable[:, None]).all()
    counts = drawn[:, 0].flatten().bincount(minlength=7) / drawn[:, 0].numel()
    torch.testing.assert_close(counts, torch.full((7,), 1 / 7), rtol=0, atol=0.01)
    assert (drawn[:, 1].diff(dim=1) > 0).all()


def counted(batches: Batches, steps: int) -> torch.Tensor:
    """How often each frame of two episodes was a target."""
    counts = torch.zeros(2, 40)
    for step in range(steps):
        episodes, times = batches.targets(step)
        counts.index_put_((episodes[:, None].expand_as(times), times), torch.ones(times.shape), accumulate=True)
    return counts


@pytest.mark.parametrize("memory", ["trace", "none"])
def test_frames_before_which_the_robot_rests_are_drawn_less_often(store, memory):
    """At 10 Hz frames 5 to 19 of the first episode have a second of rest after them."""
    action = torch.arange(len(store.columns[ACTION])).float()[:, None].repeat(1, 17)
    action[5:30] = 5.0
    restful = replace(store, columns=store.columns | {ACTION: action})
    counts = counted(sampled(restful, memory=memory, rest_weight=0.1, targets=8), 600)
    share = counts[0] / counts[0, 20:].mean()  # the last second of an episode ends with its last action
    resting = torch.zeros(40, dtype=torch.bool)
    resting[5:20] = True
    torch.testing.assert_close(share[resting].mean(), torch.tensor(0.1), atol=0.03, rtol=0)
    torch.testing.assert_close(share[~resting & (torch.arange(40) < 39)].mean(), torch.tensor(1.0), atol=0.1, rtol=0)
    assert (counts[1, 33:] == 0).all()


@pytest.mark.parametrize("memory", ["trace", "none"])
def test_frames_that_the_policy_leaves_out_are_never_targets(store, memory):
    drawn = sampled(store, "diffusion", memory, rest_weight=0.3, **{"policy.drop_n_last_frames": 7})
    assert drawn.config.drop_n_last_frames == 7
    counts = counted(drawn, 200)
    seen = {(e, t) for e, t in counts.nonzero().tolist()}
    assert seen == {(e, t) for e in (0, 1) for t in range(int(store.lengths[e]) - 7)}


# -- light -----------------------------------------------------------------------------------------------------------------


def test_pictures_of_one_owner_are_changed_alike():
    torch.manual_seed(0)
    picture = torch.rand(1, 3, 16, 16).expand(6, -1, -1, -1)
    owner = torch.tensor([7, 7, 7, 2, 2, 9])
    change = Jitter(0.2)
    out = change(picture, owner, generator(1))
    assert torch.equal(change(picture, owner, generator(1)), out)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[3], out[4])
    assert not torch.equal(out[0], out[3])
    assert out.min() >= 0
    assert out.max() <= 1
    assert torch.equal(Jitter(0.0)(picture, owner, generator(1)), picture)
