"""Many jobs in front of a person: what there is to do, what it will cost, how far it is. What a job is and who does it is in
`queue`.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console

from trace_lab.progress import progress
from trace_lab.queue import Job, Line, Queue, Runner, last_words


def kind(job: Job) -> str:
    """The command: collect, train, eval, probe."""
    return job.command[0]


def hours(jobs: Sequence[Job], lines: Mapping[str, Line], threads: int = 1) -> dict[str, float]:
    """Core hours of each job: measured if it is done, else planned, times what done ones of its kind took of their plan."""
    spent: dict[str, float] = {}
    factors: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        line = lines.get(job.name)
        if line and line.state == "done" and line.job.command == job.command and line.seconds:
            spent[job.name] = line.seconds * threads / 3600
            factors.setdefault(kind(job), []).append((spent[job.name], job.hours))
    scale = {name: sum(a for a, _ in found) / sum(b for _, b in found) for name, found in factors.items()}
    return {job.name: spent.get(job.name, job.hours * scale.get(kind(job), 1.0)) for job in jobs}


def listing(jobs: Sequence[Job], lines: Mapping[str, Line], threads: int) -> str:
    """What is done and what is to be done, with core hours."""
    each = hours(jobs, lines, threads)
    done = {job.name for job in jobs if (line := lines.get(job.name)) and line.state == "done"}
    rows = [f"{'done ' if job.name in done else 'to do'}  {each[job.name]:8.2f}  {job.name}" for job in jobs]
    left = sum(each[job.name] for job in jobs if job.name not in done)
    measured = "by those that are done" if done else "a rough plan: nothing has been measured yet"
    return "\n".join(
        ["       core h", *rows, f"{len(jobs) - len(done)} jobs to do, {left:.1f} core hours ({measured})"]
    )


def work(queue: Queue, jobs: Sequence[Job], runner: Runner, console: Console, threads: int = 1) -> dict[str, str]:
    """Does what is not done; returns for each job that is left why."""
    queue.add(jobs)
    names = {job.name for job in jobs}
    before = sum(1 for name, line in queue.lines().items() if name in names and line.state == "done")
    with progress("jobs", len(jobs), done=before, console=console) as bar:

        def tell(line: Line) -> None:
            lines = {name: each for name, each in queue.lines().items() if name in names}
            done = [name for name, each in lines.items() if each.state == "done"]
            each = hours(jobs, lines, threads)
            spent, all_ = sum(each[name] for name in done), sum(each.values())
            now = ", ".join(name for name, each in lines.items() if each.state == "running")
            bar.update(len(done), f"{spent:.1f} of {all_:.1f} core hours, now {now or 'nothing'}")
            if line.state in {"failed", "waiting"}:
                again = "; it is tried once more" if line.state == "waiting" else ""
                say(console, f"{line.job.name} failed{again}: {last_words(queue.log(line.job.name))}")

        return queue.run(runner, tell)


def say(console: Console, text: str) -> None:
    """A line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
