import json
import subprocess
import sys

import pytest

from trace_errors import UsageError
from trace_lab.probe import probe

QUICK = {"delay": 8, "batch": 4, "lengths": (2,), "json_": True}


def test_probe_writes_results_and_a_plot(tmp_path, capsys):
    assert probe(memory=("trace", "none"), updates=50, out=tmp_path, **QUICK) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert [r["memory"] for r in printed] == ["trace", "none"]
    assert set(printed[0]["longer"]) == {"far 2x", "slow 2x"}
    assert printed[0]["solved_at"] is None
    assert [u for u, _ in printed[0]["curve"]] == [25, 50]
    assert (tmp_path / "curves.png").stat().st_size > 5000


@pytest.mark.parametrize(("updates", "seen"), [(2, [2]), (27, [25, 27])])
def test_any_number_of_updates_will_do(updates, seen, tmp_path, capsys):
    assert probe(memory=("none",), updates=updates, out=tmp_path, **QUICK) == 0
    assert [u for u, _ in json.loads(capsys.readouterr().out)[0]["curve"]] == seen


def test_options_of_the_papers_form_reach_it(tmp_path, capsys, monkeypatch):
    from trace_lab.cli import main

    arguments = ["--memory", "paper", "none", "--delay", "8", "--updates", "2", "--batch", "4", "--lengths", "1"]
    assert main(["probe", *arguments, "--paper.slots", "2", "--json", "--out", str(tmp_path)]) == 0
    assert [r["paper"]["slots"] for r in json.loads(capsys.readouterr().out)] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cues": -1}, "--cues: -1, expected 1 to 3"),
        ({"cues": 9}, "--cues: 9, expected 1 to 3"),
        ({"delay": 7}, "--delay: 7, expected 8 or more"),
        ({"seeds": 0}, "--seeds: 0, expected 1 or more"),
        ({"updates": 0}, "--updates: 0, expected 1 or more"),
        ({"batch": 0}, "--batch: 0, expected 1 or more"),
        ({"lengths": (2, 0)}, "--lengths: 0, expected 1 or more"),
        ({"rate": -1.0}, "--rate: -1.0, expected a positive number"),
        ({"speed": 0.5}, "--speed: 0.5, expected 1 or more"),
        ({"memory": ()}, "--memory: none given"),
        ({"memory": ("grv",)}, "--memory: 'grv' is not known; did you mean 'gru'"),
    ],
)
def test_bad_numbers_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        probe(**options)


def test_options_of_the_papers_form_are_for_it_only():
    from trace_memory.config import PaperOptions

    with pytest.raises(UsageError, match="--paper: has options for trace, expected --memory paper"):
        probe(memory=("trace",), paper=PaperOptions(slots=2))


def test_bad_options_are_refused_before_torch_is_imported():
    script = """
import sys
from trace_errors import UsageError
from trace_lab.probe import probe
try:
    probe(cues=-1)
except UsageError:
    sys.exit(7 if "torch" not in sys.modules else 8)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
