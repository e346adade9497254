"""`tracemem doctor`: looks at a LeRobot dataset before anyone trains on it, and says what a memory would find there, what
training would cost, and whether a memory is needed at all.

The last is asked of delayed evidence: at many moments of the episodes, how much of what the robot does next can be predicted
from the present frame, and how much more when the first frames are known too? Linear regression on small pictures: a hint,
not a proof.
"""

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console

from trace_errors import DatasetError
from trace_lab.progress import progress
from trace_lab.recipe import recipe
from trace_lab.source import describe

if TYPE_CHECKING:
    from lerobot_policy_trace.paths import Paths

Array = NDArray[np.float64]

SMALL = 12  # width and height of the pictures that are compared
MOST = 200  # episodes that are looked at
FEW = 20  # episodes below which little can be said
JUMP = 50.0  # times its usual step that a channel may move at once
STILL = 1e-6
LONG = 20  # times the length over which a key fades: longer paths are likely noise

GRID = 20  # moments of an episode that are looked at
EARLY = 4  # of them count as early: the first fifth
AHEAD = 3  # moments that count as what the robot does next
RIDGES = (0.03, 0.1, 0.3, 1.0)
WEIGHTS = (0.3, 1.0, 3.0)  # of the first frames beside the present one
SHUFFLES = 200
SURE, MUCH, PLAIN = 0.01, 0.1, 0.8  # significance; share that must be gained; share that counts as all explained
FEWEST = 12  # episodes


@dataclass(frozen=True)
class Findings:
    """What was seen in words, good or neutral; what stands in the way; and the numbers behind both."""

    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(self.notes + other.notes, self.problems + other.problems, self.figures | other.figures)


# -- what is in it ---------------------------------------------------------------------------------------------------------


def names_of(meta: Any, feature: str) -> list[str]:
    """Names of a feature's channels, or their numbers."""
    shape, names = meta.features[feature]["shape"], meta.features[feature].get("names")
    flat = next(iter(names.values())) if isinstance(names, dict) and names else names
    count = int(np.prod(shape))
    return [str(name) for name in flat] if flat and len(flat) == count else [str(number) for number in range(count)]


def inventory(meta: Any, paths: "Paths", cameras: list[str]) -> Findings:
    """Features and lengths."""
    lengths = (paths.ends - paths.starts).numpy()
    low, middle, high = int(lengths.min()), int(np.median(lengths)), int(lengths.max())
    problems = list[str]()
    notes = [
        f"{len(lengths)} episodes of {low} to {high} frames (median {middle}, {middle / meta.fps:.0f} s at {meta.fps} Hz), "
        f"{paths.states.shape[1]} state channels, cameras: {', '.join(cameras) or 'none'}."
    ]
    if not cameras:
        problems.append("No camera: a memory writes what the robot sees.")
    if low < 2:
        short = (lengths < 2).nonzero()[0].tolist()
        problems.append(f"Episodes of a single frame, from which nothing can be learnt: {short[:10]}.")
    if len(lengths) < FEW:
        notes.append(f"Fewer than {FEW} episodes: whatever is said below rests on little.")
    figures = {
        "episodes": len(lengths),
        "frames": int(lengths.sum()),
        "lengths": [low, middle, high],
        "fps": meta.fps,
        "channels": paths.states.shape[1],
        "cameras": cameras,
    }
    return Findings(tuple(notes), tuple(problems), figures)


def states(meta: Any, paths: "Paths") -> Findings:
    """Channels that stand still or jump."""
    names, x = names_of(meta, "observation.state"), paths.states.numpy().astype(np.float64)
    still = [name for name, spread in zip(names, x.std(0), strict=True) if spread < STILL]
    steps = np.concatenate([np.abs(np.diff(path.numpy().astype(np.float64), axis=0)) for path in paths.episodes()])
    usual = np.quantile(steps, 0.95, axis=0)
    leaps = [name for name, top, step in zip(names, steps.max(0), usual, strict=True) if top > JUMP * max(step, STILL)]
    problems, notes = list[str](), list[str]()
    if len(still) == len(names):
        problems.append("No state channel ever moves: there is no path to address a memory by.")
    elif still:
        notes.append(f"Channels that never move, which keys leave out: {', '.join(still)}.")
    if leaps:
        notes.append(f"Channels that jump now and then (an angle that wraps, a lost sample?): {', '.join(leaps)}.")
    return Findings(tuple(notes), tuple(problems), {"constant": still, "jumping": leaps})


def keys(paths: "Paths") -> Findings:
    """How far the standardised path and its signature, which a memory's keys are made of, go."""
    import torch

    from trace_memory import MemoryConfig, TraceMemory
    from trace_memory.trace import FADE

    memory = TraceMemory.from_config(MemoryConfig(channels=paths.states.shape[1], content=8, width=8, hidden=8))
    normaliser, signature = memory.normaliser, memory.signature
    episodes = paths.episodes()
    normaliser.fit(episodes, signature)
    some = episodes[:: max(1, len(episodes) // 20)]
    lengths = [float(torch.diff(normaliser.state(path), dim=0).norm(dim=1).sum()) for path in episodes]
    xi = torch.cat([signature.stream(normaliser.state(path)[None])[1][0] for path in some])
    scaled = ((xi - normaliser.xi_mean) / normaliser.xi_std).abs()
    middle, top = float(scaled.median()), float(scaled.max())
    notes = [
        f"A path is {np.median(lengths):.0f} standard deviations long (median); its signature has {signature.dim:,} "
        f"numbers, usually within {middle:.1f} and at most {top:.0f} standard deviations from their mean."
    ]
    if np.median(lengths) > LONG * FADE:
        notes.append(
            f"Paths are long beside the {FADE:g} standard deviations over which a key forgets: noise of the sensors counts "
            "as motion. Smooth the states, or leave the noisy channels out."
        )
    figures = {
        "path_length": float(np.median(lengths)),
        "key_dim": signature.dim,
        "key_median": middle,
        "key_max": top,
    }
    return Findings(tuple(notes), figures=figures)


@contextmanager
def counting(saved: dict[int, int]) -> Iterator[None]:
    """Notes place and bytes of what autograd keeps for the backward pass meanwhile; not what a captured CUDA graph keeps."""
    import torch

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield


def cost(meta: Any, paths: "Paths", cameras: list[str], preset: str, console: Console) -> Findings:
    """Memory and time of training, from one small update on this machine."""
    import torch
    from accelerate import Accelerator

    from trace_lab.frames import open_frames
    from trace_lab.training import Training

    pictures = [int(np.prod(meta.features[camera]["shape"])) for camera in cameras]
    store = len(paths.states) * sum(pictures)
    made = recipe(preset, "act", "trace", {"episodes": 1, "targets": 8, "warmup": 1})
    whole = recipe(preset, "act", "trace", {})
    with console.status("one small update, to see how fast this machine is"):
        accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
        training = Training.begin(made, 0, open_frames(meta, accelerator.device, console=console), accelerator)
        saved: dict[int, int] = {}
        with counting(saved):
            training.update()
        begun = time.perf_counter()
        training.update()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
    weights = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in training.policy.parameters()}
    kept = sum(size for place, size in saved.items() if place not in weights)
    needed = 4 * sum(weights.values()) + kept * whole.episodes  # weights, gradients and AdamW's two averages
    update = took * whole.episodes  # frames of an episode are most of the work
    hours = update * whole.steps / 3600
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
    figures = {"frames_bytes": store, "training_bytes": needed, "update_seconds": update, "hours": hours}
    notes = (
        f"Decoded pictures take {store / 1e9:.2f} GB, in GPU memory, RAM or a file.",
        f"Training ACT with TRACE at preset {preset} ({whole.steps:,} updates of {whole.batch} targets) would take about "
        f"{hours:.1f} h on {machine} ({update:.1f} s an update) and need {needed / 1e9:.1f} GB beside the pictures; both "
        "from one update of one episode, so rough.",
    )
    return Findings(notes, figures=figures | {"machine": machine})


# -- is a memory needed? ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What was found, at the moment where knowing the first frames helps most. Shares are of the variance, between episodes,
    of what the robot does next, predicted for episodes left out.
    """

    episodes: int
    moment: float | None = None  # as a share of the episode
    now: float | None = None  # explained by the present frame
    early: float | None = None  # by the first frames
    both: float | None = None
    p: float | None = None  # how often shuffled first frames help as much
    delayed: bool | None = None  # None: cannot be said
    verdict: str = f"Fewer than {FEWEST} episodes: too few to say whether a memory is needed."


def moments(length: int) -> NDArray[np.int64]:
    """The frames of an episode that are looked at."""
    return np.linspace(0, length - 1, GRID).round().astype(np.int64)


def alike(*features: Array) -> Array:
    """How alike episodes are (E, E): scalar products of centred features, every kind of them with the same weight."""
    total = np.zeros((len(features[0]),) * 2)
    for x in features:
        centred = x - x.mean(0)
        product = centred @ centred.T
        total += product * (len(x) / max(float(np.trace(product)), 1e-12))
    return total / len(features)


def explained(kernel: Array, next_: Array) -> float:
    """Share of the variance of `next_` that a ridge regression predicts for episodes left out (in closed form)."""
    count = len(kernel)
    y = next_ - next_.mean(0)
    around = float(((y * count / (count - 1)) ** 2).sum())  # what is left if the mean of the others is predicted
    best = -np.inf
    for ridge in RIDGES:
        hat = kernel @ np.linalg.inv(kernel + ridge * np.eye(count)) + 1 / count
        left_out = (y - hat @ y) / (1 - np.diag(hat))[:, None]
        best = max(best, 1 - float((left_out**2).sum()) / max(around, 1e-12))
    return best


def gains(now: list[Array], early: Array, next_: list[Array], base: list[float]) -> list[float]:
    """How much more is explained, at each moment, when the first frames are known too."""
    found = []
    for kernel, y, alone in zip(now, next_, base, strict=True):
        found.append(max(explained(kernel + weight * early, y) for weight in WEIGHTS) - alone)
    return found


def examine(paths: Sequence[Array], pictures: Array) -> Evidence:
    """`paths`: standardised states of each episode; `pictures`: (episodes, GRID, numbers), small, at their `moments`."""
    count = len(paths)
    if count < FEWEST:
        return Evidence(count)
    states = np.stack([path[moments(len(path))] for path in paths])  # (E, GRID, d)
    early = alike(*(x[:, t] for t in range(EARLY) for x in (pictures, states)))
    times = range(EARLY + 1, GRID - AHEAD)
    now = [alike(pictures[:, t], states[:, t]) for t in times]
    next_: list[Array] = [(states[:, t + 1 : t + 1 + AHEAD] - states[:, t, None]).reshape(count, -1) for t in times]
    base = [explained(a, y) for a, y in zip(now, next_, strict=True)]
    gained = gains(now, early, next_, base)
    rng = np.random.default_rng(0)
    orders = [rng.permutation(count) for _ in range(SHUFFLES)]
    by_luck = [max(gains(now, early[np.ix_(order, order)], next_, base)) for order in orders]
    best = int(np.argmax(gained))
    p = (1 + sum(luck >= gained[best] for luck in by_luck)) / (1 + SHUFFLES)
    delayed = bool(p < SURE and gained[best] > max(MUCH, base[best]))  # more than the present frame explains
    at = times[best] / (GRID - 1)
    seen = (
        f"Where the first frames help most ({at:.0%} into an episode) they explain {max(0, gained[best]):.0%} of the next "
        f"motion beyond the {max(0, base[best]):.0%} that the present frame explains; shuffled between episodes they help "
        f"as much in {p:.1%} of cases."
    )
    rule = f"more than {MUCH:.0%}, more than the present frame explains, and by luck in under {SURE:.0%} of cases"
    if delayed:
        verdict = f"{seen} That is delayed evidence ({rule}): a memory should help."
    elif min(base) > PLAIN:
        verdict = (
            f"{seen} The present frame explains over {PLAIN:.0%} at every moment: a policy without a memory should do."
        )
    else:
        verdict = f"{seen} That is no sign of delayed evidence, which would be {rule}."
    both = base[best] + gained[best]
    return Evidence(count, at, base[best], explained(early, next_[best]), both, p, delayed, verdict)


def small_pictures(meta: Any, paths: "Paths", cameras: list[str], count: int, console: Console) -> np.ndarray:
    """(episodes, moments, numbers): what is seen, shrunk."""
    import torch

    from trace_lab.frames import Job, decode, jobs_of

    jobs = [job for job in jobs_of(meta, cameras, paths) if job.episode < count]
    found: list[list[np.ndarray]] = [[] for _ in range(count)]
    with progress("looking at moments of episodes", len(jobs), console=console) as bar:
        for job in jobs:
            at = moments(len(job.times))
            times = [job.times[t] for t in at]
            seen = torch.from_numpy(decode(Job(job.camera, job.episode, 0, job.video, times))).float()
            found[job.episode].append(torch.nn.functional.adaptive_avg_pool2d(seen, SMALL).flatten(1).numpy() / 255)
            bar.advance()
    return np.stack([np.concatenate(each, axis=1) for each in found]).astype(np.float64)


def evidence(meta: Any, paths: "Paths", cameras: list[str], console: Console) -> Evidence:
    """Is a memory needed?"""
    import torch

    count = min(MOST, len(paths.starts))
    spread = paths.states.std(0)
    standard = (
        ((paths.states - paths.states.mean(0)) / torch.where(spread > STILL, spread, 1.0)).numpy().astype(np.float64)
    )
    ends = list(zip(paths.starts.tolist(), paths.ends.tolist(), strict=True))[:count]
    return examine([standard[a:b] for a, b in ends], small_pictures(meta, paths, cameras, count, console))


# -- the command -----------------------------------------------------------------------------------------------------------


def refuse_images(dataset: Path, info: dict[str, Any]) -> None:
    """Pictures must be stored as video, which is found out now and not after all else was looked at."""
    single = [name for name, feature in info["features"].items() if feature.get("dtype") == "image"]
    if single:
        root = dataset.resolve()
        line = ["lerobot-edit-dataset", "--repo_id", f"local/{root.name}", "--root", str(root)]
        line += ["--new_root", f"{root}-video", "--operation.type", "convert_image_to_video"]
        raise DatasetError(
            f"{dataset}: {', '.join(single)} stored as single images, expected video. This makes a copy with video:\n  "
            f"{shlex.join(line)}"
        )


def next_command(dataset: Path, preset: str, memory: str) -> str:
    """What to type next."""
    words = ["tracemem", "train", str(dataset), "--out", f"outputs/{dataset.resolve().name}"]
    words += ["--memory", memory]
    words += ["--preset", preset] if preset != "default" else []
    return shlex.join(words)


def doctor(
    dataset: tyro.conf.Positional[Path],
    *,
    preset: str = "default",
    cost_: Annotated[bool, tyro.conf.arg(name="cost")] = True,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Looks at a LeRobot dataset and says what a memory would find there, what training costs, whether it is needed.

    Exit code 0: a memory can be trained on it; 1: something stands in the way, and is named.

    Args:
        dataset: folder of a LeRobot dataset (v3).
        preset: of the recipe whose cost is estimated: default, paper or tiny.
        cost_: also decode all pictures and do two small updates, to estimate memory and time of training.
        json_: print JSON instead of words.
    """
    recipe(preset, "act", "trace", {})
    refuse_images(dataset, describe(dataset))
    from lerobot_policy_trace.paths import Paths  # LeRobot takes long to import
    from trace_lab.frames import open_dataset

    console, meta, following = Console(stderr=json_, highlight=False), open_dataset(dataset), ""
    paths, cameras = Paths.of(meta), list(meta.video_keys)
    found = inventory(meta, paths, cameras) + states(meta, paths)
    if not found.problems:
        found += keys(paths)
        seen = evidence(meta, paths, cameras, console)
        found += Findings((seen.verdict,), figures={"evidence": asdict(seen)})
        if cost_:
            found += cost(meta, paths, cameras, preset, console)
        following = next_command(dataset, preset, "none" if seen.delayed is False else "trace")
    if json_:
        print(json.dumps({"problems": found.problems, "notes": found.notes, "next": following, **found.figures}))  # noqa: T201
    else:
        for words in found.notes:
            console.print(f"- {words}", markup=False, soft_wrap=True)
        for words in found.problems:
            console.print(f"! {words}", style="bold red", markup=False, soft_wrap=True)
        console.print("Something stands in the way." if found.problems else "A memory can be trained on this dataset.")
        if following:
            console.print(f"Next: {following}", markup=False, soft_wrap=True)
    return 1 if found.problems else 0
