"""A queue of our own commands, in files: one JSON line a job in `queue.jsonl`, a log for each. It can be stopped or killed
at any moment and goes on when run again; a job that fails is tried once more. Jobs are processes of this machine, or of a
Ray cluster's machines that share the folder.
"""

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from trace_errors import RunError, UsageError

TRIES = 2  # a failed job is tried once more
POLL = 0.5  # seconds between two looks at what runs
TRACEMEM = (sys.executable, "-m", "trace_lab.cli")
type State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Job:
    """A command, and what must be done before it.

    Args:
        name: names the job; a job is done once, whoever asks for it.
        command: words after `tracemem` that decide the result. A job with another command is another job.
        after: names of jobs that must be done before.
        options: further words, which change how it is done and not what comes of it: numbers of processes.
        leaves: a file or folder that must be there for the job to count as done.
        hours: how many core hours it may take.
    """

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    leaves: str = ""
    hours: float = 0.0


@dataclass(frozen=True)
class Line:
    """What the queue's file knows of a job."""

    job: Job
    state: State = "waiting"
    tries: int = 0
    seconds: float = 0.0  # that its last try took
    places: tuple[str, ...] = ()  # where it was tried

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Line":
        """From a decoded line."""
        values = dict(row)
        job = {name: values.pop(name) for name in Job.__dataclass_fields__}
        for name in ("command", "after", "options"):
            job[name] = tuple(job[name])
        return cls(Job(**job), **values | {"places": tuple(values["places"])})

    def text(self) -> str:
        """As a line of the file."""
        row = asdict(self)
        return json.dumps(row.pop("job") | row)


class Handle(Protocol):
    """A job at work."""

    place: str

    def poll(self) -> int | None:
        """Its exit code, or None while it works."""

    def stop(self) -> None:
        """Asks it to end soon."""

    def close(self) -> None:
        """Lets others have the job, once its end is noted."""


class Runner(Protocol):
    """Whoever starts jobs."""

    room: int

    def start(self, words: Sequence[str], log: Path, lock: Path, avoid: Sequence[str]) -> Handle | None:
        """Begins a command, if possible not at these places; None if another process is at work on it."""


# -- processes of this machine ---------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A process of this machine, and the lock of its job."""

    process: "subprocess.Popen[bytes]"
    lock: IO[str]
    place: str = field(default_factory=socket.gethostname)

    def poll(self) -> int | None:
        """Its exit code, or None while it works."""
        return self.process.poll()

    def stop(self) -> None:
        """Asks it to end soon; a training ends after the update that is going on."""
        self.process.terminate()

    def close(self) -> None:
        """Lets others have the job, once its end is noted."""
        self.lock.close()


def begin(words: Sequence[str], log: Path, lock: Path, threads: int, *, wait: bool = False) -> Process | None:
    """Starts a command; what it says goes to a file. The lock is held by us and by the process: if one of the two is
    killed, nobody begins the same job while the other lives. None if somebody is at work on it, unless we are to wait.
    """
    for path in (log, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"TERM": "dumb"}  # who has set it meant it
    held = lock.open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        return None
    with log.open("a") as said:
        said.write(f"$ {' '.join(words)}\n")
        said.flush()
        process = subprocess.Popen(words, stdout=said, stderr=said, env=environment, pass_fds=[held.fileno()])
    return Process(process, held)


@dataclass
class Local:
    """Processes of this machine, so many at once, each with so many threads."""

    room: int
    threads: int = 1

    def start(self, words: Sequence[str], log: Path, lock: Path, avoid: Sequence[str]) -> Process | None:
        """Begins a command; None if another process is at work on it."""
        del avoid  # there is one place only
        return begin(words, log, lock, self.threads)


# -- Ray -------------------------------------------------------------------------------------------------------------------


def perform(words: Sequence[str], log: Path, lock: Path, threads: int) -> int:
    """Runs a command to its end; called on the machines of a Ray cluster."""
    job = begin(words, log, lock, threads, wait=True)
    assert job is not None
    try:
        return job.process.wait()
    except KeyboardInterrupt:  # that is how Ray asks a job to end
        job.stop()
        return job.process.wait()


@dataclass
class Task:
    """A job on a machine of a Ray cluster."""

    ray: Any
    reference: Any
    place: str

    def poll(self) -> int | None:
        """Its exit code, or None while it works; 1 if the machine went away."""
        done, _ = self.ray.wait([self.reference], timeout=0)
        if not done:
            return None
        try:
            return int(self.ray.get(self.reference))
        except self.ray.exceptions.RayError:
            return 1

    def stop(self) -> None:
        """Asks it to end soon."""
        self.ray.cancel(self.reference)

    def close(self) -> None:
        """Nothing is held here: the lock is on the other machine."""


class OnRay:
    """The machines of a Ray cluster that share the folders and have this package.

    Args:
        address: of the cluster.
        jobs: at once on each machine.
        threads: of each job.

    Raises:
        UsageError: Ray is not installed.
    """

    def __init__(self, address: str, jobs: int, threads: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                f"--address: got {address}, but Ray is not installed here; expected it (pip install 'ray>=2.50'), or no "
                "--address, for processes of this machine"
            ) from error
        self.ray, self.threads, self.turn = ray, threads, 0
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        have, nodes = ray.cluster_resources(), self._nodes()
        self.room = jobs * len(nodes)
        cpus = max(1, int(have["CPU"] / len(nodes) / jobs))
        self.share = {"num_cpus": cpus, "num_gpus": 1 / jobs if have.get("GPU") else 0, "max_retries": 0}

    def _nodes(self) -> list[str]:
        return [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]

    def start(self, words: Sequence[str], log: Path, lock: Path, avoid: Sequence[str]) -> Task | None:
        """Begins a command, on another machine than those where it failed if there is one."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = self._nodes()
        choice = [node for node in nodes if node not in avoid] or nodes
        self.turn += 1
        place = choice[self.turn % len(choice)]
        where = NodeAffinitySchedulingStrategy(place, soft=True)
        remote: Any = self.ray.remote
        begun = remote(**self.share, scheduling_strategy=where)(perform)
        return Task(self.ray, begun.remote(list(words), log.absolute(), lock.absolute(), self.threads), place)

    def close(self) -> None:
        """Leaves the cluster."""
        self.ray.shutdown()


# -- the queue -------------------------------------------------------------------------------------------------------------


class Queue:
    """Jobs in a folder: `queue.jsonl`, `logs/`, `locks/`.

    Args:
        folder: made if it is not there.
        program: words before each command.

    Example:
        >>> queue = Queue(Path("out"))  # doctest: +SKIP
        >>> queue.add([Job("data", ("collect", "Cable", "--out", "out/data"))])  # doctest: +SKIP
        >>> queue.run(Local(room=2))  # doctest: +SKIP
        {}
    """

    def __init__(self, folder: Path, program: Sequence[str] = TRACEMEM) -> None:
        self.folder, self.program, self.asked = folder, tuple(program), list[str]()

    @property
    def file(self) -> Path:
        """A line a job."""
        return self.folder / "queue.jsonl"

    def log(self, name: str) -> Path:
        """Where a job's words go."""
        return self.folder / "logs" / f"{plain(name)}.log"

    def lock(self, name: str) -> Path:
        """Held while a job works."""
        return self.folder / "locks" / plain(name)

    def lines(self) -> dict[str, Line]:
        """All jobs by name, as the file has them.

        Raises:
            RunError: a line of the file is no job.
        """
        found = {}
        for number, text in enumerate(self.file.read_text().splitlines() if self.file.exists() else [], start=1):
            try:
                line = Line.read(json.loads(text))
            except (ValueError, KeyError, TypeError) as error:
                where = f"{self.file}:{number}"
                raise RunError(f"{where}: got {text[:80]!r}, expected a job as tracemem writes it ({error})") from error
            found[line.job.name] = line
        return found

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Line]]:
        """The jobs, for one process at a time to change; written as a whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "queue.lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = self.lines()
            before = dict(found)
            yield found
            if found != before:
                fresh = self.file.with_suffix(".tmp")
                fresh.write_text("".join(f"{line.text()}\n" for line in found.values()))
                fresh.replace(self.file)

    def _free(self, name: str) -> bool:
        """Whether no process is at work on a job."""
        lock = self.lock(name)
        if not lock.exists():
            return True
        with lock.open("w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def add(self, jobs: Sequence[Job]) -> None:
        """Asks for jobs, in the order of their urgency. What is done stays done, what failed before is tried again.

        Raises:
            RunError: a job comes before one that it needs, or is asked for twice.
        """
        with self._changed() as found:
            for number, job in enumerate(jobs):
                earlier = {each.name for each in jobs[:number]}
                if absent := [name for name in job.after if name not in earlier]:
                    raise RunError(f"{job.name}: after: got {', '.join(absent)}, expected jobs that come before it")
                if job.name in earlier:
                    raise RunError(f"{job.name}: got it twice, expected each job once")
                old = found.get(job.name)
                same = old is not None and old.job.command == job.command
                whole = not job.leaves or Path(job.leaves).exists()
                if old and same and old.state == "done" and whole:
                    found[job.name] = replace(old, job=job)
                elif old and same and old.state == "running" and not self._free(job.name):
                    found[job.name] = replace(old, job=job)  # by another process, or by one that outlived its own
                else:
                    found[job.name] = Line(job)
        self.asked = [job.name for job in jobs]

    def _take(self, runner: Runner, ours: Collection[str]) -> tuple[str, Handle] | None:
        """Begins the first of the jobs asked for that can begin. `ours` we have begun and not seen the end of."""
        with self._changed() as found:
            for name in self.asked:
                line = found[name]
                ready = all(found[each].state == "done" for each in line.job.after)
                if line.state == "running" and name not in ours and self._free(name):
                    line = replace(line, state="waiting")  # who had begun it was killed
                if line.state != "waiting" or not ready:
                    found[name] = line
                    continue
                words = (*self.program, *line.job.command, *line.job.options)
                if handle := runner.start(words, self.log(name), self.lock(name), line.places):
                    places = (*line.places, handle.place)
                    found[name] = replace(line, state="running", tries=line.tries + 1, places=places)
                    return name, handle
                found[name] = replace(line, state="running")
        return None

    def _end(self, name: str, code: int, seconds: float) -> Line:
        """Notes how a job ended."""
        with self._changed() as found:
            line = found[name]
            whole = not line.job.leaves or Path(line.job.leaves).exists()
            state: State = "done" if code == 0 and whole else "failed" if line.tries >= TRIES else "waiting"
            found[name] = replace(line, state=state, seconds=round(seconds, 3))
            return found[name]

    def run(self, runner: Runner, tell: Callable[[Line], None] = lambda line: None) -> dict[str, str]:
        """Does what is asked for and not done, until nothing is left that can be done.

        Args:
            runner: who starts jobs.
            tell: is called with each job's line when it begins and when it ends.

        Returns:
            For each job that is not done why: the last words of the log of a job that failed, or the name of one it needs.

        Raises:
            KeyboardInterrupt: passed on when the jobs at work have ended; another Ctrl-C does not wait for them.
        """
        running: dict[str, tuple[Handle, float]] = {}
        try:
            while True:
                while len(running) < runner.room and (taken := self._take(runner, running)):
                    running[taken[0]] = taken[1], time.monotonic()
                    tell(self.lines()[taken[0]])
                ended = {name: code for name, (each, _) in running.items() if (code := each.poll()) is not None}
                for name, code in ended.items():
                    handle, begun = running.pop(name)
                    line = self._end(name, code, time.monotonic() - begun)
                    handle.close()
                    tell(line)
                if not ended and not running and not self._elsewhere():
                    return self._left()
                if not ended:
                    time.sleep(POLL)
        except KeyboardInterrupt:
            for handle, _ in running.values():
                handle.stop()
            while any(handle.poll() is None for handle, _ in running.values()):
                time.sleep(POLL)
            for handle, _ in running.values():
                handle.close()
            raise

    def _elsewhere(self) -> bool:
        """Whether another process works on a job of ours."""
        found = self.lines()
        return any(found[name].state == "running" for name in self.asked)

    def _left(self) -> dict[str, str]:
        found = self.lines()
        left = {}
        for name in self.asked:
            if found[name].state == "failed":
                left[name] = last_words(self.log(name))
            elif found[name].state != "done":
                left[name] = f"needs {next(x for x in found[name].job.after if found[x].state != 'done')}"
        return left


def plain(name: str) -> str:
    """A job's name as a file's name."""
    return "".join(letter if letter.isalnum() or letter in "+-" else "_" for letter in name.lower())


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    said = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"{lines[-1][:300]} ({log})" if lines else str(log)
