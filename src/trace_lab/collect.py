"""`tracemem collect`: lets the suite's experts do their tasks and writes LeRobot datasets, on all cores, with progress. It
can be stopped at any moment and goes on where it was when called again; `dataset` says how.
"""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from trace_bench.tasks import TASKS, load, of_suite
from trace_errors import DatasetError, RunError, SimulationError, UsageError
from trace_lab import dataset
from trace_lab.dataset import WORK, Attempt, Finished, Settings, shard
from trace_lab.progress import progress
from trace_lab.run import write_json

if TYPE_CHECKING:
    from trace_bench.env import BenchEnv

BYTES_A_PIXEL, BYTES_A_FRAME, COPIES = 0.10, 250, 3  # measured, on the low side; shards, groups and the whole
PATIENCE = 10  # failures of the expert beyond the number of episodes asked for, after which something is wrong


@dataclass(frozen=True)
class Plan:
    """One dataset to make."""

    settings: Settings
    episodes: int
    out: Path

    def env(self) -> "BenchEnv":
        """An environment that draws nothing."""
        return self.settings.env(cameras=())


@dataclass(frozen=True)
class Result:
    """What came of a plan."""

    task: str
    out: str
    episodes: int
    frames: int
    not_stored: int
    bytes: int
    seconds: float
    steps_per_second: float


class Inline(Executor):
    """Runs every job at once in this process: one worker needs no other."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Does it."""
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


# -- before ---------------------------------------------------------------------------------------------------------------


def resolve(plan: Plan) -> Plan:
    """The same plan with the profile's delay written out, so that folders can be compared."""
    return replace(plan, settings=replace(plan.settings, delay=plan.env().delay))


def estimate(plan: Plan, missing: int) -> int:
    """Bytes that will be needed, rather too few than too many."""
    env, size = plan.env(), plan.settings.size
    frames = missing * (env.bench.seconds * env.profile.pace * env.profile.rate + env.delay) * 0.8
    return int(COPIES * frames * (3 * size * size * BYTES_A_PIXEL + BYTES_A_FRAME))


def check_space(plans: list[Plan], missing: list[int]) -> None:
    """A DatasetError if the disk clearly cannot hold it."""
    needed = sum(estimate(plan, count) for plan, count in zip(plans, missing, strict=True))
    place = next(path for path in (plans[0].out.absolute(), *plans[0].out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DatasetError(f"not enough space at {place}: about {megabytes(needed)} needed, {megabytes(free)} free")


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.1f} MB"


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """Keeps a second collection out of the same folder; the lock ends with the process, however it ends."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DatasetError(f"{work.parent}: another tracemem collect is at work there") from error
        yield


@contextlib.contextmanager
def workers_of(count: int) -> Iterator[Executor]:
    """Worker processes, or this one for one. When an exception leaves, they give up what they are doing."""
    if count == 1:
        yield Inline()
        return
    import multiprocessing

    context = multiprocessing.get_context("forkserver")  # GL does not survive a fork; LeRobot is slow to import
    context.set_forkserver_preload(["lerobot.datasets.aggregate", "lerobot.datasets.lerobot_dataset"])
    stop = context.Event()
    pool = ProcessPoolExecutor(count, context, initializer=dataset.begin_worker, initargs=(stop,))
    try:
        yield pool
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


# -- the work -------------------------------------------------------------------------------------------------------------


def episodes(plan: Plan, begin: int, missing: int, pool: Executor, window: int, console: Console) -> list[Attempt]:
    """Plays until `missing` episodes are stored, from number `begin` on. Which ones they are does not depend on who is
    quick: every failure asks for one more at the end. Returns all attempts in order.
    """
    work = plan.out / WORK
    done, end = {}, begin + missing
    earlier = dataset.attempts(work)
    queue, running = deque(range(begin, end)), set[Future]()
    started, steps = time.perf_counter(), 0
    with progress(f"{plan.settings.task}: episodes", missing, console=console, keep=True) as bar:

        def note(attempt: Attempt) -> None:
            nonlocal end
            done[attempt.index] = attempt
            if not attempt.note:
                bar.advance()
                return
            if len(done) > 2 * missing + PATIENCE:
                raise RunError(f"the expert fails too often, last: {attempt.note}")
            queue.append(end)
            end += 1

        while queue or running:
            while queue and len(running) < window:
                index = queue.popleft()
                if index in earlier:
                    note(earlier[index])
                else:
                    running.add(pool.submit(dataset.record, plan.settings, index, work))
            if not running:
                continue
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                attempt = future.result()
                steps += attempt.steps
                bar.update(bar.done, f"{steps / (time.perf_counter() - started):.0f} steps/s")
                note(attempt)
    return [done[index] for index in sorted(done)]


def draw(plan: Plan, rows: list[dict[str, Any]], pool: Executor) -> Callable[[], Path]:
    """Begins the pictures of the first episode of each cue; the returned function waits for them and makes the sheet."""
    from trace_lab import films

    cues = plan.env().bench.cues
    folder = plan.out / WORK / "pictures.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    first = {row["cue"]: row for row in reversed(rows)}
    jobs = [
        (cues[cue], row, pool.submit(films.film, plan.settings, row, folder / films.slug(cues[cue])))
        for cue, row in sorted(first.items())
    ]

    def finish() -> Path:
        lines = [(cue, row, job.result()) for cue, row, job in jobs]
        title = f"{plan.settings.task}: one episode for each cue, with the number of steps taken"
        films.contact_sheet(title, lines, folder / "contact_sheet.png")
        return folder

    return finish


def make(plan: Plan, pool: Executor, window: int, console: Console) -> Result:
    """Makes one dataset, or what is missing of it."""
    started, settings, out = time.perf_counter(), plan.settings, plan.out
    finished = dataset.check(out, settings)
    steps = 0
    if (out / WORK).exists() or finished.episodes < plan.episodes:
        with locked(out / WORK):
            dataset.tidy(out)
            finished = dataset.check(out, settings)
            missing = plan.episodes - finished.episodes
            if missing > 0:
                write_json(out / WORK / "settings.json", vars(settings))
                tries = episodes(plan, finished.attempts, missing, pool, window, console)
                steps = sum(attempt.steps for attempt in tries)
                finished = assemble(plan, finished, tries, pool, console)
            elif (out / WORK).exists():
                dataset.clear(out)
    if not steps:
        tell(console, f"{out} holds {finished.episodes} episodes of {settings.task} already: nothing to do")
    seconds, frames = time.perf_counter() - started, sum(row["steps"] for row in dataset.sheets(out))
    count, failed = finished.episodes, len(finished.failed)
    speed, size = round(steps / seconds, 1), dataset.size_of(out)
    result = Result(settings.task, str(out), count, frames, failed, size, round(seconds, 1), speed)
    if steps:
        tell(console, f"Wrote {out}: {count} episodes, {frames} frames, {megabytes(result.bytes)}, {seconds:.0f} s")
        if failed:
            tell(console, f"{failed} not stored, because the expert did not complete them (seeds {finished.failed})")
    return result


def assemble(plan: Plan, finished: Finished, tries: list[Attempt], pool: Executor, console: Console) -> Finished:
    """Pictures, the merged dataset and its card, moved into place."""
    settings, out = plan.settings, plan.out
    shards = [shard(out / WORK, attempt.index) for attempt in tries if not attempt.note]
    failed = [settings.first_seed + attempt.index for attempt in tries if attempt.note]
    finished = Finished(plan.episodes, finished.attempts + len(tries), finished.failed + failed)
    with console.status(f"{settings.task}: merging {plan.episodes} episodes, drawing pictures"):
        rows = [row for part in (out, *shards) for row in dataset.sheets(part)]
        finish = draw(plan, rows, pool)
        target = dataset.merge(out, shards, settings, finished, pool)
        finish().rename(target / "pictures")
        command = go_on([replace(plan, out=Path(out.name))])
        (target / "README.md").write_text(dataset.card(settings, plan.env(), finished, rows, command))
        target.rename(out / WORK / "merged")
        dataset.install(out)
    return finished


# -- the command ----------------------------------------------------------------------------------------------------------


def plans_of(task: str | None, episodes: int | None, out: Path, settings: Settings, *, every: bool) -> list[Plan]:
    """What the options ask for."""
    if every == (task is not None):
        raise UsageError("name one task, or --all for the suite" if task is None else f"{task!r} or --all, not both")
    if episodes is not None and episodes < 1:
        raise UsageError(f"--episodes: got {episodes}, expected 1 or more")
    if settings.first_seed < 0:
        raise UsageError(f"--first-seed: got {settings.first_seed}, expected 0 or more")
    names = of_suite() if task is None else (load(task).name,)
    return [
        resolve(
            Plan(
                replace(settings, task=name),
                episodes or TASKS[name].demonstrations,
                out / name.lower() if every else out,
            )
        )
        for name in names
    ]


def go_on(plans: list[Plan]) -> str:
    """The command that makes these plans."""
    one, many = plans[0], len(plans) > 1
    counts = {plan.episodes for plan in plans}
    words = ["tracemem", "collect", "--all" if many else one.settings.task]
    if not many or len(counts) == 1:
        words += ["--episodes", str(one.episodes)]
    words += ["--out", str(one.out.parent if many else one.out)]
    usual = {"split": "train", "size": 96, "profile": "default", "first_seed": 0}
    for name, value in usual.items():
        if getattr(one.settings, name) != value:
            words += [f"--{name.replace('_', '-')}", str(getattr(one.settings, name))]
    if any(plan.settings.delay != replace(plan.settings, delay=None).env(cameras=()).delay for plan in plans):
        words += ["--delay", str(one.settings.delay)]
    return shlex.join(words)


def stored(plans: list[Plan]) -> int:
    """Episodes that are safe on disk."""
    count = 0
    for plan in plans:
        with contextlib.suppress(DatasetError):
            begun = dataset.check(plan.out, plan.settings)
            fresh = [a for a in dataset.attempts(plan.out / WORK).values() if not a.note and a.index >= begun.attempts]
            count += begun.episodes + len(fresh)
    return count


def how_to_go_on(plans: list[Plan]) -> str:
    """What is safe, and the command that does the rest."""
    return f"Finished episodes: {stored(plans)}. To go on, the same command again:\n  {go_on(plans)}"


def disk_full(error: BaseException | None) -> bool:
    """Whether this is why; some libraries only pass the words on."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def tell(console: Console, text: str) -> None:
    """A line as it is: paths are neither wrapped nor read as markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def collect(
    task: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TASK]", help=f"one of {', '.join(TASKS)}.")
    ] = None,
    *,
    all_: Annotated[bool, tyro.conf.arg(name="all"), tyro.conf.FlagCreatePairsOff] = False,
    out: Path,
    episodes: int | None = None,
    split: Literal["train", "heldout"] = "train",
    size: int = 96,
    profile: Literal["default", "paper"] = "default",
    delay: int | None = None,
    workers: int | Literal["auto"] = "auto",
    first_seed: int = 0,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Lets the scripted expert do a task of the suite and writes a LeRobot dataset, with a card and pictures.

    Stopped or killed, it goes on where it was when called again with the same options; asked for more episodes, it adds
    them. Laundry, 60 episodes, takes about four minutes on two cores.

    Args:
        all_: every task of the suite, each in a folder of its own below --out.
        out: the folder to write.
        episodes: how many to store; the number registered with the task if not said; the paper's, for its five.
        split: which scenes: train or heldout.
        size: width and height of the pictures, pixels.
        profile: default is 10 control steps a second; paper has the paper's rate and horizons, several times as many frames.
        delay: least number of control steps between cue and branch; the profile's if not said.
        workers: processes; auto is one for each core.
        first_seed: seed of the first episode; the next ones count up from it.
        json_: print the results as JSON instead of sentences.
    """
    console = Console(stderr=json_)
    if workers != "auto" and workers < 1:
        raise UsageError(f"--workers: got {workers}, expected auto, or 1 or more")
    plans = plans_of(task, episodes, out, Settings("", split, size, profile, delay, first_seed), every=all_)
    missing = [max(0, plan.episodes - dataset.check(plan.out, plan.settings).episodes) for plan in plans]
    check_space(plans, missing)
    cores = len(os.sched_getaffinity(0)) if workers == "auto" else workers
    count = max(1, min(cores, max(missing)))
    try:
        with dataset.temporary_cache(), workers_of(count) as pool:
            results = [make(plan, pool, 2 * count if count > 1 else 1, console) for plan in plans]
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"stopped. {how_to_go_on(plans)}") from stop
    except BrokenProcessPool as error:
        raise SimulationError(f"a worker died (out of memory?). {how_to_go_on(plans)}") from error
    except (OSError, RuntimeError) as error:
        if not disk_full(error):
            raise
        raise RunError(f"the disk is full. {how_to_go_on(plans)}") from error
    if json_:
        print(json.dumps([vars(result) for result in results]))  # noqa: T201
    return 0
