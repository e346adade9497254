"""The registry of tasks, an entry each. A task's module, one file beside this one, is imported when the task is asked for.
docs/suite.md says in ten lines how to add one.
"""

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import gymnasium

from trace_errors import UsageError

if TYPE_CHECKING:
    from trace_bench.task import Task


@dataclass(frozen=True)
class Entry:
    """What the registry knows of a task; `register` says what each field means."""

    target: str
    version: int
    suite: bool
    demonstrations: int


TASKS: dict[str, Entry] = {}  # in the order of tables


def register(name: str, target: str, version: int = 1, *, suite: bool = False, demonstrations: int = 50) -> None:
    """Adds a task, also as the Gymnasium environment `trace_bench/NAME-vVERSION`.

    Args:
        name: the task's name, the same as its class says.
        target: "module:class" of a `trace_bench.task.Task`.
        version: raise it when the same seed no longer gives the same episode or the same score. Results of different
            versions are not compared.
        suite: whether `all` and the tables of the suite include it.
        demonstrations: how many `tracemem collect` and `tracemem compare` store if not told.

    Raises:
        UsageError: the name is taken.

    Example:
        >>> register("Door", "my_tasks.door:Door")
        >>> env = gymnasium.make("trace_bench/Door-v1")
    """
    if name.lower() in map(str.lower, TASKS):
        raise UsageError(f"task: got {name!r}, expected a name that is not yet registered")
    TASKS[name] = Entry(target, version, suite, demonstrations)
    gymnasium.register(f"trace_bench/{name}-v{version}", entry_point="trace_bench.env:make", kwargs={"task": name})


def of_suite() -> tuple[str, ...]:
    """The names of the suite's tasks."""
    return tuple(name for name, entry in TASKS.items() if entry.suite)


def load(name: str) -> "Task":
    """A new instance of a task, by its name in any capitalisation."""
    known = {task.lower(): task for task in TASKS}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {known[near[0]]!r}?" if near else f"the tasks are {', '.join(TASKS)}"
        raise UsageError(f"there is no task {name!r}; {hint}")
    module, attribute = TASKS[known[name.lower()]].target.split(":")
    task: Task = getattr(import_module(module), attribute)()
    return task


# The paper's five, with its numbers of demonstrations, and one more.
register("Tool", "trace_bench.tasks.tool:Tool", 3, suite=True, demonstrations=100)
register("Book", "trace_bench.tasks.book:Book", 5, suite=True, demonstrations=150)
register("Laundry", "trace_bench.tasks.laundry:Laundry", 3, suite=True, demonstrations=60)
register("Cable", "trace_bench.tasks.cable:Cable", 3, suite=True, demonstrations=30)
register("Medicine", "trace_bench.tasks.medicine:Medicine", 3, suite=True, demonstrations=60)
register("Signal", "trace_bench.tasks.signal:Signal", 3, demonstrations=40)  # for first steps
