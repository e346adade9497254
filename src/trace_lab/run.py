"""The folder of a training: what it was asked to do (`run.json`), its metrics as they come, its checkpoints, its curves.
Written so that a process may die at any moment: a checkpoint is there as a whole or not at all. What is in one is
`training`'s matter.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trace_errors import RunError
from trace_lab.recipe import Recipe

OURS = re.compile(r"lock|run\.json\..*")  # what a run that was killed before it began may have left
INSIST = 3.0  # seconds after which a second Ctrl-C is meant
NEEDED = ("pretrained_model/model.safetensors", "training_state/optimizer.safetensors")  # to go on from a checkpoint
KEPT = 2  # checkpoints that stay: if the newest should ever turn out bad, there is one before it


def write_json(path: Path, value: Any) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def commit() -> str | None:
    """The commit of this source, with a plus if there are changes beside it; None outside of a repository."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def versions() -> dict[str, str]:
    """Of what a result may depend on."""
    return {name: metadata.version(name) for name in ("lerobot_policy_trace", "lerobot", "torch")}


def differences(before: dict[str, Any], now: dict[str, Any], name: str = "") -> list[str]:
    """Fields in which two descriptions differ, with both values."""
    found = []
    for key in sorted({*before, *now}):
        a, b, full = before.get(key), now.get(key), f"{name}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{full}.")
        elif a != b:
            found.append(f"{full} was {a!r}, now {b!r}")
    return found


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint on disk: a file that is missing, cut off or not readable. None if nothing is."""
    files = {checkpoint / name for name in NEEDED} | {*checkpoint.rglob("*.json"), *checkpoint.rglob("*.safetensors")}
    for file in sorted(files):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text())
            else:
                with safe_open(file, "pt"):  # compares the size with what the header tells
                    pass
        except (OSError, ValueError, SafetensorError) as error:
            return f"{file.relative_to(checkpoint)} is missing or damaged ({' '.join(str(error).split())[:200]})"
    return None


@dataclass
class Run:
    """One training's folder."""

    folder: Path

    def usable(self) -> None:
        """A RunError unless the folder is one of ours, or can be. Changes nothing."""
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder} is a file, expected a folder")
        if not folder.exists():
            above = next(each for each in folder.absolute().parents if each.exists())
            if not above.is_dir() or not os.access(above, os.W_OK):
                why = "may not be written to" if above.is_dir() else "is a file"
                raise RunError(f"--out {folder}: cannot be created, because {above} {why}")
        elif not (folder / "run.json").exists() and any(not OURS.fullmatch(each.name) for each in folder.iterdir()):
            raise RunError(f"{folder} is not empty and has no run.json, expected a new folder or one of tracemem train")

    def check(self, asked: dict[str, Any]) -> None:
        """A RunError unless the folder is new, or a run that was asked for the same, or one that came to nothing. Changes
        nothing.
        """
        self.usable()
        if (self.folder / "run.json").exists() and (differ := self._differences(asked)) and self.finished():
            raise RunError(
                f"{self.folder} is a run of other settings ({'; '.join(differ[:4])}"
                f"{f'; and {len(differ) - 4} more' if len(differ) > 4 else ''}). Nothing was changed: choose another "
                "--out, or ask for the same"
            )

    def note(self) -> dict[str, Any]:
        """What `run.json` says."""
        try:
            found = json.loads((self.folder / "run.json").read_text())
            return dict(found | {"asked": dict(found["asked"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.folder / 'run.json'}: cannot be read ({error!r}), expected that of a run") from error

    def _differences(self, asked: dict[str, Any]) -> list[str]:
        before = self.note()["asked"]
        if "recipe" in before:  # a run from before a field existed has what is its default now
            before["recipe"] = Recipe().to_dict() | before["recipe"]
        return differences(before, json.loads(json.dumps(asked)))

    def begin(self, asked: dict[str, Any], **resolved: Any) -> None:
        """Notes what was asked for, if it is not noted, and beside it what that is in full. `last` becomes the last
        checkpoint, however the one before ended.
        """
        self.check(asked)
        note = self.folder / "run.json"
        if not note.exists() or self._differences(asked):
            self.metrics.unlink(missing_ok=True)
            content = {"asked": asked, **resolved, "commit": commit(), "versions": versions()}
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(note, content)
        self.checkpoints.mkdir(exist_ok=True)
        if done := self.finished():
            self._point(done[-1])

    @property
    def checkpoints(self) -> Path:
        """Where they are, named as LeRobot names them."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One json line every few updates."""
        return self.folder / "metrics.jsonl"

    def finished(self) -> list[int]:
        """Updates after which there is a checkpoint, oldest first."""
        if not self.checkpoints.exists():
            return []
        return sorted(int(p.name) for p in self.checkpoints.iterdir() if p.name.isdigit() and not p.is_symlink())

    def checkpoint(self, step: int) -> Path:
        """Its folder."""
        return self.checkpoints / f"{step:06d}"

    def mend(self, tell: Callable[[str], object]) -> None:
        """Sets newest checkpoints aside that are damaged, and tells of each; a RunError if no other is left."""
        bad = {}
        for step in reversed(self.finished()):
            if not (reason := damage(self.checkpoint(step))):
                break
            bad[step] = f"{self.checkpoint(step)}: {reason}"
        if bad and len(bad) == len(self.finished()):
            raise RunError(
                f"{'; '.join(bad.values())}. No other checkpoint is left and nothing was changed: restore one of these, or "
                "choose another --out"
            )
        sound = next((step for step in reversed(self.finished()) if step not in bad), 0)
        for step, reason in bad.items():
            aside = self.checkpoints / f"damaged-{step:06d}"
            shutil.rmtree(aside, ignore_errors=True)
            self.checkpoint(step).rename(aside)
            tell(f"{reason}. It is now {aside.name}; going on from update {sound}")
        if bad:
            self._point(sound)

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """A checkpoint, put in place when it is whole; then `last` points to it, and old ones go."""
        if self.checkpoint(step).exists():
            return
        unfinished = self.checkpoints / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            write(unfinished)
        except (OSError, RuntimeError, SafetensorError) as error:  # PyTorch and safetensors have errors of their own
            shutil.rmtree(unfinished, ignore_errors=True)
            left = (
                f"the checkpoint of update {self.finished()[-1]} is intact" if self.finished() else "there is none yet"
            )
            raise RunError(
                f"{self.folder}: the checkpoint of update {step} could not be written ({error}); {left}. Make room and call "
                "again"
            ) from error
        unfinished.rename(self.checkpoint(step))
        self._point(step)
        for old in self.finished()[:-KEPT]:
            self.checkpoint(old).rename(unfinished)  # half a checkpoint must not look like one
            shutil.rmtree(unfinished)

    def _point(self, step: int) -> None:
        """`last` leads to this checkpoint."""
        link = self.checkpoints / "last.new"
        link.unlink(missing_ok=True)
        link.symlink_to(self.checkpoint(step).name)
        link.replace(self.checkpoints / "last")

    def log(self, line: dict[str, Any]) -> None:
        """One line more."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """What was logged; a last line that was cut off does not count."""
        found = []
        for line in self.metrics.read_text().splitlines() if self.metrics.exists() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def forget_after(self, step: int) -> None:
        """Drops the lines of updates that are done again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        temporary = self.metrics.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self.metrics)

    def draw(self) -> None:
        """`curves.png`: the loss and its parts."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        lines = self.lines()
        parts = {
            name: [(line["step"], line[name]) for line in lines if line.get(name, 0) > 0]  # the axis is logarithmic
            for name in dict.fromkeys(name for line in lines for name in line)
            if name == "loss" or name.endswith("_loss") or name.startswith("memory_")
        }
        if not any(parts.values()):
            return
        figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for name, points in parts.items():
            if points:
                whole = name == "loss"
                axis.plot(*zip(*points, strict=True), label=name, linewidth=2 if whole else 1, zorder=3 if whole else 2)
        axis.set(xlabel="updates", ylabel="loss", yscale="log")
        axis.grid(which="both", alpha=0.25)
        axis.legend(frameon=False)
        figure.savefig(self.folder / "curves.png", dpi=120)
        plt.close(figure)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second training out; the lock ends with the process, however it ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / "lock").open("w")
        except OSError as error:
            raise RunError(f"--out {self.folder}: cannot be created or written to ({error.strerror})") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(f"{self.folder}: another tracemem train is at work there") from error
            yield


@contextmanager
def listening() -> Iterator[Callable[[], bool]]:
    """Whether someone has asked to stop: Ctrl-C or a polite kill ends the training after the update that is going on.
    Whoever insists, later than a launcher that only passes the same signal on, stops it at once.
    """
    asked: list[float] = []

    def hear(_number: int, _frame: Any) -> None:
        if asked and time.monotonic() - asked[0] > INSIST:
            raise KeyboardInterrupt("stopped at once; the same command goes on from the last checkpoint")
        asked.append(time.monotonic())

    try:
        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody can ask
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
