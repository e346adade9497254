"""`tracemem probe`: trains memories on a task of the battery, with progress, a table, learning curves and raw results; or
runs whole lists of such trainings, one process each, as jobs of a `queue`.
"""

import inspect
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from trace_errors import RunError, UsageError
from trace_lab import cells, scores
from trace_lab.progress import progress
from trace_lab.questions import CORRIDORS, CUES, DELAY, QUESTIONS, SHORTEST, Task
from trace_lab.tables import Table, markdown, to_json
from trace_memory.config import PaperOptions, nearest
from trace_memory.registry import METHODS, paper_forms

if TYPE_CHECKING:
    from trace_lab.battery import Training

LISTS, EITHER = (
    ("cells_", "jobs", "to", "plan_only"),
    ("battery", "out", "json_"),
)  # options with --battery, with and without


def run(training: "Training", episodes: int, few: int, corridors: tuple[int, ...], console: Console) -> dict[str, Any]:
    """One training and its trials, as a line of the raw results."""
    from trace_lab.battery import reached, start, train, trials
    from trace_lab.run import commit

    begin, task = time.perf_counter(), training.task
    title = f"{training.memory}, seed {training.seed}"
    model, curve = start(training), []
    with progress(title, training.updates, console=console) as bar:
        for news in train(training, model):
            curve.append(news)
            bar.update(news.update, f"loss {news.loss:.3f}, accuracy {news.accuracy:.3f}")
    conditions = dict[str, tuple[int, int]]()
    with progress(f"{title}, trials", len([*task.conditions(corridors)]), console=console) as bar:
        for name, right, of in trials(model, task, episodes, few, corridors):
            conditions[name] = right, of
            bar.advance(1, f"{name}: {right / of:.3f}")
    return {
        "memory": training.memory,
        "question": task.question,
        "cues": task.cues,
        "seed": training.seed,
        "rate": training.rate,
        "updates_to_95": reached(curve, 0.95),
        "updates_to_99": reached(curve, 0.99),
        "conditions": conditions,
        "seconds": round(time.perf_counter() - begin, 1),
        "state_bytes": model.memory.state_bytes,
        "commit": commit() or "",
        "delay": task.delay,
        "updates": training.updates,
        "batch": training.batch,
        "paper": asdict(training.paper),
        "curve": [(each.update, each.accuracy) for each in curve],
    }


def probe(
    *,
    memory: tuple[str, ...] = ("trace",),
    question: Annotated[str, tyro.conf.arg(help_behavior_hint="(default: sign)")] = "sign",
    cues: Annotated[int, tyro.conf.arg(help_behavior_hint="(1 to 8, default: 1)")] = 1,
    delay: int = DELAY,
    seeds: int = 1,
    first_seed: int = 0,
    rate: float = 1e-3,
    updates: int | None = None,
    batch: int = 64,
    episodes: int = 2000,
    few: int = 500,
    corridors: tuple[int, ...] = CORRIDORS,
    paper: PaperOptions = PaperOptions(),  # noqa: B008
    device: str = "cpu",
    battery: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    cells_: Annotated[tuple[str, ...], tyro.conf.arg(name="cells")] = ("full",),
    jobs: int | None = None,
    to: Path | None = None,
    plan_only: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    out: Path | None = None,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Trains memories on small tasks of delayed evidence: do they learn, how fast, does it last, at any sampling rate?

    A small robot passes stations where a framed glyph shows for four frames, wanders among stray patches, and is asked at
    the end. The questions:

      sign   a bar names the station by its height; what was its glyph?
      place  the robot returns to the station; what was its glyph?
      order  stations lie anywhere, anew each episode; what was the first, second, n-th glyph?
      count  how many of the glyphs were of the colour of the bar?
      match  where, among four options, is the one like the named station's glyph?
      tmaze  a cue in the first frame, a corridor of up to 64 steps, a junction

    Then, without more training, the delay is 8 and 64 times as long, the same way is sampled 8 times finer and 4 times
    coarser, every third frame is lost, and each frame is shown twice; the T-Maze gets longer corridors instead. A training
    takes two to ten minutes of a core.

    With --battery it runs lists of such trainings from experiments/battery.txt, one process of one thread each. Stopped or
    killed, the same command goes on.

    Args:
        memory: one or more of the memories, e.g. --memory trace paper gru none.
        question: sign, place, order, count, match or tmaze.
        cues: stations to remember; the battery has 1, 3, 5 and 8.
        delay: steps of wandering, before and after the tour; steps in all in the T-Maze.
        seeds: trainings a memory.
        first_seed: the first of them has this seed.
        rate: Adam's learning rate.
        updates: most a training may take; 1,500, or 2,500 for order with 5 and more cues. It ends earlier 250 updates after
            two validations in a row at 99 %.
        batch: episodes an update.
        episodes: on which a trained model is tried in each condition.
        few: the same where one of them is longer than 2,000 frames.
        corridors: lengths of the T-Maze in which it is tried.
        paper: options of the paper's form, for --memory paper.
        device: cpu or cuda.
        battery: run lists of cells instead; of the options above none goes with it.
        cells_: which lists: full, strong, rest, rates, addresses, tmaze, ci.
        jobs: processes at once; as many as there are cores if not said.
        to: where the battery's set is kept; OUT/battery.parquet if not said.
        plan_only: list the trainings and their core hours, and do nothing.
        out: folder for curves.png and results.json, or of the battery; outputs/probe and outputs/battery if not said.
        json_: print the results as JSON instead of a table.
    """
    given, console = dict(locals()), Console(stderr=json_)
    for name, each in inspect.signature(probe).parameters.items():
        if (name in LISTS) is not battery and name not in EITHER and given[name] != each.default:
            why = "has no place beside --battery, whose lists say it" if battery else "is of --battery only"
            raise UsageError(f"--{name.strip('_').replace('_', '-')}: {why}")
    if battery:
        return run_battery(
            cells_, jobs, (out or Path("outputs/battery")).absolute(), to, console, plan_only=plan_only, json_=json_
        )
    task = check(memory, question, cues, delay, rate, paper)
    for option, value, least in (
        ("seeds", seeds, 1), ("first-seed", first_seed, 0), ("updates", updates, 1), ("batch", batch, 1),
        ("episodes", episodes, 1), ("few", few, 1), *(("corridors", each, SHORTEST) for each in corridors),
    ):  # fmt: skip
        if value is not None and value < least:
            raise UsageError(f"--{option}: {value}, expected {least} or more")

    import torch

    from trace_lab.battery import Training

    torch.set_num_threads(1)  # at this size a second one waits more than it works
    out, trained = out or Path("outputs/probe"), list[dict[str, Any]]()
    most = updates or (2500 if question == "order" and cues >= 5 else 1500)
    for name in memory:
        for seed in range(first_seed, first_seed + seeds):
            own = paper if METHODS[name].paper_form else PaperOptions()
            training = Training(name, task, seed, rate, most, batch, paper=own, device=device)
            trained.append(run(training, episodes, few, corridors, console))
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(trained, indent=1) + "\n"
            fresh = out / f"{scores.RAW}.tmp"
            fresh.write_text(text)
            fresh.replace(out / scores.RAW)
    scores.draw_curves(trained, out / "curves.png")
    if json_:
        print(json.dumps(trained))  # noqa: T201
    else:
        found = [score for each in trained for score in scores.of(each)]
        show(scores.tables(found, seeds=True), console)
    console.print(f"Wrote {out / scores.RAW} and {out / 'curves.png'}")
    return 0


def check(memory: Sequence[str], question: str, cues: int, delay: int, rate: float, paper: PaperOptions) -> Task:
    """Refuses what makes no sense, before anything heavy is imported; returns what is asked."""
    if not memory:
        raise UsageError("--memory: none given, expected one or more")
    for name in memory:
        if name not in METHODS:
            raise UsageError(f"--memory: {name!r} is not known; {nearest(name, METHODS)}")
    if question not in QUESTIONS:
        raise UsageError(f"--question: {question!r} is not known; {nearest(question, QUESTIONS)}")
    if not 1 <= cues <= max(CUES):
        raise UsageError(f"--cues: {cues}, expected 1 to {max(CUES)}")
    if not 0 < rate < float("inf"):
        raise UsageError(f"--rate: {rate}, expected a positive number")
    if paper != PaperOptions() and not any(METHODS[name].paper_form for name in memory):
        raise UsageError(
            f"--paper: has options for {', '.join(memory)}, expected --memory {' or '.join(paper_forms())}"
        )
    try:
        return Task(question, cues, delay)
    except UsageError as error:
        raise UsageError(f"--{error}") from None


def show(tables: dict[str, Table], console: Console) -> None:
    """As Markdown: wide tables stay whole."""
    console.print(markdown(tables), markup=False, highlight=False, soft_wrap=True)


# -- the battery -----------------------------------------------------------------------------------------------------------


def run_battery(
    names: Sequence[str],
    count: int | None,
    out: Path,
    to: Path | None,
    console: Console,
    *,
    plan_only: bool,
    json_: bool,
) -> int:
    """Does what is not done of some lists, and lays out all that is done in the folder, also when it is stopped."""
    from trace_lab.jobs import listing, say, work
    from trace_lab.queue import Local, Queue

    if count is not None and count < 1:
        raise UsageError(f"--jobs: {count}, expected 1 or more")
    queue, asked = Queue(out), cells.jobs(cells.chosen(names), out)
    say(console, listing(asked, queue.lines(), threads=1))
    if plan_only:
        return 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends it as Ctrl-C does
    try:
        left = work(queue, asked, Local(count or len(os.sched_getaffinity(0)), threads=1), console)
    except KeyboardInterrupt:
        left = None
    finally:
        signal.signal(signal.SIGTERM, before)
    command = f"tracemem probe --battery --cells {' '.join(names)}"
    finish(out, to or out / "battery.parquet", command, console, json_=json_)
    if left is None:
        raise KeyboardInterrupt(f"stopped. The same command goes on; finished work is in {out}")
    if left:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3])
        raise RunError(
            f"{len(left)} of {len(asked)} trainings could not be done. {why}. The same command tries them again"
        )
    return 0


def finish(out: Path, to: Path, command: str, console: Console, *, json_: bool) -> None:
    """The set, the figure and the table of all trainings in a folder."""
    from trace_lab.run import versions

    found = scores.read_raw(out / "runs")
    if not found:
        return
    decides = "what each memory learns, how fast, and what of it lasts and is blind to the sampling rate"
    scores.write(to, found, decides=decides, command=[command], versions=versions())
    scores.draw(found, to.with_suffix(".svg"))
    made = scores.tables(found, seeds=False)
    if json_:
        print(json.dumps(to_json(made)))  # noqa: T201
    else:
        show(made, console)
    console.print(f"Wrote {to} and {to.with_suffix('.svg')}", highlight=False, soft_wrap=True)
