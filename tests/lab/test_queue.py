"""Every job once, in order of need; after a kill, a failure and beside another process nothing is lost or done twice."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from trace_errors import RunError, UsageError
from trace_lab import queue as module
from trace_lab.queue import Job, Line, Local, OnRay, Queue

PYTHON = (sys.executable, "-c")
# Notes when it begins, waits for a file if it is told to, fails if it is told to, and leaves a file.
WORK = """
import sys, time, os, pathlib
name, here, wait, fails = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with (here / "diary").open("a") as diary: diary.write(f"{name}\\n")
while wait and not (here / wait).exists(): time.sleep(0.02)
tries = (here / "diary").read_text().split().count(name)
print(f"the last words of {name}")
if tries <= fails: sys.exit(3)
(here / f"{name}.made").touch()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.02)


def job(here: Path, name: str, *after: str, wait: str = "", fails: int = 0, **more) -> Job:
    return Job(name, (WORK, name, str(here), wait, str(fails)), after, **more)


def of(here: Path) -> Queue:
    return Queue(here / "queue", PYTHON)


def diary(here: Path) -> list[str]:
    return (here / "diary").read_text().split() if (here / "diary").exists() else []


def until(holds, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.02)


def test_each_job_after_what_it_needs_in_the_order_asked_for_and_none_twice(tmp_path):
    queue = of(tmp_path)
    queue.add([job(tmp_path, "a"), job(tmp_path, "b", "a"), job(tmp_path, "c"), job(tmp_path, "d", "b", "c")])
    assert queue.run(Local(1)) == {}
    assert diary(tmp_path) == ["a", "b", "c", "d"]
    again = of(tmp_path)
    again.add([job(tmp_path, "a"), job(tmp_path, "e", "a")])
    assert again.run(Local(1)) == {}
    assert diary(tmp_path) == ["a", "b", "c", "d", "e"]
    lines = again.lines()
    assert {name: line.state for name, line in lines.items()} == dict.fromkeys("abcde", "done")
    assert all(line.tries == 1 and line.seconds > 0 and line.places for line in lines.values())
    rows = [json.loads(text) for text in (tmp_path / "queue/queue.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == [*"abcde"]  # a line a job, in plain words
    assert {row["state"] for row in rows} == {"done"}
    assert "the last words of a" in again.log("a").read_text()


def test_so_many_at_once_and_no_more(tmp_path):
    queue = of(tmp_path)
    queue.add([job(tmp_path, name, wait="go") for name in "abc"])
    seen = []

    def look() -> None:
        until(lambda: len(diary(tmp_path)) == 2)
        time.sleep(0.2)
        seen.append(diary(tmp_path))
        (tmp_path / "go").touch()

    watch = threading.Thread(target=look)
    watch.start()
    assert queue.run(Local(2)) == {}
    watch.join()
    assert sorted(seen[0]) == ["a", "b"]
    assert sorted(diary(tmp_path)) == ["a", "b", "c"]


def test_a_job_that_fails_is_tried_once_more(tmp_path):
    queue, seen = of(tmp_path), list[Line]()
    queue.add(
        [job(tmp_path, "a", fails=1), job(tmp_path, "b", fails=9), job(tmp_path, "c", "b"), job(tmp_path, "d", "c")]
    )
    left = queue.run(Local(1), seen.append)
    assert sorted(diary(tmp_path)) == ["a", "a", "b", "b"]
    assert "the last words of b" in left["b"]
    assert (left["c"], left["d"]) == ("needs b", "needs c")
    assert "a" not in left
    ended = [(line.job.name, line.state) for line in seen if line.state != "running"]
    assert ended == [("a", "waiting"), ("a", "done"), ("b", "waiting"), ("b", "failed")]
    again = of(tmp_path)  # whoever calls again wants it tried again
    again.add([job(tmp_path, "a", fails=1), job(tmp_path, "b", fails=2), job(tmp_path, "c", "b")])
    assert again.lines()["b"].state == "waiting"
    again.add([job(tmp_path, "b", fails=0), job(tmp_path, "c", "b")])
    assert again.run(Local(1)) == {}
    assert diary(tmp_path)[-2:] == ["b", "c"]


def test_another_command_is_another_job_and_options_are_not(tmp_path):
    queue = of(tmp_path)
    queue.add([job(tmp_path, "a", options=("--jobs", "1"))])
    assert queue.run(Local(1)) == {}
    queue.add([job(tmp_path, "a", options=("--jobs", "9"))])
    assert queue.run(Local(1)) == {}
    assert diary(tmp_path) == ["a"]
    queue.add([Job("a", (WORK, "a", str(tmp_path), "", "00"))])
    assert queue.run(Local(1)) == {}
    assert diary(tmp_path) == ["a", "a"]


def test_a_job_whose_work_was_removed_is_done_again_and_one_that_leaves_nothing_failed(tmp_path):
    queue, made = of(tmp_path), tmp_path / "a.made"
    queue.add([job(tmp_path, "a", leaves=str(made))])
    assert queue.run(Local(1)) == {}
    made.unlink()
    queue.add([job(tmp_path, "a", leaves=str(made))])
    assert queue.run(Local(1)) == {}
    assert diary(tmp_path) == ["a", "a"]
    queue.add([job(tmp_path, "b", leaves=str(tmp_path / "nothing"))])
    assert list(queue.run(Local(1))) == ["b"]


# -- kills ----------------------------------------------------------------------------------------------------------


def worker(here: Path, *jobs: str) -> "subprocess.Popen[bytes]":
    """Another process that works on a queue of jobs, which wait for a file `go`."""
    code = (
        "import sys; from pathlib import Path; from trace_lab import queue as m; m.POLL = 0.02\n"
        f"here = Path({str(here)!r}); q = m.Queue(here / 'queue', {PYTHON!r})\n"
        f"q.add([m.Job(n, ({WORK!r}, n, str(here), 'go', '0')) for n in {jobs!r}])\n"
        "q.run(m.Local(1))"
    )
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def test_what_was_killed_is_done_again(tmp_path):
    """The worker and its job die at once, as when a machine goes down."""
    killed = worker(tmp_path, "a", "b")
    until(lambda: diary(tmp_path) == ["a"])
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    until(lambda: of(tmp_path)._free("a"))  # both are gone
    assert json.loads((tmp_path / "queue/queue.jsonl").read_text().splitlines()[0])["state"] == "running"
    (tmp_path / "go").touch()
    queue = of(tmp_path)
    queue.add([job(tmp_path, name, wait="go") for name in "ab"])
    assert queue.run(Local(1)) == {}
    assert diary(tmp_path) == ["a", "a", "b"]


def test_a_job_that_outlives_its_worker_is_waited_for(tmp_path):
    """Only the worker dies: its job is at work still and must not be begun a second time beside it."""
    killed = worker(tmp_path, "a", "b")
    until(lambda: diary(tmp_path) == ["a"])
    killed.kill()
    killed.wait()
    queue = of(tmp_path)
    queue.add([job(tmp_path, name, wait="go") for name in "ab"])
    assert queue.lines()["a"].state == "running"
    begun = list[str]()
    ended = threading.Thread(target=lambda: begun.append(str(queue.run(Local(1)))))
    ended.start()
    until(lambda: diary(tmp_path) == ["a", "b"])  # there is room for the other one
    time.sleep(0.2)
    assert diary(tmp_path) == ["a", "b"]
    (tmp_path / "go").touch()
    ended.join(20)
    assert begun == ["{}"]
    assert diary(tmp_path) == ["a", "b", "a"]  # nobody saw how it ended; our commands find their work done


def test_two_workers_share_the_jobs(tmp_path):
    (tmp_path / "go").touch()
    names = [f"job{number}" for number in range(8)]
    both = [worker(tmp_path, *names) for _ in range(2)]
    assert [each.wait(60) for each in both] == [0, 0]
    assert sorted(diary(tmp_path)) == names


def test_whoever_stops_it_stops_its_jobs_and_the_next_call_goes_on(tmp_path):
    stopped = worker(tmp_path, "a", "b")
    until(lambda: diary(tmp_path) == ["a"])
    os.kill(stopped.pid, signal.SIGINT)
    assert stopped.wait(20) != 0
    until(lambda: of(tmp_path)._free("a"))  # its job has ended with it
    (tmp_path / "go").touch()
    queue = of(tmp_path)
    queue.add([job(tmp_path, name, wait="go") for name in "ab"])
    assert queue.run(Local(1)) == {}


# -- what is wrong --------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_queue_is_named(tmp_path):
    queue = of(tmp_path)
    with pytest.raises(RunError, match=r"b: after: got a, expected jobs that come before it"):
        queue.add([job(tmp_path, "b", "a"), job(tmp_path, "a")])
    with pytest.raises(RunError, match=r"a: got it twice, expected each job once"):
        queue.add([job(tmp_path, "a"), job(tmp_path, "a")])
    assert queue.lines() == {}
    queue.file.write_text('{"name": "a"}\n')
    with pytest.raises(RunError, match=r"queue.jsonl:1: got '{\"name\": \"a\"}', expected a job"):
        queue.lines()


def test_our_own_commands_are_run_and_their_words_kept(tmp_path):
    queue = Queue(tmp_path)
    queue.add([Job("good", ("--version",)), Job("bad", ("parms",))])
    left = queue.run(Local(2))
    assert list(left) == ["bad"]
    assert "did you mean 'params'" in left["bad"]
    assert "--version\n0." in queue.log("good").read_text()


# -- Ray ------------------------------------------------------------------------------------------------------------


def test_without_ray_an_address_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--address: got head:6379, but Ray is not installed here.*pip install 'ray"):
        OnRay("head:6379", 1, 1)


def test_nothing_but_an_address_imports_ray():
    code = "import sys, trace_lab.queue, trace_lab.compare; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class LostError(Exception):
    """As Ray's RayError: the machine is gone, and the job's exit code with it."""


class Cluster(types.ModuleType):
    """A fake of what is used of Ray: jobs run here and at once, but on machines that are lost."""

    exceptions = types.SimpleNamespace(RayError=LostError)

    def __init__(self, machines, lost):
        super().__init__("ray")
        self.machines, self.lost, self.closed = machines, lost, False

    def init(self, **options):
        assert options["address"] == "head:6379"

    def nodes(self):
        return [{"NodeID": name, "Alive": True} for name in self.machines]

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, *, scheduling_strategy, **share):
        assert share["max_retries"] == 0  # who tries again, and where, is the queue's matter

        def begun(function):
            gone = scheduling_strategy in self.lost
            return types.SimpleNamespace(remote=lambda *given: None if gone else function(*given))

        return begun

    def wait(self, references, timeout):
        return references, []

    def get(self, code):
        if code is None:
            raise LostError
        return code

    def shutdown(self):
        self.closed = True


@pytest.mark.parametrize(
    ("lost", "left", "places"),
    [({"two"}, [], ("two", "one")), ({"one", "two"}, ["a"], ("two", "one")), (set(), [], ("two",))],
)
def test_a_machine_that_goes_away_is_a_failure_of_its_job_which_is_tried_once_elsewhere(
    lost, left, places, tmp_path, monkeypatch
):
    cluster, strategies = Cluster(["one", "two"], lost), types.ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda place, *, soft: place
    for name, fake in (("ray", cluster), ("ray.util", types.ModuleType("ray.util")), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, fake)
    queue = of(tmp_path)
    queue.add([job(tmp_path, "a"), job(tmp_path, "b", "a")])
    with contextlib.closing(OnRay("head:6379", 1, 1)) as runner:
        assert list(queue.run(runner)) == (["a", "b"] if left else [])
    assert cluster.closed
    line = queue.lines()["a"]
    assert (line.state, line.tries, line.places) == ("failed" if left else "done", len(places), places)
    assert diary(tmp_path) == ([] if left else ["a", "b"])


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray>=2.50'")
def test_ray_does_the_same_jobs(tmp_path):
    queue = of(tmp_path)
    queue.add([job(tmp_path, "a", fails=1), job(tmp_path, "b", "a"), job(tmp_path, "c", fails=9)])
    with contextlib.closing(OnRay("local", 1, 1)) as cluster:
        left = queue.run(cluster)
    assert list(left) == ["c"]
    assert sorted(diary(tmp_path)) == ["a", "a", "b", "c", "c"]
    assert queue.lines()["a"].tries == 2
