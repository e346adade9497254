"""`tracemem eval`: lets a trained policy do held-out episodes of a task, many at once, and writes one JSON line an episode
as it ends. It can be stopped at any moment and goes on where it was when called again; `rollout` plays the episodes.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import tyro
from rich.console import Console
from rich.table import Table

from trace_bench.tasks import TASKS, load
from trace_errors import RunError, SimulationError, UsageError
from trace_lab.progress import progress
from trace_lab.results import RESULTS, SETTINGS, lines
from trace_lab.trained import Trained, configuration, find, pictures, rendered, runner

if TYPE_CHECKING:
    from trace_lab.rollout import Begin, Episodes, PolicyRunner, Rows

ROWS = 32  # episodes played at once, at most, if not said
Fields = dict[str, Any]  # of JSON


@dataclass(frozen=True)
class Settings:
    """All that decides the results, kept beside them."""

    trained: Trained
    episodes: "Episodes"

    def to_dict(self) -> Fields:
        """For JSON, in one table."""
        episodes = asdict(self.episodes) | {"cameras": list(self.episodes.cameras)}
        return asdict(self.trained) | episodes | {"suite": TASKS[self.episodes.task].version}


def check(out: Path, settings: Settings) -> Fields:
    """What the folder's settings file holds, {} if there is none; a RunError if it was made with other settings."""
    if out.is_file():
        raise RunError(f"out: {out} is a file, expected a folder")
    content: Fields = json.loads((out / SETTINGS).read_text()) if (out / SETTINGS).exists() else {}
    if not content and lines(out):
        raise RunError(f"out: {out} has {RESULTS} but no {SETTINGS}: choose another folder with --out")
    asked = settings.to_dict()
    found = content.get("settings", asked)
    other = [name for name in asked if name != "episodes" and found.get(name) != asked[name]]
    if set(other) - {"checkpoint"}:  # the same weights may have moved
        differences = "; ".join(f"{name}: found {found.get(name)!r}, asked for {asked[name]!r}" for name in other)
        raise RunError(f"out: {out} was made with other settings: {differences}. Choose another folder with --out")
    return content


@contextlib.contextmanager
def opened(out: Path) -> Iterator[TextIO]:
    """The results, for one process at a time to add to. A torn end is cut off."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / RESULTS).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"out: another tracemem eval is at work in {out}") from error
        file.seek(0)
        file.truncate(file.read().rfind("\n") + 1)  # JSON is ASCII: as many bytes as characters
        yield file


def missing(out: Path, asked: "Episodes", videos: int) -> "list[Begin]":
    """Episodes without a line, or without a film where one is wanted: that one is played again, for the film only."""
    from trace_lab.rollout import Begin

    done, found = lines(out), []
    for seed in range(asked.first_seed, asked.first_seed + asked.episodes):
        stem = out / "videos" / f"{asked.task}-{seed}"
        film = stem if seed < asked.first_seed + videos and not [*stem.parent.glob(f"{stem.name}-*.mp4")] else None
        if film or seed not in done:
            found.append(Begin(seed, film, asked.cue))
    return found


def summary(rows: Collection[Fields]) -> Fields:
    """Of finished episodes. Branch accuracy is the share of the decisions taken that were right."""
    from trace_bench.referee import Outcome

    decided = [decision["correct"] for row in rows for decision in row["decisions"] if decision["choice"] is not None]
    outcomes = [row["outcome"] for row in rows]
    return {
        "episodes": len(rows),
        "mean_progress": sum(row["progress"] for row in rows) / len(rows),
        "branch_accuracy": sum(decided) / len(decided) if decided else None,
        "decisions": len(decided),
        "outcomes": {str(kind): outcomes.count(kind) for kind in Outcome if kind in outcomes},
    }


def record(
    settings: Settings,
    out: Path,
    file: TextIO,
    rows: "Rows",
    policy: "PolicyRunner",
    todo: "list[Begin]",
    console: Console,
) -> Fields:
    """Plays episodes, adds a line for each that has none, and returns the summary; its speeds are of this call."""
    from trace_lab import rollout

    trained = settings.trained
    whose: Fields = {"policy": trained.policy, "memory": trained.memory, "training_seed": trained.training_seed}
    if trained.checkpoint_step is not None:
        whose["checkpoint_step"] = trained.checkpoint_step
    done, meter, started = lines(out), rollout.Meter(), time.perf_counter()
    with progress(f"{settings.episodes.task}: episodes", len(todo), console=console, keep=True) as bar:
        for sheets in rollout.play(rows, policy, todo, meter):
            for sheet in (sheet for sheet in sheets if sheet["seed"] not in done):
                done[sheet["seed"]] = sheet | whose
                file.write(json.dumps(sheet | whose) + "\n")
                file.flush()
            seconds = time.perf_counter() - started
            mean = f", mean progress {summary(done.values())['mean_progress']:.0%}" if done else ""
            bar.advance(len(sheets), f"{meter.steps / seconds:.0f} steps/s{mean}")
    speed = {
        "env_steps_per_second": meter.steps / seconds,
        "policy_ms_per_step": 1e3 * meter.policy_seconds / meter.calls,
    }
    return summary(done.values()) | {"seconds": seconds, "env_steps": meter.steps} | speed


def finish(
    settings: Settings, config: Any, out: Path, rows: int | None, workers: int | None, videos: int, console: Console
) -> tuple[Settings, Fields]:
    """Plays what is missing in a folder. Returns the settings of all that it holds then, and their summary."""
    from trace_lab.rollout import Rows
    from trace_lab.run import write_json

    check(out, settings)
    with opened(out) as file:
        content, asked = check(out, settings), settings.episodes
        todo = missing(out, asked, videos)
        count = max(asked.episodes, content.get("settings", {}).get("episodes", 0))
        settings = replace(settings, episodes=replace(asked, episodes=count))
        if todo:
            write_json(out / SETTINGS, {"settings": settings.to_dict()})
            at_once = min(ROWS if rows is None else rows, len(todo))
            processes = min(len(os.sched_getaffinity(0)) if workers is None else workers, at_once)
            with Rows(partial(asked.make, renders=rendered(config)), at_once, processes) as envs:
                policy = runner(Path(settings.trained.checkpoint), config.device, asked.first_seed)
                content["summary"] = record(settings, out, file, envs, policy, todo, console)
        found = content.get("summary") or summary(lines(out).values())
        write_json(out / SETTINGS, {"settings": settings.to_dict(), "summary": found})
    return settings, found


def show(console: Console, path: Path, settings: Settings, found: Fields) -> None:
    """The results as a table."""
    right = f"{found['branch_accuracy']:.0%} of {found['decisions']}" if found["decisions"] else "none taken"
    outcomes = "\n".join(f"{count} {kind}" for kind, count in found["outcomes"].items())
    title = f"{settings.episodes.task}: {settings.trained.policy}, memory {settings.trained.memory}"
    table = Table("episodes", "mean progress", "right decisions", "outcomes", title=title)
    table.add_row(str(found["episodes"]), f"{found['mean_progress']:.1%}", right, outcomes)
    console.print(table)
    console.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)


def evaluate(
    checkpoint: tyro.conf.Positional[Path],
    *,
    task: Annotated[
        str | None, tyro.conf.arg(help=f"one of {', '.join(TASKS)}; what the run was trained on if not said.")
    ] = None,
    episodes: int = 25,
    first_seed: int = 0,
    split: Literal["heldout", "train"] = "heldout",
    profile: Literal["default", "paper"] = "default",
    delay: int | None = None,
    limit: int | None = None,
    cue: int | None = None,
    rows: int | Literal["auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    videos: int = 0,
    out: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Lets a trained policy do a task of the suite and writes how far it came in each episode.

    Every method gets the same episodes: those of the seeds from --first-seed on. Stopped or killed, it goes on where it was
    when called again with the same options; asked for more episodes, it adds them. How often the policy predicts actions,
    and how, is in its own configuration (config.json).

    Args:
        checkpoint: a pretrained_model folder, a checkpoint that holds one, or a run (its last checkpoint).
        episodes: how many.
        first_seed: seed of the first episode; the next ones count up from it.
        split: which scenes: heldout or train.
        profile: default is 10 control steps a second; paper has the paper's rate and horizons.
        delay: least number of control steps between cue and branch; the profile's if not said.
        limit: control steps after which an episode is stopped; the task's own if not said.
        cue: every episode has this one, counted from 0, in place of its seed's. With each of them in turn (and a folder for
            each, --out) it shows whether the choice in a scene changes with the cue at all.
        rows: episodes played at once; auto is up to 32.
        workers: processes that simulate; auto is one for each core.
        videos: how many episodes to film, from the first on.
        out: the folder to write; evaluation/TASK in the run if not said.
        device: where the policy runs.
        json_: print the results as JSON instead of a table.
    """
    counts = {"episodes": episodes, "first-seed": first_seed, "rows": rows, "workers": workers, "videos": videos}
    for name, least in (("episodes", 1), ("first-seed", 0), ("rows", 1), ("workers", 1), ("videos", 0)):
        if isinstance(count := counts[name], int) and count < least:
            raise UsageError(f"--{name}: got {count}, expected {least} or more")
    folder, run = find(checkpoint)
    notes = json.loads((run / "run.json").read_text()) if run and (run / "run.json").exists() else {}
    if not (task := task or notes.get("task")):
        raise UsageError(
            f"--task: got none, and {checkpoint} is in no run whose run.json names one; say which one. tracemem eval plays "
            f"the tasks of the simulated suite ({', '.join(TASKS)}); on a robot, use lerobot-rollout (docs/robot.md)"
        )
    bench = load(task)
    if cue is not None and not 0 <= cue < len(bench.cues):
        raise UsageError(f"--cue: got {cue}, expected 0 to {len(bench.cues) - 1} ({', '.join(bench.cues)})")
    if out is None and run is None:
        raise UsageError(f"--out: say where to write, because {checkpoint} is in no run")
    place, console = out or Path(run or "", "evaluation", bench.name), Console(stderr=json_)
    config = configuration(folder, device)
    size, cameras = pictures(config)
    from trace_lab.rollout import Episodes  # loads the simulator

    asked = Episodes(bench.name, split, profile, delay, limit, cue, first_seed, episodes, size, cameras)
    env = replace(asked, cameras=()).make()
    settings = Settings(Trained.of(folder, config, notes.get("seed")), replace(asked, delay=env.delay, limit=env.limit))

    def number(count: int | Literal["auto"]) -> int | None:
        return None if count == "auto" else count

    try:
        settings, found = finish(settings, config, place, number(rows), number(workers), videos, console)
    except KeyboardInterrupt:
        print(f"tracemem eval: stopped. {_finished(place)}", file=sys.stderr)  # noqa: T201
        return 130
    except SimulationError as error:
        raise SimulationError(f"{error}. {_finished(place)}") from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunError(f"{error}. {_finished(place)}") from error
    if json_:
        print(json.dumps({"out": str(place), "settings": settings.to_dict(), "summary": found}))  # noqa: T201
    else:
        show(console, place / RESULTS, settings, found)
    return 0


def _finished(out: Path) -> str:
    return f"Finished episodes: {len(lines(out))}. To go on, call it again with the same options"
