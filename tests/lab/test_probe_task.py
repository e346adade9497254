"""The leak probe finds a cue that is there, none that is not, and says so in its exit code."""

import json

import numpy as np
import pytest

from trace_bench.tasks.cable import Cable
from trace_lab.cli import main
from trace_lab.probe_task import Moment, judge, read


def moments(count: int, seed: int, *, shown: bool) -> list[tuple[Moment, int]]:
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        pixels, cue = rng.integers(90, 110, size=(24, 24, 9), dtype=np.uint8), index % 2
        if shown:
            pixels[8:14, 4 + 10 * cue : 10 + 10 * cue, :3] = 200
        rows.append((Moment(pixels, rng.normal(size=17).astype(np.float32), int(rng.integers(150, 170))), cue))
    return rows


def test_classifier_sees_what_is_shown():
    assert read(moments(80, 0, shown=True), moments(80, 1, shown=True), 2) >= 78


def test_classifier_finds_nothing_in_nothing():
    assert 24 <= read(moments(80, 0, shown=False), moments(80, 1, shown=False), 2) <= 56


@pytest.mark.parametrize(
    ("moment", "right", "expected", "leak_free"),
    [
        ("cue", 95, False, True),
        ("cue", 94, False, False),
        ("branch 1", 54, False, True),
        ("branch 1", 56, False, False),
        ("branch 1", 44, False, False),
        ("branch 1", 80, True, True),
    ],
)
def test_what_counts_as_leak_free(moment, right, expected, leak_free):
    reading = judge(moment, right, 100, 0.5, expected=expected)
    assert reading.leak_free is leak_free
    assert reading.low < right / 100 < reading.high


def test_a_leak_is_found_and_fails(monkeypatch, capsys):
    """Cable leaks by design; had it promised not to, the command would fail."""
    monkeypatch.setattr(Cable, "partly_readable", False)
    assert main(["probe-task", "cable", "--episodes", "10", "--size", "48", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["task"] == "Cable"
    assert report["expert"] == 1.0
    assert report["same"] is False
    assert report["pair_pixels"][0] > report["floor"] > 0
    assert [reading["moment"] for reading in report["readings"]] == ["cue", "branch 1"]


@pytest.mark.parametrize(
    ("words", "message"), [(["Tol"], "did you mean 'Tool'"), (["Tool", "--episodes", "3"], "episodes: got 3")]
)
def test_bad_input_is_named(words, message, capsys):
    assert main(["probe-task", *words]) == 2
    assert message in capsys.readouterr().err


def test_gallery_names_the_nearest_task(tmp_path, capsys):
    assert main(["gallery", "--task", "Boook", "--out", str(tmp_path / "x")]) == 2
    assert "did you mean 'Book'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
