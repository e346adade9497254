"""How many trainings go on one device at once. A training leaves much of a GPU idle, several share it well up to a point;
where that point is depends on the machine, so it is measured there (`measure`) and not guessed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trace_lab.train import Training

COUNTS = (1, 4, 8)
WORTH = 1.05  # more trainings at once must bring at least so much more in total
SHORT = 10.0  # seconds of a measurement, after everything has started
POLL = 0.02  # seconds between two looks at what the others have done
PATIENCE = 60.0  # seconds in which a training that is asked to end does so


@dataclass(frozen=True)
class Packed:
    """So many trainings at once, and what they did together."""

    count: int
    total: float  # targets a second of all
    each: float  # of one
    failed: int  # did not get through, for want of memory mostly


class PackingError(Exception):
    """Not even one training ran."""


def measure(
    dataset: Path, counts: Sequence[int] = COUNTS, settings: Sequence[str] = (), seconds: float = SHORT
) -> list[Packed]:
    """Starts as many trainings as the largest count, each a process as in real life, and lets so many of them work at once
    as are asked for, one count after the other. Those that do not fit on the device are told as failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [_begin(dataset, number, settings, folder) for number in range(max(counts))]
        try:
            ready = _ready(jobs, folder)
            if not ready:
                words = (folder / "0.log").read_text(errors="replace").strip().splitlines()
                raise PackingError(f"no training of {dataset} ran here: {words[-1] if words else 'it said nothing'}")
            return [_together(count, ready, jobs, folder, seconds) for count in counts]
        finally:
            _end(jobs, folder)


def _begin(dataset: Path, number: int, settings: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / f"{number}.log").open("w") as log:
        words = [sys.executable, "-m", "trace_lab.packing", str(dataset), str(number), str(folder), *settings]
        return subprocess.Popen(words, stdout=log, stderr=log)


def _end(jobs: "Sequence[subprocess.Popen[bytes]]", folder: Path) -> None:
    """Asks them to go. Under CUDA's multi-process service one that is killed at work takes all others on the GPU with it,
    also those of other people.
    """
    (folder / "end").touch()
    begin = time.monotonic()
    for job in jobs:
        try:
            job.wait(max(0.0, PATIENCE - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _ready(jobs: "Sequence[subprocess.Popen[bytes]]", folder: Path) -> list[int]:
    """The numbers of those that got as far as training, once all have or have given up."""
    waiting = set(range(len(jobs)))
    while waiting:
        waiting = {n for n in waiting if jobs[n].poll() is None and not (folder / f"{n}.ready").exists()}
        time.sleep(POLL)
    return [n for n in range(len(jobs)) if jobs[n].poll() is None]


def _together(
    count: int, ready: list[int], jobs: "Sequence[subprocess.Popen[bytes]]", folder: Path, seconds: float
) -> Packed:
    """The first `count` of them work for a while; the others wait."""
    who = ready[:count]
    if len(who) < count:
        return Packed(count, 0.0, 0.0, count - len(who))
    note = folder / f"go-{count}"
    note.with_suffix(".new").write_text(json.dumps({"who": who, "seconds": seconds}))
    note.with_suffix(".new").replace(note)
    results = [folder / f"{count}-{number}" for number in who]
    while not all(result.exists() or jobs[n].poll() is not None for n, result in zip(who, results, strict=True)):
        time.sleep(POLL)
    speeds = [json.loads(result.read_text()) for result in results if result.exists()]
    lost = count - len(speeds)
    total = 0.0 if lost else sum(speeds)
    return Packed(count, round(total, 1), round(total / count, 1), lost)


def choose(rows: Sequence[Packed]) -> int:
    """The fewest at once that do (nearly) the most together."""
    if rows[0].total == 0:
        raise PackingError(f"not even {rows[0].count} of these trainings fit here: a smaller batch may")
    best = rows[0]
    for row in rows[1:]:
        if row.total > WORTH * best.total:
            best = row
    return best.count


def load(note: Path, device: str) -> list[Packed] | None:
    """What was measured before on such a device, if anything."""
    if not note.exists():
        return None
    found = json.loads(note.read_text())
    return [Packed(**row) for row in found["rows"]] if found["device"] == device else None


def device_name() -> str:
    """The device trainings will use."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _one(arguments: list[str]) -> None:
    """One of the trainings: begins, says that it is ready, works when told to."""
    from accelerate import Accelerator

    from trace_lab.frames import open_dataset, open_frames
    from trace_lab.policy import cameras
    from trace_lab.recipe import parse, recipe
    from trace_lab.train import Training

    dataset, number, folder, *settings = arguments
    here, cuda, done = Path(folder), torch.cuda.is_available(), set[Path]()
    changes = parse(settings)
    names = {name: changes.pop(name) for name in ("preset", "policy", "memory") if name in changes}
    made = recipe(names.get("preset", "default"), names.get("policy", "act"), names.get("memory", "trace"), changes)
    accelerator = Accelerator(mixed_precision="bf16" if cuda else "no")
    meta = open_dataset(Path(dataset))
    store = open_frames(meta, accelerator.device, cameras=cameras(made, meta), cache=here / "frames")
    training = Training.begin(made, int(number), store, accelerator)
    for _ in range(3):
        training.update()
    (here / f"{number}.ready").touch()
    while here.exists() and not (here / "end").exists():
        for note in {each for each in here.glob("go-*") if not each.suffix} - done:
            done.add(note)
            told = json.loads(note.read_text())
            if int(number) in told["who"]:
                speed = _speed(training, told["seconds"])
                result = here / f"{note.name.removeprefix('go-')}-{number}"
                result.with_suffix(".new").write_text(json.dumps(speed))
                result.with_suffix(".new").replace(result)
        time.sleep(POLL)


def _speed(training: "Training", seconds: float) -> float:
    """Targets a second over a while."""
    begin, targets = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        training.update()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        targets += training.made.batch
    return targets / (time.perf_counter() - begin)


if __name__ == "__main__":
    _one(sys.argv[1:])
