"""Rollout lines (`evaluation.jsonl`), read and checked: whose each is, and its score sheet. It writes no file and imports no
learning library.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

from trace_bench.referee import Decision, Outcome, Record
from trace_bench.registry import EVERY

FILE = "evaluation.jsonl"
ONCE = ("policy", "memory", "training_seed", "task", "split", "seed", "cue", "delay")  # what tells rollouts apart
MEMORIES = {  # beside none and trace, in the order of the rows; spelled out, because trace_memory would import torch
    "gru": "GRU",
    "transformer": "transformer context",
    "lru": "LRU slots",
    "retrieval": "retrieval prompt",
    "current": "current observation",
    "signature-only": "signature only",
    "unrouted": "unrouted slots",
    "no-delta": "no delta key",
    "mean-read": "mean readout",
    "no-auxiliary": "no auxiliary losses",
}
type Method = tuple[str, str]  # policy, memory
type Check = tuple[Callable[[Any], bool], str]  # whether a value will do, and what would
NAMES: dict[Method, str] = {
    ("act", "none"): "ACT",
    ("diffusion", "none"): "Diffusion Policy",
    ("act", "trace"): "TRACE Regression",
    ("diffusion", "trace"): "TRACE Diffusion",
    **{("act", memory): f"ACT + {words}" for memory, words in MEMORIES.items()},
    **{("diffusion", memory): f"Diffusion + {words}" for memory, words in MEMORIES.items()},
}


class LineError(ValueError):
    """A line that is not a rollout: says where, what came and what was expected."""

    def __init__(self, where: str, got: object, expected: str) -> None:
        super().__init__(f"{where}: got {got}, expected {expected}")


@dataclass(frozen=True)
class Rollout:
    """One line: the score sheet, and whose it is."""

    method: Method
    training_seed: int
    record: Record
    encoder: str = ""  # hash of the weights with which that training began, if it began with another's encoder


@dataclass(frozen=True)
class Reading:
    """Rollouts, and a note for everything that was left out."""

    rollouts: tuple[Rollout, ...]
    notes: tuple[str, ...] = ()


def _one_of(words: Iterable[str]) -> Check:
    known = list(dict.fromkeys(words))
    return lambda v: v in known, f"one of {', '.join(known)}"


COUNT: Check = (lambda v: type(v) is int and v >= 0, "an integer from 0")  # true is no number here
STEP: Check = (lambda v: v is None or COUNT[0](v), "an integer from 0, or null")
TEXT: Check = (lambda v: isinstance(v, str) and v != "", "a name")
LINE: dict[str, Check] = {
    "policy": _one_of(policy for policy, _ in NAMES),
    "memory": _one_of(memory for _, memory in NAMES),
    "task": _one_of(EVERY),
    "split": TEXT,
    **dict.fromkeys(("training_seed", "seed", "cue", "delay", "steps", "drops"), COUNT),
    "cue_gone": STEP,
    "stages": (lambda v: isinstance(v, dict) and v != {} and all(map(STEP[0], v.values())), "a step or null by stage"),
    "decisions": (lambda v: isinstance(v, list) and v != [], "a list of at least one decision"),
    "progress": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "a number from 0 to 1"),
    "outcome": _one_of(Outcome),
}
DECISION: dict[str, Check] = {
    "name": TEXT,
    "answer": COUNT,
    **dict.fromkeys(("frame", "step", "choice"), STEP),
    "correct": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
}


def _checked(row: Any, checks: dict[str, Check], where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise LineError(where, short(row), f"an object with {', '.join(checks)}")
    for name, (fits, expected) in checks.items():
        if name not in row or not fits(row[name]):
            raise LineError(f"{where}: {name}", short(row[name]) if name in row else "nothing", expected)
    return row


def rollout(row: Any, where: str) -> Rollout:
    """A decoded line, checked. `where` begins the message of an error; further fields are allowed and not read."""
    line, decisions = _checked(row, LINE, where), []
    for number, each in enumerate(line["decisions"]):
        place = f"{where}: decisions[{number}]"
        values = _checked(each, DECISION, place)
        decision = Decision(**{known.name: values[known.name] for known in fields(Decision)})
        if values["correct"] is not decision.correct:
            raise LineError(f"{place}: correct", values["correct"], f"{decision.correct} by choice and answer")
        decisions.append(decision)
    typed = line | {"decisions": decisions, "outcome": Outcome(line["outcome"])}
    record = Record(**{known.name: typed[known.name] for known in fields(Record)})
    if abs(line["progress"] - record.progress) > 1e-6:
        raise LineError(f"{where}: progress", line["progress"], f"{record.progress}, the share of stages done")
    return Rollout((line["policy"], line["memory"]), line["training_seed"], record)


def encoder_of(file: Path) -> str:
    """What the run.json above a file of lines says of the encoder; nothing if there is none."""
    notes = [note for folder in file.parents[1:3] if (note := folder / "run.json").exists()]
    try:
        encoder = json.loads(notes[0].read_text()).get("asked", {}).get("encoder") if notes else None
        return "" if encoder is None else str(encoder["weights"])
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise LineError(str(notes[0]), repr(error), "what tracemem train writes, with asked.encoder.weights") from error


def read(*paths: Path) -> Reading:
    """All rollouts of these files, and of every `evaluation.jsonl` in or below these folders.

    A last line that is not whole JSON is what a killed run leaves: it is left out with a note. Anything else that is
    wrong raises `LineError`; so does a rollout met twice, which would pass for more evidence than there is.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        found = sorted(path.rglob(FILE)) if path.is_dir() else [path]
        if not found:
            raise LineError(str(path), "a folder without rollouts", f"{FILE} in or below it")
        files |= {file.resolve(): file for file in found}
    rollouts, notes, places = [], [], dict[tuple[Any, ...], str]()
    for file in files.values():
        lines, encoder = file.read_bytes().splitlines(), encoder_of(file)
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                if number < len(lines):
                    raise LineError(where, short(line), f"one JSON object a line ({error})") from error
                notes.append(f"{where}: torn last line left out ({len(line)} bytes): the run ended while writing it")
                continue
            rollouts.append(replace(rollout(row, where), encoder=encoder))
            key = tuple(row[name] for name in ONCE)
            if places.setdefault(key, where) != where:
                raise LineError(f"{where}: seed", f"the episode of {places[key]} again", "each rollout once")
    return Reading(tuple(rollouts), tuple(notes))
