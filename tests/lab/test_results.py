"""Rollouts that are read are those that were written; what is torn, wrong, changed or met twice is named with its place."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trace_bench.referee import Decision, Outcome, Record
from trace_errors import RunError
from trace_lab import results, tables
from trace_lab.results import Rollout
from trace_memory.registry import METHODS, Method

ROOT = Path(__file__).parents[2]
TRACE = ("act", "trace")


def row(**changes) -> dict:
    record = Record("Tool", 3, "heldout", 1, 60, {"a": 5, "b": None}, [Decision("first", 1, 40, 50, 1)], cue_gone=9)
    return record.to_dict() | {"policy": "act", "memory": "trace", "training_seed": 0} | changes


def write(path, *rows, end=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + end)
    return path


# -- what eval writes -----------------------------------------------------------------------------------------------


def test_a_line_is_the_record_that_was_written(tmp_path):
    file = write(tmp_path / "evaluation.jsonl", row(checkpoint_step=200))
    reading = results.read(file)
    assert reading.notes == ()
    (found,) = reading.rollouts
    assert found.method == TRACE
    assert found.training_seed == 0
    assert found.record.to_dict().items() <= row().items()
    assert found.record.outcome is Outcome.OTHER


def test_folders_are_searched_and_no_file_counts_twice(tmp_path):
    for seed in range(3):
        write(tmp_path / f"runs/{seed}/deep/evaluation.jsonl", row(training_seed=seed))
    write(tmp_path / "runs/other.jsonl", row(training_seed=9))
    reading = results.read(tmp_path, tmp_path / "runs/1", tmp_path / "runs/1/deep/evaluation.jsonl")
    assert [each.training_seed for each in reading.rollouts] == [0, 1, 2]


@pytest.mark.parametrize(
    "lines_in", ["Tool", "evaluation/Tool"]
)  # as results keep them, and as tracemem eval writes them
def test_rollouts_know_the_encoder_with_which_their_training_began(tmp_path, lines_in):
    write(tmp_path / "run" / lines_in / "evaluation.jsonl", row())
    (none,) = results.read(tmp_path).rollouts
    (tmp_path / "run/run.json").write_text(json.dumps({"asked": {"encoder": {"weights": "abc"}}}))
    (one,) = results.read(tmp_path).rollouts
    (tmp_path / "run/run.json").write_text(json.dumps({"asked": {"encoder": None}}))
    (own,) = results.read(tmp_path).rollouts
    assert (none.encoder, one.encoder, own.encoder) == ("", "abc", "")
    for wrong in ('{"asked": {"enc', '["asked"]', '{"asked": {"encoder": {}}}'):
        (tmp_path / "run/run.json").write_text(wrong)
        with pytest.raises(RunError, match=r"run.json: got .*, expected what tracemem train writes"):
            results.read(tmp_path)


def test_nothing_found_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"folder without rollouts, expected evaluation.jsonl"):
        results.read(tmp_path)
    with pytest.raises(RunError, match=r"absent.jsonl: got no such file, expected rollouts"):
        results.read(tmp_path / "absent.jsonl")
    with pytest.raises(RunError, match=r"got neither a path nor a published set, expected .* one of the sets: none"):
        results.read("suite", sets=tmp_path)
    with pytest.raises(ValueError, match="got none, expected at least one"):
        tables.report(results.read(write(tmp_path / "evaluation.jsonl")))


@pytest.mark.parametrize("end", ['{"task": "To', '{"task": "Tool", "seed": 3}'[:-1], "\x00\x00\x00"])
def test_torn_last_line_is_left_out_with_a_note(tmp_path, end):
    file = write(tmp_path / "evaluation.jsonl", row(), row(seed=4), end=end)
    reading = results.read(file)
    assert len(reading.rollouts) == 2
    (note,) = reading.notes
    assert note.startswith(f"{file}:3: torn last line left out ({len(end)} bytes)")
    assert note in tables.markdown(tables.report(reading))
    assert note in tables.to_json(tables.report(reading))["main"]["notes"]


def test_whole_last_line_without_newline_counts(tmp_path):
    file = write(tmp_path / "evaluation.jsonl", row(), end=json.dumps(row(seed=4)))
    assert len(results.read(file).rollouts) == 2
    assert results.read(file).notes == ()


def test_torn_line_in_the_middle_is_an_error(tmp_path):
    file = write(tmp_path / "evaluation.jsonl", row(), end='{"task": "To\n' + json.dumps(row(seed=4)) + "\n")
    with pytest.raises(RunError, match=r"evaluation.jsonl:2: got .*task.*, expected one JSON object a line"):
        results.read(file)


DECISION = row()["decisions"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "Tol"}, r"task: got 'Tol', expected one of Tool, Book, Laundry, Cable, Medicine"),
        ({"policy": "pi0"}, r"policy: got 'pi0', expected one of act, diffusion"),
        ({"memory": ["trace"]}, r"memory: got \['trace'\], expected one of none, trace, paper, .*gru, .*no-auxiliary"),
        ({"training_seed": True}, r"training_seed: got True, expected an integer from 0"),
        ({"seed": -1}, r"seed: got -1, expected an integer from 0"),
        ({"steps": 1.5}, r"steps: got 1.5, expected an integer from 0"),
        ({"split": None}, r"split: got None, expected a name"),
        ({"cue_gone": "9"}, r"cue_gone: got '9', expected an integer from 0, or null"),
        ({"stages": {}}, r"stages: got {}, expected a step or null by stage"),
        ({"stages": {"a": "5"}}, r"stages: got .*'5'.*, expected a step or null by stage"),
        ({"progress": 0.75}, r"progress: got 0.75, expected 0.5, the share of stages done"),
        ({"progress": math.nan}, r"progress: got nan, expected a number from 0 to 1"),
        ({"progress": 50}, r"progress: got 50, expected a number from 0 to 1"),
        ({"outcome": "won"}, r"outcome: got 'won', expected one of success, .*other"),
        ({"decisions": []}, r"decisions: got \[\], expected a list of at least one"),
        ({"decisions": [3]}, r"decisions\[0\]: got 3, expected an object with name, answer"),
        (
            {"decisions": [DECISION | {"choice": "1"}]},
            r"decisions\[0\]: choice: got '1', expected an integer from 0, or null",
        ),
        (
            {"decisions": [DECISION, DECISION | {"correct": False}]},
            r"decisions\[1\]: correct: got False, expected True by",
        ),
    ],
)
def test_bad_fields_are_named(tmp_path, changes, message):
    file = write(tmp_path / "evaluation.jsonl", row(seed=0), row(**changes))
    with pytest.raises(RunError, match=r"evaluation.jsonl:2: " + message):
        results.read(file)


@pytest.mark.parametrize("name", [*row()])
def test_missing_fields_are_named(tmp_path, name):
    line = row()
    del line[name]
    with pytest.raises(RunError, match=rf"evaluation.jsonl:1: {name}: got nothing, expected"):
        results.read(write(tmp_path / "evaluation.jsonl", line))


def test_a_line_that_is_no_object(tmp_path):
    with pytest.raises(RunError, match=r":1: got \[1\], expected an object with policy, memory"):
        results.read(write(tmp_path / "evaluation.jsonl", [1]))


def test_the_same_rollout_twice_is_an_error(tmp_path):
    write(tmp_path / "a/evaluation.jsonl", row())
    write(tmp_path / "b/evaluation.jsonl", row(training_seed=1), row(cue=0), row(memory="gru"), row(seed=4), row())
    with pytest.raises(RunError, match=r"b/evaluation.jsonl:5: seed: got the episode of .*a/evaluation.jsonl:1 again"):
        results.read(tmp_path)


# -- whole evaluations ----------------------------------------------------------------------------------------------


def test_only_evaluations_that_are_finished_count(tmp_path):
    for name, asked in (("done", 2), ("begun", 3)):
        place = tmp_path / name / "evaluation/Tool"
        rows = [row(seed=seed, training_seed=0 if name == "done" else 1) for seed in range(2)]
        write(place / "evaluation.jsonl", *rows)
        (place / "evaluation.json").write_text(json.dumps({"settings": {"episodes": asked}}))
    found = results.whole(tmp_path)
    assert [each.training_seed for each in found.rollouts] == [0, 0]
    (note,) = found.notes
    assert "begun" in note
    assert "it has 2 episodes of 3; let tracemem eval finish them" in note
    assert results.whole(tmp_path / "begun").rollouts == ()
    with pytest.raises(RunError, match=r"expected evaluation.jsonl in or below it"):
        results.whole(tmp_path / "done/evaluation/nothing")


# -- published sets -------------------------------------------------------------------------------------------------


def rollouts() -> list[Rollout]:
    """Of two methods and two seeds, with all that a row can hold."""
    made = []
    for seed, memory in ((0, "none"), (0, "trace"), (3, "trace")):
        for episode in (5, 6, 8):
            decisions = [Decision("first", 1, 40, 50, episode % 2), Decision("second", 0)]
            stages = {"a": 5, "b": None, "c: d": 7}
            record = Record("Tool", episode, "heldout", 1, 60, stages, decisions, steps=99, outcome=Outcome.WRONG)
            made.append(Rollout(("act", memory), seed, record, "abc", "tiny", f"train --seed {seed}", "1234"))
    made[0] = replace(made[0], record=replace(made[0].record, cue_gone=9, drops=2), encoder="")
    return made


def test_a_set_is_read_as_it_was_written(tmp_path):
    made, file = rollouts(), tmp_path / "sets/tool.parquet"
    results.write(file, made[::-1], command=["tracemem compare"], decides="whether")
    assert sorted(results.read(file).rollouts, key=results.order) == sorted(made, key=results.order)
    assert results.read("tool", sets=tmp_path / "sets") == results.read(file)
    facts = json.loads((tmp_path / "sets/tool.json").read_text())
    assert facts["decides"] == "whether"
    assert (facts["rollouts"], facts["tasks"], facts["methods"]) == (9, ["Tool"], ["act+none", "act+trace"])
    assert (facts["seeds"], facts["episodes"], facts["commits"]) == ("0, 3", "5-6, 8", ["1234"])
    columns = pq.read_table(file).to_pylist()[0]
    assert (columns["task"], columns["seed"], columns["episode"], columns["first_right"]) == ("Tool", 0, 5, True)
    before = file.read_bytes()
    results.write(file, made)
    assert file.read_bytes() == before  # in any order
    with pytest.raises(RunError, match="got no rollouts, expected at least one"):
        results.write(file, [])


def test_a_set_that_was_changed_is_refused(tmp_path):
    file = tmp_path / "tool.parquet"
    results.write(file, rollouts())
    note = tmp_path / "tool.json"
    kept = note.read_text()
    results.write(tmp_path / "other.parquet", rollouts()[1:])
    file.write_bytes((tmp_path / "other.parquet").read_bytes())
    with pytest.raises(RunError, match=r"tool.parquet: sha256: got \w+, expected \w+, of which tool.json tells"):
        results.read(file)
    for text in ("{", "{}", "[]"):
        note.write_text(text)
        with pytest.raises(RunError, match=r"tool.json: got .*, expected the manifest of tool.parquet"):
            results.read(file)
    note.unlink()
    with pytest.raises(RunError, match=r"tool.json: got .*, expected the manifest of tool.parquet"):
        results.read(file)
    assert "sha256" in kept


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("memory", "trade", r"row 0: memory: got 'trade', expected one of none, trace"),
        ("seed", -1, r"row 0: seed: got -1, expected an integer from 0"),
        ("episode", None, r"row 0: episode: got None, expected an integer from 0"),
        ("progress", 0.25, r"row 0: progress: got 0.25, expected 0.66\d*, the share of stages done"),
        ("first_right", False, r"row 0: first_right: got False, expected True by decisions"),
        ("stages", "{", r"row 0: stages: got '{', expected JSON"),
        ("decisions", None, r"row 0: decisions: got None, expected JSON"),
        ("stages", None, None),
    ],
)
def test_bad_columns_are_named(tmp_path, column, value, message):
    import hashlib

    file = tmp_path / "tool.parquet"
    results.write(file, rollouts())
    table = pq.read_table(file)
    if message is None:
        table = table.drop_columns([column])
        message = "tool.parquet: got no column stages, expected the columns task, policy"
    else:
        rows = table.to_pylist()
        rows[0][column] = value
        table = table.from_pylist(rows, schema=table.schema)
    pq.write_table(table, file)
    facts = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    file.with_suffix(".json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=message):
        results.read(file)


def test_what_is_no_parquet_file_is_named(tmp_path):
    import hashlib

    file = tmp_path / "tool.parquet"
    file.write_bytes(b"nothing")
    file.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(b"nothing").hexdigest()}))
    with pytest.raises(RunError, match=r"tool.parquet: got what cannot be read .*, expected a parquet file"):
        results.read(file)


def test_a_rollout_of_a_set_that_is_met_again_is_an_error(tmp_path):
    for name in ("one", "two"):
        results.write(tmp_path / f"{name}.parquet", rollouts())
    with pytest.raises(RunError, match=r"two.parquet: row 0: seed: got the episode of .*one.parquet: row 0 again"):
        results.read("one", "two", sets=tmp_path)


def test_a_memory_that_is_registered_later_has_rows_and_a_label(tmp_path, monkeypatch):
    line = row(memory="mine")
    with pytest.raises(RunError, match="memory: got 'mine'"):
        results.read(write(tmp_path / "evaluation.jsonl", line))
    monkeypatch.setitem(METHODS, "mine", Method("mine", "my:Memory", "my memory", "#123456"))
    (found,) = results.read(tmp_path / "evaluation.jsonl").rollouts
    assert results.label(found.method) == "ACT + my memory"
    assert results.methods()[-1] == ("diffusion", "mine")


def test_this_projects_sets_are_whole_and_small():
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert len(files) <= 15
    assert sum(path.stat().st_size for path in files) < 2e6
    counts = {path.stem: len(results.read(path).rollouts) for path in results.sets_in(ROOT / "results")}
    assert counts["suite"] == 3300
    assert counts["signal"] == 160
    for name, count in counts.items():
        facts = results.manifest(ROOT / "results" / f"{name}.parquet")
        assert facts["rollouts"] == count
        assert facts["decides"]
        assert facts["command"]
        assert all(len(each) == 40 for each in facts["commits"])
