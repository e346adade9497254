"""All frames of a LeRobot dataset, decoded once: pictures as uint8 in GPU memory, RAM or a mapped file, numbers beside them
(`FrameStore`). Batches for training are cut from here on the training device; which ones is `sampling`'s matter.
"""

import fcntl
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from lerobot.datasets.video_utils import decode_video_frames
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_STATE
from rich.console import Console
from torch import Tensor

from lerobot_policy_trace.paths import Paths
from trace_errors import DatasetError, UsageError
from trace_lab.progress import progress
from trace_lab.source import changes, describe, fingerprint

PLACES = ("auto", "gpu", "ram", "file")
GPU_SHARE, RAM_SHARE = 0.25, 0.4  # of free GPU memory and of all RAM that pictures may take
MANY = 50_000  # pictures from which on decoding in other processes is worth their start
AHEAD = 64  # episodes of one camera decoded before they are needed


# -- decoding --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Pictures of one camera in one episode."""

    camera: str
    episode: int
    begin: int  # row of the store
    video: Path
    times: list[float]


_in_use: dict[str, Lock] = {}  # LeRobot keeps one decoder a file, which is not for two threads


def decode(job: Job) -> np.ndarray:
    """(T, 3, H, W) uint8."""
    try:
        with _in_use.setdefault(str(job.video), Lock()):
            return decode_video_frames(job.video, job.times, 1e-4, return_uint8=True).numpy()
    except Exception as error:
        raise DatasetError(
            f"{job.video}: cannot be decoded for {job.camera}, episode {job.episode} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). "
            "The file is damaged, not complete, or not of this dataset's timestamps: fetch or collect it again"
        ) from error


def jobs_of(meta: Any, cameras: Sequence[str], paths: Paths) -> list[Job]:
    """One job an episode and camera."""
    jobs = []
    for number, (begin, end) in enumerate(zip(paths.starts.tolist(), paths.ends.tolist(), strict=True)):
        row = meta.episodes[number]
        for camera in cameras:
            start = row[f"videos/{camera}/from_timestamp"]
            times = [start + frame / meta.fps for frame in range(end - begin)]
            jobs.append(Job(camera, number, begin, Path(meta.root) / meta.get_video_file_path(number, camera), times))
    return jobs


def workers(pictures: int) -> Executor:
    """Threads for little, processes for much: a decoder's threads wait for each other in Python."""
    count = os.cpu_count() or 1
    if pictures < MANY:
        return ThreadPoolExecutor(min(2, count))
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lerobot.datasets.video_utils"])
    return ProcessPoolExecutor(count, context)


def decode_into(target: dict[str, Tensor], meta: Any, paths: Paths, console: Console) -> None:
    """Decodes every picture into its row."""
    jobs = deque(jobs_of(meta, list(target), paths))
    pool = workers(len(paths.states) * len(target))
    with progress("decoding videos, once", len(jobs), console=console) as bar:
        running: deque[tuple[Job, Future[np.ndarray]]] = deque()
        try:
            while jobs or running:
                while jobs and len(running) < AHEAD:  # not all at once: what is decoded waits in RAM
                    running.append((jobs[0], pool.submit(decode, jobs.popleft())))
                job, future = running.popleft()
                pictures, into = future.result(), target[job.camera][job.begin : job.begin + len(job.times)]
                if into.shape != pictures.shape:
                    raise DatasetError(
                        f"{job.camera}, episode {job.episode}: pictures {pictures.shape}, expected {tuple(into.shape)}"
                    )
                into.copy_(torch.from_numpy(pictures))
                bar.advance()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """One process at a time; others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def mapped(folder: Path, shapes: dict[str, tuple[int, ...]], mode: Any) -> dict[str, Tensor]:
    """Pictures as files that look like memory."""
    return {
        camera: torch.from_numpy(np.memmap(folder / f"{camera}.u8", np.uint8, mode, shape=shape))
        for camera, shape in shapes.items()
    }


def on_disk(folder: Path, meta: Any, paths: Paths, shapes: dict[str, tuple[int, ...]], console: Console) -> Any:
    """Decoded pictures in a folder that several runs share; made by the first that needs them."""
    now = fingerprint(Path(meta.root))
    described = {"dataset": now, "shapes": {camera: list(shape) for camera, shape in shapes.items()}}
    with held(folder):
        note = folder / "frames.json"
        if note.exists():
            kept = json.loads(note.read_text())
            if what := changes(kept["dataset"], now):
                raise DatasetError(
                    f"{meta.root} changed since its frames were decoded into {folder}: {what}. Remove that folder to "
                    "decode anew, or put the dataset back"
                )
            if kept["shapes"] == described["shapes"]:
                return mapped(folder, shapes, "r+")
        needed, free = sum(int(np.prod(shape)) for shape in shapes.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise DatasetError(
                f"not enough space at {folder}: {needed / 1e6:,.0f} MB needed for decoded frames, {free / 1e6:,.0f} MB "
                "free"
            )
        note.unlink(missing_ok=True)  # files of other cameras; whoever has them open keeps them
        for camera in shapes:
            (folder / f"{camera}.u8").unlink(missing_ok=True)
        try:
            for camera, shape in shapes.items():
                with (folder / f"{camera}.u8").open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, int(np.prod(shape)))  # a full disk shows here, not as a crash
            pictures = mapped(folder, shapes, "r+")
            decode_into(pictures, meta, paths, console)
        except BaseException:
            for camera in shapes:
                (folder / f"{camera}.u8").unlink(missing_ok=True)
            raise
        note.with_suffix(".tmp").write_text(json.dumps(described))
        note.with_suffix(".tmp").replace(note)
    return pictures


# -- the store -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameStore:
    """Frames of all episodes, one after the other."""

    meta: Any
    paths: Paths
    columns: dict[str, Tensor]  # feature -> (N, d) float32 on `device`: states and actions
    cameras: dict[str, Tensor]  # camera -> (N, 3, H, W) uint8, on `device` or not
    device: torch.device
    place: str

    @cached_property
    def starts(self) -> Tensor:
        """(E,) rows of first frames, on the device."""
        return self.paths.starts.to(self.device)

    @cached_property
    def ends(self) -> Tensor:
        """(E,) rows after last frames, on the device."""
        return self.paths.ends.to(self.device)

    @cached_property
    def _numbers(self) -> Tensor:
        return self.paths.index.to(self.device)

    def episode_of(self, rows: Tensor) -> Tensor:
        """Episodes of frames by row, where the rows are."""
        return torch.searchsorted(self.paths.ends.to(rows.device), rows, right=True)

    @property
    def lengths(self) -> Tensor:
        """Frames of each episode, on the CPU."""
        return self.paths.ends - self.paths.starts

    @property
    def bytes(self) -> int:
        """Size of all pictures."""
        return sum(pictures.numel() for pictures in self.cameras.values())

    def pictures(self, camera: str, rows: Tensor) -> Tensor:
        """Frames by row, any shape of rows: (..., 3, H, W) float32 in [0, 1] on the device, as LeRobot gives them."""
        kept = self.cameras[camera]
        flat = kept[rows.flatten().to(kept.device)].to(self.device, non_blocking=True)
        return flat.unflatten(0, tuple(rows.shape)).to(torch.float32) / 255

    def sample(self, rows: Tensor, episodes: Tensor, config: Any) -> dict[str, Tensor]:
        """What LeRobot's loader gives for these frames and a policy's configuration: (N,) rows and their episodes."""
        batch: dict[str, Tensor] = {"index": self._numbers[rows]}
        for name, column in self.columns.items():
            deltas = config.action_delta_indices if name == ACTION else config.observation_delta_indices
            at, outside = self.reach(rows, episodes, deltas)
            batch[name] = column[at]
            if deltas is not None:
                batch[f"{name}_is_pad"] = outside
        at, _ = self.reach(rows, episodes, config.observation_delta_indices)
        return batch | {camera: self.pictures(camera, at) for camera in self.cameras}

    def reach(self, rows: Tensor, episodes: Tensor, deltas: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Rows so many frames away, clamped to the episode, and whether they had to be."""
        if deltas is None:
            return rows, torch.zeros_like(rows, dtype=torch.bool)
        at = rows[:, None] + torch.tensor(list(deltas)).to(rows.device, non_blocking=True)
        first, last = self.starts[episodes][:, None], self.ends[episodes][:, None] - 1
        return at.clamp(first, last), (at < first) | (at > last)


def shapes_of(meta: Any, cameras: Sequence[str] | None, count: int) -> dict[str, tuple[int, ...]]:
    """Shape of each camera's pictures."""
    videos = list(meta.video_keys)
    if images := [
        camera for camera in cameras or meta.camera_keys if camera in meta.camera_keys and camera not in videos
    ]:
        raise DatasetError(
            f"{meta.root}: {', '.join(images)} stored as single images, expected video (LeRobot's default); "
            "lerobot-edit-dataset --operation.type convert_image_to_video makes it so"
        )
    if missing := [camera for camera in cameras or videos if camera not in meta.features]:
        raise DatasetError(
            f"{meta.root}: has no camera {', '.join(missing)}; its cameras are {', '.join(meta.camera_keys) or 'none'}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for camera in cameras or videos:
        height, width, colours = meta.features[camera]["shape"]
        if colours != 3:
            raise DatasetError(f"{meta.root}: {camera} has {colours} channels, expected 3 (height, width, 3)")
        shapes[camera] = (count, 3, height, width)
    return shapes


def choose_place(place: str, size: int, device: torch.device) -> str:
    """Where the pictures go: the nearest place they fit in."""
    if place not in PLACES:
        raise UsageError(f"--frames: got {place!r}, expected one of {', '.join(PLACES)}")
    if place == "gpu" and device.type != "cuda":
        raise UsageError(f"--frames: got 'gpu', but the training device is {device}")
    if place != "auto":
        return place
    if device.type == "cuda" and size < GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
        return "gpu"
    return "ram" if size < RAM_SHARE * ram() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "file"


def ram() -> int:
    """Bytes of RAM this machine has, or this container may use."""
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(have, int(allowed)) if allowed.isdigit() else have


def open_dataset(root: Path) -> Any:
    """A dataset's description, or an error that says what is wrong with the folder."""
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata

    describe(root)  # refuses what is no dataset, or an empty one
    return LeRobotDatasetMetadata(f"local/{root.resolve().name}", root=root)


def open_frames(
    meta: Any,
    device: torch.device | str,
    *,
    cameras: Sequence[str] | None = None,
    place: str = "auto",
    cache: Path | None = None,
    console: Console | None = None,
) -> FrameStore:
    """The store of a dataset. With a `cache` folder the decoded pictures are kept there and shared by all who name it; the
    mapped file is there too, or in the dataset's own folder.
    """
    device, console = torch.device(device), console or Console(stderr=True)
    paths = Paths.of(meta)
    lengths = paths.ends - paths.starts
    if bool((lengths < 2).any()):
        short = (lengths < 2).nonzero()[:, 0].tolist()
        raise DatasetError(
            f"{meta.root}: episode {', '.join(map(str, short[:5]))} has a single frame, from which nothing can be learnt; "
            f'remove it: lerobot-edit-dataset --operation.type delete_episodes --operation.episode_indices "{short}"'
        )
    expected = [int(row["length"]) for row in meta.episodes]
    if lengths.tolist() != expected:
        raise DatasetError(
            f"{meta.root}: its tables hold {len(lengths)} episodes of {len(paths.states)} frames, its description says "
            f"{len(expected)} of {sum(expected)}. Fetch the whole dataset"
        )
    shapes = shapes_of(meta, cameras, len(paths.states))
    place = choose_place(place, sum(int(np.prod(shape)) for shape in shapes.values()), device)
    if cache is not None or place == "file":
        folder = cache or Path(meta.root) / "meta" / "trace_memory" / "frames"
        pictures = on_disk(folder, meta, paths, shapes, console)
    else:
        pictures = {camera: torch.empty(shape, dtype=torch.uint8) for camera, shape in shapes.items()}
        decode_into(pictures, meta, paths, console)
    if place == "gpu":
        pictures = {camera: kept.to(device) for camera, kept in pictures.items()}
    elif place == "ram" and cache is not None:
        pictures = {camera: kept.clone() for camera, kept in pictures.items()}
    return FrameStore(meta, paths, read_columns(meta, paths, device), pictures, device, place)


def read_columns(meta: Any, paths: Paths, device: torch.device) -> dict[str, Tensor]:
    """Actions and what a policy may see beside pictures, (N, d); states are those of `paths`."""
    import pyarrow.dataset

    names = [name for name in (OBS_ENV_STATE, ACTION) if name in meta.features]
    files = sorted((Path(meta.root) / "data").glob("**/*.parquet"))
    table = pyarrow.dataset.dataset(files).to_table(columns=["index", *names]).sort_by("index")
    columns = {
        name: torch.tensor(np.stack(table[name].to_numpy()), dtype=torch.float32).reshape(len(table), -1)
        for name in names
    }
    for name, column in columns.items():
        if not (finite := torch.isfinite(column).all(1)).all():
            raise DatasetError(f"{meta.root}: {name} of frame {int((~finite).nonzero()[0])} is not finite")
    return {name: column.to(device) for name, column in ({OBS_STATE: paths.states} | columns).items()}
