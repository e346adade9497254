"""`tracemem profile`: every figure is there, and what it says of steps is so."""

import json

import numpy as np
import pytest
import torch
from rich.progress import Progress
from torch.utils.flop_counter import FlopCounterMode

from trace_lab import stopwatch as module
from trace_lab.cli import main
from trace_lab.stopwatch import Observations, Stopwatch, Timing, long_run, make
from trace_lab.stopwatch import parts as cut_into_parts


def test_figures_of_one_policy(tmp_path, capsys):
    words = ["profile", "--policies", "act", "--preset", "tiny", "--sizes", "32", "--device", "cpu", "--steps", "100"]
    assert main([*words, "--seconds", "0.2", "--precision", "fp16", "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert made == json.loads((tmp_path / "profile.json").read_text())
    assert (tmp_path / "profile.png").stat().st_size > 1_000
    (found,) = made["results"]
    parts = found["parts"]
    assert parts.keys() == {"TRACE overhead", "adapter", "signature", "slot update", "readout", "encode"}
    for timing in (*parts.values(), found["base forward"], found["base compiled"], found["eager with memory"]):
        assert 0 < timing["median"] <= timing["p95"]
        assert timing["calls"] >= module.WARM_UP
    assert found["state_bytes"] == 22_488  # 8 + 4 * (4 * 64 + 17 + 5219 + 128), the last for the anchor
    assert 0 < found["error"] < 0.05
    assert "base forward" in printed.err
    assert "118.00" not in printed.err  # the paper's row of a policy that was not asked for


@pytest.mark.parametrize("memory", ["trace", "paper"])
def test_the_parts_do_all_of_its_work_and_nothing_twice(memory):
    """Counted in multiplications, which a busy machine does not change; in fused kernels they are not, so none is fused."""
    session = make("act", "tiny", memory, 32, "cpu").compile_for_control(fuse=False)
    work = {}
    for name, part in cut_into_parts(session).items():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            part()
        work[name] = counter.get_total_flops()
    whole = work.pop("TRACE overhead")
    assert whole == sum(work.values())
    assert work.pop("signature") == 0  # it has no matrix product
    assert work.keys() == {"adapter", "slot update", "readout"}
    assert min(work.values()) > 0


def test_steps_with_a_new_chunk_are_told_from_the_others(monkeypatch):
    """The slow steps are those at which the policy was asked for a chunk."""
    policy = make("act", "tiny", "trace", 32, "cpu")
    session = policy.compile_for_control()
    predicted, number = [], iter(range(-module.WARM_UP, 10_000))
    compute = session.compute

    def spy(batch, turn, *, act, noise):
        if act:
            predicted.append(current[0])
        return compute(batch, turn, act=act, noise=noise)

    current = [0]
    monkeypatch.setattr(session, "compute", spy)
    select = policy.select_action

    def count(batch):
        current[0] = next(number)
        return select(batch)

    monkeypatch.setattr(policy, "select_action", count)
    with Progress(disable=True) as progress:
        watch = Stopwatch(torch.device("cpu"), 100, 60.0, progress)
        found = long_run(policy, Observations(32, "cpu"), watch, "loop")
    assert found["steps"] == 100
    begun = [step for step in predicted if step >= 0]
    assert begun == list(range(0, 100, 10))
    assert (found["chunk"]["calls"], found["between"]["calls"]) == (10, 90)
    assert found["finite"]
    assert found["resident_growth_mb"] is None or found["resident_growth_mb"] < 50


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_told(value, monkeypatch):
    policy = make("act", "tiny", "none", 32, "cpu")
    policy.compile_for_control()
    monkeypatch.setattr(policy, "select_action", lambda _: torch.full((1, 17), value))
    with Progress(disable=True) as progress:
        found = long_run(policy, Observations(32, "cpu"), Stopwatch(torch.device("cpu"), 100, 60.0, progress), "loop")
    assert not found["finite"]


def test_timings():
    timing = Timing.of(np.arange(1, 101, dtype=np.float32))
    assert (timing.mean, timing.calls) == (50.5, 100)
    assert timing.p95 == pytest.approx(95.05)
    assert str(timing) == "50.50 / 95.05"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "5"], "at least 100"),
        (["--sizes", "8"], "at least 32"),
        (["--device", "cuda"], "PyTorch finds none here"),
        (["--memory", "gruu"], "gru"),
        (["--precision", "tf32", "--device", "cpu"], "tf32"),
    ],
)
def test_bad_input(words, message, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["profile", "--preset", "tiny", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
