"""The registry of tasks: name, class and version of each. A task's module, one file beside this one, is imported when the
task is asked for. docs/suite.md says in ten lines how to add one.
"""

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

import gymnasium

from trace_errors import UsageError

if TYPE_CHECKING:
    from trace_bench.task import Task

TASKS: dict[str, str] = {}  # the suite: name -> "module:class"
SHORT: dict[str, str] = {}  # for first steps; not of the suite
EVERY: dict[str, str] = {}  # both
VERSIONS: dict[str, int] = {}


def register(name: str, target: str, version: int = 1, *, suite: bool = False) -> None:
    """Adds a task, also as the Gymnasium environment `trace_bench/NAME-vVERSION`.

    Args:
        name: the task's name, the same as its class says.
        target: "module:class" of a `trace_bench.task.Task`.
        version: raise it when the same seed no longer gives the same episode or the same score. Results of different
            versions are not compared.
        suite: whether `all` and the tables of the suite include it.

    Raises:
        UsageError: the name is taken.

    Example:
        >>> register("Door", "my_tasks.door:Door")
        >>> env = gymnasium.make("trace_bench/Door-v1")
    """
    if name.lower() in map(str.lower, EVERY):
        raise UsageError(f"task: got {name!r}, expected a name that is not yet registered")
    (TASKS if suite else SHORT)[name] = EVERY[name] = target
    VERSIONS[name] = version
    gymnasium.register(f"trace_bench/{name}-v{version}", entry_point="trace_bench.env:make", kwargs={"task": name})


def load(name: str) -> "Task":
    """A new instance of a task, by its name in any capitalisation."""
    known = {task.lower(): task for task in EVERY}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {known[near[0]]!r}?" if near else f"the tasks are {', '.join(EVERY)}"
        raise UsageError(f"there is no task {name!r}; {hint}")
    module, attribute = EVERY[known[name.lower()]].split(":")
    task: Task = getattr(import_module(module), attribute)()
    return task


register("Tool", "trace_bench.tasks.tool:Tool", 3, suite=True)
register("Book", "trace_bench.tasks.book:Book", 5, suite=True)
register("Laundry", "trace_bench.tasks.laundry:Laundry", 3, suite=True)
register("Cable", "trace_bench.tasks.cable:Cable", 3, suite=True)
register("Medicine", "trace_bench.tasks.medicine:Medicine", 3, suite=True)
register("Signal", "trace_bench.tasks.signal:Signal", 3)
