"""Signatures against pysiglib and a naive float64 sum; their algebra as properties."""

import itertools
import math

import pysiglib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_errors import UsageError
from trace_memory import signature as home
from trace_memory.signature import LogSignature, Signature, lyndon_words

FADES = [math.inf, 3.0]
KINDS = [Signature, LogSignature]


def path(seed: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(points: torch.Tensor, depth: int) -> torch.Tensor:
    """Iterated integrals of a piecewise-linear path by summing over segments word by word: segments i1 <= ... <= ik with
    1/m! for each run of m equal ones. Independent of Chen's identity and of our code.
    """
    dx = points.diff(dim=0)
    segments, channels = dx.shape
    values = []
    for k in range(1, depth + 1):
        for word in itertools.product(range(channels), repeat=k):
            total = 0.0
            for chosen in itertools.combinations_with_replacement(range(segments), k):
                runs = [len(list(group)) for _, group in itertools.groupby(chosen)]
                weight = 1 / math.prod(math.factorial(run) for run in runs)
                total += weight * math.prod(float(dx[s, c]) for s, c in zip(chosen, word, strict=True))
            values.append(total)
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_agrees_with_a_naive_sum(depth):
    points = path(0, 6, 2)
    _, xi, _ = Signature(2, depth).stream(points[None])
    torch.testing.assert_close(xi[0, -1], naive(points, depth), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_agrees_with_pysiglib_at_the_papers_size(dtype, tolerance):
    points = path(1, 4, 50, 17, dtype=dtype) * 0.3
    signature = Signature(17, 3)
    _, xi, _ = signature.stream(points)
    for t in (1, 7, 49):
        oracle = pysiglib.sig(points[:, : t + 1].double().clone(), 3)
        error = (xi[:, t] - oracle).norm(dim=-1) / oracle.norm(dim=-1)
        assert error.max() < tolerance


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_log_signature_agrees_with_pysiglib(depth):
    points = path(2, 3, 12, 3)
    pysiglib.prepare_log_sig(3, depth, 1)
    _, xi, _ = LogSignature(3, depth).stream(points)
    torch.testing.assert_close(xi[:, -1], pysiglib.log_sig(points, depth, method=1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("letters", "longest"), [(1, 3), (2, 6), (3, 4), (17, 3)])
def test_lyndon_words_agree_with_pysiglib(letters, longest):
    assert lyndon_words(letters, longest) == [tuple(word) for word in pysiglib.lyndon_words(letters, longest)]


def test_dimensions_of_the_paper():
    assert [Signature(17, p).dim for p in (1, 2, 3, 4)] == [17, 306, 5219, 88740]
    assert [LogSignature(17, p).dim for p in (1, 2, 3, 4)] == [17, 153, 1785, 22593]


@pytest.mark.parametrize("fade", FADES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_stream_is_folded_step(kind, fade, dtype, tolerance):
    points = path(3, 3, 20, 4, dtype=dtype)
    signature = kind(4, 3, fade)
    state = signature.init(3, dtype=dtype)
    final, xi, delta = signature.stream(points)
    for t in range(20):
        state, xi_t, delta_t = signature.step(state, points[:, t])
        torch.testing.assert_close(xi_t, xi[:, t], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(delta_t, delta[:, t], rtol=tolerance, atol=tolerance)
    for a, b in zip(state, final, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fade", FADES)
@pytest.mark.parametrize("kind", KINDS)
def test_stream_goes_on_from_a_state_and_skips_padding(kind, fade):
    points = path(4, 2, 16, 3)
    signature = kind(3, 3, fade)
    whole, xi, delta = signature.stream(points)
    state, xi_a, delta_a = signature.stream(points[:, :5])
    junk = torch.full((2, 4, 3), math.nan, dtype=torch.float64)
    holes = torch.cat([points[:, 5:9], junk, points[:, 9:]], dim=1)
    valid = torch.tensor([True] * 4 + [False] * 4 + [True] * 7).expand(2, -1)
    state, xi_b, delta_b = signature.stream(holes, valid, state)
    torch.testing.assert_close(torch.cat([xi_a, xi_b[valid].view(2, 11, -1)], 1), xi)
    torch.testing.assert_close(torch.cat([delta_a, delta_b[valid].view(2, 11, -1)], 1), delta)
    torch.testing.assert_close(state.value, whole.value)
    assert (state.seen == 16).all()
    assert (delta_b[~valid] == 0).all()


@pytest.mark.parametrize("fade", FADES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [10, 60])  # below and above where pysiglib takes over
@pytest.mark.parametrize("installed", [True, False])
def test_chosen_indices_equal_the_stream(kind, fade, length, installed, monkeypatch):
    """With pysiglib, and without."""
    if not installed:
        monkeypatch.setattr(home, "_pysiglib", lambda: None)
    points = path(5, 3, length, 4)
    signature = kind(4, 3, fade)
    last = length - 1
    indices = torch.tensor([[0, 3, 3, last], [5, 5, 5, 2], [last, last - 1, 0, 0]])
    junk = torch.full(
        (3, 3, 4), math.nan, dtype=torch.float64
    )  # padding after the last wanted point is never looked at
    xi, delta = signature.at(torch.cat([points, junk], dim=1), indices)
    _, all_xi, all_delta = signature.stream(points)
    where = indices[..., None].expand(-1, -1, signature.dim)
    torch.testing.assert_close(xi, all_xi.gather(1, where), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(delta, all_delta.gather(1, where), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_point_is_the_basepoint(kind):
    points = path(6, 2, 5, 3)
    signature = kind(3, 3)
    _, xi, delta = signature.stream(points)
    assert (xi[:, 0] == 0).all()
    assert (delta[:, 0] == 0).all()  # delta_1 = 0
    torch.testing.assert_close(delta, torch.diff(xi, dim=1, prepend=torch.zeros_like(xi[:, :1])))


@pytest.mark.parametrize("fade", FADES)
@pytest.mark.parametrize("kind", KINDS)
def test_differentiable_in_the_path(kind, fade):
    points = path(7, 1, 5, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kind(2, 3, fade).stream(x)[1:], points)


paths = st.integers(0, 2**31 - 1)


@settings(max_examples=25, deadline=None)
@given(paths, st.integers(1, 8))
def test_chen(seed, cut):
    """Sig(a * b) = Sig(a) ⊗ Sig(b), the product taken by pysiglib."""
    points = path(seed, 1, 10, 3)
    signature = Signature(3, 3)
    whole = signature.stream(points)[1][0, -1]
    first, second = (signature.stream(x)[1][0, -1] for x in (points[:, : cut + 1], points[:, cut:]))
    torch.testing.assert_close(whole, pysiglib.sig_combine(first, second, 3, 3), rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(paths, st.sampled_from(FADES), st.sampled_from(KINDS), st.integers(2, 5))
def test_time_reparameterisation_changes_nothing(seed, fade, kind, finer):
    """Sampling the same straight pieces more finely, or waiting on the way, leaves the key. Eq. (signature_routing_…)."""
    points = path(seed, 1, 8, 3)
    shares = torch.linspace(0, 1, finer + 1, dtype=torch.float64)[:-1, None] ** 1.7  # uneven speed
    pieces = [a + shares * (b - a) for a, b in itertools.pairwise(points[0])]
    slow = torch.cat([*pieces, points[0, -1:], points[0, -1:]])[None]
    signature = kind(3, 3, fade)
    torch.testing.assert_close(
        signature.stream(slow)[1][:, -1], signature.stream(points)[1][:, -1], rtol=1e-8, atol=1e-8
    )


@settings(max_examples=25, deadline=None)
@given(paths, st.sampled_from(FADES), st.floats(-100, 100))
def test_a_constant_offset_changes_nothing(seed, fade, offset):
    points = path(seed, 1, 8, 3)
    signature = Signature(3, 3, fade)
    moved = signature.stream(points + offset)[1]
    torch.testing.assert_close(moved, signature.stream(points)[1], rtol=1e-8, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(paths, st.sampled_from(FADES))
def test_order_matters(seed, fade):
    points = path(seed, 1, 8, 3)
    signature = Signature(3, 3, fade)
    forth, back = (signature.stream(x)[1][:, -1] for x in (points, points.flip(1)))
    assert (forth - back).norm() > 1e-3 * forth.norm()
    swapped = points[:, [0, 1, 2, 3, 4, 6, 5, 7]]  # the same places in another order, ends kept
    assert (forth - signature.stream(swapped)[1][:, -1]).norm() > 1e-3 * forth.norm()


def test_a_fading_signature_keeps_its_range_on_an_endless_path():
    """|level k| <= fade^k / k!, whatever the length; the plain signature leaves any range."""
    points = path(8, 1, 4000, 3).cumsum(1).sin() * 3
    fading, plain = Signature(3, 3, fade=2.0), Signature(3, 3)
    levels = fading.stream(points)[1].split(fading.sizes, dim=-1)
    for k, level in enumerate(levels, start=1):
        assert level.norm(dim=-1).max() <= 2.0**k / math.factorial(k) + 1e-9
    assert plain.stream(points)[1].abs().max() > 1e3


@pytest.mark.parametrize("numbers", [(0, 3, 1.0), (3, 0, 1.0), (3, 3, 0.0), (3, 3, math.nan)])
def test_impossible_sizes_are_refused(numbers):
    with pytest.raises(UsageError, match="must be positive"):
        Signature(*numbers)
