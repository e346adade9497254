"""Normalisation, losses, adapters, history indices: each by value."""

import math

import numpy as np
import pytest
import torch

from trace_errors import DatasetError, UsageError
from trace_memory.adapters import ConditionAdapter, FeatureModulation, RegressionAdapter, ResidualAdapter
from trace_memory.losses import (
    auxiliary_losses,
    balance_loss,
    consistency_loss,
    entropy_loss,
    weighted,
)
from trace_memory.memory import AuxiliaryWeights, Readout, Routing, history_indices
from trace_memory.normalise import STD_FLOOR, Normaliser
from trace_memory.signature import LogSignature, Signature

EPISODES = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).cumsum(0) for n in (30, 41, 5)]


@pytest.mark.parametrize("signature", [Signature(4, 2), Signature(4, 2, 3.0), LogSignature(4, 3)])
def test_statistics_equal_those_of_all_frames_at_once(signature):
    normaliser = Normaliser(4, signature.dim).double().fit(EPISODES, signature)
    states = np.concatenate([e.double().numpy() for e in EPISODES])
    np.testing.assert_allclose(normaliser.state_mean, states.mean(0), atol=1e-10)
    np.testing.assert_allclose(normaliser.state_std, states.std(0), atol=1e-10)
    assert normaliser.frames == len(states)
    streams = [signature.stream(normaliser.state(e.double())[None])[1:] for e in EPISODES]
    for name, pieces in zip(("xi", "delta"), zip(*streams, strict=True), strict=True):
        rows = torch.cat([p[0] for p in pieces])
        torch.testing.assert_close(getattr(normaliser, f"{name}_mean"), rows.mean(0), rtol=1e-8, atol=1e-8)
        floored = rows.std(0, correction=0).clamp_min(STD_FLOOR)
        torch.testing.assert_close(getattr(normaliser, f"{name}_std"), floored, rtol=1e-8, atol=1e-8)
        standard = getattr(normaliser, name)(rows)
        torch.testing.assert_close(standard.std(0, correction=0)[:4], torch.ones(4).double(), rtol=1e-6, atol=1e-6)


def test_a_masked_or_constant_channel_contributes_nothing():
    signature = Signature(4, 2)
    episodes = [torch.cat([e[:, :3], torch.full((len(e), 1), 7.0)], 1) for e in EPISODES]
    normaliser = Normaliser(4, signature.dim).fit(episodes, signature)
    assert normaliser.mask.tolist() == [True, True, True, False]
    wobble = episodes[0] + torch.tensor([0, 0, 0, 0.1]) * torch.randn(30, 1)
    assert (normaliser.state(wobble)[:, 3] == 0).all()
    masked = Normaliser(4, signature.dim).fit(EPISODES, signature, mask=torch.tensor([False, True, True, True]))
    assert (masked.state(EPISODES[0])[:, 0] == 0).all()
    assert masked.state_mean[0] == 0


def test_keys_are_bounded_softly():
    normaliser = Normaliser(2, 3, bound=10.0)
    x = torch.tensor([0.1, -50.0, 1e30])
    torch.testing.assert_close(normaliser.xi(x), torch.tensor([0.1, -50 / math.hypot(1, 5), 10.0]), rtol=1e-3, atol=0)
    assert torch.equal(Normaliser(2, 3).delta(x), x)


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([], "episodes: none came"),
        ([EPISODES[0], torch.zeros(3, 5)], r"episodes\[1\]: shape \(3, 5\), expected \(T >= 1, 4\)"),
        ([torch.zeros(0, 4)], r"episodes\[0\]: shape \(0, 4\)"),
        ([EPISODES[0] * math.nan], r"episodes\[0\]: has a NaN"),
    ],
)
def test_bad_episodes_are_named_and_change_nothing(episodes, message):
    signature = Signature(4, 2)
    normaliser = Normaliser(4, signature.dim)
    before = {n: b.clone() for n, b in normaliser.named_buffers()}
    with pytest.raises(DatasetError, match=message):
        normaliser.fit(episodes, signature)
    assert all(torch.equal(b, before[n]) for n, b in normaliser.named_buffers())


def test_losses_as_defined():
    omega = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], [[1 / 3, 1 / 3, 1 / 3], [math.nan] * 3]])
    valid = torch.tensor([[True, True], [True, False]])
    mean = [(0.5 + 1 + 1 / 3) / 3, (0.25 + 1 / 3) / 3, (0.25 + 1 / 3) / 3]
    expected = sum((m - 1 / 3) ** 2 for m in mean) / 3
    assert balance_loss(omega, valid) == pytest.approx(expected)
    entropy = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25)) / math.log(3)
    assert entropy_loss(omega, valid) == pytest.approx((entropy + 0 + 1) / 3)
    z, u = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]), torch.tensor([[[0.5, -1.0], [9.0, 9.0]]])
    one = ((math.tanh(1) - math.tanh(0.5)) ** 2 + (math.tanh(2) - math.tanh(-1)) ** 2) / 2
    assert consistency_loss(z, u, torch.tensor([[True, False]])) == pytest.approx(one)


def test_padding_stays_out_of_losses_and_gradients():
    valid = torch.tensor([True, False])
    omega = torch.tensor([[0.3, 0.7], [math.nan, 0.0]], requires_grad=True)
    z = torch.tensor([[1.0], [math.inf]], requires_grad=True)
    u = torch.tensor([[0.5], [math.nan]])
    total = balance_loss(omega, valid) + entropy_loss(omega, valid) + consistency_loss(z, u, valid)
    total.backward()
    assert torch.isfinite(total)
    for grad in (omega.grad, z.grad):
        assert torch.isfinite(grad[0]).all()
        assert (grad[1] == 0).all()


def test_losses_have_finite_gradients_where_routing_is_hard():
    omega = torch.tensor([[1.0, 0.0], [0.3, 0.7]], requires_grad=True)
    entropy_loss(omega, torch.tensor([True, True])).backward()
    assert torch.isfinite(omega.grad).all()


def test_weights_of_losses():
    routing = Routing(torch.tensor([[0.9, 0.1]]), torch.zeros(1, 2), torch.ones(1, 3))
    readout = Readout(torch.zeros(1, 2, 3), *(torch.zeros(1, 3) for _ in range(3)), torch.zeros(1, 2), routing)
    losses = auxiliary_losses(readout, torch.tensor([True]))
    total = weighted(losses, AuxiliaryWeights(2.0, 0.0, 3.0))
    assert total == pytest.approx(float(2 * losses["balance"] + 3 * losses["consistency"]))
    assert weighted(losses, AuxiliaryWeights()) == 0.0
    assert auxiliary_losses(readout._replace(routing=None), torch.tensor([True])) == {}


def readout(slots: int) -> Readout:
    torch.manual_seed(0)
    z, g, dg = (torch.randn(2, 5, 8) for _ in range(3))
    return Readout(torch.randn(2, 5, slots, 8), z, g, dg, torch.softmax(torch.randn(2, 5, slots), -1))


@pytest.mark.parametrize("slots", [0, 1, 4])
def test_adapters(slots):
    r = readout(slots)
    regression, condition = RegressionAdapter(8, 6), ConditionAdapter(8, 10)
    tokens = regression(r)
    assert tokens.shape == (2, 5, slots + 1, 6)
    summary = regression.summary(torch.cat([r.z, r.g, r.dg], -1))
    torch.testing.assert_close(tokens[..., -1, :], summary)
    torch.testing.assert_close(tokens[..., :-1, :], r.slots @ regression.W_M.weight.T)
    pool = torch.einsum("btk,btkd->btd", r.alpha, r.slots)
    inside = torch.nn.functional.gelu(condition.map.first(torch.cat([pool, r.z, r.g, r.dg], -1)))
    torch.testing.assert_close(condition(r), inside @ condition.map.last.weight.T)
    assert condition(r).shape == (2, 5, 8)


def test_a_residual_adds_nothing_at_the_start():
    torch.manual_seed(0)
    r, features, adapter = readout(4).at(0), torch.randn(2, 7, 16), ResidualAdapter(8, 16)
    assert torch.equal(adapter(features, r), features)
    torch.nn.init.eye_(adapter.attention.out_proj.weight)
    tokens = adapter.tokens(r)
    expected = features + adapter.attention(features, tokens, tokens)[0]
    torch.testing.assert_close(adapter(features, r), expected)


def test_feature_modulation_starts_as_the_identity():
    modulation, features = FeatureModulation(6, 5), torch.randn(2, 5)
    assert torch.equal(modulation(torch.randn(2, 6)).apply(features), features)
    torch.nn.init.ones_(modulation.map.bias)
    torch.testing.assert_close(modulation(torch.zeros(2, 6)).apply(features), 2 * features + 1)


@pytest.mark.parametrize("budget", [2, 5, 32])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("t", [0, 1, 4, 7, 200])
def test_history_is_first_frame_strided_tail_and_now(t, budget, stride):
    indices, valid = history_indices(torch.tensor([t]), budget, stride)
    assert indices.shape == valid.shape == (1, budget)
    tail = list(range(t, 0, -stride))[: budget - 1][::-1]
    assert indices[valid].tolist() == [0, *tail]
    assert valid[0, -1]
    assert indices[0, -1] == t  # the current frame always stands last
    assert int(indices.max()) <= t


def test_bad_histories_are_named():
    with pytest.raises(UsageError, match="frames=1"):
        history_indices(torch.tensor([3]), 1, 4)
    with pytest.raises(UsageError, match="t: minimum -1"):
        history_indices(torch.tensor([3, -1]), 4, 4)
