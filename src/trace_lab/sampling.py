"""What an update learns from: which episodes, which times of each, and the batch made of them; and what is changed in it at
random: the light of pictures (`Jitter`) and the path that addresses a memory (`PathSwap`). Everything is a function of the
seed and the update's number, so a training that was stopped goes on with the very batches it would have had.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor

from lerobot_policy_trace import EpisodeBatch
from lerobot_policy_trace.episodes import MemoryInputs
from lerobot_policy_trace.paths import Paths
from trace_errors import UsageError
from trace_lab.frames import FrameStore
from trace_lab.recipe import Recipe

UNIT, SHAPES = 8, 8  # captured scans have lengths that are multiples of the first, about as many as the second
TINY = 1e-9  # an arc length that is none
STILL = 0.05  # standard deviations of an action that count as no movement
POOL = 8  # batches whose episodes are sorted by length together, so that a batch holds episodes of similar length
TIMES, LIGHT, SWAP = 1, 3, 6  # streams of random numbers, apart from each other

MapLookup = Callable[[str, Tensor, Tensor, torch.Generator], Tensor]  # camera, rows, owners, draw -> maps


def generator(*numbers: int) -> torch.Generator:
    """A source of randomness for exactly these numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number + 1442695040888963407) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


def order_of(count: int, size: int, epoch: int, seed: int, lengths: Tensor | None = None) -> Tensor:
    """(rounds, size) of `count` things for an epoch: every one once, the last row filled from the front. With lengths,
    things of similar length come together.
    """
    rounds, draw = -(-count // size), generator(seed, epoch)
    order = torch.randperm(count, generator=draw)
    order = torch.cat([order] * -(-rounds * size // count))[: rounds * size]
    if lengths is not None:
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(POOL * size)]
        return torch.cat(pools).view(rounds, size)[torch.randperm(rounds, generator=draw)]
    return order.view(rounds, size)


def padding(least: int, most: int) -> int:
    """Steps to whose multiples lengths between these are padded: few lengths, and few steps that only fill up."""
    return UNIT * max(1, -(-(most - least) // (UNIT * SHAPES)))


def spread(weight: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """(E, count) places within (E,) weights, well apart: one from each of `count` equal parts."""
    u = torch.rand(len(weight), count, generator=draw, dtype=torch.float64)
    return (torch.arange(count) + u) / count * weight[:, None]


def resting(store: FrameStore) -> Tensor:
    """(N,) on the CPU: whether the robot is told to stay where it is for the second after each frame of a store."""
    ends = store.paths.ends
    action = store.columns[ACTION][: ends[-1]].cpu()
    now, near, still = torch.arange(len(action)), STILL * action.std(0), torch.ones(len(action), dtype=torch.bool)
    last = ends[store.episode_of(now)] - 1
    for later in range(1, round(store.meta.fps) + 1):
        still &= ((action[torch.minimum(now + later, last)] - action).abs() <= near).all(1)
    return still


class Jitter:
    """Changes brightness and contrast, alike in all pictures that have the same owner."""

    def __init__(self, share: float):
        self.share = share

    def __call__(self, pictures: Tensor, owner: Tensor, draw: torch.Generator) -> Tensor:
        """(N, ..., 3, H, W) in [0, 1] of (N,) owners, any numbers; the same draw changes the same owners alike."""
        if not self.share:
            return pictures
        kinds, of = owner.cpu().unique(return_inverse=True)
        change = ((torch.rand(2, len(kinds), generator=draw) * 2 - 1) * self.share)[:, of]
        gain, light = change.to(pictures.device, non_blocking=True).view(2, -1, *[1] * (pictures.ndim - 1))
        return ((pictures - 0.5) * (1 + gain) + 0.5 + light).clamp(0, 1)


def arc_lengths(paths: Paths, velocity_channels: Sequence[int]) -> Tensor:
    """(N,) float64: how far the robot has gone since its episode began, in standard deviations of the states. Channels that
    are velocities count by their value, the others by their change.
    """
    std = paths.states.std(0)
    states = torch.where(std > 1e-6, paths.states / std, 0.0).double()
    steps, velocities = states.diff(dim=0, prepend=states[:1]), list(velocity_channels)
    steps[:, velocities] = states[:, velocities]
    steps[paths.starts] = 0.0
    gone = torch.linalg.vector_norm(steps, dim=1).cumsum(0)
    frame = torch.arange(len(gone))
    return gone - gone[paths.starts[torch.searchsorted(paths.starts, frame, right=True) - 1]]


class PathSwap:
    """The path of one episode, followed as another one is made: as far along its arc length as that one is along its own.
    Who rests on the one path rests on the other, or a memory whose writes scale with the arc length could tell the time.
    """

    def __init__(self, paths: Paths, velocity_channels: Sequence[int], period: int):
        self.paths, self.period, self.arc = paths, period, arc_lengths(paths, velocity_channels)
        channels = torch.arange(paths.states.shape[1])
        self.velocity = torch.isin(channels, torch.tensor(list(velocity_channels), dtype=torch.int64))  # (d,) bool

    def places(self, written: Tensor, own: int, other: int) -> Tensor:
        """(T,) float64: for steps that are frames (T,) of one episode, where they are on the other's path, between rows."""
        starts, ends = self.paths.starts, self.paths.ends
        theirs = self.arc[starts[other] : ends[other]]
        gone = self.arc[written] / self.arc[ends[own] - 1].clamp_min(TINY) * theirs[-1]
        after = torch.searchsorted(theirs, gone).clamp_max(len(theirs) - 1)
        before = (after - 1).clamp_min(0)
        part = (gone - theirs[before]) / (theirs[after] - theirs[before]).clamp_min(TINY)
        return starts[other] + before + part

    def path(self, written: Tensor, own: int, other: int) -> Tensor:
        """(T, d): states on the other's path. Velocities are as many times slower as the robot gets on slower there."""
        states, places = self.paths.states, self.places(written, own, other)
        row, part = places.long(), places.frac().to(states.dtype)
        path = torch.lerp(states[row], states[(row + 1).clamp_max(len(states) - 1)], part[:, None])
        speed = (places.diff(prepend=places[:1] - self.period) / self.period).clamp_max(1.0).to(states.dtype)
        return torch.where(self.velocity, path * speed[:, None], path)


class Batches:
    """Batches of a store for one policy.

    Args:
        store: the frames.
        config: the policy's configuration.
        prepare: its preprocessor.
        made: the recipe.
        seed: of everything drawn.
        share: which part of each batch is ours, of `shares` (several GPUs).
        maps: feature maps in place of pictures, where the encoder is not trained.
    """

    def __init__(
        self,
        store: FrameStore,
        config: Any,
        prepare: Any,
        made: Recipe,
        seed: int,
        *,
        share: int = 0,
        shares: int = 1,
        maps: MapLookup | None = None,
    ):
        if made.episodes % shares:
            raise UsageError(f"episodes: got {made.episodes}, expected a multiple of the {shares} processes")
        self.store, self.config, self.prepare, self.recipe, self.seed = store, config, prepare, made, seed
        self.share, self.shares, self.maps, self.jitter = share, shares, maps, Jitter(made.jitter)
        self.whole = made.scan == "episode" and made.memory != "none"
        self.period = int(config.memory.period)
        self.swap = PathSwap(store.paths, config.memory.velocity_channels, self.period)
        self.usable = (store.lengths - int(getattr(config, "drop_n_last_frames", 0))).clamp_min(1)
        self.weight = self._weights().cumsum(0)  # (N,): frames are drawn by these
        self._order: tuple[int, Tensor] | None = None  # of the epoch that was asked for last
        self.steps = -(-store.lengths // self.period)  # (E,): steps of the memory for each episode
        self.pad = 1
        if store.device.type == "cuda":  # scans are captured: there must be few lengths
            self.pad = padding(int(self.steps.min()), int(self.steps.max()))

    def at(self, step: int) -> EpisodeBatch | dict[str, Any]:
        """The batch of an update: LeRobot's own for the paper's budget scan, pieces of episodes otherwise."""
        episodes, times = self.targets(step)
        others = self.path_owners(step, episodes)
        mine = [x[self.share :: self.shares] for x in (episodes, times, others)]
        return self._stock(step, *mine[:2]) if self.recipe.scan == "budget" else self._episodes(step, *mine)

    # -- which frames --------------------------------------------------------------------------------------------------

    def targets(self, step: int) -> tuple[Tensor, Tensor]:
        """(E,) episodes and (E, n) times of each; where frames come by themselves, (N,) and (N, 1). Of all processes, on
        the CPU.
        """
        made, paths, draw = self.recipe, self.store.paths, generator(self.seed, step, TIMES)
        after = self.weight[paths.ends - 1]
        own = after.diff(prepend=after.new_zeros(1))  # weights of whole episodes
        if self.whole:
            episodes = self._turn(len(after), made.episodes, step, self.store.lengths)
            places = (after - own)[episodes][:, None] + spread(own[episodes], made.targets, draw)
        else:
            count = math.ceil(after[-1])
            turn = self._turn(count, made.batch, step)
            within = torch.rand(len(turn), 1, generator=draw, dtype=torch.float64)
            places = (turn[:, None] + within) * (after[-1] / count)
            episodes = torch.searchsorted(after, places[:, 0], right=True).clamp_max(len(after) - 1)
        frames = torch.searchsorted(self.weight, places, right=True)
        times = frames - paths.starts[episodes][:, None]
        return episodes, times.minimum(self.usable[episodes][:, None] - 1)

    def path_owners(self, step: int, episodes: Tensor) -> Tensor:
        """(E,): whose path addresses the memory of each of these episodes: its own, or that of another of them."""
        draw, count = generator(self.seed, step, SWAP), len(episodes)
        swapped = torch.rand(count, generator=draw) < self.recipe.path_swap
        other = (torch.arange(count) + torch.randint(1, max(2, count), (count,), generator=draw)) % count
        return torch.where(swapped, episodes[other], episodes)

    def lengths(self) -> list[int]:
        """Lengths to which scans of whole episodes are padded."""
        return sorted(set(self._padded(self.steps).tolist()))

    def _padded(self, steps: Tensor) -> Tensor:
        """Steps of the memory with those that only fill up."""
        return -(-steps // self.pad) * self.pad

    def _weights(self) -> Tensor:
        """(N,): how often each frame is a target; none of those at an episode's end that the policy leaves out."""
        paths = self.store.paths
        frame = torch.arange(int(paths.ends[-1]))
        owner = self.store.episode_of(frame)
        weight = ((frame >= paths.starts[owner]) & (frame < (paths.starts + self.usable)[owner])).double()
        return weight * torch.where(resting(self.store), self.recipe.rest_weight, 1.0)

    def _turn(self, count: int, size: int, step: int, lengths: Tensor | None = None) -> Tensor:
        """(size,) of `count` things, whose turn it is."""
        epoch, place = divmod(step, -(-count // size))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, order_of(count, size, epoch, self.seed, lengths)
        return self._order[1][place]

    # -- the batch of them ---------------------------------------------------------------------------------------------

    def _episodes(self, step: int, episodes: Tensor, times: Tensor, others: Tensor) -> EpisodeBatch:
        """Every frame that the memory takes in or the policy looks at, once; without a memory, the policy's alone."""
        store, first = self.store, self.store.paths.starts[episodes]
        target, begin = (first[:, None] + times).flatten(), first.repeat_interleave(times.shape[1])
        past = torch.arange(1 - int(self.config.n_obs_steps), 1)
        seen = torch.maximum(target[:, None] + past, begin[:, None])  # (N, s)
        memory: MemoryInputs | None = None
        if self.whole:
            written, valid = self._written(episodes)
            rows, where = torch.cat([written.flatten(), seen.flatten()]).unique(return_inverse=True)
            owner, where_seen = store.episode_of(rows), where[written.numel() :].view(seen.shape)
            memory = MemoryInputs(
                states=store.columns[OBS_STATE][self._there(rows)],
                written=self._there(where[: written.numel()].view(written.shape)),
                path=self._there(self._path(written, episodes, others)),
                valid=self._there(valid),
                row=self._there(torch.arange(len(episodes)).repeat_interleave(times.shape[1])),
                time=self._there((times // self.period).flatten()),
            )
        else:  # the light of a picture changes with the target that it is for, so none is shared
            rows, owner = seen.flatten(), torch.arange(len(seen)).repeat_interleave(seen.shape[1])
            where_seen = torch.arange(len(rows)).view(seen.shape)
        batch = self._numbers(target, seen, store.episode_of(target))
        frames = self._frames(step, rows, owner)
        encoded = self.maps is not None
        batch = self.prepare(batch if encoded else batch | frames)
        return EpisodeBatch(
            frames=tuple((frames if encoded else batch)[camera] for camera in store.cameras),
            encoded=encoded,
            seen=self._there(where_seen),
            inputs={name: batch[name] for name in store.columns if name != ACTION},
            actions=batch[ACTION],
            action_is_pad=batch[f"{ACTION}_is_pad"],
            memory=memory,
        )

    def _written(self, episodes: Tensor) -> tuple[Tensor, Tensor]:
        """(E, T) rows that the memory takes in, one a period, and whether the episode goes on so long."""
        count = self.steps[episodes][:, None]
        step = torch.arange(int(self._padded(count).max()))
        last = self.store.lengths[episodes][:, None] - 1
        return self.store.paths.starts[episodes][:, None] + (self.period * step).minimum(last), step < count

    def _path(self, written: Tensor, episodes: Tensor, others: Tensor) -> Tensor:
        """(E, T, d): the states that address what is written."""
        path = self.store.paths.states[written]
        for row, (own, other) in enumerate(zip(episodes.tolist(), others.tolist(), strict=True)):
            if own != other:
                path[row] = self.swap.path(written[row], own, other)
        return path

    def _frames(self, step: int, rows: Tensor, owner: Tensor) -> dict[str, Tensor]:
        """Pictures of these frames, or the maps that stand for them; in the same light for what has the same owner."""
        frames, rows = {}, self._there(rows)
        for number, camera in enumerate(self.store.cameras):
            draw = generator(self.seed, step, self.share, number, LIGHT)
            if self.maps is not None:
                frames[camera] = self.maps(camera, rows, owner, draw)
            else:
                frames[camera] = self.jitter(self.store.pictures(camera, rows), owner, draw)
        return frames

    def _numbers(self, target: Tensor, seen: Tensor, episodes: Tensor) -> dict[str, Tensor]:
        """Actions of targets, and what a policy gets beside pictures: ACT of the present frame, Diffusion of all it sees."""
        target, seen, episodes = self._there(target), self._there(seen), self._there(episodes)
        at = seen if self.recipe.policy == "diffusion" else target
        batch = {name: column[at] for name, column in self.store.columns.items() if name != ACTION}
        at, outside = self.store.reach(target, episodes, self.config.action_delta_indices)
        return batch | {ACTION: self.store.columns[ACTION][at], f"{ACTION}_is_pad": outside}

    def _stock(self, step: int, episodes: Tensor, times: Tensor) -> dict[str, Any]:
        """LeRobot's batch of single frames, with the history that the budget scan takes."""
        rows = self.store.paths.starts[episodes] + times[:, 0]
        batch = self.store.sample(self._there(rows), self._there(episodes), self.config)
        for number, camera in enumerate(self.store.cameras):
            draw = generator(self.seed, step, self.share, number, LIGHT)
            batch[camera] = self.jitter(batch[camera], torch.arange(len(rows)), draw)
        return dict(self.prepare(batch))

    def _there(self, x: Tensor) -> Tensor:
        """On the store's device. Indices are worked out on the CPU: to ask a GPU for them is to wait until it is done."""
        return x.to(self.store.device, non_blocking=True)
