"""Scores of the battery: one training under one condition a row. Kept by `results`, laid out as tables and drawn as figures
here. Imports no torch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trace_errors import RunError
from trace_lab.questions import QUESTIONS, Task, wilson
from trace_lab.results import keep, kept, spans, wrong
from trace_lab.tables import Show, Table
from trace_memory.registry import METHODS

RAW = "results.json"  # what `tracemem probe` leaves in its folder


@dataclass(frozen=True)
class Score:
    """What a training reached in a condition.

    Args:
        memory: its name.
        question: as the battery has them.
        cues: how many.
        condition: trained, delay_8x, ...; steps_1000 of the T-Maze.
        seed: of the training.
        rate: the learning rate.
        updates_to_95: to the first validation at 0.95; None if there was none.
        updates_to_99: the same at 0.99.
        accuracy: in this condition.
        episodes: on so many.
        seconds: of the training with all its trials, on one thread.
        state_bytes: what the memory keeps of an episode.
        commit: of the code.
    """

    memory: str
    question: str
    cues: int
    condition: str
    seed: int
    rate: float
    updates_to_95: int | None
    updates_to_99: int | None
    accuracy: float
    episodes: int
    seconds: float
    state_bytes: int
    commit: str

    @property
    def task(self) -> Task:
        """What was asked."""
        return Task(self.question, self.cues)

    @property
    def passed(self) -> bool:
        """Whether its 95 % interval reaches the bar."""
        return wilson(round(self.accuracy * self.episodes), self.episodes)[1] >= self.task.bar(self.condition)

    @property
    def place(self) -> tuple[Any, ...]:
        """In the order of tables."""
        return (
            [*METHODS].index(self.memory), [*QUESTIONS].index(self.question), self.cues, self.seed, self.rate
        )  # fmt: skip


# -- files -----------------------------------------------------------------------------------------------------------------


def of(training: dict[str, Any]) -> list[Score]:
    """The scores of one training as `tracemem probe` writes it."""
    plain = {each.name: training[each.name] for each in fields(Score) if each.name in training}
    return [
        Score(**plain, condition=name, accuracy=right / episodes, episodes=episodes)
        for name, (right, episodes) in training["conditions"].items()
    ]


def read_raw(folder: Path) -> list[Score]:
    """The scores of all trainings whose files lie in or below a folder.

    Raises:
        RunError: a file is not what `tracemem probe` writes.
    """
    found = []
    for file in sorted(folder.rglob(RAW)):
        try:
            found += [score for training in json.loads(file.read_text()) for score in of(training)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise wrong(str(file), repr(error), "what tracemem probe writes") from error
    return found


def _schema() -> Any:
    import pyarrow as pa

    words = pa.dictionary(pa.int16(), pa.string())
    types = {str: words, int: pa.int32(), float: pa.float64(), int | None: pa.int32()}
    return pa.schema({each.name: types[each.type] for each in fields(Score)})  # type: ignore[index]


def write(file: Path, scores: Sequence[Score], **facts: Any) -> None:
    """Keeps scores as a set, a parquet file and its manifest.

    Args:
        file: ends in .parquet. What is there is replaced.
        scores: in any order.
        facts: for the manifest; memories, questions, seeds, commits and the number of scores are read off the scores.

    Raises:
        RunError: there are none.
    """
    if not scores:
        raise RunError(f"{file}: got no scores, expected at least one")
    note = {
        **facts,
        "scores": len(scores),
        "memories": [name for name in METHODS if any(each.memory == name for each in scores)],
        "questions": [name for name in QUESTIONS if any(each.question == name for each in scores)],
        "seeds": spans(sorted({each.seed for each in scores})),
        "commits": sorted({each.commit for each in scores}),
    }
    keep(file, [asdict(each) for each in sorted(scores, key=lambda each: each.place)], _schema(), note)


def read(file: Path) -> list[Score]:
    """The scores of a set.

    Raises:
        RunError: the file is not what `write` wrote.
    """
    return [Score(**row) for row in kept(file, _schema())]


# -- the table -------------------------------------------------------------------------------------------------------------


def groups(scores: Sequence[Score], *, seeds: bool) -> Iterator[tuple[Score, dict[str, list[Score]]]]:
    """Scores by condition, of each cell or, if `seeds` are told apart, of each training; with one of them."""
    found: dict[tuple[Any, ...], dict[str, list[Score]]] = {}
    for each in sorted(scores, key=lambda each: each.place):
        key = (each.memory, each.question, each.cues, each.rate, each.seed if seeds else None)
        found.setdefault(key, {}).setdefault(each.condition, []).append(each)
    for conditions in found.values():
        yield next(iter(conditions.values()))[0], conditions


def conditions(scores: Sequence[Score]) -> list[str]:
    """All that were met, in the order of the battery."""
    return list(dict.fromkeys(each.condition for each in scores))


def tables(scores: Sequence[Score], *, seeds: bool) -> dict[str, Table]:
    """One table; the T-Maze, which is tried on other things, has one of its own."""
    parts = {"battery": [x for x in scores if not x.task.maze], "tmaze": [x for x in scores if x.task.maze]}
    return {name: table(some, seeds=seeds) for name, some in parts.items() if some}


def table(scores: Sequence[Score], *, seeds: bool) -> Table:
    """A row a training if seeds are told apart, else a row a cell: the worst of its seeds, and how many pass."""
    rows, names = list[tuple[Any, ...]](), conditions(scores)
    for one, by in groups(scores, seeds=seeds):
        own = by[next(iter(by))]
        many = one.seed if seeds else len(own)
        updates = [_range([getattr(x, f"updates_to_{n}") for x in own]) for n in (95, 99)]
        tried = [_worst(by[name], seeds=seeds) if name in by else None for name in names]
        minutes = sum(each.seconds for each in own) / 60
        rows.append((METHODS[one.memory].label, one.question, one.cues, one.rate, many, *updates, *tried, minutes))
    shows: dict[str, Show] = {"Memory": str, "Question": str, "Cues": str, "Rate": "{:g}".format}
    shows |= {"Seed" if seeds else "Seeds": str, "Updates to 95 %": str, "99 %": str}
    shows |= dict.fromkeys((name.replace("_", " ") for name in names), str) | {"Minutes": "{:.1f}".format}
    return Table("Accuracy of the battery (%)", shows, rows, tuple(_notes(scores, seeds=seeds)))


def _range(updates: Sequence[int | None]) -> str:
    known = sorted(each for each in updates if each is not None)
    span = f"{known[0]}-{known[-1]}" if len(set(known)) > 1 else str(*known[:1])
    never = len(updates) - len(known)
    return span if not never else f"{span}, {never} never" if known else "never"


def _worst(own: Sequence[Score], *, seeds: bool) -> str:
    worst, passed = min(each.accuracy for each in own), sum(each.passed for each in own)
    return f"{100 * worst:.1f}{'' if passed else ' *'}" if seeds else f"{100 * worst:.1f} ({passed}/{len(own)})"


def _notes(scores: Sequence[Score], *, seeds: bool) -> Iterator[str]:
    yield (
        "* : the 95 % interval (Wilson's) does not reach the bar."
        if seeds
        else "The worst seed and, in brackets, how many seeds pass: those whose 95 % interval (Wilson's) reaches the bar."
    ) + " The bar is 95 %, 90 % at 64 times the delay and 4 times coarser, 100 % in the T-Maze."
    tasks = dict.fromkeys(each.task for each in scores)
    guessed = [f"{t.question} {t.cues}: {100 * t.chance:.0f}" for t in tasks]
    yield f"Right by chance, %: {', '.join(guessed)}."
    watch = [f"{t.question} {t.cues}: {100 * t.watch:.0f}" for t in tasks if t.watch and t.question == "order"]
    if watch:
        yield f"Right by the watch alone, %: {', '.join(watch)}."


# -- figures ---------------------------------------------------------------------------------------------------------------


def draw(scores: Sequence[Score], path: Path) -> None:
    """The worst seed of every cell in every condition: a panel a question, a row a memory and number of cues."""
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    found = {q: some for q in QUESTIONS if (some := [each for each in scores if each.question == q])}
    tall = [len([*groups(some, seeds=False)]) for some in found.values()]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trace", "font.size": 8}):
        size = (7, 1.2 * len(found) + 0.25 * sum(tall))
        figure, axes = plt.subplots(
            len(found), 1, figsize=size, height_ratios=tall, layout="constrained", squeeze=False
        )
        for axis, (question, some) in zip(axes[:, 0], found.items(), strict=True):
            cells, names = [*groups(some, seeds=False)], conditions(some)
            worst = [[min((x.accuracy for x in by.get(n, ())), default=np.nan) for n in names] for _, by in cells]
            axis.imshow(100 * np.array(worst), vmin=0, vmax=100, cmap="viridis", aspect="auto")
            for y, x in np.argwhere(~np.isnan(worst)):
                dark = "white" if worst[y][x] < 0.6 else "black"
                axis.text(x, y, f"{100 * worst[y][x]:.0f}", ha="center", va="center", color=dark)
            axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
            labels = [f"{METHODS[one.memory].label}, {one.cues}" for one, _ in cells]
            axis.set_yticks(range(len(cells)), labels)
            axis.set_title(question, loc="left")
        figure.supxlabel("worst seed, %; a row is a memory and its number of cues", fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def draw_curves(trainings: Sequence[dict[str, Any]], path: Path) -> None:
    """Learning curves of one task, a line a training, a colour a memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    task = Task(trainings[0]["question"], trainings[0]["cues"])
    figure, axes = plt.subplots(figsize=(7, 4))
    named = set[str]()
    for each in trainings:
        method = METHODS[each["memory"]]
        label = None if method.name in named else method.label
        named.add(method.name)
        updates, accuracies = zip(*each["curve"], strict=True)
        axes.plot(updates, accuracies, color=method.colour, alpha=0.7, label=label)
    axes.axhline(task.chance, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="updates", ylabel="accuracy of the answer", ylim=(0, 1.02))
    axes.set_title(f"{task.question}, {task.cues} cue{'s' * (task.cues > 1)}")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
