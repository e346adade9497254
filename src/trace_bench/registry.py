"""The table of tasks: name to module, imported when asked for."""

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trace_bench.task import Task

# Of each task: raised when the same seed no longer gives the same episode or the same score. Environments' ids end in it.
VERSIONS = {"Tool": 3, "Book": 5, "Laundry": 3, "Cable": 3, "Medicine": 3, "Signal": 3}

TASKS: dict[str, str] = {
    "Tool": "trace_bench.tasks.tool:Tool",
    "Book": "trace_bench.tasks.book:Book",
    "Laundry": "trace_bench.tasks.laundry:Laundry",
    "Cable": "trace_bench.tasks.cable:Cable",
    "Medicine": "trace_bench.tasks.medicine:Medicine",
}
SHORT: dict[str, str] = {"Signal": "trace_bench.tasks.signal:Signal"}  # for first steps; not of the suite
EVERY = TASKS | SHORT


class UnknownTaskError(ValueError):
    """There is no task of that name."""


def load(name: str) -> "Task":
    """A task by name, in any capitalisation."""
    known = {task.lower(): task for task in EVERY}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {known[near[0]]!r}?" if near else f"the tasks are {', '.join(EVERY)}"
        raise UnknownTaskError(f"there is no task {name!r}; {hint}")
    module, attribute = EVERY[known[name.lower()]].split(":")
    task: Task = getattr(import_module(module), attribute)()
    return task
