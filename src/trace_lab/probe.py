"""`tracemem probe`: trains memories on the synthetic delayed-evidence task, with progress, a table, a plot and JSON."""

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trace_errors import UsageError
from trace_memory.config import MemoryConfig, PaperOptions, nearest
from trace_memory.registry import METHODS, paper_forms

if TYPE_CHECKING:
    from trace_memory.probe import ProbeRun

LENGTHS = (2, 8, 64)


@dataclass(frozen=True)
class Result:
    """One training and what came of it; accuracies at longer lengths by "far 8x" or "slow 8x"."""

    memory: str
    cues: int
    seed: int
    solved_at: int | None  # first of the two evaluations in a row that reached `solved`
    accuracy: float
    longer: dict[str, float]
    curve: list[tuple[int, float]]
    seconds: float


def run(probe: "ProbeRun", lengths: tuple[int, ...], progress: Progress) -> Result:
    """Trains one memory and tries it at longer lengths."""
    import torch

    from trace_memory.probe import start, train

    begin = time.perf_counter()
    label = f"{probe.memory.name}, seed {probe.seed}"
    task = progress.add_task(label, total=probe.updates)
    model, curve, solved_at = start(probe), list[tuple[int, float]](), None
    for news in train(probe, model):
        if news.solved:
            solved_at = curve[-1][0]
        curve.append((news.update, news.accuracy))
        progress.update(task, completed=news.update, description=f"{label}: accuracy {news.accuracy:.2f}")
    progress.update(task, total=curve[-1][0], completed=curve[-1][0])

    def accuracy(how: Literal["far", "slow"], stretch: int) -> float:
        generator = torch.Generator(probe.device).manual_seed(2_000_000 + probe.seed)
        return model.accuracy(replace(probe.task, stretch=stretch, how=how), 256 if stretch <= 8 else 128, generator)

    final = accuracy("far", 1)
    longer = {}
    trial = progress.add_task(f"{label}: longer episodes", total=2 * len(lengths))
    for stretch in lengths:
        for how in ("far", "slow"):
            longer[f"{how} {stretch}x"] = accuracy(how, stretch)
            progress.advance(trial)
    progress.remove_task(trial)
    seconds = round(time.perf_counter() - begin, 1)
    return Result(probe.memory.name, probe.task.cues, probe.seed, solved_at, final, longer, curve, seconds)


def show(results: list[Result], updates: int, console: Console) -> None:
    """One row a training, in the order run."""
    from trace_memory.probe import GLYPHS

    names = list(results[0].longer)
    table = Table("memory", "seed", "solved at", "accuracy", *names, "s", title="Probe", box=SIMPLE, padding=(0, 0))
    for r in results:
        solved = str(r.solved_at) if r.solved_at else f"not in {updates}"
        table.add_row(
            r.memory,
            str(r.seed),
            solved,
            f"{r.accuracy:.2f}",
            *(f"{r.longer[n]:.2f}" for n in names),
            f"{r.seconds:.0f}",
        )
    console.print(table)
    console.print(
        f"Chance is {1 / GLYPHS:.2f}. far: the same speed for longer; slow: the same route, sampled more finely."
    )


def plot(results: list[Result], path: Path) -> None:
    """Learning curves, one line a training, one colour a memory."""
    import matplotlib

    from trace_memory.probe import GLYPHS

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for r in results:
        first = next(other for other in results if other.memory == r.memory) is r
        colour = METHODS[r.memory].colour
        axes.plot(
            *zip(*r.curve, strict=True), color=colour, alpha=0.7, label=METHODS[r.memory].label if first else None
        )
    axes.axhline(1 / GLYPHS, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="updates", ylabel="accuracy of the answer", ylim=(0, 1.02))
    axes.set_title(f"Probe: {results[0].cues} cue{'s' * (results[0].cues > 1)}")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def probe(
    *,
    memory: tuple[str, ...] = ("trace",),
    cues: Annotated[int, tyro.conf.arg(help_behavior_hint="(1 to 3, default: 1)")] = 1,
    delay: int = 64,
    seeds: int = 1,
    updates: int = 1500,
    batch: int = 64,
    rate: float = 1e-3,
    solved: float = 0.99,
    speed: float = 2.0,
    paper: PaperOptions = PaperOptions(),  # noqa: B008
    lengths: tuple[int, ...] = LENGTHS,
    device: str = "cpu",
    out: Path = Path("outputs/probe"),
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Trains memories on a small delayed-evidence task: does it learn, how fast, and does it last?

    A small robot passes stations where a framed colour shows for four frames, wanders for `delay` steps among stray
    colours, and is asked at the end for the colour of one station. One cue takes about a minute on two cores.

    Args:
        memory: one or more of the memories, e.g. --memory trace paper gru none.
        cues: stations to remember; one of them is asked for.
        delay: steps between the last cue and the question.
        seeds: trainings a memory, with seeds 0, 1, ...
        updates: most updates a training may take; after being solved twice in a row it settles for 100 more.
        batch: episodes an update.
        rate: Adam's learning rate.
        solved: accuracy that counts as solved.
        speed: training batches are played up to this much faster or slower; 1 for none of that.
        paper: options of the paper's form, for --memory paper.
        lengths: how many times the trained length to try afterwards.
        device: cpu or cuda.
        out: folder for curves.png and results.json.
        json_: print the results as JSON instead of a table.
    """
    check(memory, cues, delay, seeds, updates, batch, lengths)
    for name, value, least in (("rate", rate, 0.0), ("solved", solved, 0.0), ("speed", speed, 1.0)):
        if not value >= least or value == 0 or value == float("inf"):
            raise UsageError(f"--{name}: {value}, expected {'1 or more' if least else 'a positive number'}")
    if paper != PaperOptions() and not any(METHODS[name].paper_form for name in memory):
        raise UsageError(
            f"--paper: has options for {', '.join(memory)}, expected --memory {' or '.join(paper_forms())}"
        )

    from trace_memory.probe import PROBE_MEMORY, ProbeRun, ProbeTask

    def config(name: str) -> MemoryConfig:
        return replace(PROBE_MEMORY, name=name, paper=paper if METHODS[name].paper_form else PaperOptions())

    plan = ProbeRun(
        task=ProbeTask(cues, delay), updates=updates, batch=batch, rate=rate, speed=speed, solved=solved, device=device
    )
    settings = {"delay": delay, "batch": batch, "rate": rate, "speed": speed, "paper": asdict(paper)}
    console, results = Console(stderr=json_), list[Result]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for name in memory:
            for seed in range(seeds):
                results.append(run(replace(plan, memory=config(name), seed=seed), lengths, progress))
                out.mkdir(parents=True, exist_ok=True)
                lines = [asdict(r) | settings for r in results]
                (out / "results.json").write_text(json.dumps(lines, indent=1) + "\n")
    plot(results, out / "curves.png")
    if json_:
        print(json.dumps(lines))  # noqa: T201
    else:
        show(results, updates, console)
        for name in memory:
            accuracies = [r.accuracy for r in results if r.memory == name]
            console.print(f"{name}: mean accuracy {statistics.mean(accuracies):.3f} over {len(accuracies)} training(s)")
    console.print(f"Wrote {out / 'results.json'} and {out / 'curves.png'}")
    return 0


def check(
    memory: tuple[str, ...], cues: int, delay: int, seeds: int, updates: int, batch: int, lengths: tuple[int, ...]
) -> None:
    """Refuses what makes no sense, before anything heavy is imported."""
    if not memory:
        raise UsageError("--memory: none given, expected one or more")
    for name in memory:
        if name not in METHODS:
            raise UsageError(f"--memory: {name!r} is not known; {nearest(name, METHODS)}")
    if not 1 <= cues <= 3:
        raise UsageError(f"--cues: {cues}, expected 1 to 3")
    for option, value, least in (
        ("delay", delay, 8), ("seeds", seeds, 1), ("updates", updates, 1), ("batch", batch, 1),
        *(("lengths", length, 1) for length in lengths),
    ):  # fmt: skip
        if value < least:
            raise UsageError(f"--{option}: {value}, expected {least} or more")
