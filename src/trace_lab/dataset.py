"""Demonstrations on disk. An episode of the expert becomes a shard, a small LeRobotDataset of its own; shards become one
dataset with a card. What a folder holds, and whether it may be written to, is decided here; who does the work is `collect`'s
business.

While work is going on a folder holds `.collect/`: settings.json, a folder for each finished episode, a `.failed` file for
each that the expert did not complete. `merged/` in it is a whole dataset that only needs to be moved into place.
"""

import atexit
import contextlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trace_bench.tasks import TASKS
from trace_errors import ControlError, DatasetError, SimulationError
from trace_lab.run import write_json

if TYPE_CHECKING:
    from trace_bench.env import BenchEnv, Observation

WORK = ".collect"
SETTINGS, SHEET = Path("meta/trace_bench.json"), Path("meta/trace_bench.jsonl")
# Full colour (4:4:4) halves the error at these sizes and allows odd ones; two frames a group for quick random access.
ENCODER: dict[str, Any] = {
    "vcodec": "h264",
    "pix_fmt": "yuv444p",
    "preset": "veryfast",
    "crf": 18,
    "g": 2,
    "extra_options": {"bf": 0},
}


class Flag(Protocol):
    """threading.Event, or that of multiprocessing."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


@dataclass(frozen=True)
class Settings:
    """What decides the content of an episode, besides its number."""

    task: str
    split: str
    size: int
    profile: str
    delay: int | None
    first_seed: int
    suite: int = field(init=False)  # the task's version

    def __post_init__(self) -> None:
        object.__setattr__(self, "suite", TASKS[self.task].version if self.task in TASKS else 0)

    def env(self, **options: Any) -> "BenchEnv":
        """A new environment."""
        from trace_bench.env import make

        shared: dict[str, Any] = {"split": self.split, "size": self.size, "profile": self.profile, "delay": self.delay}
        return make(self.task, **shared, **options)

    @property
    def repo_id(self) -> str:
        """The dataset's name for LeRobot."""
        return f"trace_bench/{self.task.lower()}"


@dataclass(frozen=True)
class Attempt:
    """One episode of the expert. A note says why it was not stored."""

    index: int
    steps: int
    note: str = ""


@dataclass(frozen=True)
class Finished:
    """What a finished folder holds: episodes stored, seeds used for them, seeds of which the expert did not complete."""

    episodes: int = 0
    attempts: int = 0
    failed: list[int] = field(default_factory=list)


# -- episodes -----------------------------------------------------------------------------------------------------------


def play(env: "BenchEnv", seed: int, cue: int | None = None) -> "Iterator[tuple[Observation, NDArray[np.float32]]]":
    """One episode of the expert: every observation with the action that answers it. The robot is given the action as it
    is stored, in float32, so that replaying a dataset gives the same episode. A ControlError if the expert cannot do it.
    """
    observation, _ = env.reset(seed=seed, options={"cue": cue})
    script, over = env.expert(), False
    while not over:
        action = next(script).astype(np.float32)
        yield observation, action
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated


def features(size: int) -> dict[str, dict[str, Any]]:
    """The columns of a dataset. The cue, the branch and the stages are not among them."""
    from trace_bench.robot import CAMERAS, CHANNELS

    vector = {"dtype": "float32", "shape": (len(CHANNELS),), "names": list(CHANNELS)}
    picture = {"dtype": "video", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    return {
        "observation.state": dict(vector),
        "action": dict(vector),
        **{f"observation.images.{camera}": dict(picture) for camera in CAMERAS},
    }


class Recorder:
    """What a process that records episodes keeps from one to the next: an environment, and the flag that says to stop."""

    def __init__(self) -> None:
        self.stop: Flag = threading.Event()
        self.kept: tuple[Settings, BenchEnv] | None = None

    def obey(self, stop: Flag) -> None:
        """From now on recordings end when this flag is set."""
        self.stop = stop

    def env(self, settings: Settings) -> "BenchEnv":
        """The environment of these settings; the last one is used again."""
        if self.kept is None or self.kept[0] != settings:
            self.kept = settings, settings.env()
        return self.kept[1]

    def record(self, settings: Settings, index: int, root: Path) -> Attempt:
        """Plays an episode into a new dataset at `root`."""
        from lerobot.configs.video import RGBEncoderConfig
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        _hush()
        env, steps = self.env(settings), 0
        dataset = LeRobotDataset.create(
            settings.repo_id,
            env.profile.rate,
            features(settings.size),
            root=root,
            robot_type="trace_bench",
            rgb_encoder=RGBEncoderConfig(**ENCODER),
            streaming_encoding=True,
            encoder_queue_maxsize=0,  # without an end: LeRobot drops frames when a queue is full
            encoder_threads=1,
        )
        try:
            for observation, action in play(env, settings.first_seed + index):
                if self.stop.is_set():
                    raise SimulationError(f"episode {index} was given up, because the whole collection stops")
                pictures = {f"observation.images.{name}": picture for name, picture in observation["pixels"].items()}
                dataset.add_frame(
                    {"observation.state": observation["agent_pos"], "action": action, **pictures}
                    | {"task": env.task_description}
                )
                steps += 1
            if not env.record.complete:
                return Attempt(index, steps, f"ended with {env.record.outcome}")
            dataset.save_episode()
        except ControlError as error:
            return Attempt(index, steps, str(error))
        finally:
            dataset.writer.cancel_pending_videos()
            dataset.finalize()
        _check_videos(root, steps, env.profile.rate)
        (root / SHEET).write_text(json.dumps(env.record.to_dict()) + "\n")
        return Attempt(index, steps)


_recorder = Recorder()  # of this process


def begin_worker(stop: Flag) -> None:
    """Prepares a worker process: one core for everything, deaf to Ctrl-C, gone when its parent is."""
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("LP_NUM_THREADS", "1")  # software GL's
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
    _recorder.obey(stop)


def shard(work: Path, index: int) -> Path:
    """Where an episode's shard is, once finished."""
    return work / f"episode_{index:06d}"


def record(settings: Settings, index: int, work: Path) -> Attempt:
    """Plays an episode into a shard. A shard has its name only when everything in it is finished."""
    final = shard(work, index)
    temporary = final.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        attempt = _recorder.record(settings, index, temporary)
        if attempt.note:
            final.with_suffix(".failed").write_text(json.dumps(asdict(attempt)) + "\n")
        else:
            temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return attempt


def _check_videos(root: Path, steps: int, rate: int) -> None:
    """LeRobot goes on with a half-written video when its encoder was too slow; we do not."""
    from lerobot.datasets.video_utils import get_video_duration_in_s

    for path in sorted(root.glob("videos/**/*.mp4")):
        frames = round(get_video_duration_in_s(path) * rate)
        if frames != steps:
            raise OSError(f"{path.parent.parent.name}: {frames} frames were written, expected {steps}")


# -- folders ------------------------------------------------------------------------------------------------------------


def check(out: Path, settings: Settings) -> Finished:
    """What the folder holds already; a DatasetError if it is not ours or was made with other settings."""
    if "'" in str(out.absolute()):
        raise DatasetError(f"{out}: LeRobot cannot join videos in a folder with an apostrophe in its path")
    if out.exists() and not out.is_dir():
        raise DatasetError(f"{out} is a file, expected a folder")
    marks = [path for path in (out / WORK / "settings.json", out / SETTINGS) if path.exists()]
    if not marks and out.exists() and {path.name for path in out.iterdir()} - {WORK}:
        raise DatasetError(f"{out} is not empty and was not made by tracemem collect: choose another folder")
    row: dict[str, Any] = {}
    for mark in marks:  # the finished one last
        try:
            row = json.loads(mark.read_text())
            found = {name: row[name] for name in asdict(settings)}
        except (json.JSONDecodeError, KeyError) as error:
            raise DatasetError(f"{mark}: not the settings of a collection ({error})") from error
        for name, asked in asdict(settings).items():
            if found[name] != asked:
                raise DatasetError(
                    f"{out} was made with other settings: {name}: found {found[name]!r}, asked for {asked!r}. "
                    "Choose another folder, or the same settings"
                )
    return (
        Finished(**{name: row[name] for name in ("episodes", "attempts", "failed")})
        if "attempts" in row
        else Finished()
    )


def tidy(out: Path) -> None:
    """Removes what was left half done, and finishes a move that was interrupted."""
    work = out / WORK
    for path in (*work.glob("*.tmp"), *out.glob(f"{WORK}.tmp")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (work / "merged").exists():
        install(out)


def attempts(work: Path) -> dict[int, Attempt]:
    """Episodes that are finished, whichever way."""
    done = {}
    for path in sorted(work.glob("episode_*")):
        if path.suffix == ".failed":
            attempt = Attempt(**json.loads(path.read_text()))
            done[attempt.index] = attempt
        elif not path.suffix:
            index = int(path.name.removeprefix("episode_"))
            done[index] = Attempt(index, sheets(path)[0]["steps"])
    return done


def sheets(dataset: Path) -> list[dict[str, Any]]:
    """The score sheets of a dataset or shard, in its order."""
    path = dataset / SHEET
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merge(out: Path, shards: list[Path], settings: Settings, finished: Finished, pool: Executor) -> Path:
    """One dataset of what the folder holds already and the shards, as a folder that still has to be installed. LeRobot
    joins one part at a time to all before it, so many shards are first joined to groups, which workers can share.
    """
    target = out / WORK / "merged.tmp"
    parts = [out, *shards] if (out / SETTINGS).exists() else shards
    width = max(8, math.isqrt(len(parts)))
    groups = [parts[start : start + width] for start in range(0, len(parts), width)]
    if len(groups) > 1:
        sources = [out / WORK / f"group_{number}.tmp" for number in range(len(groups))]
        for job in [pool.submit(aggregate, settings.repo_id, *p) for p in zip(groups, sources, strict=True)]:
            job.result()
    else:
        sources = parts
    pool.submit(aggregate, settings.repo_id, sources, target).result()
    rows = [row for part in parts for row in sheets(part)]
    lines = [json.dumps({"episode_index": index} | row) for index, row in enumerate(rows)]
    (target / SHEET).write_text("\n".join(lines) + "\n")
    made_by = f"lerobot_policy_trace {metadata.version('lerobot_policy_trace')}"
    write_json(target / SETTINGS, asdict(settings) | asdict(finished) | {"made_by": made_by})
    return target


def aggregate(repo_id: str, parts: list[Path], target: Path) -> None:
    """Datasets one after the other, as a new one: LeRobot's function, without its bars."""
    from lerobot.datasets.aggregate import aggregate_datasets

    _hush()
    with contextlib.redirect_stderr(StringIO()):
        aggregate_datasets([repo_id] * len(parts), repo_id, roots=parts, aggr_root=target)
    stats = target / "meta/stats.json"  # LeRobot takes its names from a set: in another order in every process
    stats.write_text(json.dumps(json.loads(stats.read_text()), indent=4, sort_keys=True) + "\n")


@contextlib.contextmanager
def temporary_cache() -> Iterator[None]:
    """Lets the datasets library, with which LeRobot reads tables, keep its copies of shards in a temporary folder, not in
    the home folder for ever. It reads the variable when it is first imported, here or in a worker; one that is imported
    already, or a place that the user has chosen, stays as it is.
    """
    if "HF_DATASETS_CACHE" in os.environ or "datasets" in sys.modules:
        yield
        return
    place = tempfile.mkdtemp(prefix="tracemem-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)  # not earlier: this process goes on using it
    os.environ["HF_DATASETS_CACHE"] = place
    try:
        yield
    finally:
        del os.environ["HF_DATASETS_CACHE"]


def _hush() -> None:
    """Encoders report their statistics to the terminal, and the datasets library draws bars; neither here."""
    import av
    import datasets

    av.logging.set_libav_level(av.logging.ERROR)
    datasets.disable_progress_bars()


def install(out: Path) -> None:
    """Moves a merged dataset into place. Can be interrupted anywhere and called again; meanwhile the folder does not open
    as a dataset, because `meta` goes first and comes last.
    """
    work = out / WORK
    merged, old = work / "merged", work / "old"
    shutil.rmtree(old, ignore_errors=True)
    old.mkdir()
    for path in sorted(merged.iterdir(), key=lambda path: path.name != "meta"):
        if (out / path.name).exists():
            (out / path.name).rename(old / path.name)
    for path in sorted(merged.iterdir(), key=lambda path: path.name == "meta"):
        path.rename(out / path.name)
    clear(out)


def clear(out: Path) -> None:
    """Removes the working folder, at once as far as anybody can see."""
    shutil.rmtree((out / WORK).rename(out / f"{WORK}.tmp"))


def size_of(folder: Path) -> int:
    """Bytes in all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- the card -----------------------------------------------------------------------------------------------------------

HEADER = """---
license: apache-2.0
task_categories:
- robotics
tags:
- LeRobot
- trace_bench
configs:
- config_name: default
  data_files: data/*/*.parquet
---
"""


def card(settings: Settings, env: "BenchEnv", finished: Finished, rows: list[dict[str, Any]], command: str) -> str:
    """The dataset card, README.md with the header that dataset hubs read. `rows` are the score sheets."""
    about = " ".join((inspect.getdoc(sys.modules[type(env.bench).__module__]) or "").split())
    counts = Counter(row["cue"] for row in rows)
    cues = "\n".join(f"| {cue} | {counts[number]} |" for number, cue in enumerate(env.bench.cues))
    frames = sum(row["steps"] for row in rows)
    left_out = len(finished.failed)
    gone = sorted(row["decisions"][0]["frame"] - row["cue_gone"] for row in rows)
    return f"""{HEADER}
# trace_bench {settings.task}, {settings.split} split

{about}

The scripted expert of the simulated suite `trace_bench` did the task {len(rows)} times ({frames} frames at
{env.profile.rate} a second). The instruction is the same in every episode, whatever the cue: "{env.task_description}"
From the moment the cue is gone to the first branch an episode takes {gone[0]} to {gone[-1]} control steps
({gone[len(gone) // 2]} in the middle).

| cue | episodes |
|---|---|
{cues}

![moments of one episode for each cue](pictures/contact_sheet.png)

## What is in it

| feature | what it is |
|---|---|
| `observation.state` | 17 numbers: velocities of the base, then six joints and a gripper for the left and the right arm |
| `action` | the same 17 channels, as commanded |
| `observation.images.overhead`, `left_wrist`, `right_wrist` | pictures of {settings.size} x {settings.size}, H.264 video |
| `task` | the instruction |

Frame t holds what was observed before action t. The cue, the branches and the stages are not features, because a policy must
not see them. The score sheet of every episode is in `{SHEET}`, for analysis only: the cue, when it was gone, when each
branch was open and decided, when each stage succeeded. `pictures/` has a video of one episode for each cue.

## Splits

`train` and `heldout` episodes draw light, surfaces, distractors and object instances from sets that have nothing in common.
This is the {settings.split} split, profile `{settings.profile}`, seeds {settings.first_seed} to \
{settings.first_seed + finished.attempts - 1}. Stored are the {len(rows)} episodes in which the expert completed every stage;
{left_out} {"was" if left_out == 1 else "were"} left out.

## How it was made

```
{command}
```

The same command gives the same episodes.

## How to load it

```python
from lerobot.datasets.lerobot_dataset import LeRobotDataset

dataset = LeRobotDataset("{settings.repo_id}", root="path/to/this/folder")
```
"""
