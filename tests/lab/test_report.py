"""Published tables come from the sets and from nothing else: what is typed into a page is replaced or found out."""

import json
from pathlib import Path

import pytest

from trace_bench.referee import Decision, Outcome, Record
from trace_lab import results
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


def report(place: Path, *options: str) -> int:
    return main(["report", str(place / "results"), *options])


def add(place: Path, *names: str, to: str = "signal") -> int:
    return report(place, "--add", *(str(place / name) for name in names or ("runs",)), "--to", to)


def test_runs_are_kept_and_pages_filled(place):
    page, kept = place / "README.md", place / "results/signal.parquet"
    assert report(place, "--add", str(place / "runs"), "--to", "signal", "--decides", "whether") == 0
    text = page.read_text()
    assert "old words" not in text
    assert text.startswith("# Page\n<!-- tracemem report signal main branches -->\n")
    assert text.endswith("<!-- end of report -->\nAfter.\n")
    assert "| TRACE Regression | **100.0 ± 0.0** | **100.0 ± 0.0** |" in text
    assert "| ACT | Signal | 50.0 | 50.0" in text
    facts = results.manifest(kept)
    assert (facts["decides"], facts["commits"], facts["rollouts"]) == ("whether", ["abc"], 16)
    assert "/home/me" not in json.dumps(facts)  # no path of the machine it was made on
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "runs" not in path.parts}
    assert len(before) == 3
    assert report(place) == 0
    assert before == {path: path.read_bytes() for path in before}  # byte for byte


def test_a_comparison_is_kept_as_it_is_and_what_it_lacks_is_told(place, capsys):
    whole = place / "comparison"
    whole.mkdir()
    rollouts = results.read(place / "runs").rollouts
    results.write(whole / "results.parquet", rollouts, command=["tracemem compare"], unfinished=["Cable: act, seed 1"])
    assert report(place, "--add", str(whole), "--to", "signal", "--decides", "which") == 0
    assert "not in it, because not finished: Cable: act, seed 1" in " ".join(capsys.readouterr().out.split())
    assert (place / "results/signal.parquet").read_bytes() == (whole / "results.parquet").read_bytes()
    facts = results.manifest(place / "results/signal.parquet")
    assert (facts["decides"], facts["command"]) == ("which", ["tracemem compare"])
    assert "| TRACE Regression | **100.0 ± 0.0**" in (place / "README.md").read_text()


def test_evaluations_that_are_not_finished_are_left_out(place, capsys):
    lines = place / "runs/none/evaluation/Signal/evaluation.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:7]))
    assert add(place) == 0
    assert "it has 7 episodes of 8; let tracemem eval finish them" in " ".join(capsys.readouterr().out.split())
    assert {each.method[1] for each in results.read(place / "results/signal.parquet").rollouts} == {"trace"}
    (place / "runs/trace/evaluation/Signal/evaluation.jsonl").write_text("")
    assert add(place, to="other") == 1
    assert "no run there has played all of its episodes" in capsys.readouterr().err
    assert not (place / "results/other.parquet").exists()


def test_a_page_may_want_some_methods_only(place):
    (place / "README.md").write_text(MARKS.replace("main branches", "main of act+trace"))
    assert add(place) == 0
    text = (place / "README.md").read_text()
    assert "| TRACE Regression |" in text
    assert "| ACT |" not in text
    assert "1 of the set's 2 methods are shown." in text


def test_a_set_gets_a_picture_where_a_page_shows_it(place):
    assert add(place) == 0
    assert not list(place.rglob("*.svg"))
    (place / "README.md").write_text(MARKS + "![Progress](results/signal.svg)\n")
    assert report(place) == 0
    picture = (place / "results/signal.svg").read_text()
    assert all(f">{words}<" in picture for words in ("ACT", "TRACE Regression", "Signal", "chance"))
    assert report(place) == 0
    assert (place / "results/signal.svg").read_text() == picture


def test_all_tables_of_a_set_are_shown_and_nothing_written(place, capsys):
    assert add(place) == 0
    (place / "README.md").write_text(MARKS)
    capsys.readouterr()
    assert report(place, "--show", "signal") == 0
    printed = capsys.readouterr().out
    assert "## Branch accuracy (%) with Wilson 95 % intervals" in printed
    assert "| ACT | Signal | 50.0 | 50.0" in printed
    assert (place / "README.md").read_text() == MARKS


def test_a_typed_figure_is_found_out(place, capsys):
    page = place / "README.md"
    assert add(place) == 0
    assert report(place, "--check") == 0
    typed = page.read_text().replace("| ACT | Signal | 50.0 | 50.0", "| ACT | Signal | 50.0 | 52.0")
    assert typed != page.read_text()
    page.write_text(typed)
    capsys.readouterr()
    assert report(place, "--check") == 1
    assert "README.md: its tables are not those of" in "".join(capsys.readouterr().out.split("\n"))
    assert page.read_text() == typed  # a check writes nothing
    assert report(place) == 0
    assert page.read_text() != typed


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            MARKS.replace("signal main", "signal mean"),
            "tables mean of signal, expected some of main, summary, leave_one_task_out",
        ),
        (MARKS.replace("<!-- end of report -->", ""), "does not end with <!-- end of report -->"),
        (MARKS.replace("signal", "laundry"), "laundry: no such set in"),
        (MARKS.replace("branches", "of act+gru"), "signal: of: got act+gru, expected some of act+none, act+trace"),
    ],
)
def test_what_is_wrong_with_a_page_is_named_and_nothing_is_written(place, page, message, capsys):
    assert add(place) == 0
    (place / "README.md").write_text(page)
    assert report(place) == 1
    assert message in capsys.readouterr().err
    assert (place / "README.md").read_text() == page


def test_what_is_wrong_is_named(place, capsys):
    for options, code, message in (
        (
            ["--add", str(place / "results"), "--to", "signal"],
            1,
            "a folder without rollouts, expected evaluation.jsonl",
        ),
        (
            ["--add", str(place / "nowhere"), "--to", "signal"],
            1,
            "expected a folder of tracemem compare, train or demo",
        ),
        (["--add", str(place)], 2, "--add and --to go together"),
        (["--add", str(place / "runs"), "--to", "a/b"], 2, "--to: got a/b, expected a name without folders"),
        (["--add", str(place / "runs"), "--to", "signal", "--check"], 2, "--add has no place beside them"),
        (["--pages", str(place / "missing.md")], 2, "missing.md, expected a file"),
        (["--show", "nothing"], 1, "nothing: no such set in"),
    ):
        assert report(place, *options) == code
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["report", str(place / "nowhere")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert list((place / "results").iterdir()) == []


def test_nothing_that_is_kept_is_written_over(place, capsys):
    assert add(place) == 0
    kept = place / "results/signal.parquet"
    before = kept.read_bytes()
    assert add(place, "runs/none") == 1
    assert "is there already" in capsys.readouterr().err
    assert kept.read_bytes() == before


def test_this_projects_tables_are_those_of_its_results():
    assert BLOCK.search((ROOT / "docs/results.md").read_text())
    assert main(["report", str(ROOT / "results"), "--check"]) == 0
