"""Published tables come from the raw lines and from nothing else: what is typed into a page is replaced or found out."""

import json
from pathlib import Path

import pytest

from trace_bench.referee import Decision, Outcome, Record
from trace_lab.cli import main
from trace_lab.report import BLOCK

ROOT = Path(__file__).parents[2]
MARKS = "# Page\n<!-- tracemem report signal main branches -->\nold words\n<!-- end of report -->\nAfter.\n"


def line(memory: str, seed: int, *, right: bool) -> dict:
    decision = Decision("answer", seed % 2, 40, 50, seed % 2 if right else 1 - seed % 2)
    stages = {"a": 5, "b": 50 if right else None}
    outcome = Outcome.SUCCESS if right else Outcome.WRONG
    record = Record("Signal", seed, "heldout", seed % 2, 20, stages, [decision], cue_gone=9, steps=60, outcome=outcome)
    return record.to_dict() | {"policy": "act", "memory": memory, "training_seed": 0}


@pytest.fixture
def place(tmp_path) -> Path:
    """Two trained and evaluated runs, and a page that wants their tables."""
    for memory in ("none", "trace"):
        folder = tmp_path / "runs" / memory / "evaluation" / "Signal"
        folder.mkdir(parents=True)
        rows = [line(memory, seed, right=memory == "trace" or seed % 4 < 2) for seed in range(8)]
        (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "evaluation.json").write_text(json.dumps({"settings": {"checkpoint": "/home/me/x", "episodes": 8}}))
        (tmp_path / "runs" / memory / "run.json").write_text(json.dumps({"seed": 0, "commit": "abc"}))
    (tmp_path / "README.md").write_text(MARKS)
    (tmp_path / "results").mkdir()
    return tmp_path


def add(place: Path, memory: str) -> int:
    runs = str(place / "runs" / memory)
    return main(["report", str(place / "results"), "--add", runs, "--to", "signal/seed-0"])


def test_a_comparison_is_added_as_far_as_it_is_finished(place, capsys):
    whole = place / "compare"
    for memory in ("none", "trace"):
        run = whole / "signal" / f"act+{memory}" / "seed0"
        run.parent.mkdir(parents=True)
        (place / "runs" / memory).rename(run)
    (whole / "compare.json").write_text("{}")
    lines = whole / "signal" / "act+none" / "seed0" / "evaluation" / "Signal" / "evaluation.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:7]))
    assert main(["report", str(place / "results"), "--add", str(whole), "--to", "signal"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "act+none/seed0: left out" in said
    assert "7 episodes of 8; let tracemem eval finish them" in said
    assert (place / "results/signal/signal/act+trace/seed0/Signal/evaluation.jsonl").exists()
    assert not (place / "results/signal/signal/act+none").exists()
    (whole / "signal" / "act+trace" / "seed0" / "evaluation" / "Signal" / "evaluation.jsonl").write_text("")
    assert main(["report", str(place / "results"), "--add", str(whole), "--to", "other"]) == 1
    assert "no run of this comparison has played all of its episodes" in capsys.readouterr().err


def test_runs_are_kept_and_pages_filled(place, capsys):
    page, results = place / "README.md", place / "results"
    assert add(place, "none") == 0
    assert add(place, "trace") == 0
    text = page.read_text()
    assert "old words" not in text
    assert text.startswith("# Page\n<!-- tracemem report signal main branches -->\n")
    assert text.endswith("<!-- end of report -->\nAfter.\n")
    assert "| TRACE Regression | **100.0 ± 0.0** | **100.0 ± 0.0** |" in text
    assert "| ACT | Signal | 50.0 | 50.0" in text
    kept = json.loads((results / "signal/seed-0/trace/Signal/evaluation.json").read_text())
    assert kept == {"settings": {"episodes": 8}}  # no path of the machine it was made on
    assert json.loads((results / "signal/seed-0/none/run.json").read_text())["commit"] == "abc"
    picture = (results / "signal/methods.svg").read_text()
    assert all(f">{words}<" in picture for words in ("ACT", "TRACE Regression", "Signal"))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "runs" not in path.parts}
    assert main(["report", str(results)]) == 0
    assert before == {path: path.read_bytes() for path in before}  # byte for byte


def test_a_typed_figure_is_found_out(place, capsys):
    page, results = place / "README.md", place / "results"
    assert add(place, "none") == 0
    assert main(["report", str(results), "--check"]) == 0
    typed = page.read_text().replace("| ACT | Signal | 50.0 | 50.0", "| ACT | Signal | 50.0 | 52.0")
    assert typed != page.read_text()
    page.write_text(typed)
    capsys.readouterr()
    assert main(["report", str(results), "--check"]) == 1
    assert "README.md: its tables are not those of" in "".join(capsys.readouterr().out.split("\n"))
    assert page.read_text() == typed  # a check writes nothing
    assert main(["report", str(results)]) == 0
    assert page.read_text() != typed


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            MARKS.replace("signal main", "signal mean"),
            "tables mean of signal, expected some of main, leave_one_task_out",
        ),
        (MARKS.replace("<!-- end of report -->", ""), "does not end with <!-- end of report -->"),
        (MARKS.replace("signal", "laundry"), "laundry: no such folder of results"),
    ],
)
def test_what_is_wrong_with_a_page_is_named_and_nothing_is_written(place, page, message, capsys):
    assert add(place, "none") == 0
    (place / "README.md").write_text(page)
    assert main(["report", str(place / "results")]) == 1
    assert message in capsys.readouterr().err
    assert (place / "README.md").read_text() == page


def test_what_is_not_a_run_is_named(place, capsys):
    assert main(["report", str(place / "results"), "--add", str(place), "--to", "signal"]) == 1
    assert "expected run.json and evaluation/TASK/evaluation.jsonl" in capsys.readouterr().err
    assert main(["report", str(place / "results"), "--add", str(place)]) == 1
    assert "--add and --to go together" in capsys.readouterr().err
    assert main(["report", str(place / "results"), "--pages", str(place / "missing.md")]) == 1
    assert "missing.md" in capsys.readouterr().err
    assert main(["report", str(place / "nowhere")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_nothing_that_is_kept_is_written_over_and_half_an_evaluation_is_refused(place, capsys):
    assert add(place, "none") == 0
    kept = place / "results/signal/seed-0/none/Signal/evaluation.jsonl"
    before = kept.read_bytes()
    assert add(place, "none") == 1
    assert "is there already" in capsys.readouterr().err
    source = place / "runs/trace/evaluation/Signal/evaluation.jsonl"
    source.write_text("".join(line + "\n" for line in source.read_text().splitlines()[:5]))
    assert add(place, "trace") == 1
    assert "5 episodes of 8; let tracemem eval finish them" in capsys.readouterr().err
    assert not (place / "results/signal/seed-0/trace").exists()
    (place / "more/none").mkdir(parents=True)
    two = [str(place / "runs/none"), str(place / "more/none")]
    assert main(["report", str(place / "results"), "--add", *two, "--to", "signal/seed-1"]) == 1
    assert "have the same name" in capsys.readouterr().err
    assert main(["report", str(place / "results"), "--add", two[0], "--to", "signal/seed-1", "--check"]) == 1
    assert kept.read_bytes() == before


def test_a_typed_figure_in_a_sets_own_tables_is_found_out(place):
    assert add(place, "trace") == 0
    page = place / "results/signal/tables.md"
    page.write_text(page.read_text().replace("100.0", "99.0"))
    assert main(["report", str(place / "results"), "--check"]) == 1


def test_earlier_sets_have_tables_too_and_no_pictures(place):
    assert add(place, "trace") == 0
    (place / "results/earlier").mkdir()
    (place / "results/signal").rename(place / "results/earlier/signal")
    (place / "results/earlier/signal/methods.svg").unlink()
    (place / "results/earlier/signal/tables.md").write_text("typed")
    (place / "README.md").write_text(MARKS.replace("report signal", "report earlier/signal"))
    assert main(["report", str(place / "results"), "--check"]) == 1
    assert main(["report", str(place / "results")]) == 0
    assert "| TRACE Regression | **100.0 ± 0.0**" in (place / "README.md").read_text()
    assert "| TRACE Regression | **100.0 ± 0.0**" in (place / "results/earlier/signal/tables.md").read_text()
    assert not list((place / "results").rglob("*.svg"))


def test_this_projects_tables_are_those_of_its_results():
    assert BLOCK.search((ROOT / "README.md").read_text())
    assert main(["report", str(ROOT / "results"), "--check"]) == 0
