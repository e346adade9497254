"""The demonstration: it runs to its report, goes on where it was, and the parts of the report say what is so."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from trace_bench.tasks import load
from trace_lab import films
from trace_lab.cli import main
from trace_lab.demo import Page
from trace_lab.films import Film
from trace_lab.inside import Inside, difference, most_different

SMALL = ["--demonstrations", "2", "--steps", "4", "--episodes", "2", "--device", "cpu"]


def test_it_runs_to_its_report_and_does_nothing_twice(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), *SMALL]) == 0
    place = tmp_path / "seed-0"
    first = capsys.readouterr().out
    assert "ACT without a memory" in first
    assert "ACT with TRACE" in first
    text = (place / "report.html").read_text()
    assert text.count("<video src=") == 4
    assert not re.search(r'(src|href)="(?!data:)', text)  # it opens without a network
    assert (place / "inside.png").exists()
    with Image.open(place / "films.webp") as moving:
        assert moving.n_frames > 20
    assert (place / "films.webp").stat().st_size < 2_000_000
    kept = {path: path.stat().st_mtime_ns for path in place.glob("*/checkpoints/*/pretrained_model/model.safetensors")}
    assert len(kept) >= 2
    assert main(["demo", "--out", str(tmp_path), *SMALL]) == 0
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert "nothing to do" in capsys.readouterr().out


def test_a_folder_with_other_things_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "seed-0" / "data").mkdir(parents=True)
    (tmp_path / "seed-0" / "data" / "something").write_text("mine")
    assert main(["demo", "--out", str(tmp_path), *SMALL]) != 0
    assert (tmp_path / "seed-0" / "data" / "something").read_text() == "mine"


def episode(differs: int, sign: float) -> Inside:
    """Four slots over ten steps, one of which differs from step 3 on; the branch is at 8."""
    slots = np.ones((10, 4, 6))
    slots[3:, differs, :3] += sign
    heat = np.full((4, 10), 0.25)
    return Inside("blue" if sign > 0 else "orange", 3, [8], heat, heat, heat, slots)


@pytest.mark.parametrize("slot", [0, 2])
def test_the_slot_that_differs_most_is_found(slot):
    pair = [episode(slot, 0.5), episode(slot, -0.5)]
    apart = difference(pair)
    assert apart.shape == (4, 8)  # what comes after the branch is not compared
    assert not apart[:, :3].any()
    assert (apart[slot, 3:] > 0).all()
    assert not np.delete(apart, slot, axis=0).any()
    found, share = most_different(pair)
    assert found == slot
    assert 0 < share < 2


def test_a_page_keeps_what_it_is_told(tmp_path):
    page = Page("a < b")
    page.text("<script>alert(1)</script>")
    page.table(("x", "y"), [("1 & 2", 3)])
    (tmp_path / "dot.png").write_bytes(b"\x89PNG")
    page.picture(tmp_path / "dot.png", "a dot")
    page.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>" not in text
    assert "a &lt; b" in text
    assert "1 &amp; 2" in text
    assert "data:image/png;base64,iVBORw==" in text


def sheet(seed: int, *correct: bool | None) -> dict:
    decisions = [{"choice": None if right is None else 1, "correct": right} for right in correct]
    return {
        "seed": seed,
        "cue": seed % 2,
        "decisions": decisions,
        "outcome": "success" if correct[-1] else "wrong branch",
    }


@pytest.fixture
def evaluations(tmp_path) -> dict:
    """Two policies' films of three episodes: short, of noise that is hard to compress, and one policy lacks the last."""
    rng = np.random.default_rng(0)
    made = {"without": {0: None, 1: False, 2: False}, "with": {0: True, 1: True}}
    for number, (policy, rights) in enumerate(made.items()):
        for seed, right in rights.items():
            film = Film(tmp_path / policy / "videos" / f"Signal-{seed}", 10)
            for _ in range(4 + 3 * number):
                film.add(rng.integers(0, 256, (64, 96, 3), dtype=np.uint8))
            film.finish("success" if right else "wrong branch")
        lines = [json.dumps(sheet(seed, right)) + "\n" for seed, right in rights.items()]
        (tmp_path / policy / "evaluation.jsonl").write_text("".join(lines))
    return {policy: tmp_path / policy for policy in made}


def test_films_of_the_same_episode_stand_beside_one_another(evaluations, tmp_path):
    found = films.takes(evaluations, "Signal")
    assert list(found) == [0, 1]  # of the third one there is but one film
    cues = load("Signal").cues
    assert [each.caption for each in found[0]] == [
        f"without: cue {cues[0]}, no choice",
        f"with: cue {cues[0]}, chose right",
    ]
    assert [each.caption.split(", ")[1] for each in found[1]] == ["chose wrong", "chose right"]
    assert films.telling(found) == 1
    assert films.telling({0: found[0]}) == 0
    films.side_by_side(found[1], tmp_path / "both.webp")
    with Image.open(tmp_path / "both.webp") as moving:
        assert moving.n_frames == 7  # the shorter film stands still
        assert moving.size[0] == 2 * films.TRIES[0][0]
        last = moving.seek(6) or moving.convert("RGB")
    assert last.getpixel((2, 2)) == pytest.approx((255, 255, 255), abs=20)


def test_a_moving_picture_is_made_smaller_until_it_is_small_enough(evaluations, tmp_path, monkeypatch):
    found = films.takes(evaluations, "Signal")
    sizes = {}
    for limit in (10**9, 60_000):
        monkeypatch.setattr(films, "LARGEST", limit)
        path = films.side_by_side(found[1], tmp_path / f"{limit}.webp")
        with Image.open(path) as moving:
            sizes[limit] = moving.size[0]
    assert sizes[60_000] < sizes[10**9]
    assert (tmp_path / "60000.webp").stat().st_size < 60_000
