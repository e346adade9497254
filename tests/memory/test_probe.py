"""The probe: its data are what they claim, and a small version of the learning claim runs here, in about half a minute."""

from dataclasses import replace

import pytest
import torch

from trace_memory.probe import ASK, DWELL, GLYPHS, PROBE_MEMORY, TRAVEL, ProbeModel, ProbeRun, ProbeTask, start, train
from trace_memory.registry import METHODS


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def framed(images: torch.Tensor) -> torch.Tensor:
    """Frames that show a cue: twelve white pixels or more (a bar has at most six and stands at the end)."""
    return (images > 0.99).all(2).flatten(2).sum(-1) >= 12


@pytest.mark.parametrize("cues", [1, 3])
def test_cues_show_at_their_stations_only(cues):
    data = ProbeTask(cues=cues, delay=32).sample(8, generator())
    length = cues * (TRAVEL + DWELL) + 32 + ASK
    assert data.images.shape == (8, length, 3, 8, 8)
    assert data.path.shape == (8, length, 3)
    expected = [begin + i for c in range(cues) for begin in [c * (TRAVEL + DWELL) + TRAVEL] for i in range(DWELL)]
    shown = framed(data.images)
    assert all(shown[row].nonzero()[:, 0].tolist() == expected for row in range(8))


def test_the_answer_is_a_fair_draw_and_absent_from_the_question():
    data = ProbeTask(cues=3).sample(2000, generator())
    share = torch.bincount(data.answer, minlength=GLYPHS) / 2000
    assert (share - 1 / GLYPHS).abs().max() < 0.05
    last = data.images[:, -1].flatten(1)
    mean = torch.stack([last[data.answer == k].mean(0) for k in range(GLYPHS)])
    assert (mean - mean.mean(0)).abs().max() < 0.12  # pixels of the last frame do not tell the classes apart


def test_longer_episodes_keep_cues_and_question():
    far, slow = (ProbeTask(delay=16, stretch=4, how=how).sample(4, generator()) for how in ("far", "slow"))
    assert far.path.shape[1] == TRAVEL + DWELL + 64 + ASK
    assert slow.path.shape[1] == 4 * (TRAVEL + DWELL + 16 + ASK)
    assert framed(far.images).sum() == 4 * DWELL
    assert framed(slow.images).sum() == 4 * 4 * DWELL
    speed = [d.path.diff(dim=1)[:, :, :2].norm(dim=-1).median() for d in (far, slow)]
    assert speed[0] > 2 * speed[1]


def test_the_same_seed_gives_the_same_episodes():
    one, other = (ProbeTask(cues=3).sample(4, generator(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_every_memory_trains_a_step(name):
    torch.manual_seed(0)
    model = ProbeModel(replace(PROBE_MEMORY, name=name))
    model.loss(ProbeTask(delay=16).sample(4, generator())).backward()
    grads = [p.grad for p in model.see.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in grads)


def test_trace_learns_and_no_memory_cannot():
    """One cue, a short delay: TRACE answers, the same model without memory stays at chance."""
    task = ProbeTask(cues=1, delay=16)
    accuracies = {}
    for name, updates in (("trace", 400), ("none", 150)):
        run = ProbeRun(replace(PROBE_MEMORY, name=name), task, updates=updates, batch=32)
        model = start(run)
        for _ in train(run, model):
            pass
        accuracies[name] = {k: model.accuracy(replace(task, stretch=k), 256, generator(9)) for k in (1, 8)}
    assert accuracies["trace"][1] >= 0.95
    assert accuracies["trace"][8] >= 0.95
    assert accuracies["none"][1] <= 0.4
