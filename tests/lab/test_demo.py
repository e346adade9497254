"""The demonstration: it runs to its report, goes on where it was, and the parts of the report say what is so."""

import re

import numpy as np
import pytest

from trace_lab.cli import main
from trace_lab.inside import Inside, difference, holder
from trace_lab.page import Page

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


def twin(holds: int, sign: float) -> Inside:
    """Four slots over ten steps, one of which keeps the cue from step 3 on; the branch is at 8."""
    slots = np.ones((10, 4, 6))
    slots[3:, holds, :3] += sign
    heat = np.full((4, 10), 0.25)
    return Inside("blue" if sign > 0 else "orange", 3, [8], heat, heat, heat, slots)


@pytest.mark.parametrize("slot", [0, 2])
def test_the_slot_that_holds_the_cue_is_found(slot):
    pair = [twin(slot, 0.5), twin(slot, -0.5)]
    apart = difference(pair)
    assert apart.shape == (4, 8)  # what comes after the branch is not compared
    assert not apart[:, :3].any()
    assert (apart[slot, 3:] > 0).all()
    assert not np.delete(apart, slot, axis=0).any()
    found, share = holder(pair)
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
