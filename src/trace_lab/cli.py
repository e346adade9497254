"""The command line, `tracemem`. Holds the table of commands and nothing heavy: a command's module is imported only when
the command is called, so that `tracemem --help` answers at once. Options are read by tyro from each command's function.
"""

import difflib
import sys
from importlib import import_module, metadata
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command's function lives, and the line that `tracemem --help` shows for it."""

    target: str  # "module:function"
    summary: str


COMMANDS: dict[str, Command] = {
    "params": Command("trace_lab.params:params", "count the parameters of every map, adapter and memory"),
    "collect": Command("trace_lab.collect:collect", "let the expert do a task of the suite, as a LeRobot dataset"),
    "doctor": Command(
        "trace_lab.doctor:doctor", "look at a LeRobot dataset: what would a memory find there, is one needed?"
    ),
    "train": Command("trace_lab.train:train", "train a policy, with a memory or without, on a LeRobot dataset"),
    "compare": Command("trace_lab.compare:compare", "tasks x methods x seeds: collect, train, evaluate, tables"),
    "report": Command("trace_lab.report:report", "make every published table anew from the raw episode lines"),
    "probe": Command("trace_lab.probe:probe", "train memories on a one-minute delayed-evidence task"),
    "probe-task": Command(
        "trace_lab.probe_task:probe_task", "check that a task of the suite hides its cue at the branch"
    ),
    "eval": Command("trace_lab.evaluate:evaluate", "let a trained policy do a task of the suite, and score it"),
    "attach": Command("trace_lab.attach:attach", "add a memory to a trained stock ACT or Diffusion Policy"),
    "profile": Command(
        "trace_lab.profile:profile", "measure what a control step costs, part by part, and over a long run"
    ),
    "gallery": Command("trace_lab.gallery:gallery", "draw a picture of each task of the suite"),
    "demo": Command(
        "trace_lab.demo:demo", "see a policy with memory choose right where one without guesses (`make demo`)"
    ),
}


def usage() -> str:
    """The text of `tracemem --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: tracemem COMMAND [options]\n\n"
        "TRACE gives robot policies a memory: cues seen early, addressed by the robot's own path, read when needed.\n\n"
        f"commands:\n{rows}\n\n"
        "tracemem COMMAND --help explains a command; tracemem --version prints the version."
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(usage())  # noqa: T201
        return 0
    if arguments[0] == "--version":
        print(metadata.version("lerobot_policy_trace"))  # noqa: T201
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are: {', '.join(COMMANDS)}"
        print(f"tracemem: there is no command {name!r}; {hint}", file=sys.stderr)  # noqa: T201
        return 2
    import tyro

    module, function = COMMANDS[name].target.split(":")
    result = tyro.cli(getattr(import_module(module), function), prog=f"tracemem {name}", args=rest)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
