"""Which frames an update learns from, and the batch made of them. Everything is a function of the seed and the update's
number, so a training that was stopped goes on with the very batches it would have had.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor

from lerobot_policy_trace.learning import EPISODES, Episodes
from trace_lab.frames import FrameStore
from trace_lab.recipe import Recipe, RecipeError

UNIT, SHAPES = 8, 8  # captured scans have lengths that are multiples of the first, about as many as the second
STILL = 0.05  # standard deviations of an action that count as no movement
TAKEN = 0.5  # seconds for which an option has been taken when the suite's sheets call it decided
HEED = 0.9, 2.0  # seconds after the last frame of a rest: a little before the first move, and a second after it
TINY = 1e-9  # a way that is none
POOL = 8  # batches whose episodes are sorted by length together, so that a batch holds episodes of similar length


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
        for pool in order.split(POOL * size):
            pool.copy_(pool[lengths[pool].argsort(stable=True)])
        return order.view(rounds, size)[torch.randperm(rounds, generator=draw)]
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
    last = ends[torch.searchsorted(ends, now, right=True)] - 1
    for later in range(1, round(store.meta.fps) + 1):
        still &= ((action[torch.minimum(now + later, last)] - action).abs() <= near).all(1)
    return still


def setting_off(store: FrameStore, rests: Tensor) -> Tensor:
    """(N,) on the CPU: whether the robot sets off with a frame after a rest; what it was waiting for is to be seen by then.
    The last frame that `resting` has found is a second before the first move.
    """
    found, owner = torch.zeros_like(rests), torch.searchsorted(store.paths.ends, torch.arange(len(rests)), right=True)
    last = (rests[:-1] & ~rests[1:] & (owner[:-1] == owner[1:])).nonzero()[:, 0]
    begin, end = (round(seconds * store.meta.fps) for seconds in HEED)
    for later in range(begin, end + 1):
        at = (last + later).clamp_max(len(rests) - 1)
        found[at[owner[at] == owner[last]]] = True
    return found & ~rests


def way(store: FrameStore, rates: list[int]) -> Tensor:
    """(N,) on the CPU: how far the robot has gone since its episode began, in standard deviations of the states. Channels
    that are velocities (`rates`) count by their value, the others by their change.
    """
    paths, std = store.paths, store.paths.states.std(0)
    states = torch.where(std > 1e-6, paths.states / std, 0.0).double()
    steps = states.diff(dim=0, prepend=states[:1])
    steps[:, rates] = states[:, rates]
    steps[paths.starts] = 0.0
    gone = torch.linalg.vector_norm(steps, dim=1).cumsum(0)
    frame = torch.arange(len(gone))
    return gone - gone[paths.starts[torch.searchsorted(paths.starts, frame, right=True) - 1]]


def choosing(store: FrameStore, ahead: int) -> Tensor:
    """(N,) on the CPU: whether what is done in the next `ahead` frames may hang on a choice that nothing shows yet: from so
    many frames before a lamp until an option is taken. Only the suite's datasets tell when that was.
    """
    sheet, paths = Path(store.meta.root) / "meta" / "trace_bench.jsonl", store.paths
    told = [json.loads(line)["decisions"] for line in sheet.read_text().splitlines()] if sheet.exists() else []
    if len(told) != len(paths.ends):
        raise RecipeError(
            f"branches: {sheet} tells of {len(told)} episodes, expected {len(paths.ends)}; else take branches=1"
        )
    found, late = torch.zeros(int(paths.ends[-1]), dtype=torch.bool), round(TAKEN * store.meta.fps)
    for begin, end, decisions in zip(paths.starts.tolist(), paths.ends.tolist(), told, strict=True):
        for each in decisions:
            found[max(begin, begin + each["frame"] - ahead) : min(end, begin + each["step"] - late)] = True
    return found


class Augment:
    """Moves pictures and changes their light, alike in all that have the same owner, differently for each camera."""

    def __init__(self, shift: int, jitter: float):
        self.shift, self.jitter = shift, jitter

    def __call__(self, pictures: Tensor, owner: Tensor, draw: torch.Generator) -> Tensor:
        """(N, ..., 3, H, W) in [0, 1] of (N,) owners, any numbers; the same draw changes the same owners alike."""
        if not self.shift and not self.jitter:
            return pictures
        kinds, of = owner.cpu().unique(return_inverse=True)
        ones, to = [1] * (pictures.ndim - 1), partial(Tensor.to, device=pictures.device, non_blocking=True)
        if self.shift:
            for dim in (-2, -1):
                size = pictures.shape[dim]
                by = torch.randint(-self.shift, self.shift + 1, (len(kinds),), generator=draw)[of]
                at, shape = (torch.arange(size) + by[:, None]).clamp(0, size - 1), [len(of), *ones]
                shape[dim] = size
                pictures = pictures.take_along_dim(to(at.view(shape)), dim)
        if self.jitter:
            gain, light = to(((torch.rand(2, len(kinds), generator=draw) * 2 - 1) * self.jitter)[:, of])
            pictures = (pictures - 0.5) * (1 + gain.view(-1, *ones)) + 0.5 + light.view(-1, *ones)
        return pictures.clamp(0, 1)


class Shown(NamedTuple):
    """Whole episodes as a memory is shown them, in steps of the memory."""

    episodes: Tensor  # (E,)
    times: Tensor  # (E, n): frames of each that are targets
    known: Tensor  # (E, n): the last step that each of them knows
    written: Tensor  # (E, T): what is seen at each step, a row of the store
    walked: Tensor  # (E, T) float64: where the robot is, between another's rows if its path is borrowed
    pace: Tensor  # (E, T): how fast it gets on there, 0 at rest and 1 as it was
    valid: Tensor  # (E, T): whether the episode goes on


class Batches:
    """Batches of a store for one policy. `share` of `shares` takes its part of each (several GPUs)."""

    def __init__(
        self, store: FrameStore, config: Any, prepare: Any, recipe: Recipe, seed: int, share: int = 0, shares: int = 1
    ):
        if recipe.episodes % shares:
            raise RecipeError(f"episodes: got {recipe.episodes}, expected a multiple of the {shares} processes")
        self.store, self.config, self.prepare, self.recipe, self.seed = store, config, prepare, recipe, seed
        self.share, self.shares = share, shares
        self.whole = recipe.scan == "episode" and recipe.memory != "none"
        self.every = int(config.memory.update_every)
        self.augment = Augment(recipe.shift, recipe.jitter)
        self.features: Any = None  # feature maps in place of pictures, where the encoder is not trained
        dropped = int(getattr(config, "drop_n_last_frames", 0))
        self.usable = (store.lengths - dropped).clamp_min(1)
        self.unseen: Tensor | None = None  # (N,) bool: frames whose actions hang on a choice that cannot be seen
        if recipe.branches < 1:
            self.unseen = choosing(store, max(config.action_delta_indices)).to(store.device)
        rates, self.rests = list(config.memory.rates or []), resting(store)
        self.starts = setting_off(store, self.rests)
        channels, self.way = torch.arange(store.paths.states.shape[1]), way(store, rates)
        self.going = torch.isin(channels, torch.tensor(rates, dtype=torch.int64)).to(store.device)  # are velocities
        self.weight = self._weights().cumsum(0)  # (N,): frames are drawn by these
        self._order: tuple[int, Tensor] | None = None  # of the epoch that is going on
        self.pause = round(recipe.pauses * store.meta.fps / self.every)  # steps of the memory
        self.least = -(-store.lengths // self.every)  # (E,): steps of the memory for each episode, as it is
        self.most = self.least + self.pause * self._pausing(torch.arange(len(self.least))).sum(1)
        if self.whole and recipe.pauses and bool((self.most == self.least).all()):
            none = "no episode has a rest before its end"
            why = none if self.pause else f"the memory looks every {self.every} frames"
            raise RecipeError(f"pauses: got {recipe.pauses} s, which is nothing here: {why}; expected more, or 0")
        self.pad = 1
        if store.device.type == "cuda" and not recipe.truncate:  # scans are captured: there must be few lengths
            self.pad = padding(int(self.least.min()), int(self.most.max()))

    def _weights(self) -> Tensor:
        """(N,): how often each frame is a target; none of those at an episode's end that the policy leaves out."""
        paths = self.store.paths
        frame = torch.arange(int(paths.ends[-1]))
        owner = torch.searchsorted(paths.ends, frame, right=True)
        weight = ((frame >= paths.starts[owner]) & (frame < (paths.starts + self.usable)[owner])).double()
        weight *= torch.where(self.rests, self.recipe.still, torch.where(self.starts, self.recipe.starts, 1.0))
        if self.unseen is not None and not self.whole:
            weight *= torch.where(self.unseen.cpu(), self.recipe.branches, 1.0)
        return weight

    def lengths(self) -> list[int]:
        """Lengths to which batches of whole episodes are padded."""
        both = zip(self._padded(self.least).tolist(), self._padded(self.most).tolist(), strict=True)
        return sorted({n for least, most in both for n in range(least, most + 1, self.pad)})

    def _padded(self, steps: Tensor) -> Tensor:
        """Steps of the memory with those that only fill up."""
        return -(-steps // self.pad) * self.pad

    def targets(self, step: int) -> tuple[Tensor, Tensor]:
        """(E,) episodes and (E, n) times, or for single frames (N, 1) of N episodes; of all processes, on the CPU."""
        recipe, paths, draw = self.recipe, self.store.paths, generator(self.seed, step, 1)
        after = self.weight[paths.ends - 1]
        own = after.diff(prepend=after.new_zeros(1))  # weights of whole episodes
        if self.whole:
            episodes = self._turn(len(after), recipe.episodes, step, self.store.lengths)
            places = (after - own)[episodes][:, None] + spread(own[episodes], recipe.targets, draw)
        else:
            count = math.ceil(after[-1])
            turn = self._turn(count, recipe.batch, step)
            within = torch.rand(len(turn), 1, generator=draw, dtype=torch.float64)
            places = (turn[:, None] + within) * (after[-1] / count)
            episodes = torch.searchsorted(after, places[:, 0], right=True).clamp_max(len(after) - 1)
        frames = torch.searchsorted(self.weight, places, right=True)
        times = frames - paths.starts[episodes][:, None]
        return episodes, times.minimum(self.usable[episodes][:, None] - 1)

    def _turn(self, count: int, size: int, step: int, lengths: Tensor | None = None) -> Tensor:
        """(size,) of `count` things, whose turn it is."""
        epoch, place = divmod(step, -(-count // size))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, order_of(count, size, epoch, self.seed, lengths)
        return self._order[1][place]

    def at(self, step: int) -> Iterator[tuple[dict[str, Any], float]]:
        """The batches of an update, each with its weight: one, or one a piece when the gradient is cut in time."""
        of_all = self.targets(step)
        if self.whole:
            yield from self._pieces(step, Shown(*(x[self.share :: self.shares] for x in self._shown(step, *of_all))))
            return
        episodes, times = (x[self.share :: self.shares] for x in of_all)
        first, owner = self.store.paths.starts[episodes], torch.arange(len(episodes))
        rows = first + times[:, 0]
        if self.features is not None:
            seen = torch.maximum(rows[:, None] + self._past(), first[:, None])
            several = isinstance(self.config, DiffusionConfig)
            batch = self.prepare(self._stock(rows, seen, episodes))
            looks = self._look(step, seen, owner)
            yield batch | {camera: x if several else x[:, -1] for camera, x in looks.items()}, 1.0
            return
        batch = self.store.sample(self._there(rows), self._there(episodes), self.config)
        for number, camera in enumerate(self.store.cameras):
            draw = generator(self.seed, step, self.share, number, 3)
            batch[camera] = self.augment(batch[camera], owner, draw)
        yield self.prepare(batch), 1.0

    def _there(self, x: Tensor) -> Tensor:
        """On the store's device. Indices are worked out on the CPU: to ask a GPU for them is to wait until it is done."""
        return x.to(self.store.device, non_blocking=True)

    def _past(self) -> Tensor:
        """(s,): frames that the stock policy looks at, counted from the present one."""
        return torch.arange(1 - int(self.config.n_obs_steps), 1)

    def _look(self, step: int, rows: Tensor, owner: Tensor) -> dict[str, Any]:
        """Pictures of these frames, or what stands for them; the same light for what has the same owner."""
        seen, rows = {}, self._there(rows)
        for number, camera in enumerate(self.store.cameras):
            draw = generator(self.seed, step, self.share, number, 3)  # the same for every piece of an episode
            if self.features is not None:
                seen[camera] = self.features(camera, rows, owner, draw)
            else:
                seen[camera] = self.augment(self.store.pictures(camera, rows), owner, draw)
        return seen

    def _pausing(self, episodes: Tensor) -> Tensor:
        """(E, W): whether a rest begins with each frame that is written, on the CPU; not the one at an episode's end."""
        at = torch.arange(int(self.least[episodes].max())) * self.every
        last = self.store.lengths[episodes][:, None] - 1
        rests = self.rests[self.store.paths.starts[episodes][:, None] + at.minimum(last)]
        for_good = (rests | (at > last)).long().flip(1).cumprod(1).flip(1).bool()
        return rests & ~for_good & ~torch.cat([torch.zeros_like(rests[:, :1]), rests[:, :-1]], 1)

    def _shown(self, step: int, episodes: Tensor, times: Tensor) -> Shown:
        """What the memory is shown in an update, of all processes, on the CPU. With `pauses` the first frame of a rest is
        shown several times: whoever can count would else learn when a rest is over, and not to look.
        """
        draw, paths, pausing = generator(self.seed, step, 7), self.store.paths, self._pausing(episodes)
        last = self.store.lengths[episodes][:, None] - 1
        often = (torch.arange(pausing.shape[1]) * self.every <= last).long()
        often += pausing * torch.randint(0, self.pause + 1, pausing.shape, generator=draw)
        after = often.cumsum(1)
        steps = torch.arange(int(self._padded(after[:, -1].max()))).expand(len(after), -1).contiguous()
        frame = (self.every * torch.searchsorted(after, steps, right=True)).minimum(last)
        again = often.gather(1, times // self.every)
        known = after.gather(1, times // self.every) - again
        known += (torch.rand(times.shape, generator=draw) * again).long()  # somewhere in the pause
        written = paths.starts[episodes][:, None] + frame
        lenders = self._lenders(step, len(episodes))
        if self.recipe.walk == "steps":
            walked = (paths.starts[episodes[lenders]][:, None] + frame[lenders]).double()
            pace = torch.ones(walked.shape)
        else:
            walked = self._walk(written, episodes, episodes[lenders])
            pace = (walked.diff(dim=1, prepend=walked[:, :1] - self.every) / self.every).clamp_max(1.0).float()
        return Shown(episodes, times, known, written, walked, pace, steps < after[:, -1:])

    def _pieces(self, step: int, shown: Shown) -> Iterator[tuple[dict[str, Any], float]]:
        """As many for every process, however long its own episodes are: they add up their gradients piece by piece."""
        size = -(-self.recipe.truncate // self.every) or shown.valid.shape[1]
        state = None
        for begin in range(0, shown.valid.shape[1], size):
            batch, weight = self._piece(step, shown, begin, begin + size)
            batch[EPISODES].state = state
            yield batch, weight
            state = batch[EPISODES].state  # the policy has put it there
            if state is not None:
                state = state._replace(cells={name: cell.detach() for name, cell in state.cells.items()})

    def _walk(self, written: Tensor, episodes: Tensor, lenders: Tensor) -> Tensor:
        """(E, T) float64: the place by which each step is addressed, in rows of the store: as far along a lender's way as
        on one's own. Who rests on the one rests on the other; else a memory whose clock is the path could tell the time.
        """
        starts, ends, walked = self.store.paths.starts, self.store.paths.ends, written.double()
        for row, (own, lender) in enumerate(zip(episodes.tolist(), lenders.tolist(), strict=True)):
            if own != lender:
                theirs = self.way[starts[lender] : ends[lender]]
                gone = self.way[written[row]] / self.way[ends[own] - 1].clamp_min(TINY) * theirs[-1]
                after = torch.searchsorted(theirs, gone).clamp_max(len(theirs) - 1)
                before = (after - 1).clamp_min(0)
                part = (gone - theirs[before]) / (theirs[after] - theirs[before]).clamp_min(TINY)
                walked[row] = starts[lender] + before + part
        return walked

    def _lenders(self, step: int, count: int) -> Tensor:
        """(count,): whose path addresses what is seen in each episode of a batch of all processes: its own or another's.
        The ablation that knows the path and nothing else keeps its own.
        """
        draw, share = generator(self.seed, step, 6), self.recipe.borrowed
        borrows = torch.rand(count, generator=draw) < (0.0 if self.recipe.memory == "signature-only" else share)
        other = (torch.arange(count) + torch.randint(1, max(2, count), (count,), generator=draw)) % count
        return torch.where(borrows, other, torch.arange(count))

    def _piece(self, step: int, shown: Shown, begin: int, end: int) -> tuple[dict[str, Any], float]:
        """Steps begin..end of the memory, and the targets among them; with none, one that weighs nothing."""
        store, to = self.store, self._there
        row, column = ((shown.known >= begin) & (shown.known < end)).nonzero(as_tuple=True)
        weight = len(row) / shown.known.numel()
        if not len(row):
            row, column = row.new_zeros(1), column.new_zeros(1)
        target, written = shown.times[row, column], shown.written[:, begin:end]
        first = store.paths.starts[shown.episodes[row]]
        seen = first[:, None] + (target[:, None] + self._past()).clamp_min(0)  # (N, s): the stock policy looks at these
        rows, where = torch.cat([written.flatten(), seen.flatten()]).unique(return_inverse=True)
        batch = self._stock(first + target, seen, shown.episodes[row])
        pictures = self._look(step, rows, torch.searchsorted(store.paths.ends, rows, right=True))
        batch = self.prepare(batch) | pictures if self.features is not None else self.prepare(batch | pictures)
        here, there = to(where[: written.numel()].view(written.shape)), to(where[written.numel() :].view(seen.shape))
        states, place, rows = store.columns[OBS_STATE], shown.walked[:, begin:end], to(rows)
        before, part = to(place.long()), to(place.frac().to(states.dtype))
        path = torch.lerp(states[before], states[(before + 1).clamp_max(len(states) - 1)], part[..., None])
        path = torch.where(self.going, path * to(shown.pace[:, begin:end, None]), path)
        batch[EPISODES] = Episodes(
            pictures=[batch.pop(camera) for camera in store.cameras],
            states=states[rows],
            written=here,
            path=path,
            valid=to(shown.valid[:, begin:end]),
            row=to(row),
            time=to((shown.known[row, column] - begin).clamp(0, written.shape[1] - 1)),
            seen=there,
            taught=self._taught(rows, there),
        )
        return batch, weight

    def _stock(self, rows: Tensor, seen: Tensor, episodes: Tensor) -> dict[str, Any]:
        """What the stock policy gets beside pictures."""
        rows, seen, episodes = self._there(rows), self._there(seen), self._there(episodes)
        batch: dict[str, Any] = {}
        for name, column in self.store.columns.items():
            if name == ACTION:
                at, outside = self.store.reach(rows, episodes, self.config.action_delta_indices)
                batch[name], batch[f"{name}_is_pad"] = column[at], outside
            else:
                batch[name] = column[seen] if isinstance(self.config, DiffusionConfig) else column[seen[:, -1]]
        return batch

    def _taught(self, rows: Tensor, seen: Tensor) -> Tensor | None:
        """Frames through which the encoder learns: those the policy looks at, and of the others a share, each weighing the
        more, so that on average the gradient is what it would be with all of them. `branches` of it where nothing shows
        what to do, or the encoder would learn that by heart.
        """
        share = self.recipe.taught
        if share == 1 and self.unseen is None:
            return None
        weight = (torch.rand(len(rows), device=rows.device) < share).float() / share
        weight[seen.flatten()] = 1.0
        if self.unseen is not None:
            weight *= torch.where(self.unseen[rows], self.recipe.branches, 1.0)
        return weight
