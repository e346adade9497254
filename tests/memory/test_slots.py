"""The equations of routing, writing and reading, by value, against a transcription with explicit loops."""

import math

import pytest
import torch

from trace_memory.ablations import EvenRoute, MeanRead
from trace_memory.config import MemoryConfig, PaperOptions, build
from trace_memory.keys import Key
from trace_memory.slots import AttentionRead, ClosingGate, CosineRoute, DotRoute, ScalarGate, Slots, slot_identity

K, D, C = 3, 8, 5


def make(gate=None, route=None, read=None, **numbers) -> Slots:
    torch.manual_seed(0)
    parts = (gate or ScalarGate(), route or DotRoute(D), read or AttentionRead(D))
    return Slots(K, D, 7, C, 2 * D, *parts, **numbers).double()


def given(batch=2):
    torch.manual_seed(1)
    key = Key(*(torch.randn(batch, n).double() for n in (D, D, 2 * D, D)))
    return torch.randn(batch, K, D).double(), torch.randn(batch, C).double(), key


@pytest.mark.parametrize("gate", [ScalarGate(), ClosingGate()])
def test_write_and_read_as_the_paper_writes_them(gate):
    slots = make(gate, DotRoute(D, tau=0.7), identity=0.5)
    m, e, key = given()
    inputs = slots.prepare(e, key, torch.ones(len(e)), slots.maps())
    written = slots.write(m, inputs, slots.maps())
    z, alpha = slots.read(written.slots, inputs)
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
        torch.testing.assert_close(inputs.u[b], u)


def test_cosine_routes_stay_soft():
    """However large key and slots become, no slot is beyond the reach of the gradient."""
    slots = make(route=CosineRoute(D))
    m, e, key = given()
    huge = [
        slots.prepare(e, key._replace(rho=key.rho * size), torch.ones(len(e)), slots.maps()).route
        for size in (10.0, 1e4)
    ]
    torch.testing.assert_close(*huge, rtol=1e-4, atol=1e-4)
    wide = slots.omega(huge[0], m)
    torch.testing.assert_close(slots.omega(huge[1], 1e4 * m), wide, rtol=1e-3, atol=1e-4)
    aligned = slots.omega(m[:, 0] / m[:, 0].norm(dim=-1, keepdim=True), m)
    assert aligned.max() > wide.max() > 1 / K
    assert aligned.min() > 1 / (1 + K * math.exp(2 * 0.25 * math.sqrt(D)))
    assert make().omega(1e4 * m[:, 0], m).min() == 0  # what cosines spare us


def test_a_path_that_never_moved_teaches_calmly():
    """Keys are nothing then, and a direction of nothing must not have a huge gradient."""
    torch.manual_seed(0)
    memory = build(MemoryConfig(channels=3, content=6, width=16, hidden=16))
    readouts = memory.scan(torch.randn(2, 9, 6), torch.zeros(2, 9, 3))[1]
    readouts.z.square().sum().backward()
    assert max(float(p.grad.abs().max()) for p in memory.parameters() if p.grad is not None) < 1e6  # not 1e14


def test_weights_sum_to_one():
    slots = make()
    m, e, key = given()
    inputs = slots.prepare(e, key, torch.ones(len(e)), slots.maps())
    written = slots.write(m, inputs, slots.maps())
    torch.testing.assert_close(written.omega.sum(-1), torch.ones(2).double())
    torch.testing.assert_close(slots.read(m, inputs)[1].sum(-1), torch.ones(2).double())


def test_a_closed_gate_leaves_a_slot_exactly_unchanged():
    slots = make(gate=ClosingGate(margin=0.05))
    m, e, key = given()
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
    """Before training, what our form writes does not depend on the path, only where; what the paper's writes does."""
    torch.manual_seed(0)
    numbers = {"channels": 3, "content": 6, "width": 16, "hidden": 16, "dropout": 0.0}
    contents, path = torch.randn(2, 9, 6), torch.randn(2, 9, 3).cumsum(1)
    for name, depends in (("trace", False), ("paper", True)):
        memory = build(MemoryConfig(name=name, **numbers)).eval()
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
    numbers = {"channels": 3, "content": 6, "width": 16, "hidden": 16}
    memory = build(MemoryConfig(name="paper", paper=PaperOptions(identity=identity), **numbers)).eval()
    state, _ = memory.scan(torch.randn(2, 30, 6), torch.randn(2, 30, 3).cumsum(1))
    slots = state.tensors["slots"]
    apart = (slots[:, 1:] - slots[:, :1]).abs().max()
    assert slots.abs().max() > 0
    assert (apart > 1e-3) == diverge


def test_ablations_take_one_part_away():
    m, e, key = given()
    even, mean = make(route=EvenRoute()), make(read=MeanRead())
    inputs = even.prepare(e, key, torch.ones(len(e)), even.maps())
    third = torch.full((2, K), 1 / K).double()
    torch.testing.assert_close(even.write(m, inputs, even.maps()).omega, third)
    torch.testing.assert_close(mean.read(m, inputs)[1], third)
    numbers = {"channels": 3, "content": 6, "width": 16, "hidden": 16}
    memories = {n: build(MemoryConfig(name=n, **numbers)) for n in ("unrouted", "mean-read", "no-delta")}
    assert isinstance(memories["unrouted"].slots.omega, EvenRoute)
    assert isinstance(memories["mean-read"].slots.alpha, MeanRead)
    assert not any("phi_delta" in name for name, _ in memories["no-delta"].named_parameters())
    readouts = memories["no-delta"].scan(torch.randn(2, 9, 6), torch.randn(2, 9, 3).cumsum(1))[1]
    assert (readouts.dg == 0).all()
    assert (readouts.g != 0).any()


def test_ablations_start_as_trace_does():
    """With the same seed all of their weights are TRACE's."""
    made = {}
    for name in ("trace", "unrouted", "mean-read", "no-delta"):
        torch.manual_seed(3)
        made[name] = dict(build(MemoryConfig(name=name, channels=3, content=6, width=16, hidden=16)).named_parameters())
    for name, weights in made.items():
        assert len(weights) == len(made["trace"]) - 4 * (name == "no-delta")
        assert all(torch.equal(weight, made["trace"][key]) for key, weight in weights.items())


def test_the_papers_updater_has_the_papers_size():
    assert sum(p.numel() for p in build(MemoryConfig(name="paper")).parameters()) == 11_905_025
    anchor, per_channel = 1024 * 512 * 2, 511 * 513  # phi_rho and phi_w see the anchor; the gate is one a channel
    assert sum(p.numel() for p in build(MemoryConfig()).parameters()) == 11_905_025 + anchor + per_channel
