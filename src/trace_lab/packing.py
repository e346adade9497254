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

import torch

COUNTS = (1, 4, 8)
WORTH = 1.05  # more trainings at once must bring at least so much more in total
SHORT = 15.0  # seconds of a measurement, after everything has started


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
    """Runs so many trainings side by side for a while, each a process as in real life."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            rows.append(_together(dataset, count, settings, seconds, Path(folder)))
            if rows[-1].failed:  # more will not fit either
                break
    if not rows or rows[0].total == 0:
        raise PackingError(f"no training of {dataset} ran here: try tracemem train {dataset}")
    return rows


def _together(dataset: Path, count: int, settings: Sequence[str], seconds: float, folder: Path) -> Packed:
    """They start at different times; what counts is the stretch in which all of them are at work."""
    command = [
        sys.executable,
        "-m",
        "trace_lab.packing",
        str(dataset),
        str(count),
        str(seconds),
        str(folder),
        *settings,
    ]
    jobs = []
    for i in range(count):
        with (folder / f"{count}-{i}.log").open("w") as log:
            jobs.append(subprocess.Popen([*command[:4], str(i), *command[4:]], stdout=log, stderr=log))
    lost = sum(job.wait() != 0 for job in jobs)
    if lost == count:
        raise PackingError((folder / f"{count}-0.log").read_text(errors="replace")[-1000:])
    speeds = [json.loads((folder / f"{count}-{i}").read_text()) for i, job in enumerate(jobs) if job.returncode == 0]
    total = 0.0 if lost else sum(speeds)
    return Packed(count, round(total, 1), round(sum(speeds) / len(speeds), 1), lost)


def choose(rows: Sequence[Packed]) -> int:
    """The fewest at once that do (nearly) the most together."""
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
    """One of the trainings: waits for the others, then counts its targets for a while, and works on until all are done."""
    from accelerate import Accelerator

    from trace_lab.frames import open_dataset, open_frames
    from trace_lab.recipe import parse, recipe
    from trace_lab.train import Training, settle

    settle()
    dataset, number, count, seconds, folder, *settings = arguments
    here, cuda = Path(folder), torch.cuda.is_available()
    changes = parse(settings)
    names = {name: changes.pop(name) for name in ("preset", "policy", "memory") if name in changes}
    made = recipe(names.get("preset", "default"), names.get("policy", "act"), names.get("memory", "trace"), changes)
    accelerator = Accelerator(mixed_precision="bf16" if cuda else "no")
    store = open_frames(open_dataset(Path(dataset)), accelerator.device, cache=here / "frames")
    training = Training.begin(made, int(number), store, accelerator)
    for _ in range(3):
        training.update()
    (here / f"{count}-{number}.ready").touch()
    limit = time.monotonic() + 300
    while len(list(here.glob(f"{count}-*.ready"))) < int(count) and time.monotonic() < limit:
        training.update()
    begin, targets = time.perf_counter(), 0
    while time.perf_counter() - begin < float(seconds):
        training.update()
        if cuda:
            torch.cuda.synchronize()
        targets += made.batch
    (here / f"{count}-{number}").write_text(json.dumps(targets / (time.perf_counter() - begin)))
    others = [here / f"{count}-{i}" for i in range(int(count))]
    while not all(each.exists() for each in others) and time.monotonic() < limit:
        training.update()  # the others are still being measured


if __name__ == "__main__":
    _one(sys.argv[1:])
