"""How far long work has come: a bar on a terminal, a line every few seconds elsewhere (a log file, a job queue), nothing
on a quiet console. Commands use this and draw no bars of their own.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two lines, at least


@dataclass
class Bar:
    """What is done of something. `update` is cheap: call it as often as you like."""

    total: int
    done: int
    show: Callable[[int, str], None]

    def update(self, done: int, note: str = "") -> None:
        """So much is done now. A note, if there is one, replaces the one before."""
        self.done = done
        self.show(done, note)

    def advance(self, count: int = 1, note: str = "") -> None:
        """So much more is done."""
        self.update(self.done + count, note)


@dataclass
class _Lines:
    """Plain lines, at most one every `EVERY` seconds."""

    console: Console
    title: str
    total: int
    first: int  # what was done before we began
    note: str
    begun: float = field(init=False)
    printed: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.printed = time.monotonic()

    def __call__(self, done: int, note: str) -> None:
        self.note, now = note or self.note, time.monotonic()
        if now - self.printed < EVERY:
            return
        self.printed = now
        left = (now - self.begun) / max(1, done - self.first) * (self.total - done)
        words = [
            f"{self.title}: {done:,} of {self.total:,}",
            self.note,
            f"{clock(left)} left" if done > self.first else "",
        ]
        self.console.print(", ".join(filter(None, words)), markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextmanager
def progress(
    title: str, total: int, note: str = "", *, done: int = 0, console: Console | None = None, keep: bool = False
) -> Iterator[Bar]:
    """Shows how far something has come while the `with` block lasts.

    Args:
        title: what is going on, in one or two words.
        total: how much there is to do.
        note: shown beside the count until an update brings another.
        done: how much of it was done before.
        console: where to; by default the standard error stream.
        keep: leave the full bar on the terminal afterwards.

    Example:
        with progress("decoding videos", len(jobs)) as bar:
            for job in jobs:
                decode(job)
                bar.advance()
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield Bar(total, done, _Lines(console, title, total, done, note))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=not keep) as shown:
        task = shown.add_task(title, total=total, completed=done, note=note)

        def show(done: int, note: str) -> None:
            shown.update(task, completed=done)
            if note:
                shown.update(task, note=note)

        yield Bar(total, done, show)
