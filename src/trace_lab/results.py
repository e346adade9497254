"""Rollouts: read from files, checked, and kept. `read` is the one way in, for a published set (a parquet file with its
manifest beside it) and for what `tracemem eval` writes while it plays; `write` makes a set. `stats` says what they mean.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from reprlib import repr as short
from typing import Any

from trace_bench.referee import Decision, Outcome, Record
from trace_bench.tasks import TASKS
from trace_errors import RunError
from trace_lab.recipe import POLICIES
from trace_memory.registry import METHODS, of_policies

SETTINGS, RESULTS = "evaluation.json", "evaluation.jsonl"  # what tracemem eval writes into its folder
SETS = Path("results")  # where published sets are, seen from the project's folder
FORMS = {"act": "TRACE Regression", "diffusion": "TRACE Diffusion"}  # the paper's names
ONCE = ("policy", "memory", "training_seed", "task", "split", "seed", "cue", "delay")  # what tells rollouts apart
SPELT = {"training_seed": "seed", "seed": "episode"}  # the names of these two in a parquet file
type Method = tuple[str, str]  # policy, memory
type Check = tuple[Callable[[Any], bool], str]  # whether a value will do, and what would


@dataclass(frozen=True)
class Rollout:
    """One episode: the score sheet, and whose it is.

    Args:
        method: policy and memory, by name.
        training_seed: of the training that was evaluated.
        record: the score sheet.
        encoder: hash of the weights with which that training began, if it began with another's encoder, as in version 0.1.
        size: which recipe it was trained with.
        command: what trained and evaluated it.
        commit: of the code.
    """

    method: Method
    training_seed: int
    record: Record
    encoder: str = ""
    size: str = ""
    command: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Reading:
    """Rollouts, and a note for everything that was left out."""

    rollouts: tuple[Rollout, ...]
    notes: tuple[str, ...] = ()


def label(method: Method) -> str:
    """What tables and figures call a method.

    Example:
        >>> label(("act", "gru"))
        'ACT + GRU'
    """
    policy, memory = method
    if memory == "none":
        return POLICIES[policy]
    if memory == "trace":
        return FORMS[policy]
    return f"{POLICIES[policy].removesuffix(' Policy')} + {METHODS[memory].label}"


def methods() -> list[Method]:
    """All methods in the order of the rows: without a memory and with TRACE first, then the others policy by policy."""
    first = [(policy, memory) for memory in ("none", "trace") for policy in POLICIES]
    return first + [
        (policy, memory) for policy in POLICIES for memory in of_policies() if (policy, memory) not in first
    ]


# -- one row ---------------------------------------------------------------------------------------------------------------


def wrong(where: str, got: object, expected: str) -> RunError:
    """The error about a row that is not a rollout: where, what came, what was expected."""
    return RunError(f"{where}: got {got}, expected {expected}")


def _one_of(words: Iterable[str]) -> Check:
    known = list(words)
    return lambda v: v in known, f"one of {', '.join(known)}"


def _checks() -> dict[str, Check]:
    """For each field of a row what it must be. Made anew each time, because memories may be registered later."""
    count: Check = (lambda v: type(v) is int and v >= 0, "an integer from 0")  # true is no number here
    step: Check = (lambda v: v is None or count[0](v), "an integer from 0, or null")
    return {
        "policy": _one_of(POLICIES),
        "memory": _one_of(METHODS),
        "task": _one_of(TASKS),
        "split": TEXT,
        **dict.fromkeys(("training_seed", "seed", "cue", "delay", "steps", "drops"), count),
        "cue_gone": step,
        "stages": (
            lambda v: isinstance(v, dict) and v != {} and all(map(step[0], v.values())),
            "a step or null by stage",
        ),
        "decisions": (lambda v: isinstance(v, list) and v != [], "a list of at least one decision"),
        "progress": (lambda v: type(v) in (int, float) and 0 <= v <= 1, "a number from 0 to 1"),
        "outcome": _one_of(map(str, Outcome)),
    }


TEXT: Check = (lambda v: isinstance(v, str) and v != "", "a name")
DECISION: dict[str, Check] = {
    "name": TEXT,
    "answer": (lambda v: type(v) is int and v >= 0, "an integer from 0"),
    **dict.fromkeys(
        ("frame", "step", "choice"),
        (lambda v: v is None or (type(v) is int and v >= 0), "an integer from 0, or null"),
    ),
    "correct": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
}


def _checked(row: Any, checks: dict[str, Check], where: str, spelt: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise wrong(where, short(row), f"an object with {', '.join(checks)}")
    for name, (fits, expected) in checks.items():
        if name not in row or not fits(row[name]):
            place = f"{where}: {spelt.get(name, name)}"
            raise wrong(place, short(row[name]) if name in row else "nothing", expected)
    return row


def rollout(row: Any, where: str, spelt: Mapping[str, str] | None = None) -> Rollout:
    """A decoded row, checked.

    Args:
        row: what `tracemem eval` writes for an episode; further fields are allowed and not read.
        where: begins the message of an error.
        spelt: other names of fields, for that message.

    Raises:
        RunError: names the field that is wrong, what came and what was expected.
    """
    line, decisions = _checked(row, _checks(), where, spelt or {}), []
    for number, each in enumerate(line["decisions"]):
        place = f"{where}: decisions[{number}]"
        values = _checked(each, DECISION, place, {})
        decision = Decision(**{known.name: values[known.name] for known in fields(Decision)})
        if values["correct"] is not decision.correct:
            raise wrong(f"{place}: correct", values["correct"], f"{decision.correct} by choice and answer")
        decisions.append(decision)
    typed = line | {"decisions": decisions, "outcome": Outcome(line["outcome"])}
    record = Record(**{known.name: typed[known.name] for known in fields(Record)})
    if abs(line["progress"] - record.progress) > 1e-6:
        raise wrong(f"{where}: progress", line["progress"], f"{record.progress}, the share of stages done")
    return Rollout((line["policy"], line["memory"]), line["training_seed"], record)


# -- what eval writes ------------------------------------------------------------------------------------------------------


def lines(out: Path) -> dict[int, dict[str, Any]]:
    """The finished episodes of a folder, by seed. A line that was torn off at the end does not count."""
    path = out / RESULTS
    try:
        rows = [json.loads(text) for text in path.read_text().split("\n")[:-1]] if path.exists() else []
        return {row["seed"]: row for row in rows}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise RunError(f"{path}: a line in it is not the result of an episode ({error!r})") from error


def _origin(file: Path) -> dict[str, Any]:
    """What the run.json above a file of lines says of the training; nothing if there is none."""
    notes = [note for folder in file.parents[1:3] if (note := folder / "run.json").exists()]
    if not notes:
        return {}
    try:
        run = json.loads(notes[0].read_text())
        asked = run.get("asked", {})
        encoder, recipe = asked.get("encoder"), asked.get("recipe") or {}
        return {
            "encoder": "" if encoder is None else str(encoder["weights"]),
            "size": str(recipe.get("size") or ""),
            "commit": str(run.get("commit") or ""),
        }
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise wrong(str(notes[0]), repr(error), "what tracemem train writes, with asked.encoder.weights") from error


def _read_lines(file: Path, notes: list[str]) -> Iterable[tuple[str, dict[str, Any], Rollout]]:
    """Where each is, the decoded row and the rollout. A torn last line is noted and left out."""
    lines, origin = file.read_bytes().splitlines(), _origin(file)
    for number, line in enumerate(lines, start=1):
        where = f"{file}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise wrong(where, short(line), f"one JSON object a line ({error})") from error
            notes.append(f"{where}: torn last line left out ({len(line)} bytes): the run ended while writing it")
            continue
        yield where, row, replace(rollout(row, where), **origin)


def whole(*folders: Path) -> Reading:
    """The rollouts of all evaluations in or below these folders that have played every episode asked for; the others are
    noted. What trained and evaluated runs leave: `run.json`, `evaluation/TASK/evaluation.json` and `evaluation.jsonl`.

    Raises:
        RunError: as `read`; or one of the folders has no such evaluation.
    """
    done, notes = list[Path](), list[str]()
    for folder in folders:
        files = sorted(folder.rglob(RESULTS))
        for file in files:
            note = file.with_suffix(".json")
            asked = json.loads(note.read_text()).get("settings", {}).get("episodes") if note.exists() else None
            count = len(file.read_text().splitlines())
            if count == asked:
                done.append(file)
            else:
                notes.append(f"{file}: left out, it has {count} episodes of {asked}; let tracemem eval finish them")
        if not files:
            raise wrong(str(folder), "a folder without rollouts", f"{RESULTS} in or below it")
    found = read(*done) if done else Reading(())
    return Reading(found.rollouts, (*found.notes, *notes))


# -- published sets --------------------------------------------------------------------------------------------------------


def manifest_of(file: Path) -> Path:
    """Where the manifest of a parquet file is."""
    return file.with_suffix(".json")


def manifest(file: Path) -> dict[str, Any]:
    """What a set says of itself: commands, commit, versions, seeds, when it was made, what it decides.

    Raises:
        RunError: there is none, or the parquet file is not the one it was written for.
    """
    note = manifest_of(file)
    try:
        facts = json.loads(note.read_text())
        expected = str(facts["sha256"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise wrong(str(note), repr(error), f"the manifest of {file.name}, with its sha256") from error
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != expected:
        raise wrong(f"{file}: sha256", found, f"{expected}, of which {note.name} tells")
    return dict(facts)


def _schema() -> Any:
    import pyarrow as pa

    words = pa.dictionary(pa.int16(), pa.string())
    columns = {
        **dict.fromkeys(("task", "policy", "memory", "size"), words),
        **dict.fromkeys(("seed", "episode"), pa.int32()),
        "progress": pa.float64(),
        "first_right": pa.bool_(),
        "outcome": words,
        "split": words,
        **dict.fromkeys(("cue", "delay", "steps", "cue_gone", "drops"), pa.int32()),
        **dict.fromkeys(("stages", "decisions"), pa.string()),
        **dict.fromkeys(("encoder", "command", "commit"), words),
    }
    return pa.schema(columns)


def _to_row(each: Rollout) -> dict[str, Any]:
    """A rollout as a row of a parquet file."""
    record = each.record.to_dict()
    return record | {
        "policy": each.method[0],
        "memory": each.method[1],
        "seed": each.training_seed,
        "episode": record["seed"],
        "first_right": record["decisions"][0]["correct"],
        "stages": json.dumps(record["stages"]),
        "decisions": json.dumps(record["decisions"]),
        "encoder": each.encoder,
        "size": each.size,
        "command": each.command,
        "commit": each.commit,
    }


def _read_set(file: Path) -> Iterable[tuple[str, dict[str, Any], Rollout]]:
    """As `_read_lines`, of a parquet file."""
    found = kept(file, _schema())
    for number, row in enumerate(found):
        where = f"{file}: row {number}"
        line = row | {"training_seed": row["seed"], "seed": row["episode"]}
        for name in ("stages", "decisions"):
            try:
                line[name] = json.loads(row[name])
            except (ValueError, TypeError) as error:
                raise wrong(f"{where}: {name}", short(row[name]), f"JSON ({error})") from error
        made = rollout(line, where, SPELT)
        if row["first_right"] is not made.record.decisions[0].correct:
            raise wrong(f"{where}: first_right", row["first_right"], f"{made.record.decisions[0].correct} by decisions")
        origin: dict[str, Any] = {name: row[name] or "" for name in ("encoder", "size", "command", "commit")}
        yield where, line, replace(made, **origin)


def order(each: Rollout) -> tuple[Any, ...]:
    """By method, task, training seed and episode: the same rollouts give the same file, whichever came first."""
    record = each.record
    place = (methods().index(each.method), list(TASKS).index(record.task), each.training_seed)
    return (*place, record.split, record.seed, record.cue, record.delay)


def write(file: Path, rollouts: Sequence[Rollout], **facts: Any) -> None:
    """Keeps rollouts as a set: a parquet file, and beside it its manifest.

    Args:
        file: ends in .parquet. What is there is replaced.
        rollouts: one or more, in any order.
        facts: for the manifest: command, versions, decides, ...; tasks, methods, seeds, commits and the number of rollouts
            are read off the rollouts.

    Raises:
        RunError: there are no rollouts.
    """
    if not rollouts:
        raise RunError(f"{file}: got no rollouts, expected at least one")
    ordered = sorted(rollouts, key=order)
    met = [method for method in methods() if any(each.method == method for each in ordered)]
    note = {
        **facts,
        "rollouts": len(ordered),
        "tasks": [task for task in TASKS if any(each.record.task == task for each in ordered)],
        "methods": ["+".join(method) for method in met],
        "seeds": sorted({each.training_seed for each in ordered}),
        "episodes": sorted({each.record.seed for each in ordered}),
        "commits": sorted({each.commit for each in ordered if each.commit}),
    }
    for name in ("episodes", "seeds"):
        note[name] = spans(note[name])
    keep(file, [_to_row(each) for each in ordered], _schema(), note)


def keep(file: Path, rows: Sequence[Mapping[str, Any]], schema: Any, facts: Mapping[str, Any]) -> None:
    """Writes rows of any kind as a parquet file, and its manifest: when it was made, what is known of it, its hash."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.tmp")
    table = pa.Table.from_pylist([*rows], schema=schema)
    pq.write_table(table, fresh, compression="zstd", compression_level=19)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"made": made, **facts, "sha256": hashlib.sha256(fresh.read_bytes()).hexdigest()}
    fresh.replace(file)
    manifest_of(file).write_text(json.dumps(note, indent=1, ensure_ascii=False) + "\n")


def kept(file: Path, schema: Any) -> list[dict[str, Any]]:
    """The rows that `keep` wrote.

    Raises:
        RunError: the file is not the one its manifest tells of, or has not these columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    manifest(file)
    try:
        rows = pq.read_table(file)
        if absent := [name for name in schema.names if name not in rows.column_names]:
            raise wrong(str(file), f"no column {', '.join(absent)}", f"the columns {', '.join(schema.names)}")
        return list(rows.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise wrong(str(file), f"what cannot be read ({error})", "a parquet file") from error


def sets_in(folder: Path) -> list[Path]:
    """The published sets of rollouts in a folder; sets of other things have other manifests."""
    return [file for file in sorted(folder.glob("*.parquet")) if "rollouts" in manifest(file)]


def spans(numbers: Sequence[int]) -> str:
    """Numbers that follow each other as first-last: 0-24, 200-224."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


# -- the one way in --------------------------------------------------------------------------------------------------------


def find(place: Path | str, sets: Path = SETS) -> list[Path]:
    """The files meant by a path (a parquet file, a file of lines, or a folder with such files of lines in or below it) or by
    the name of a published set.
    """
    path, named = Path(place), sets / f"{place}.parquet"
    if path.is_dir():
        if found := sorted(path.rglob(RESULTS)):
            return found
        raise wrong(str(path), "a folder without rollouts", f"{RESULTS} in or below it")
    if not path.exists() and named.exists():
        return [named]
    if not path.exists() and path.suffix not in {".parquet", ".jsonl"}:
        known = ", ".join(sorted(each.stem for each in sets.glob("*.parquet"))) or "none"
        raise wrong(str(place), "neither a path nor a published set", f"a file, a folder, or one of the sets: {known}")
    return [path]


def read(*places: Path | str, sets: Path = SETS) -> Reading:
    """All rollouts of these places, checked.

    Args:
        places: published sets by name, parquet files, files of lines, or folders with such files of lines.
        sets: where published sets are.

    Returns:
        The rollouts, and notes on what was left out: a last line that is not whole JSON is what a killed run leaves.

    Raises:
        RunError: anything else that is wrong, with where, what came and what was expected; also a rollout that is met
            twice, which would pass for more evidence than there is.

    Example:
        >>> reading = read("suite")  # doctest: +SKIP
        >>> reading.rollouts[0].record.progress  # doctest: +SKIP
    """
    files = {file.resolve(): file for place in places for file in find(place, sets)}
    rollouts, notes, met = [], list[str](), dict[tuple[Any, ...], str]()
    for file in files.values():
        if not file.is_file():
            raise wrong(str(file), "no such file", "rollouts")
        for where, row, made in _read_set(file) if file.suffix == ".parquet" else _read_lines(file, notes):
            rollouts.append(made)
            key = tuple(row[name] for name in ONCE)
            if met.setdefault(key, where) != where:
                raise wrong(f"{where}: seed", f"the episode of {met[key]} again", "each rollout once")
    return Reading(tuple(rollouts), tuple(notes))
