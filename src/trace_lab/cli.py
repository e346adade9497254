"""The command line, `tracemem`: the table of commands, and the one place where errors become a line and an exit code.
A command's module is imported when the command is called, and imports nothing heavy itself: `--help` and a wrong argument
are answered at once. Options are read by tyro from each command's function.
"""

import difflib
import os
import sys
from importlib import import_module, metadata
from typing import NamedTuple

from trace_errors import TraceError

INSTALL = "pip install 'lerobot_policy_trace[all]'"
INTERRUPTED, PIPE_CLOSED = 130, 141  # as shells count: 128 and the number of the signal


class Command(NamedTuple):
    """Where a command's function lives, and the line that `tracemem --help` shows for it."""

    target: str  # "module:function"
    summary: str


COMMANDS: dict[str, Command] = {
    "collect": Command("trace_lab.collect:collect", "record the expert of a simulated task as a LeRobot dataset"),
    "doctor": Command(
        "trace_lab.doctor:doctor", "check a LeRobot dataset: can a memory be trained on it, is one needed?"
    ),
    "train": Command("trace_lab.train:train", "train a policy, with a memory or without, on a LeRobot dataset"),
    "eval": Command("trace_lab.evaluate:evaluate", "run a trained policy on a task of the suite, and score it"),
    "attach": Command("trace_lab.attach:attach", "add a memory to a trained stock ACT or Diffusion Policy"),
    "profile": Command(
        "trace_lab.profile:profile", "measure the cost of a control step, part by part and over a long run"
    ),
    "demo": Command(
        "trace_lab.demo:demo", "see a policy with memory choose right where one without guesses (`make demo`)"
    ),
    "compare": Command("trace_lab.compare:compare", "tasks x methods x seeds: collect, train, evaluate, make tables"),
    "probe": Command("trace_lab.probe:probe", "train memories on small tasks of delayed evidence"),
    "probe-task": Command(
        "trace_lab.probe_task:probe_task", "check that a task of the suite hides its cue at every branch"
    ),
    "report": Command("trace_lab.report:report", "make every published table from the raw results"),
    "params": Command("trace_lab.params:params", "count the parameters of every map, adapter and memory"),
    "gallery": Command("trace_lab.gallery:gallery", "draw a picture of each task of the suite"),
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
    try:
        code = run(name, rest)
        sys.stdout.flush()
        return code
    except TraceError as error:
        say(name, str(error))
        return error.exit_code
    except ModuleNotFoundError as error:  # of an extra that was not installed; of ours, it is a mistake to be seen
        if (error.name or "").partition(".")[0].startswith(("trace_", "lerobot_policy_trace")):
            raise
        say(name, f"needs {error.name}, which is not installed; {INSTALL}")
        return TraceError.exit_code
    except KeyboardInterrupt as stop:
        say(name, str(stop) or "stopped by Ctrl-C")
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads on, as in `tracemem params | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def run(name: str, options: list[str]) -> int:
    """One command. Its errors are the caller's to catch."""
    import tyro

    module, function = COMMANDS[name].target.split(":")
    return int(tyro.cli(getattr(import_module(module), function), prog=f"tracemem {name}", args=options) or 0)


def say(command: str, text: str) -> None:
    """A line to the terminal, not into what another program reads."""
    print(f"tracemem {command}: {text}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
