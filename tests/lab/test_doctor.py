"""`tracemem doctor`: what it says of a dataset is so, and what stands in the way is named."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trace_errors import DatasetError
from trace_lab.cli import main
from trace_lab.doctor import GRID, alike, counting, examine, explained, moments, refuse_images
from trace_lab.source import describe


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
        assert "That is delayed evidence" in found.verdict
        assert "a memory should help" in found.verdict
    else:
        assert "a memory should help" not in found.verdict


def test_the_sentence_is_the_rule():
    """Whoever reads the numbers of the sentence and the rule in it comes to the same verdict."""
    for number, (early, now) in enumerate([(True, False), (True, True), (False, True), (False, False)] * 2):
        found = examine(*synthetic(early=early, now=now, seed=number)[:2])
        moment, gained, alone, p = (float(x) for x in re.findall(r"([\d.]+)%", found.verdict)[:4])
        assert moment == pytest.approx(100 * found.moment, abs=0.51)
        if "would be" in found.verdict or "That is delayed" in found.verdict:
            assert "(more than 10%" in found.verdict or "be more than 10%" in found.verdict
            assert "under 1% of cases" in found.verdict
            assert found.delayed is (gained > 10 and gained > alone and p < 1)
        else:
            assert "over 80% at every moment" in found.verdict
            assert not found.delayed


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
        explained(alike(rng.normal(size=(40, 30))), rng.normal(size=(40, 3))) < 0.1
    )  # a fit of those it saw would tell more
    known = rng.normal(size=(40, 5))
    assert explained(alike(known), known[:, :2] + 0.1 * rng.normal(size=(40, 2))) > 0.9


def test_leaving_out_in_closed_form(monkeypatch):
    """It is what fitting forty times gives."""
    rng = np.random.default_rng(0)
    known = rng.normal(size=(40, 5))
    known -= known.mean(0)
    y = known[:, :1] + rng.normal(size=(40, 1))
    y -= y.mean(0)
    scale = np.sqrt(40 / np.trace(known @ known.T))
    ridge, errors = 0.3, []
    monkeypatch.setattr("trace_lab.doctor.RIDGES", (ridge,))
    for left in range(40):
        others = np.arange(40) != left
        x = np.c_[scale * known[others], np.ones(39)]
        weights = np.linalg.solve(x.T @ x + np.diag([ridge] * 5 + [0.0]), x.T @ y[others])
        errors.append(float((y[left] - np.r_[scale * known[left], 1] @ weights)[0]))
    around = y * 40 / 39
    assert explained(alike(known), y) == pytest.approx(1 - np.square(errors).sum() / np.square(around).sum(), abs=1e-9)


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
    assert f"Next: tracemem train {dataset} --out outputs/cable --memory trace" in words


def test_what_stands_in_the_way_is_named(dataset, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(dataset, broken)
    note = broken / "meta" / "info.json"
    info = json.loads(note.read_text())
    info["features"] = {n: f for n, f in info["features"].items() if f["dtype"] != "video"}
    note.write_text(json.dumps(info))
    assert main(["doctor", str(broken), "--no-cost"]) == 1
    said = capsys.readouterr().out
    assert "No camera" in said
    assert "Next:" not in said
    assert main(["doctor", str(tmp_path / "nowhere")]) == 1
    assert "no meta/info.json" in capsys.readouterr().err
    assert main(["doctor", str(dataset), "--preset", "tinny"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


def test_pictures_stored_one_by_one_are_refused_at_once_with_the_line_that_helps(tmp_path, capsys):
    """LeRobot's own converter, word for word; nothing but the description was read."""
    folder = tmp_path / "my images"
    (folder / "meta").mkdir(parents=True)
    shapes = {"observation.state": "float32", "action": "float32", "observation.images.top": "image"}
    info = {"features": {name: {"dtype": kind} for name, kind in shapes.items()}}
    (folder / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 1, "total_frames": 9}))
    assert main(["doctor", str(folder)]) == 1
    said, line, *_ = capsys.readouterr().err.splitlines()
    assert "observation.images.top stored as single images, expected video" in said
    words = shlex.split(line)
    assert words[0] == "lerobot-edit-dataset"
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options == {
        "--repo_id": "local/my images",
        "--root": str(folder),
        "--new_root": f"{folder}-video",
        "--operation.type": "convert_image_to_video",
    }


def test_the_line_that_helps_is_lerobots(tmp_path):
    """A dataset of single images, converted by the command that doctor prints, passes."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    vector = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    picture = {"dtype": "image", "shape": (32, 32, 3), "names": ["height", "width", "channels"]}
    features = {"observation.state": vector, "action": vector, "observation.images.top": picture}
    made = LeRobotDataset.create("local/single", 10, features, root=tmp_path / "single", use_videos=False)
    rng = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(5):
            frame = {name: rng.normal(size=2).astype(np.float32) for name in ("observation.state", "action")}
            image = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            made.add_frame(frame | {"observation.images.top": image, "task": "none"})
        made.save_episode()
    made.finalize()
    try:
        refuse_images(tmp_path / "single", describe(tmp_path / "single"))
    except DatasetError as error:
        words = shlex.split(str(error).splitlines()[1])
    program = Path(sys.executable).parent / words[0]
    run = subprocess.run(
        [program, *words[1:]],
        capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    refuse_images(tmp_path / "single-video", describe(tmp_path / "single-video"))
    assert LeRobotDataset("local/x", root=tmp_path / "single-video").num_frames == 10
