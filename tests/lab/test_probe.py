"""`tracemem probe`: raw results, table, curves; lists of trainings as jobs, none done twice; wrong options refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_errors import RunError, UsageError
from trace_lab import cells, scores
from trace_lab.cells import COLUMNS, FILE
from trace_lab.cli import main
from trace_lab.probe import probe
from trace_lab.questions import CONDITIONS, CUES, QUESTIONS
from trace_lab.queue import Queue
from trace_memory.config import PaperOptions
from trace_memory.registry import METHODS

ROOT = Path(__file__).parents[2]
QUICK = {"delay": 26, "batch": 4, "episodes": 8, "few": 1, "json_": True}


def test_a_probe_writes_results_and_a_plot(tmp_path, capsys):
    assert probe(memory=("gru", "none"), updates=50, seeds=2, first_seed=3, out=tmp_path, **QUICK) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert [(r["memory"], r["seed"]) for r in printed] == [("gru", 3), ("gru", 4), ("none", 3), ("none", 4)]
    assert [*printed[0]["conditions"]] == [*CONDITIONS]
    assert [of for _, of in printed[0]["conditions"].values()] == [8, 8, 8, 8, 8, 8, 8]  # none longer than 2,000
    assert printed[0]["updates_to_99"] is None
    assert [u for u, _ in printed[0]["curve"]] == [25, 50]
    assert [r["state_bytes"] for r in printed[1:3]] == [264, 8]
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_a_probe_prints_one_table(tmp_path, capsys):
    words = {"question": "order", "cues": 2, "updates": 1, "out": tmp_path} | QUICK | {"json_": False, "delay": 40}
    assert probe(memory=("none",), **words) == 0
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.startswith("| no memory")]
    heading = next(line for line in said.splitlines() if line.startswith("| Memory"))
    assert all(name.replace("_", " ") in heading for name in CONDITIONS)
    assert row.split(" | ")[1:7] == ["order", "2", "0.001", "0", "never", "never"]
    assert "Right by chance, %: order 2: 25." in said


def test_the_t_maze_is_tried_in_the_corridors_asked_for(tmp_path, capsys):
    assert probe(question="tmaze", memory=("gru",), updates=1, corridors=(30, 2100), out=tmp_path, **QUICK) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert {name: of for name, (_, of) in one["conditions"].items()} == {
        "trained": 8, "steps_30": 8, "steps_2100": 1
    }  # fmt: skip


@pytest.mark.parametrize(("updates", "seen"), [(2, [2]), (27, [25, 27])])
def test_any_number_of_updates_will_do(updates, seen, tmp_path, capsys):
    assert probe(memory=("none",), updates=updates, out=tmp_path, **QUICK) == 0
    assert [u for u, _ in json.loads(capsys.readouterr().out)[0]["curve"]] == seen


@pytest.mark.parametrize(("question", "cues", "most"), [("order", 5, 2500), ("order", 3, 1500), ("count", 8, 1500)])
def test_order_with_many_cues_may_take_longer(question, cues, most, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trace_lab.battery.train", lambda *_: iter([Progress(1, 1.0, 0.5)]))
    monkeypatch.setattr("trace_lab.battery.trials", lambda *_: iter([("trained", 1, 2)]))
    from trace_lab.battery import Progress

    assert probe(memory=("none",), question=question, cues=cues, out=tmp_path, json_=True) == 0
    assert json.loads(capsys.readouterr().out)[0]["updates"] == most


def test_options_of_the_papers_form_reach_it(tmp_path, capsys):
    sizes = ["--updates", "2", "--batch", "4", "--delay", "26", "--episodes", "2", "--few", "1"]
    words = ["--memory", "paper", "none", "--paper.slots", "2", "--json", "--out", str(tmp_path)]
    assert main(["probe", *sizes, *words]) == 0
    paper, none = json.loads(capsys.readouterr().out)
    assert (paper["paper"]["slots"], none["paper"]["slots"]) == (2, PaperOptions().slots)
    assert paper["state_bytes"] == 8 + 4 * (2 * 64 + 3 + 39)  # two slots, the path's point, its signature to depth 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "orders"}, "--question: 'orders' is not known; did you mean 'order'"),
        ({"cues": -1}, "--cues: -1, expected 1 to 8"),
        ({"cues": 9}, "--cues: 9, expected 1 to 8"),
        ({"question": "tmaze", "cues": 3}, "--cues: got 3, expected 1 of tmaze"),
        ({"delay": 7}, "--delay: got 7, expected 26 or more"),
        ({"seeds": 0}, "--seeds: 0, expected 1 or more"),
        ({"first_seed": -1}, "--first-seed: -1, expected 0 or more"),
        ({"updates": 0}, "--updates: 0, expected 1 or more"),
        ({"batch": 0}, "--batch: 0, expected 1 or more"),
        ({"episodes": 0}, "--episodes: 0, expected 1 or more"),
        ({"few": 0}, "--few: 0, expected 1 or more"),
        ({"corridors": (100, 2)}, "--corridors: 2, expected 8 or more"),
        ({"rate": -1.0}, "--rate: -1.0, expected a positive number"),
        ({"rate": float("nan")}, "--rate: nan, expected a positive number"),
        ({"memory": ()}, "--memory: none given"),
        ({"memory": ("grv",)}, "--memory: 'grv' is not known; did you mean 'gru'"),
        ({"memory": ("trace",), "paper": PaperOptions(slots=2)}, "--paper: has options for trace, expected --memory paper"),
        ({"jobs": 2}, "--jobs: is of --battery only"),
        ({"cells_": ("ci",)}, "--cells: is of --battery only"),
        ({"battery": True, "first_seed": 1}, "--first-seed: has no place beside --battery"),
        ({"battery": True, "jobs": 0}, "--jobs: 0, expected 1 or more"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        probe(**options)


@pytest.mark.parametrize("options", ["cues=-1", "battery=True, cells_=('nope',)", "battery=True, cues=2"])
def test_bad_options_are_refused_before_torch_is_imported(options):
    script = f"""
import sys
from trace_errors import UsageError
from trace_lab.probe import probe
try:
    probe({options})
except UsageError:
    sys.exit(7 if "torch" not in sys.modules else 8)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT).returncode == 7


# -- lists of cells --------------------------------------------------------------------------------------------------


def test_the_projects_lists_are_what_the_battery_promises():
    lists = cells.read(ROOT / FILE)
    assert [*lists] == ["full", "strong", "rest", "rates", "addresses", "tmaze", "ci"]
    full = {(c.task.question, c.task.cues) for c in lists["full"]}
    assert full == {(q, n) for q in QUESTIONS for n in CUES if q != "tmaze"}
    assert {c.seeds for c in lists["full"]} == {c.seeds for c in lists["strong"]} == {6}
    assert all(c.updates == (2500 if c.task.question == "order" and c.task.cues >= 5 else 1500) for c in lists["full"])
    assert {(c.task.question, c.task.cues) for c in lists["rest"]} == {
        ("sign", 3), ("place", 5), ("order", 3), ("match", 3)
    }  # fmt: skip
    assert {c.seeds for c in lists["rest"]} == {2}
    by_memory = {c.memory: {x.rate for x in lists["rates"] if x.memory == c.memory} for c in lists["rates"]}
    assert all(len(rates) == 3 for rates in by_memory.values())
    assert sum(c.minutes for c in lists["ci"]) < 1


def test_the_header_has_the_sums_of_the_lists():
    text = (ROOT / FILE).read_text()
    for name, own in cells.read(ROOT / FILE).items():
        sums = f"{len(own)} cells, {sum(c.seeds for c in own)} trainings, {sum(c.minutes for c in own) / 60:.1f} core hours"
        assert f"# {name}: {sums}" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ci gru sign 1", f"a.txt:2: got 4 words, expected {', '.join(COLUMNS)}"),
        ("ci gru sign one 1 1e-3 2 2 2 1", "a.txt:2: got .*'one', expected numbers for cues, seeds"),
        ("ci grv sign 1 1 1e-3 2 2 2 1", "a.txt:2: memory 'grv' is not known; did you mean 'gru'"),
        ("ci gru sigh 1 1 1e-3 2 2 2 1", "question: got 'sigh'"),
        ("ci gru sign 1 0 1e-3 2 2 2 1", "a.txt:2: got ci gru sign 1 0 .*, expected positive numbers"),
    ],
)
def test_a_line_that_is_no_cell_is_named(line, message, tmp_path):
    (tmp_path / "a.txt").write_text(f"# a comment\n{line}\n")
    with pytest.raises(UsageError, match=message):
        cells.read(tmp_path / "a.txt")


def test_lists_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"--cells: 'rate' is not in .*; did you mean 'rates'"):
        cells.chosen(["rate"], ROOT / FILE)
    with pytest.raises(UsageError, match="is not here, expected to be called in the project's folder"):
        cells.read(tmp_path / "b.txt")


def test_a_cell_is_a_training_for_every_seed_each_once():
    (cell,) = [
        c for c in cells.chosen(["rest", "rest"], ROOT / FILE) if (c.memory, c.task.question) == ("lru", "place")
    ]
    jobs = [*cell.jobs(Path("out"))]
    assert len({job.leaves for job in jobs}) == len({job.name for job in jobs}) == cell.seeds == 2
    assert sum(job.hours for job in jobs) == pytest.approx(cell.minutes / 60)
    words = list(jobs[1].command)
    told = dict(zip(words[1::2], words[2::2], strict=True))
    assert (told["--seeds"], told["--first-seed"], told["--memory"], told["--cues"]) == ("1", "1", "lru", "5")


# -- the battery -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def battery(tmp_path_factory):
    """The list `ci`, run by two processes at once."""
    out = tmp_path_factory.mktemp("battery")
    command = [
        sys.executable,
        "-m",
        "trace_lab.cli",
        "probe",
        "--battery",
        "--cells",
        "ci",
        "--out",
        str(out),
        "--jobs",
        "2",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out, run.stdout, command


def test_the_short_list_leaves_a_table_a_figure_and_a_set(battery):
    out, said, _ = battery
    found = scores.read(out / "battery.parquet")
    asked = cells.read(ROOT / FILE)["ci"]
    assert {(x.memory, x.task) for x in found} == {(c.memory, c.task) for c in asked}
    assert len(found) == sum(c.seeds for c in asked) * len(CONDITIONS)
    assert sorted(found, key=lambda x: (x.place, x.condition)) == sorted(
        scores.read_raw(out / "runs"), key=lambda x: (x.place, x.condition)
    )
    assert all(x.seconds > 0 and x.state_bytes >= 8 and 0 <= x.accuracy <= 1 for x in found)
    assert "<svg" in (out / "battery.svg").read_text()
    assert all(f"| {METHODS[c.memory].label} | {c.task.question} | {c.task.cues} |" in said for c in asked)


def test_what_is_done_is_not_done_again(battery):
    out, _, command = battery
    before = {name: line.tries for name, line in Queue(out).lines().items()}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "0 jobs to do" in again.stdout
    assert {name: line.tries for name, line in Queue(out).lines().items()} == before


# -- scores ----------------------------------------------------------------------------------------------------------


def score(**changes):
    plain = {
        "memory": "gru", "question": "order", "cues": 3, "condition": "trained", "seed": 0, "rate": 1e-3,
        "updates_to_95": 75, "updates_to_99": None, "accuracy": 0.95, "episodes": 2000, "seconds": 60.0,
        "state_bytes": 264, "commit": "abc",
    }  # fmt: skip
    return scores.Score(**plain | changes)


def test_a_set_is_read_as_it_was_written(tmp_path):
    some = [score(seed=seed, condition=name) for seed in (1, 0) for name in ("trained", "dropped")]
    scores.write(tmp_path / "a.parquet", some, decides="nothing")
    assert scores.read(tmp_path / "a.parquet") == [*some[2:], *some[:2]]
    told = json.loads((tmp_path / "a.json").read_text())
    assert (told["scores"], told["memories"], told["seeds"], told["decides"]) == (4, ["gru"], "0-1", "nothing")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes() + b" ")
    with pytest.raises(RunError, match="sha256"):
        scores.read(tmp_path / "a.parquet")
    with pytest.raises(RunError, match="got no scores"):
        scores.write(tmp_path / "b.parquet", [])


def test_sets_of_scores_are_no_sets_of_rollouts(tmp_path):
    from trace_lab.results import sets_in

    scores.write(tmp_path / "battery.parquet", [score()])
    assert sets_in(tmp_path) == []


def test_a_raw_file_that_is_torn_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/results.json").write_text('[{"memory": "gru"}]')
    with pytest.raises(RunError, match=r"results.json: got .*conditions.*, expected what tracemem probe writes"):
        scores.read_raw(tmp_path)


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({"accuracy": 0.95}, True),
        ({"accuracy": 0.9405}, True),  # 1,881 of 2,000: the interval ends at 0.9501
        ({"accuracy": 0.9385}, False),
        ({"accuracy": 0.9385, "condition": "coarser_4x"}, True),
        ({"accuracy": 0.87, "condition": "delay_64x"}, False),
        ({"accuracy": 0.9995, "question": "tmaze", "cues": 1, "condition": "steps_100"}, False),
        ({"accuracy": 1.0, "question": "tmaze", "cues": 1, "condition": "steps_100"}, True),
    ],
)
def test_a_seed_passes_where_its_interval_reaches_the_bar(changes, passed):
    assert score(**changes).passed is passed


def test_the_table_has_the_worst_seed_and_how_many_pass():
    some = [score(), score(seed=1, accuracy=0.5, updates_to_95=None), score(seed=2, accuracy=0.97, updates_to_95=100)]
    table = scores.table([*some, score(seed=1, condition="dropped", accuracy=0.99)], seeds=False)
    (row,) = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert (row["trained"], row["dropped"], row["Seeds"]) == ("50.0 (2/3)", "99.0 (1/1)", 3)
    assert (row["Updates to 95 %"], row["99 %"]) == ("75-100, 1 never", "never")
    assert any("order 3: 88" in note for note in table.notes)  # the watch
    single = scores.table(some, seeds=True)
    assert [row[7] for row in single.rows] == ["95.0", "50.0 *", "97.0"]


def test_the_t_maze_has_a_table_of_its_own():
    maze = score(question="tmaze", cues=1, condition="steps_100")
    assert [*scores.tables([score(), maze], seeds=False)] == ["battery", "tmaze"]
