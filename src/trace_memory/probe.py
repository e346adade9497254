"""A minute-long delayed-evidence task on which every memory can be tried: a small robot passes stations where a framed
glyph shows for a few frames, wanders for `delay` steps among unframed glyphs, and is then asked, by a bar in the image, for
the glyph of one station. Chance is 1 / GLYPHS. Everything here is data, model and training; printing is trace_lab's.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_memory.config import MemoryConfig, build
from trace_memory.keys import MLP
from trace_memory.losses import auxiliary_losses, weighted
from trace_memory.memory import MemoryState, Readout
from trace_memory.trace import PathMemory

GLYPHS = 4
SIZE = 8  # pixels
STRAY = 0.25  # chance of an unframed patch in a frame
TRAVEL, DWELL, ASK = 4, 4, 3  # steps between stations, at a station, and of the question
CHANNELS = 3  # robot state: x, y, gripper


class Episodes(NamedTuple):
    """A batch of episodes of one length; the answer is due at the last step."""

    images: Float[Tensor, "B T 3 s s"]
    path: Float[Tensor, "B T 3"]
    answer: Int[Tensor, " B"]

    def resampled(self, factor: float) -> "Episodes":
        """The same episodes at another speed: frames repeated (factor > 1) or dropped, the last one kept."""
        length = self.path.shape[1]
        index = length - 1 - (torch.arange(round(length * factor), device=self.path.device) / factor).long().flip(0)
        return Episodes(self.images[:, index], self.path[:, index], self.answer)


@dataclass(frozen=True)
class ProbeTask:
    """How many cues, how long to remember, and how the delay is made longer: `far` moves on for longer at the same speed,
    `slow` samples the same route more finely.
    """

    cues: int = 1
    delay: int = 64
    stretch: int = 1
    how: Literal["far", "slow"] = "far"

    def sample(self, batch: int, generator: torch.Generator) -> Episodes:
        """Fresh random episodes, on the generator's device."""
        device = generator.device

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        repeat = self.stretch if self.how == "slow" else 1
        delay = self.delay * (self.stretch if self.how == "far" else 1)
        length = self.cues * (TRAVEL + DWELL) + delay + ASK
        path = self._path(batch, length, uniform)
        glyph = torch.randint(GLYPHS, (batch, self.cues), generator=generator, device=device)
        asked = torch.randint(self.cues, (batch,), generator=generator, device=device)

        if repeat > 1:
            path = F.interpolate(path.transpose(1, 2), scale_factor=repeat, mode="linear").transpose(1, 2)
        path = path + 0.01 * torch.randn(path.shape, generator=generator, device=device)
        event = torch.full((batch, length), -1, device=device)  # framed glyph shown, or -1
        for cue in range(self.cues):
            begin = cue * (TRAVEL + DWELL) + TRAVEL
            event[:, begin : begin + DWELL] = glyph[:, cue : cue + 1]
        event = event.repeat_interleave(repeat, dim=1)
        images = _draw(event, uniform)
        # the question: a bar whose height names the station
        bar = torch.arange(SIZE, device=device) >= SIZE - 2 * (asked[:, None] + 1)
        column = images[:, -ASK * repeat :, :, :, SIZE - 1]
        images[:, -ASK * repeat :, :, :, SIZE - 1] = torch.where(bar[:, None, None], 1.0, column)
        return Episodes(images, path, glyph.gather(1, asked[:, None])[:, 0])

    def _path(self, batch: int, length: int, uniform: Callable[..., Tensor]) -> Tensor:
        """Waypoints: the stations in order, then places at random, the question's place last; speed and course vary."""
        stations = torch.tensor([[math.cos(a), math.sin(a)] for a in (0.5, 2.2, 4.0, 5.2, 1.3)])[: self.cues]
        device = uniform(1).device
        hops = max((length - self.cues * (TRAVEL + DWELL) - ASK) // 8, 1)
        places = 2 * uniform(batch, hops, 2) - 1
        home = torch.zeros(batch, 1, 2, device=device)
        waypoints = torch.cat([home, stations.to(device).expand(batch, -1, -1), places, home], dim=1)
        waypoints = waypoints + 0.1 * (uniform(*waypoints.shape) - 0.5)
        # how long each hop takes: fixed to the stations, then a random share of the delay each
        share = 0.5 + uniform(batch, hops + 1)
        rest = share / share.sum(1, keepdim=True) * (length - 1 - self.cues * (TRAVEL + DWELL))
        times = torch.cat([torch.full((batch, self.cues), float(TRAVEL + DWELL), device=device), rest], dim=1)
        arrival = torch.cat([torch.zeros(batch, 1, device=device), times.cumsum(1)], dim=1)
        t = torch.arange(length, device=device, dtype=torch.float32).expand(batch, length).contiguous()
        hop = (torch.searchsorted(arrival, t, right=True) - 1).clamp(0, times.shape[1] - 1)
        begin, span = arrival.gather(1, hop), times.gather(1, hop)
        moving = torch.where(hop < self.cues, TRAVEL, span)
        phase = ((t - begin) / moving).clamp(0, 1)[..., None]
        index = hop[..., None].expand(-1, -1, 2)
        xy = waypoints.gather(1, index) * (1 - phase) + waypoints.gather(1, index + 1) * phase
        gripper = torch.sin(xy.sum(-1, keepdim=True) * 2 + uniform(batch, 1, 1))
        return torch.cat([xy, gripper], dim=-1)


def _draw(event: Tensor, uniform: Callable[..., Tensor]) -> Tensor:
    """Images: noise, a small patch somewhere (black, or at times a stray colour), and the framed colour of an event."""
    shape, frames, device = event.shape, event.numel(), event.device
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], device=device)
    images = 0.2 * uniform(frames, 3, SIZE, SIZE)
    stray = colours[(uniform(frames) * GLYPHS).long()] * (uniform(frames, 1) < STRAY)
    _stamp(images, stray[..., None, None].expand(-1, -1, 2, 2), (uniform(frames, 2) * (SIZE - 1)).long())
    event = event.flatten()
    patch = torch.ones(frames, 3, 4, 4, device=device)
    patch[:, :, 1:3, 1:3] = colours[event.clamp_min(0)][..., None, None]
    seen = event >= 0
    images[seen] = _stamp(images[seen], patch[seen], (uniform(frames, 2) * (SIZE - 3)).long()[seen])
    return images.view(*shape, 3, SIZE, SIZE)


def _stamp(images: Tensor, patch: Tensor, corner: Tensor) -> Tensor:
    """Puts each patch into its image at its corner, in place."""
    offset = torch.arange(patch.shape[-1], device=images.device)
    rows = (corner[:, 0, None] + offset)[:, None, :, None]
    columns = (corner[:, 1, None] + offset)[:, None, None, :]
    which = torch.arange(len(images), device=images.device)[:, None, None, None]
    plane = torch.arange(3, device=images.device)[None, :, None, None]
    images[which, plane, rows, columns] = patch
    return images


class ProbeModel(nn.Module):
    """A small convolution and a proprioceptive map make the content; a memory; a classifier of the last readout."""

    def __init__(self, config: MemoryConfig):
        super().__init__()
        half = config.content // 2
        self.see = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (SIZE // 4) ** 2, half),
        )
        for layer in self.see:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                layer.bias.data.zero_()  # type: ignore[union-attr]
        self.feel = MLP(CHANNELS, half, half)
        self.memory = build(config)
        self.answer = MLP(3 * config.width + config.content, config.width, GLYPHS)

    def content(self, images: Tensor, path: Tensor) -> Tensor:
        """e = [v, p] of every frame."""
        return torch.cat([self.see(images.flatten(0, 1)).unflatten(0, images.shape[:2]), self.feel(path)], dim=-1)

    def loss(self, episodes: Episodes) -> Tensor:
        """Cross entropy of the answer at the last step, and the auxiliary losses."""
        contents = self.content(episodes.images, episodes.path)
        _, readouts = self.memory.scan(contents, episodes.path)
        valid = torch.ones(contents.shape[:2], dtype=torch.bool, device=contents.device)
        loss = F.cross_entropy(self.classify(readouts.at(-1), contents[:, -1]), episodes.answer)
        return loss + weighted(auxiliary_losses(readouts, valid), self.memory.auxiliary)

    def classify(self, readout: Readout, content: Tensor) -> Tensor:
        """Logits from the readout and what is seen now."""
        return self.answer(torch.cat([readout.z, readout.g, readout.dg, content], dim=-1))

    @torch.no_grad()
    def accuracy(self, task: ProbeTask, episodes: int, generator: torch.Generator, chunk: int = 64) -> float:
        """Share of right answers, run in pieces of `chunk` steps so that any length fits in memory."""
        self.eval()
        right = 0
        for begin in range(0, episodes, 128):
            data = task.sample(min(128, episodes - begin), generator)
            state: MemoryState | None = None
            for images, path in zip(data.images.split(chunk, 1), data.path.split(chunk, 1), strict=True):
                contents = self.content(images, path)
                state, readouts = self.memory.scan(contents, path, state=state)
                readout = readouts.at(-1)
            right += int((self.classify(readout, contents[:, -1]).argmax(-1) == data.answer).sum())
        self.train()
        return right / episodes


ONE_CUE = ProbeTask()
PROBE_MEMORY = MemoryConfig(channels=CHANNELS, content=128, width=64, hidden=64, dropout=0.0)


@dataclass(frozen=True)
class ProbeRun:
    """One training: the memory, the task, and how it is trained."""

    memory: MemoryConfig = PROBE_MEMORY
    task: ProbeTask = ONE_CUE
    seed: int = 0
    updates: int = 1500
    batch: int = 64
    rate: float = 1e-3
    warm: int = 100
    settle: int = 100  # updates after solving, while the rate falls to zero
    speed: float = 2.0  # batches are played up to this much faster or slower (1: as they are)
    solved: float = 0.99
    every: int = 25
    device: str = "cpu"


class Progress(NamedTuple):
    """What a training tells after every `every` updates, and after the last."""

    update: int
    loss: float
    accuracy: float
    solved: bool


def start(run: ProbeRun) -> ProbeModel:
    """A fresh model, its key statistics fitted on episodes of the task."""
    torch.manual_seed(run.seed)
    model = ProbeModel(replace(run.memory, channels=CHANNELS)).to(run.device)
    if isinstance(model.memory, PathMemory):
        paths = run.task.sample(64, torch.Generator().manual_seed(10_000 + run.seed)).path
        model.memory.normaliser.fit(list(paths), model.memory.signature)
    return model


def train(run: ProbeRun, model: ProbeModel) -> Iterator[Progress]:
    """Trains in place until out of updates, or until solved twice in a row and then settled.

    Settling matters: at a full rate single updates still throw one answer off at longer lengths, and stopping is luck.
    """
    generator = torch.Generator(run.device).manual_seed(run.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=run.rate)
    before, total, since, end = False, 0.0, 0, math.inf
    for update in range(1, run.updates + run.settle + 1):
        if update > run.updates and end == math.inf:
            return
        for group in optimiser.param_groups:
            group["lr"] = run.rate * min(1.0, update / run.warm, max(0.0, (end - update + 1) / max(run.settle, 1)))
        factor = run.speed ** (2 * float(torch.rand((), generator=generator, device=run.device)) - 1)
        loss = model.loss(run.task.sample(run.batch, generator).resampled(factor))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        total, since = total + float(loss.detach()), since + 1
        if update % run.every == 0 or update == run.updates:
            accuracy = model.accuracy(run.task, 256, torch.Generator(run.device).manual_seed(1_000_000 + run.seed))
            solved = accuracy >= run.solved
            first = solved and before and end == math.inf
            end = update + run.settle if first else end
            yield Progress(update, total / since, accuracy, first)
            if update >= end:
                return
            before, total, since = solved, 0.0, 0
