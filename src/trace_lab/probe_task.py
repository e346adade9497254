"""`tracemem probe-task`: is a task of the suite leak-free? The cue must be plain when it is shown and gone at every branch.
Three measurements: counterfactual pairs (same seed, other cue) compared pixel by pixel; a small classifier on frames; the
expert's success.
"""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from trace_bench.tasks import TASKS, load
from trace_errors import UsageError
from trace_lab.progress import progress

if TYPE_CHECKING:
    from trace_bench.env import BenchEnv
    from trace_bench.episode import Split

MARGIN, PLAIN = 0.05, 0.95  # a branch frame may beat chance by this much; a cue frame must reach that much
READABLE = 0.8  # what may be read of a cue where the task says that something may
PAIRS = 20  # sets of episodes that differ in the cue only
JITTER = 1e-4  # radians: a joint encoder's step. What it does to a picture is the noise floor


@dataclass(frozen=True)
class Moment:
    """What a policy sees at one moment: the cameras side by side, the state and the step."""

    pixels: NDArray[np.uint8]  # (H, W, 9)
    state: NDArray[np.float32]  # (17,)
    step: int


@dataclass(frozen=True)
class Sample:
    """One expert episode: its first moment and the moment of each branch."""

    cue: int
    complete: bool
    moments: tuple[Moment, ...]
    floor: float  # mean difference that joint jitter makes to the pictures of the first branch, grey levels


@dataclass(frozen=True)
class Reading:
    """How well a classifier reads the cue at a moment, on episodes it has not seen."""

    moment: str
    accuracy: float
    low: float  # 95 % interval (Wilson)
    high: float
    leak_free: bool


@dataclass(frozen=True)
class Report:
    """All that was measured on a task."""

    task: str
    episodes: int
    chance: float
    expert: float  # share of episodes completed
    lengths: tuple[int, int, int]  # shortest, median, longest number of steps up to the first branch
    floor: float  # mean difference between pictures that joint jitter makes, grey levels
    pair_pixels: list[float]  # mean difference between the pictures of counterfactual pairs at each branch, grey levels
    pair_states: list[float]  # largest difference in a channel of the state
    pair_steps: list[int]  # largest difference in the time of a branch, control steps
    same: bool  # pairs differ by less than the floor, or the task says that they may
    readings: list[Reading]
    seconds: float

    @property
    def leak_free(self) -> bool:
        """Every check holds."""
        return self.expert >= 0.99 and self.same and all(reading.leak_free for reading in self.readings)


def look(env: "BenchEnv") -> Moment:
    """The present moment, drawn only now."""
    from trace_bench.robot import CAMERAS

    views = [env.world.render(camera, env.size, env.size) for camera in CAMERAS]
    return Moment(np.concatenate(views, axis=2), env.world.state(), env.record.steps)


def difference(one: Moment, other: Moment) -> float:
    """Mean absolute difference between two pictures, grey levels."""
    return float(np.abs(one.pixels.astype(int) - other.pixels).mean())


def floor(env: "BenchEnv") -> float:
    """What a joint encoder's step, up or down in every joint, does to the present picture; nothing is moved."""
    import mujoco

    data = env.world.data
    before, here = data.qpos.copy(), look(env)
    signs = np.random.default_rng(env.episode.seed).choice((-1.0, 1.0), size=before.shape)
    joints = env.world.model.jnt_type == mujoco.mjtJoint.mjJNT_HINGE
    data.qpos[env.world.model.jnt_qposadr[joints]] += JITTER * signs[: joints.sum()]
    mujoco.mj_forward(env.world.model, data)
    moved = look(env)
    data.qpos[:] = before
    mujoco.mj_forward(env.world.model, data)
    return difference(here, moved)


def sample(env: "BenchEnv", seed: int, cue: int | None = None) -> Sample:
    """Lets the expert do an episode and keeps the moments that matter."""
    env.reset(seed=seed, options={"cue": cue})
    moments, noise = [look(env)], 0.0
    for action in env.expert():
        *_, terminated, truncated, _ = env.step(action)
        if env.world.lamp == len(moments):
            moments.append(look(env))
            noise = noise or floor(env)
        if terminated or truncated:
            break
    return Sample(env.episode.cue, env.record.complete, tuple(moments), noise)


@lru_cache(maxsize=2)
def _env(task: str, split: "Split", size: int) -> "BenchEnv":
    """A worker's environment, used again."""
    from trace_bench.env import make

    return make(task, split=split, size=size, cameras=())


def _work(task: str, split: "Split", size: int, seed: int, cue: int | None) -> Sample:
    return sample(_env(task, split, size), seed, cue)


def pairs_apart(samples: list[Sample]) -> list[tuple[float, float, int]]:
    """Difference in pixels, state and time, at each branch, between episodes that differ in the cue only."""
    rows = []
    for first, *others in zip(*(s.moments[1:] for s in samples), strict=False):
        pixels = max(difference(first, other) for other in others)
        state = max(float(np.abs(other.state - first.state).max()) for other in others)
        rows.append((pixels, state, max(abs(other.step - first.step) for other in others)))
    return rows


def read(train: list[tuple[Moment, int]], test: list[tuple[Moment, int]], classes: int, seed: int = 0) -> int:
    """Trains a small convolutional classifier on pictures, state and step; counts the test moments it gets right."""
    import torch
    from torch import nn

    torch.manual_seed(seed)

    def tensors(rows: list[tuple[Moment, int]]) -> tuple[Any, Any, Any]:
        pictures = torch.from_numpy(np.stack([m.pixels for m, _ in rows])).permute(0, 3, 1, 2).float() / 255
        extra = torch.from_numpy(np.stack([np.append(m.state, m.step / 100).astype(np.float32) for m, _ in rows]))
        return pictures, extra, torch.tensor([cue for _, cue in rows])

    (pictures, extra, labels), (new_pictures, new_extra, new_labels) = tensors(train), tensors(test)
    mean, std = extra.mean(0), extra.std(0)
    std[std == 0] = 1.0
    level = pictures.mean((0, 2, 3), keepdim=True)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (9, 16, 32, 32)
            layers = [
                layer for a, b in pairwise(widths) for layer in (nn.Conv2d(a, b, 5, 2, 2), nn.BatchNorm2d(b), nn.ReLU())
            ]
            self.see = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(0.3))
            self.tell = nn.Linear(32 * 36 + extra.shape[1], classes)

        def forward(self, pictures: Any, extra: Any) -> Any:
            return self.tell(torch.cat([self.see(pictures - level), (extra - mean) / std], dim=1))

    model = Reader()
    epochs = min(60, max(8, 6000 // len(train)))
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=1e-2)
    steps = epochs * -(-len(train) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(train)).split(64):
            light = 1 + 0.25 * (torch.rand(len(rows), 1, 1, 1) - 0.5)  # held-out episodes have other light
            loss = nn.functional.cross_entropy(model(pictures[rows] * light, extra[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return int((model(new_pictures, new_extra).argmax(1) == new_labels).sum())


def examine(task: str, episodes: int, size: int, workers: int, console: Console) -> Report:
    """Runs the experts and makes all measurements."""
    from trace_bench.episode import SPLITS

    begin = time.perf_counter()
    bench = load(task)
    count = len(bench.cues)
    jobs: list[tuple[Split, int, int | None]] = [("train", seed, None) for seed in range(episodes)]
    jobs += [("heldout", seed, None) for seed in range(episodes)]
    jobs += [(split, 10_000 + n, cue) for n in range(PAIRS // 2) for split in SPLITS for cue in range(count)]
    with ProcessPoolExecutor(workers, mp_context=get_context("forkserver")) as pool:
        futures = [pool.submit(_work, bench.name, split, size, seed, cue) for split, seed, cue in jobs]
        samples = []
        with progress(f"{bench.name}: expert episodes", len(jobs), console=console) as bar:
            for future in futures:
                samples.append(future.result())
                bar.advance()
    train, test, pairs = samples[:episodes], samples[episodes : 2 * episodes], samples[2 * episodes :]
    moments = ["cue", *(f"branch {k}" for k in range(1, len(bench.lamps) + 1))]
    readings = []
    with progress(f"{bench.name}: classifiers", len(moments), console=console) as bar:
        for index, moment in enumerate(moments):
            known, new = ([(s.moments[index], s.cue) for s in part if len(s.moments) > index] for part in (train, test))
            right = read(known, new, count)
            readings.append(judge(moment, right, len(new), 1 / count, expected=bench.partly_readable))
            bar.advance()
    differences = [pairs_apart(pairs[k : k + count]) for k in range(0, len(pairs), count)]
    gaps = np.array([d for d in differences if len(d) == len(bench.lamps)])  # (pairs, branches, 3)
    noise = float(np.mean([s.floor for s in pairs]))
    steps = sorted(s.moments[1].step for s in train + test)
    return Report(
        task=bench.name,
        episodes=2 * episodes,
        chance=1 / count,
        expert=float(np.mean([s.complete for s in train + test])),
        lengths=(steps[0], steps[len(steps) // 2], steps[-1]),
        floor=noise,
        pair_pixels=gaps[..., 0].mean(0).tolist(),
        pair_states=gaps[..., 1].max(0).tolist(),
        pair_steps=gaps[..., 2].max(0).astype(int).tolist(),
        same=bench.partly_readable or bool(gaps[..., 0].mean(0).max() < noise),
        readings=readings,
        seconds=round(time.perf_counter() - begin, 1),
    )


def judge(moment: str, right: int, total: int, chance: float, *, expected: bool) -> Reading:
    """A reading with its interval. `expected`: the task says itself that its branch can partly be read."""
    from scipy.stats import binomtest

    interval = binomtest(right, total).proportion_ci(method="wilson")
    accuracy = right / total
    leak_free = accuracy >= PLAIN if moment == "cue" else abs(accuracy - chance) <= MARGIN
    if expected and moment != "cue":
        leak_free = accuracy <= READABLE
    return Reading(moment, accuracy, float(interval.low), float(interval.high), leak_free)


def probe_task(
    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=f"one of {', '.join(TASKS)}.")],
    episodes: int = 600,
    size: int = 96,
    workers: int = os.cpu_count() or 1,
    *,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Checks that a task of the suite is leak-free: the cue can be read when it is shown and at no branch.

    The expert does many training and as many held-out episodes. A small classifier is trained on the training ones, once
    on the first frames and once on the frames of each branch (pictures, state and step number), and tried on the held-out
    ones. Counterfactual pairs, episodes that differ in nothing but the cue, are compared pixel by pixel. Exit code 1 if a
    check fails.

    Args:
        episodes: training episodes, and as many held-out ones. 600 give an interval of about 4 points either way.
        size: height and width of the pictures, pixels.
        workers: processes that simulate.
        json_: print one json object instead of a table.
    """
    if episodes < 10:
        raise UsageError(f"episodes: got {episodes}, expected at least 10")
    if workers < 1:
        raise UsageError(f"workers: got {workers}, expected 1 or more")
    load(task)
    console = Console(stderr=json_)
    report = examine(task, episodes, size, workers, console)
    if json_:
        print(json.dumps(asdict(report) | {"leak_free": report.leak_free}))  # noqa: T201
    else:
        show(report, console)
    return 0 if report.leak_free else 1


def show(report: Report, console: Console) -> None:
    """The table of a report."""
    table = Table(title=f"{report.task}: can the cue be read? (chance {report.chance:.2f})")
    for column in ("moment", "accuracy", "95 % interval", "pairs differ by (grey levels)", "as it should be"):
        table.add_column(column)
    for index, r in enumerate(report.readings):
        gap = f"{report.pair_pixels[index - 1]:.4f}" if index else ""
        table.add_row(
            r.moment, f"{r.accuracy:.3f}", f"{r.low:.3f} to {r.high:.3f}", gap, "yes" if r.leak_free else "NO"
        )
    console.print(table)
    console.print(
        f"Noise floor: {report.floor:.4f} grey levels (joint jitter of {JITTER} rad); "
        f"states of pairs differ by {max(report.pair_states):.0e}, their branch times by {max(report.pair_steps)} steps.\n"
        f"Expert: {100 * report.expert:.1f} % of {report.episodes} episodes complete; "
        f"first branch at step {report.lengths[0]} to {report.lengths[2]} (median {report.lengths[1]}). "
        f"{report.seconds:.0f} s."
    )
