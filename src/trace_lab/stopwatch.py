"""How long calls take (`Stopwatch`), on a CPU and on a GPU, and what that says (`Timing`)."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress, TaskID

from lerobot_policy_trace.frozen import captured, computing

PARTS = 2_000  # times a part is measured at most
WARM_UP = 20
SECONDS = 30.0  # for a measurement, unless told otherwise; longer runs than those of parts take what they need
# Bytes written before each measurement of a part, so that it finds its weights where a robot's step does.
CACHE = 128 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds, over so many calls."""

    mean: float
    p95: float
    median: float
    calls: int

    @classmethod
    def of(cls, milliseconds: NDArray[np.float32]) -> "Timing":
        """Of all calls."""
        x = milliseconds.astype(np.float64)
        return cls(float(x.mean()), float(np.quantile(x, 0.95)), float(np.median(x)), len(x))

    def __str__(self) -> str:
        digits = 3 if self.mean < 1 else 2
        return f"{self.mean:.{digits}f} / {self.p95:.{digits}f}"


class Stopwatch:
    """Measures calls, on a device, for at most so many seconds each (`SECONDS` if None)."""

    def __init__(self, device: torch.device, steps: int, seconds: float | None, progress: Progress):
        self.device, self.steps, self.seconds, self.progress = device, steps, seconds, progress
        self.cuda = device.type == "cuda"

    def wall(self, what: str, call: Callable[[int], Any], steps: int | None = None) -> NDArray[np.float32]:
        """What a robot waits: from the call to its result."""
        steps = min(self.steps, steps or self.steps)
        usual = SECONDS if steps <= PARTS else math.inf
        limit = time.perf_counter() + (usual if self.seconds is None else self.seconds)
        times = np.full(steps, np.nan, np.float32)
        task = self.progress.add_task(what, total=steps)
        for number in range(-min(WARM_UP, steps), steps):
            begun = time.perf_counter()
            call(number)
            if self.cuda:
                torch.cuda.synchronize()
            if number >= 0:
                times[number] = (time.perf_counter() - begun) * 1e3
            if number % 100 == 0:
                self.progress.update(task, completed=max(0, number))
            if time.perf_counter() > limit and number >= WARM_UP:
                return self._told(what, task, times[: number + 1])
        return self._told(what, task, times)

    def _told(self, what: str, task: TaskID, times: NDArray[np.float32]) -> NDArray[np.float32]:
        """Where nobody sees the bar, a line a measurement."""
        self.progress.update(task, completed=len(times), total=len(times))
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{what}: {Timing.of(times)} ms ({len(times)} calls)", highlight=False)
        return times

    def part(self, what: str, program: Callable[[], Any], precision: str) -> Timing:
        """What a part takes by itself: on a GPU the device's own time for it as a graph, with cold caches."""
        with torch.no_grad(), computing(self.device, precision):
            if not self.cuda:
                return Timing.of(self.wall(what, lambda _: program(), PARTS))
            replay = captured(program)
        cache = torch.zeros(CACHE, dtype=torch.uint8, device=self.device)
        times, block, count = [], 50, min(self.steps, PARTS) + WARM_UP
        task = self.progress.add_task(what, total=count)
        for _ in range(0, count, block):
            marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(block)]
            for begin, end in marks:
                cache.zero_()
                begin.record()
                replay()
                end.record()
            torch.cuda.synchronize()
            times += [begin.elapsed_time(end) for begin, end in marks]
            self.progress.advance(task, block)
        return Timing.of(self._told(what, task, np.array(times[WARM_UP:], np.float32)))


def resident() -> float | None:
    """Megabytes of memory this process holds, where that can be known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """CPU threads, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
