"""Lists of what the battery runs, read from `experiments/battery.txt`: one cell a line, with its cost. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from trace_errors import UsageError
from trace_lab.questions import Task
from trace_lab.queue import Job
from trace_lab.scores import RAW
from trace_memory.config import nearest
from trace_memory.registry import METHODS

FILE = Path("experiments/battery.txt")  # seen from the project's folder
COLUMNS = ("list", "memory", "question", "cues", "seeds", "rate", "updates", "episodes", "few", "minutes")


@dataclass(frozen=True)
class Cell:
    """One memory on one task, with some seeds.

    Args:
        memory: its name.
        task: what is asked.
        seeds: how many trainings; seeds 0, 1, ...
        rate: the learning rate.
        updates: most of a training.
        episodes: of each condition.
        few: of conditions with long episodes.
        minutes: of a core that all its trainings may take.
    """

    memory: str
    task: Task
    seeds: int
    rate: float
    updates: int
    episodes: int
    few: int
    minutes: float

    def jobs(self, out: Path) -> Iterator[Job]:
        """One a training, each in a folder of its own."""
        for seed in range(self.seeds):
            name = f"{self.memory} {self.task.question} {self.task.cues} {self.rate:g} seed {seed}"
            folder = out / "runs" / name.replace(" ", "-")
            options = {
                "memory": self.memory, "question": self.task.question, "cues": self.task.cues, "seeds": 1,
                "first-seed": seed, "rate": f"{self.rate:g}", "updates": self.updates, "episodes": self.episodes,
                "few": self.few, "out": folder,
            }  # fmt: skip
            command = ("probe", *(word for key, value in options.items() for word in (f"--{key}", str(value))))
            yield Job(name, command, leaves=str(folder / RAW), hours=self.minutes / 60 / self.seeds)


def read(file: Path = FILE) -> dict[str, list[Cell]]:
    """The lists of a file by name.

    Raises:
        UsageError: there is no such file, or a line of it is no cell; the message names it.
    """
    if not file.is_file():
        raise UsageError(f"--battery: {file} is not here, expected to be called in the project's folder")
    lists: dict[str, list[Cell]] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if words := line.partition("#")[0].split():
            where = f"{file}:{number}"
            name, cell = _cell(words, where)
            lists.setdefault(name, []).append(cell)
    return lists


def _cell(words: Sequence[str], where: str) -> tuple[str, Cell]:
    if len(words) != len(COLUMNS):
        raise UsageError(f"{where}: got {len(words)} words, expected {', '.join(COLUMNS)}")
    name, memory, question, *numbers = words
    try:
        cues, seeds, updates, episodes, few = (int(numbers[i]) for i in (0, 1, 3, 4, 5))
        rate, minutes = float(numbers[2]), float(numbers[6])
    except ValueError as error:
        raise UsageError(f"{where}: got {error}, expected numbers for {', '.join(COLUMNS[3:])}") from error
    if memory not in METHODS:
        raise UsageError(f"{where}: memory {memory!r} is not known; {nearest(memory, METHODS)}")
    if min(seeds, rate, updates, episodes, few) <= 0:
        raise UsageError(f"{where}: got {' '.join(words)}, expected positive numbers")
    return name, Cell(memory, Task(question, cues), seeds, rate, updates, episodes, few, minutes)


def jobs(cells: Sequence[Cell], out: Path) -> list[Job]:
    """Of some cells, each once: the first seed of every cell, then the second, so that what is stopped early tells most."""
    seeds = zip_longest(*(cell.jobs(out) for cell in cells))
    return [*{job.name: job for turn in seeds for job in turn if job is not None}.values()]


def chosen(names: Sequence[str], file: Path = FILE) -> list[Cell]:
    """The cells of some lists, each once.

    Raises:
        UsageError: a list is not in the file.
    """
    lists = read(file)
    if strange := [name for name in names if name not in lists]:
        raise UsageError(f"--cells: {strange[0]!r} is not in {file}; {nearest(strange[0], lists)}")
    return list(dict.fromkeys(cell for name in names for cell in lists[name]))
