#!/usr/bin/env python3
"""Draws the way of the data into docs/concepts.md: which of our modules one training update and one control step pass.

    python tools/trace_calls.py            writes both drawings
    python tools/trace_calls.py --check    says whether they are what it would write

Both are run on two small episodes while Python reports every call (`sys.setprofile`). A module stands below the one from
which it was entered first, in the order of first entry, with the function that was called and how many functions ran.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts.md"
OURS = ("trace_errors", "trace_memory", "lerobot_policy_trace", "trace_bench", "trace_lab")
SMALL = {
    "episodes": 2, "targets": 2, "policy.dim_model": 32, "policy.n_heads": 2, "policy.dim_feedforward": 32,
    "policy.n_encoder_layers": 1, "policy.chunk_size": 8, "policy.n_action_steps": 4, "memory.width": 32,
    "memory.hidden": 32, "memory.period": 16,
}  # fmt: skip


@dataclass
class Entered:
    """A module that was passed."""

    name: str
    first: str  # the function that was called first
    functions: set[str] = field(default_factory=set)
    inside: list["Entered"] = field(default_factory=list)  # modules entered first from here


def module_of(frame: FrameType) -> str | None:
    """Our module that a frame runs in, if it is one of ours."""
    name = str(frame.f_globals.get("__name__", ""))
    written = Path(frame.f_code.co_filename).stem == name.rpartition(".")[2]
    made = frame.f_code.co_filename == "<string>" and frame.f_code.co_name == "__init__"  # of a dataclass
    return name if name.partition(".")[0] in OURS and (written or made) else None


def called(frame: FrameType) -> str:
    """The function that a frame runs, with its class."""
    if frame.f_code.co_filename == "<string>":
        return type(frame.f_locals.get("self")).__name__
    return frame.f_code.co_qualname.replace(".<locals>", "")


def traced(call: Callable[[], Any]) -> Entered:
    """The modules that a call passes, as a tree."""
    top, known = Entered("", ""), dict[str, Entered]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := module_of(frame)) is None:
            return
        if name not in known:
            caller = frame.f_back
            while caller is not None and module_of(caller) not in known:
                caller = caller.f_back
            above = top if caller is None else known[str(module_of(caller))]
            known[name] = Entered(name, called(frame))
            above.inside.append(known[name])
        if not frame.f_code.co_name.startswith("<"):  # a generator expression, or another part of a function
            known[name].functions.add(f"{called(frame)}:{frame.f_code.co_firstlineno}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return top


def drawn(top: Entered) -> str:
    """The tree as text."""
    rows: list[tuple[str, str, int]] = []

    def add(node: Entered, before: str, begin: str, rest: str) -> None:
        rows.append((f"{before}{begin}{node.name}", node.first, len(node.functions)))
        for place, each in enumerate(node.inside):
            last = place == len(node.inside) - 1
            add(each, before + rest, "└─ " if last else "├─ ", "   " if last else "│  ")

    for node in top.inside:
        add(node, "", "", "")
    width, wide = max(len(name) for name, *_ in rows), max(len(first) for _, first, _ in rows)
    lines = [f"{name:<{width}}  {first:<{wide}}  {count:>9}" for name, first, count in rows]
    head = f"{f'{len(rows)} modules':<{width}}  {'entered by':<{wide}}  functions"
    return "\n".join(["```text", head, *lines, "```"])


def blocks(dataset: Path) -> dict[str, str]:
    """Both drawings, by the name between the page's marks, from a dataset of the suite."""
    import torch
    from accelerate import Accelerator
    from rich.console import Console

    from trace_lab.frames import open_dataset, open_frames
    from trace_lab.policy import cameras
    from trace_lab.recipe import recipe
    from trace_lab.training import Training

    made, meta, silent = recipe("tiny", "act", "trace", SMALL), open_dataset(dataset), Console(quiet=True)
    store = open_frames(meta, torch.device("cpu"), cameras=cameras(made, meta), place="ram", cache=None, console=silent)
    training = Training.begin(made, 0, store, Accelerator(cpu=True), silent)
    training.update()  # what is done once is done
    found = {"update": drawn(traced(training.update))}
    policy = training.policy
    shapes = {name: feature.shape for name, feature in policy.config.input_features.items()}
    shapes["observation.raw_state"] = shapes["observation.state"]
    observation = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
    policy.select_action(observation)
    policy.session.reset()
    return found | {"step": drawn(traced(lambda: policy.select_action(observation)))}


def written(page: str, found: dict[str, str]) -> str:
    """The page with the drawings between their marks."""
    for name, block in found.items():
        mark = re.compile(rf"(<!-- trace_calls {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        page, count = mark.subn(lambda match, block=block: match[1] + block + match[2], page)
        if count != 1:
            raise SystemExit(f"{PAGE}: <!-- trace_calls {name} --> stands there {count} times, expected once")
    return page


def main(words: list[str]) -> int:
    """Writes, or checks, both drawings."""
    from trace_lab.cli import main as tracemem

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with contextlib.redirect_stdout(io.StringIO()):
            code = tracemem(
                ["collect", "Signal", "--episodes", "2", "--size", "32", "--workers", "1", "--out", str(data)]
            )
        if code:
            return code
        page = PAGE.read_text()
        new = written(page, blocks(data))
    if words == ["--check"]:
        print("as it is" if new == page else f"{PAGE}: would be changed")
        return int(new != page)
    PAGE.write_text(new)
    print(f"Wrote {PAGE}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
