"""The equations of routing, writing and reading, by value, against a transcription with explicit loops."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from jaxtyping import config
from torch._dynamo.utils import counters

from trace_memory.ablations import MeanReadSlots, UnroutedSlots
from trace_memory.config import PRESETS, MemoryConfig, build
from trace_memory.gates import ClosingGate, ScalarGate
from trace_memory.graphs import quick
from trace_memory.keys import Key
from trace_memory.slots import Slots, slot_identity

K, D, C = 3, 8, 5


def make(kind=Slots, gate=None, **numbers) -> Slots:
    torch.manual_seed(0)
    return kind(K, D, 7, C, 2 * D, gate or ScalarGate(), **numbers).double()


def inputs(batch=2):
    torch.manual_seed(1)
    key = Key(*(torch.randn(batch, n).double() for n in (D, D, 2 * D, D)))
    return torch.randn(batch, K, D).double(), torch.randn(batch, C).double(), key


@pytest.mark.parametrize("gate", [ScalarGate(), ClosingGate()])
def test_write_and_read_as_the_paper_writes_them(gate):
    slots = make(gate=gate, tau=0.7, identity=0.5)
    m, e, key = inputs()
    drive = slots.prepare(e, key, torch.ones(len(e)), slots.maps())
    written = slots.write(m, drive, slots.maps())
    z, alpha = slots.read(written.slots, drive)
    for b in range(len(m)):
        u = slots.phi_w(torch.cat([e[b], key.q[b]]))
        logits, after = [], []
        for k in range(K):
            m_bar = m[b, k] + 0.5 * slots.eta[k]
            logits.append((slots.W_Q.weight @ key.rho[b]) @ (slots.W_K.weight @ m_bar) / (0.7 * math.sqrt(D)))
        omega = torch.softmax(torch.stack(logits), 0)
        for k in range(K):
            inside = torch.cat([m[b, k] + 0.5 * slots.eta[k], u, key.rho[b]])
            beta = omega[k] * gate(slots.phi_beta(inside))
            after.append((1 - beta) * m[b, k] + beta * torch.tanh(slots.phi_m(inside)))
        query = slots.phi_r(torch.cat([e[b], key.rho[b]]))
        scores = [query @ slots.W_K_read.weight @ (after[k] + 0.5 * slots.eta[k]) / math.sqrt(D) for k in range(K)]
        weights = torch.softmax(torch.stack(scores), 0)
        expected_z = sum(weights[k] * (slots.W_V_read.weight @ after[k]) for k in range(K))
        torch.testing.assert_close(written.omega[b], omega)
        torch.testing.assert_close(written.slots[b], torch.stack(after))
        torch.testing.assert_close(alpha[b], weights)
        torch.testing.assert_close(z[b], expected_z)
        torch.testing.assert_close(drive.u[b], u)


def test_level_routes_are_angles_and_stay_soft():
    """However large key and slots become, no slot is beyond the reach of the gradient."""
    slots = make(level=True, tau=0.5)
    m, e, key = inputs()
    huge = [
        slots.prepare(e, key._replace(rho=key.rho * size), torch.ones(len(e)), slots.maps()).route
        for size in (10.0, 1e4)
    ]
    torch.testing.assert_close(*huge, rtol=1e-4, atol=1e-4)
    wide = slots.route(huge[0], m)
    torch.testing.assert_close(slots.route(huge[1], 1e4 * m), wide, rtol=1e-3, atol=1e-4)
    aligned = slots.route(m[:, 0] / m[:, 0].norm(dim=-1, keepdim=True), m)
    assert aligned.max() > wide.max() > 1 / K
    assert aligned.min() > 1 / (1 + K * math.exp(2 * 0.25 * math.sqrt(D) / 0.5))
    assert make(tau=0.5).route(1e4 * m[:, 0], m).min() == 0  # what angles spare us


def test_a_path_that_never_moved_teaches_calmly():
    """Keys are nothing then, and a direction of nothing must not have a huge gradient."""
    torch.manual_seed(0)
    memory = build(MemoryConfig(channels=3, content=6, width=16, hidden=16, depth=2))
    readouts = memory.scan(torch.randn(2, 9, 6), torch.zeros(2, 9, 3))[1]
    readouts.z.square().sum().backward()
    assert max(float(p.grad.abs().max()) for p in memory.parameters() if p.grad is not None) < 1e6  # not 1e14


def test_weights_sum_to_one():
    slots = make()
    m, e, key = inputs()
    drive = slots.prepare(e, key, torch.ones(len(e)), slots.maps())
    written = slots.write(m, drive, slots.maps())
    torch.testing.assert_close(written.omega.sum(-1), torch.ones(2).double())
    torch.testing.assert_close(slots.read(m, drive)[1].sum(-1), torch.ones(2).double())


def test_a_closed_gate_leaves_a_slot_exactly_unchanged():
    slots = make(gate=ClosingGate(margin=0.05))
    m, e, key = inputs()
    with torch.no_grad():
        slots.phi_beta.last.weight.zero_()
        slots.phi_beta.last.bias.fill_(-4.0)
    written = slots.write(m, slots.prepare(e, key, torch.ones(len(e)), slots.maps()), slots.maps())
    assert torch.equal(written.slots, m)


def test_the_closing_gate_by_value_and_where_it_starts():
    gate, last = ClosingGate(ajar=-3.0, shut=-5.0, gain=6.0, margin=0.05), torch.nn.Linear(4, 10)
    weight = last.weight.detach().clone()
    gate.start(last)
    torch.testing.assert_close(last.weight, 6 * weight)
    torch.testing.assert_close(last.bias[[0, -1]], torch.tensor([-3.0, -5.0]))
    logits = torch.tensor([-50.0, -3.1, 0.0, 50.0])
    torch.testing.assert_close(gate(logits), torch.tensor([0.0, 0.0, 1.05 * 0.5 - 0.05, 1.0]))


def test_content_comes_first_at_the_start():
    """Before training, what is written does not depend on the path, only where; as PyTorch starts it, both do."""
    torch.manual_seed(0)
    numbers = {"channels": 3, "content": 6, "width": 16, "hidden": 16, "depth": 2, "dropout": 0.0}
    contents, path = torch.randn(2, 9, 6), torch.randn(2, 9, 3).cumsum(1)
    for start, way, depends in (("content", "mixes", False), ("pytorch", "mixes", True), ("pytorch", "routes", False)):
        memory = build(MemoryConfig(start=start, path=way, **numbers)).eval()
        one, other = (memory.scan(contents, p)[1].routing.u for p in (path, path.flip(1)))
        assert ((one - other).abs().max() > 1e-4) == depends


def test_slot_identities_are_distinct_and_scaled():
    eta = slot_identity(4, 512)
    torch.testing.assert_close(eta.norm(dim=1), torch.full((4,), math.sqrt(512.0)))
    assert torch.cdist(eta, eta).fill_diagonal_(99).min() > 5  # of at most 2 * 22.6
    assert eta.mean(0).norm() < 0.2 * math.sqrt(512.0)  # they lie around zero, not to one side


@pytest.mark.parametrize(("identity", "diverge"), [(0.5, True), (0.0, False)])
def test_slots_diverge_from_zero_only_by_their_identity(identity, diverge):
    torch.manual_seed(0)
    memory = build(MemoryConfig(channels=3, content=6, width=16, hidden=16, depth=2, identity=identity)).eval()
    state, _ = memory.scan(torch.randn(2, 30, 6), torch.randn(2, 30, 3).cumsum(1))
    slots = state.cells["slots"]
    apart = (slots[:, 1:] - slots[:, :1]).abs().max()
    assert slots.abs().max() > 0
    assert (apart > 1e-3) == diverge


def test_ablations_take_one_part_away():
    m, e, key = inputs()
    unrouted, mean = make(UnroutedSlots), make(MeanReadSlots)
    drive = unrouted.prepare(e, key, torch.ones(len(e)), unrouted.maps())
    third = torch.full((2, K), 1 / K).double()
    torch.testing.assert_close(unrouted.write(m, drive, unrouted.maps()).omega, third)
    torch.testing.assert_close(mean.read(m, drive)[1], third)
    no_delta = build(MemoryConfig(name="no-delta", channels=3, content=6, width=16, hidden=16, depth=2))
    assert not any("phi_delta" in name for name, _ in no_delta.named_parameters())


def test_the_papers_updater_has_the_papers_size():
    assert sum(p.numel() for p in build(PRESETS["paper"]).parameters()) == 11_905_025
    per_channel = sum(p.numel() for p in build(replace(PRESETS["paper"], gate="closing")).parameters())
    assert per_channel == 11_905_025 + 511 * 513


def test_quick_scans_are_the_same_and_compiled_once_for_all_lengths(monkeypatch):
    """But for the first step, whose slots are empty and need no gradient. Where it is compiled to does not matter here."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # what is compiled cannot check its shapes as tests do
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    memory = build(replace(PRESETS["tiny"], width=16, hidden=16, content=6, channels=3)).eval()
    before = counters["stats"]["unique_graphs"]
    for length in (3, 5, 8):
        contents, path = torch.randn(2, length, 6, requires_grad=True), torch.randn(2, length, 3).cumsum(1)
        wanted, found = [contents, *memory.slots.phi_m.parameters()], []
        for context in (nullcontext(), quick(memory, fuse=True)):
            with context:
                z = memory.scan(contents, path)[1].z
                found.append([z, *torch.autograd.grad(z.square().sum(), wanted)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == before + 2
    assert not {"each", "write"} & set(memory.slots.__dict__)
