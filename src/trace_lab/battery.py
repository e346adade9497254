"""The battery's model and its training: one memory on one task. A small convolution and a map of the robot's state make what
a memory is given, a classifier answers from its last readout; episodes are drawn by `stations`, printing is `probe`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_lab.questions import CORRIDORS, SHORTEST, STRIDES, TRAINED, Condition, Task
from trace_lab.stations import CHANNELS, SIZE, Plan, generator, plan, render
from trace_memory.config import MemoryConfig, PaperOptions, build
from trace_memory.events import EventMemory
from trace_memory.keys import MLP
from trace_memory.losses import auxiliary_losses, weighted
from trace_memory.memory import MemoryState, Readout
from trace_memory.registry import METHODS
from trace_memory.trace import PathMemory

WIDTH, FEATURES = 64, 16  # of the memory; of the convolution's first layer
EMBEDDING = 2 * WIDTH  # e = [v, p]: what is seen and where the robot is
MAP, PLAIN = (1, FEATURES + 3, 2, 2), 3  # of a memory with looks: views, features, height, width; the plain ones
SOLVED, SETTLE = 0.99, 250  # see `train`
EVERY, VALIDATION = 25, 256  # updates between two validations, and its episodes
PIECE, ROWS = 64, 128  # moments and episodes that are drawn at once in an evaluation
LONG = 2000  # moments; longer episodes are fewer
TRAIN, VALIDATE, TEST, FIT = range(4)  # streams of random numbers; validation and test are the same for every seed


@dataclass(frozen=True)
class Training:
    """One training: which memory, on what, and how.

    Args:
        memory: its name.
        task: what is asked.
        seed: of the weights and of the episodes.
        rate: of Adam.
        updates: at most.
        batch: episodes an update.
        warm: updates over which the rate rises from zero.
        paper: options of the paper's form.
        device: cpu or cuda.
    """

    memory: str
    task: Task
    seed: int = 0
    rate: float = 1e-3
    updates: int = 1500
    batch: int = 64
    warm: int = 50
    paper: PaperOptions = field(default_factory=PaperOptions)
    device: str = "cpu"


class Progress(NamedTuple):
    """A validation."""

    update: int
    loss: float  # the mean since the one before
    accuracy: float


class Model(nn.Module):
    """What a memory is tried in; the same for all of them.

    Args:
        memory: its name.
        classes: how many answers there are.
        paper: options of the paper's form.
    """

    def __init__(self, memory: str, classes: int, paper: PaperOptions = PaperOptions()):  # noqa: B008
        super().__init__()
        self.first = nn.Conv2d(3, FEATURES, 3, stride=2, padding=1)
        self.second = nn.Conv2d(FEATURES, 2 * FEATURES, 3, stride=2, padding=1)
        self.see = nn.Linear(2 * FEATURES * (SIZE // 4) ** 2, EMBEDDING // 2)
        for layer in (self.first, self.second, self.see):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.feel = MLP(CHANNELS, WIDTH, EMBEDDING // 2)
        self.looks = METHODS[memory].looks
        sizes: dict[str, Any] = {"channels": CHANNELS, "width": WIDTH, "hidden": WIDTH, "dropout": 0.0}
        sizes |= {"map": MAP, "plain": PLAIN} if self.looks else {}
        self.memory = build(MemoryConfig(name=memory, content=EMBEDDING, paper=paper, **sizes))
        nothing = torch.zeros(1, self.memory.content), torch.zeros(1, CHANNELS)
        with torch.no_grad():
            _, readout = self.memory.step(self.memory.init(1), *nothing)
        self.answer = MLP(self._parts(readout).shape[-1] + EMBEDDING, WIDTH, classes)

    def contents(self, images: Tensor, path: Tensor) -> Tensor:
        """(B, T, 3, s, s), (B, T, d_s) -> (B, T, c): e of every frame, and for a memory with looks the map of its picture:
        features of the first layer and twice the colours, averaged over each of 2 x 2 places.
        """
        pictures, lead = images.flatten(0, 1), images.shape[:2]
        features = self.first(pictures).relu()
        seen = self.see(self.second(features).relu().flatten(1)).unflatten(0, lead)
        parts = [seen, self.feel(path)]
        if self.looks:
            map_ = torch.cat([F.avg_pool2d(features, 2), 2 * F.avg_pool2d(pictures, SIZE // 2)], 1)
            parts.append(map_.flatten(1).unflatten(0, lead))
        return torch.cat(parts, -1)

    @staticmethod
    def last(contents: Tensor) -> Tensor:
        """The last step of each row, at which a memory is read."""
        return torch.full_like(contents[:, :1, 0], contents.shape[1] - 1, dtype=torch.int64)

    @staticmethod
    def _parts(readout: Readout) -> Tensor:
        """All that a readout (B) has of what was written."""
        fields = readout._asdict()
        parts = [fields[name] for name in ("z", "g", "dg", "counts", "points") if fields.get(name) is not None]
        return torch.cat([x.flatten(1) for x in parts], -1)

    def classify(self, readout: Readout, content: Tensor) -> Tensor:
        """Logits from the readout and from what is seen now."""
        return self.answer(torch.cat([self._parts(readout), content[:, :EMBEDDING]], -1))

    def loss(self, batch: Plan) -> Tensor:
        """Cross entropy of the answer at the last moment, and the memory's own losses."""
        images, path = render(batch)
        contents = self.contents(images, path)
        few = self.last(contents) if self.looks else None  # the losses of the others are of every step
        _, readouts = self.memory.scan(contents, path, at=few)
        valid = torch.ones(readouts.z.shape[:2], dtype=torch.bool, device=contents.device)
        loss = F.cross_entropy(self.classify(readouts.at(-1), contents[:, -1]), batch.answer)
        return loss + weighted(auxiliary_losses(readouts, valid), self.memory.auxiliary)

    @torch.no_grad()
    def right(self, batch: Plan) -> int:
        """How many answers are right. Episodes are drawn and scanned in pieces, so that any length fits in memory."""
        state: MemoryState | None = None
        for begin in range(0, batch.length, PIECE):
            images, path = render(batch, begin, begin + PIECE)
            contents = self.contents(images, path)
            state, readouts = self.memory.scan(contents, path, state=state, at=self.last(contents))
        return int((self.classify(readouts.at(-1), contents[:, -1]).argmax(-1) == batch.answer).sum())

    def accuracy(self, task: Task, episodes: int, *key: int, condition: Condition = TRAINED) -> float:
        """The share of right answers on so many episodes of a key."""
        training = self.training
        self.eval()
        right, device = 0, next(self.parameters()).device
        for number, begin in enumerate(range(0, episodes, ROWS)):
            rows = min(ROWS, episodes - begin)
            right += self.right(plan(task, rows, *key, number, condition=condition, device=device))
        self.train(training)
        return right / episodes


def start(training: Training) -> Model:
    """A fresh model; what a memory knows of paths and of pictures before it learns is measured on episodes of the task."""
    torch.manual_seed(training.seed)
    model = Model(training.memory, training.task.classes, training.paper).to(training.device)
    images, path = render(plan(training.task, 64, training.seed, FIT, 0))
    if isinstance(model.memory, PathMemory):
        model.memory.normaliser.fit(list(path), model.memory.signature)
    if isinstance(model.memory, EventMemory):
        with torch.no_grad():
            model.memory.fit(model.contents(images.to(training.device), path.to(training.device)), list(path))
    return model


def batches(training: Training) -> Iterator[Plan]:
    """Fresh episodes for every update, all of a batch sampled in time alike; those of the T-Maze are shorter instead."""
    for number in count():
        task, condition = training.task, TRAINED
        chosen = float(torch.rand((), generator=generator(training.seed, TRAIN, number)))
        if task.maze:
            task = replace(task, delay=SHORTEST + int(chosen * (task.delay - SHORTEST + 1)))
        else:
            condition = Condition(frames=STRIDES[int(chosen * len(STRIDES))])
        yield plan(task, training.batch, training.seed, TRAIN, number, condition=condition, device=training.device)


def train(training: Training, model: Model) -> Iterator[Progress]:
    """Trains in place; tells of every validation, also after the last update.

    The rate rises over the first `warm` updates and falls linearly to zero over the last `SETTLE`. There is one way to end
    early: two validations in a row at `SOLVED` or better make the next `SETTLE` updates the last. A training that is solved
    and then lost again is not rescued by this: it is tested as it is at its end.
    """
    optimiser = torch.optim.Adam(model.parameters(), lr=training.rate)
    end, before, total, since = training.updates, 0.0, 0.0, 0
    for update, batch in zip(range(1, training.updates + 1), batches(training), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = training.rate * min(1.0, update / training.warm, (end - update + 1) / SETTLE)
        loss = model.loss(batch)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        total, since = total + float(loss.detach()), since + 1
        if update % EVERY and update != end:
            continue
        accuracy = model.accuracy(training.task, VALIDATION, VALIDATE)
        yield Progress(update, total / since, accuracy)
        if update == end:
            return
        if min(before, accuracy) >= SOLVED:
            end = min(end, update + SETTLE)
        before, total, since = accuracy, 0.0, 0


def trials(
    model: Model, task: Task, episodes: int, few: int, corridors: tuple[int, ...] = CORRIDORS
) -> Iterator[tuple[str, int, int]]:
    """Condition, right answers and episodes of a trained model: the same episodes for every memory and seed, only `few`
    where one of them is longer than `LONG` moments.
    """
    for name, own, condition in task.conditions(corridors):
        steps = own.steps + (condition.longer - 1) * own.delay
        count = few if steps * condition.frames * condition.show > LONG else episodes
        yield name, round(count * model.accuracy(own, count, TEST, condition=condition)), count


def reached(curve: list[Progress], accuracy: float) -> int | None:
    """Updates to the first validation with that accuracy."""
    return next((each.update for each in curve if each.accuracy >= accuracy), None)
