"""`tracemem doctor`: what it says of a dataset is so, and what stands in the way is named."""

import json
import shutil

import numpy as np
import pytest
import torch

from trace_lab.cli import main
from trace_lab.doctor import counting
from trace_lab.evidence import GRID, alike, examine, moments, told


def synthetic(*, early: bool, now: bool, count: int = 45, kinds: int = 3, seed: int = 0):
    """Episodes that part after 60 %, with a cue in the pictures at the start, from then on, always or never."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % kinds)
    paths, pictures = [], rng.normal(size=(count, GRID, 40))
    for number, label in enumerate(labels):
        length = int(rng.integers(90, 120))
        t = np.linspace(0, 1, length)[:, None]
        path = np.c_[t, np.sin(3 * t), np.cos(2 * t), 0 * t] + 0.05 * rng.normal(size=(length, 4))
        turn = 2 * np.pi * label / kinds
        path[:, 2:] += 8 * np.clip(t - 0.6, 0, None) * np.array([np.cos(turn), np.sin(turn)])
        paths.append(path)
        if early:
            pictures[number, :3, label] += 4
        if now:
            pictures[number, 4:, label] += 4
    return paths, pictures, labels


@pytest.mark.parametrize(
    ("early", "now", "delayed"), [(True, False, True), (True, True, False), (False, True, False), (False, False, False)]
)
def test_delayed_evidence_is_told_from_the_rest(early, now, delayed):
    found = examine(*synthetic(early=early, now=now)[:2])
    assert found.delayed is delayed, found
    if delayed:
        assert 0.45 <= found.moment <= 0.65  # the ways part after 60 %
        assert found.now < 0.2 < found.early
        assert found.both > 0.4
        assert found.p < 0.01
        assert "A memory should help" in found.verdict
    else:
        assert "Delayed" not in found.verdict


def test_luck_is_no_evidence():
    """Of datasets in which nothing is to be found, about one in a hundred may be called delayed."""
    called = sum(
        bool(examine(*synthetic(early=False, now=False, count=15, seed=seed)[:2]).delayed) for seed in range(6)
    )
    assert called <= 1


def test_few_episodes_say_nothing():
    paths, pictures, _ = synthetic(early=True, now=False, count=9)
    assert examine(paths, pictures).delayed is None


def test_what_is_told_is_told_of_episodes_left_out():
    rng = np.random.default_rng(0)
    assert (
        told(alike(rng.normal(size=(40, 30))), rng.normal(size=(40, 3))) < 0.1
    )  # a fit of those it saw would tell more
    known = rng.normal(size=(40, 5))
    assert told(alike(known), known[:, :2] + 0.1 * rng.normal(size=(40, 2))) > 0.9


def test_leaving_out_in_closed_form(monkeypatch):
    """It is what fitting forty times gives."""
    rng = np.random.default_rng(0)
    known = rng.normal(size=(40, 5))
    known -= known.mean(0)
    y = known[:, :1] + rng.normal(size=(40, 1))
    y -= y.mean(0)
    scale = np.sqrt(40 / np.trace(known @ known.T))
    ridge, errors = 0.3, []
    monkeypatch.setattr("trace_lab.evidence.RIDGES", (ridge,))
    for left in range(40):
        others = np.arange(40) != left
        x = np.c_[scale * known[others], np.ones(39)]
        weights = np.linalg.solve(x.T @ x + np.diag([ridge] * 5 + [0.0]), x.T @ y[others])
        errors.append(float((y[left] - np.r_[scale * known[left], 1] @ weights)[0]))
    around = y * 40 / 39
    assert told(alike(known), y) == pytest.approx(1 - np.square(errors).sum() / np.square(around).sum(), abs=1e-9)


def test_moments():
    assert moments(GRID).tolist() == list(range(GRID))
    assert (moments(5).min(), moments(5).max()) == (0, 4)


def test_what_autograd_keeps_is_counted_once():
    x = torch.randn(10, requires_grad=True)
    with counting(saved := {}):
        ((x * x) + (x * x)).sum()
    assert saved == {x.data_ptr(): 40}


def test_a_dataset_of_the_suite(dataset, capsys):
    assert main(["doctor", str(dataset), "--preset", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["channels"], len(found["cameras"])) == (2, 17, 3)
    assert found["problems"] == []
    assert found["hours"] > 0
    assert found["training_bytes"] > 4 * 4 * 11e6  # ResNet18's weights alone, as AdamW needs them
    assert found["key_dim"] == 17 + 17**2 + 17**3
    assert found["evidence"]["delayed"] is None  # two episodes say nothing
    assert main(["doctor", str(dataset), "--no-cost"]) == 0
    words = capsys.readouterr().out
    assert "2 episodes" in words
    assert "Fewer than 20 episodes" in words
    assert "can be trained" in words


def test_what_stands_in_the_way_is_named(dataset, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(dataset, broken)
    note = broken / "meta" / "info.json"
    info = json.loads(note.read_text())
    info["features"] = {n: f for n, f in info["features"].items() if f["dtype"] != "video"}
    note.write_text(json.dumps(info))
    assert main(["doctor", str(broken), "--no-cost"]) == 1
    assert "No camera" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "no meta/info.json" in capsys.readouterr().err
    assert main(["doctor", str(dataset), "--preset", "tinny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


def test_pictures_stored_one_by_one_are_named(dataset, tmp_path, capsys):
    other = tmp_path / "images"
    shutil.copytree(dataset, other)
    note = other / "meta" / "info.json"
    note.write_text(note.read_text().replace('"dtype": "video"', '"dtype": "image"'))
    assert main(["doctor", str(other), "--no-cost"]) == 2
    assert "stored as single images, expected video" in capsys.readouterr().err
