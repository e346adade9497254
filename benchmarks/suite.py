"""How fast the suite runs: three cameras, physics and expert. Prints env steps a second for one process and for all cores,
and where the time of one step goes. Run: python benchmarks/suite.py [--workers N] [--size 96] [--seconds 20]
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import tyro

from trace_bench.env import make
from trace_bench.robot import CAMERAS
from trace_bench.tasks import of_suite


@dataclass(frozen=True)
class Job:
    task: str
    size: int
    seconds: float
    offset: int
    cameras: tuple[str, ...] = CAMERAS


def work(job: Job) -> tuple[int, float]:
    """Expert episodes for a while: steps made and seconds taken, resets included."""
    env = make(job.task, size=job.size, cameras=job.cameras)
    env.reset(seed=0)  # build the drawing context before the clock starts
    begin, steps, seed = time.perf_counter(), 0, job.offset
    while time.perf_counter() - begin < job.seconds:
        env.reset(seed=seed)
        for action in env.expert():
            *_, terminated, truncated, _ = env.step(action)
            steps += 1
            if terminated or truncated or time.perf_counter() - begin >= job.seconds:
                break
        seed += 1
    taken = time.perf_counter() - begin
    env.close()
    return steps, taken


def main(workers: int = os.cpu_count() or 1, size: int = 96, seconds: float = 10.0) -> None:
    """Measures every task.

    Args:
        workers: processes side by side.
        size: picture height and width.
        seconds: how long each measurement runs.
    """
    print(f"{workers} processes, {size} px, MUJOCO_GL={os.environ['MUJOCO_GL']}")
    print("task      steps/s: one process, no cameras | one process | all processes together")
    context = get_context("forkserver")
    for task in of_suite():
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            blind = pool.submit(work, Job(task, size, seconds / 3, 0, ())).result()
            single = pool.submit(work, Job(task, size, seconds / 2, 0)).result()
            many = list(pool.map(work, [Job(task, size, seconds, 1000 * k) for k in range(workers)]))
        total = sum(steps / taken for steps, taken in many)
        print(f"{task:9} {blind[0] / blind[1]:8.0f} {single[0] / single[1]:8.0f} {total:8.0f}")


if __name__ == "__main__":
    tyro.cli(main)
