"""`tracemem doctor`: looks at a LeRobot dataset before anyone trains on it, and says in plain words what a memory would find
there, what training would cost, and whether a memory is needed at all.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from accelerate import Accelerator
from rich.console import Console
from rich.progress import track

from lerobot_policy_trace.paths import DatasetError, Paths
from trace_lab.evidence import Evidence, examine, moments
from trace_lab.frames import FramesError, Job, decode, jobs_of, open_dataset, open_frames, shapes_of
from trace_lab.recipe import RecipeError, recipe
from trace_lab.train import Training
from trace_memory.config import PRESETS, SIGNATURES
from trace_memory.normalise import Normaliser

SMALL = 12  # width and height of the pictures that are compared
MOST = 200  # episodes that are looked at
FEW = 20  # episodes below which little can be said
JUMP = 50.0  # times its usual step that a channel may move at once
STILL = 1e-6


@dataclass
class Findings:
    """What was seen, in words: good or neutral, and what stands in the way."""

    told: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def names_of(meta: Any, feature: str) -> list[str]:
    """Names of a feature's channels, or their numbers."""
    shape, names = meta.features[feature]["shape"], meta.features[feature].get("names")
    flat = next(iter(names.values())) if isinstance(names, dict) and names else names
    count = int(np.prod(shape))
    return [str(name) for name in flat] if flat and len(flat) == count else [str(number) for number in range(count)]


def inventory(meta: Any, paths: Paths, found: Findings) -> list[str]:
    """Features and lengths; returns the cameras."""
    cameras = list(shapes_of(meta, None, len(paths.states)))
    lengths = (paths.ends - paths.starts).numpy()
    low, middle, high = int(lengths.min()), int(np.median(lengths)), int(lengths.max())
    found.figures |= {
        "episodes": len(lengths),
        "frames": int(lengths.sum()),
        "lengths": [low, middle, high],
        "fps": meta.fps,
    }
    found.figures |= {"channels": paths.states.shape[1], "cameras": cameras}
    found.told.append(
        f"{len(lengths)} episodes of {low} to {high} frames (median {middle}, {middle / meta.fps:.0f} s at {meta.fps} Hz), "
        f"{paths.states.shape[1]} state channels, cameras: {', '.join(cameras) or 'none'}."
    )
    if not cameras:
        found.problems.append("No camera: a memory writes what the robot sees.")
    if low < 2:
        short = (lengths < 2).nonzero()[0].tolist()
        found.problems.append(f"Episodes of a single frame, from which nothing can be learnt: {short[:10]}.")
    if len(lengths) < FEW:
        found.told.append(f"Fewer than {FEW} episodes: whatever is said below rests on little.")
    return cameras


def states(meta: Any, paths: Paths, found: Findings) -> None:
    """Channels that stand still or jump."""
    names, x = names_of(meta, "observation.state"), paths.states.numpy().astype(np.float64)
    still = [name for name, spread in zip(names, x.std(0), strict=True) if spread < STILL]
    steps = np.concatenate([np.abs(np.diff(path.numpy().astype(np.float64), axis=0)) for path in paths.episodes()])
    usual = np.quantile(steps, 0.95, axis=0)
    leaps = [name for name, top, step in zip(names, steps.max(0), usual, strict=True) if top > JUMP * max(step, STILL)]
    found.figures |= {"constant": still, "jumping": leaps}
    if len(still) == len(names):
        found.problems.append("No state channel ever moves: there is no path to address a memory by.")
    elif still:
        found.told.append(f"Channels that never move, which keys leave out: {', '.join(still)}.")
    if leaps:
        found.told.append(f"Channels that jump now and then (an angle that wraps, a lost sample?): {', '.join(leaps)}.")


def keys(paths: Paths, preset: str, found: Findings) -> None:
    """How far the standardised path and its signature go."""
    c = PRESETS[preset]
    signature = SIGNATURES[c.key](paths.states.shape[1], c.depth, c.fade)
    normaliser = Normaliser(paths.states.shape[1], signature.dim, c.bound)
    episodes = paths.episodes()
    normaliser.fit(episodes, signature)
    some = episodes[:: max(1, len(episodes) // 20)]
    lengths = [float(torch.diff(normaliser.state(path), dim=0).norm(dim=1).sum()) for path in episodes]
    xi = torch.cat([signature.stream(normaliser.state(path)[None])[1][0] for path in some])
    scaled = ((xi - normaliser.xi_mean) / normaliser.xi_std).abs()
    middle, top = float(scaled.median()), float(scaled.max())
    found.figures |= {
        "path_length": float(np.median(lengths)),
        "key_dim": signature.dim,
        "key_median": middle,
        "key_max": top,
    }
    found.told.append(
        f"A path is {np.median(lengths):.0f} standard deviations long (median); its key has {signature.dim:,} numbers, "
        f"usually within {middle:.1f} and at most {top:.0f} standard deviations from their mean."
    )
    if not math.isinf(c.fade) and np.median(lengths) > 20 * c.fade:
        found.told.append(
            f"Paths are long beside the key's fading length of {c.fade:g}: noisy sensors count as motion. Consider "
            f"--set memory.fade={np.median(lengths) / 8:.0f}"
        )


@contextmanager
def counting(saved: dict[int, int]) -> Iterator[None]:
    """Notes place and bytes of what autograd keeps for the backward pass meanwhile; not what a captured CUDA graph keeps."""

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield


def cost(meta: Any, paths: Paths, cameras: list[str], preset: str, found: Findings, console: Console) -> None:
    """Memory and time of training, from one small update on this machine."""
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
    found.figures |= {"frames_bytes": store, "training_bytes": needed, "update_seconds": update, "hours": hours}
    found.figures["machine"] = machine
    found.told.append(f"Decoded pictures take {store / 1e9:.2f} GB, in GPU memory, RAM or a file.")
    found.told.append(
        f"Training ACT with TRACE at preset {preset} ({whole.steps:,} updates of {whole.batch} targets) would take about "
        f"{hours:.1f} h on {machine} ({update:.1f} s an update) and need {needed / 1e9:.1f} GB beside the pictures; both "
        "from one update of one episode, so rough."
    )


def small_pictures(meta: Any, paths: Paths, cameras: list[str], count: int, console: Console) -> np.ndarray:
    """(episodes, moments, numbers): what is seen, shrunk."""
    jobs = [job for job in jobs_of(meta, cameras, paths) if job.episode < count]
    found: list[list[np.ndarray]] = [[] for _ in range(count)]
    for job in track(jobs, "looking at moments of episodes", console=console, transient=True):
        at = moments(len(job.times))
        seen = torch.from_numpy(decode(Job(job.camera, job.episode, 0, job.video, [job.times[t] for t in at]))).float()
        found[job.episode].append(torch.nn.functional.adaptive_avg_pool2d(seen, SMALL).flatten(1).numpy() / 255)
    return np.stack([np.concatenate(each, axis=1) for each in found]).astype(np.float64)


def evidence(meta: Any, paths: Paths, cameras: list[str], found: Findings, console: Console) -> Evidence:
    """Is a memory needed?"""
    count = min(MOST, len(paths.starts))
    spread = paths.states.std(0)
    standard = (
        ((paths.states - paths.states.mean(0)) / torch.where(spread > STILL, spread, 1.0)).numpy().astype(np.float64)
    )
    ends = list(zip(paths.starts.tolist(), paths.ends.tolist(), strict=True))[:count]
    seen = examine([standard[a:b] for a, b in ends], small_pictures(meta, paths, cameras, count, console))
    found.figures["evidence"] = asdict(seen)
    if seen.moment is not None:
        found.told.append(
            f"Where the first fifth of an episode helps most (after {seen.moment:.0%}), the present frame tells "
            f"{max(0, seen.now or 0):.0%} of what the robot does next, the first frames {max(0, seen.early or 0):.0%}, both "
            f"{max(0, seen.both or 0):.0%} (shuffled first frames help as much in {seen.p:.1%} of cases)."
        )
    found.told.append(seen.verdict)
    return seen


def doctor(
    dataset: tyro.conf.Positional[Path],
    *,
    preset: str = "default",
    cost_: Annotated[bool, tyro.conf.arg(name="cost")] = True,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Looks at a LeRobot dataset and says what a memory would find there, what training costs, whether it is needed.

    Exit code 0: a memory can be trained on it; 1: something stands in the way, and is named; 2: it could not be read.

    Args:
        dataset: folder of a LeRobot dataset (v3).
        preset: of the recipe and the memory: default, paper or tiny.
        cost_: also decode all pictures and do two small updates, to estimate memory and time of training.
        json_: print JSON instead of words.
    """
    console, found = Console(stderr=json_, highlight=False), Findings()
    try:
        recipe(preset, "act", "trace", {})
        meta = open_dataset(dataset)
        paths = Paths.of(meta)
        cameras = inventory(meta, paths, found)
        states(meta, paths, found)
        if not found.problems:
            keys(paths, preset, found)
            evidence(meta, paths, cameras, found, console)
            if cost_:
                cost(meta, paths, cameras, preset, found, console)
    except (FramesError, DatasetError, RecipeError) as error:
        print(f"tracemem doctor: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if json_:
        print(json.dumps({"problems": found.problems, "told": found.told, **found.figures}))  # noqa: T201
    else:
        for words in found.told:
            console.print(f"- {words}", markup=False)
        for words in found.problems:
            console.print(f"! {words}", style="bold red", markup=False)
        console.print("Something stands in the way." if found.problems else "A memory can be trained on this dataset.")
    return 1 if found.problems else 0
