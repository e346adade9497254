"""By what events are found: each trail against an independent computation, and what an address leaves out is not seen."""

import numpy as np
import pytest
import torch

from trace_memory.addresses import PathTrail, RotationTrail, SignatureTrail, StepTrail, multiply
from trace_memory.config import MemoryConfig, build
from trace_memory.events import EventMemory
from trace_memory.memory import MemoryState
from trace_memory.normalise import Normaliser
from trace_memory.signature import Signature

B, T, D = 2, 23, 3


def path(seed: int = 0) -> torch.Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumsum(1) * 0.3


def begun(trail: PathTrail | StepTrail) -> MemoryState:
    tensors = {n: torch.zeros(B, *s, dtype=torch.float64) for n, s in trail.shapes.items()}
    return MemoryState(torch.zeros(B, dtype=torch.int64), tensors)


ALL = torch.ones(B, T, dtype=torch.bool)


def exponential(axis: np.ndarray) -> np.ndarray:
    """exp of a pure quaternion as a 4 x 4 matrix that multiplies from the right, by its power series."""
    x, y, z = axis
    matrix = np.array([[0, -x, -y, -z], [x, 0, z, -y], [y, -z, 0, x], [z, y, -x, 0]])
    total, term = np.eye(4), np.eye(4)
    for n in range(1, 40):
        term = term @ matrix / n
        total = total + term
    return total


def test_rotations_are_the_controlled_equation() -> None:
    """dq = q (w dx), solved step by step with matrix exponentials, for each quaternion."""
    torch.manual_seed(0)
    trail = RotationTrail(Normaliser(D, D + D * D), Signature(D, 2)).double()
    x = path()
    with torch.no_grad():
        found, _ = trail(begun(trail), x, ALL)
        axes = trail.axes.numpy()
    found = found.unflatten(-1, (-1, 4)).numpy()
    steps = np.diff(x.numpy(), axis=1)
    for row in range(B):
        for r in range(len(axes)):
            q = np.array([1.0, 0, 0, 0])
            np.testing.assert_allclose(found[row, 0, r], q, atol=1e-10)
            for t in range(1, T):
                q = exponential(axes[r] @ steps[row, t - 1]) @ q
                np.testing.assert_allclose(found[row, t, r], q, atol=1e-10)


def test_quaternions_multiply_as_they_should() -> None:
    i, j, k = torch.eye(4)[1:].unbind()
    assert multiply(i, j).tolist() == k.tolist()
    assert multiply(j, i).tolist() == (-k).tolist()
    assert multiply(i, i).tolist() == [-1, 0, 0, 0]


def test_the_way_back_undoes_every_turn_and_another_order_does_not() -> None:
    torch.manual_seed(0)
    trail = RotationTrail(Normaliser(D, D + D * D), Signature(D, 2)).double()
    there = path()
    back = torch.cat([there, there.flip(1)], dim=1)
    valid = torch.ones(B, 2 * T, dtype=torch.bool)
    found, _ = trail(begun(trail), back, valid)
    torch.testing.assert_close(found[:, -1], found[:, 0], rtol=1e-9, atol=1e-9)
    moves = there.diff(dim=1)
    other = torch.cat([there[:, :1], there[:, :1] + moves.flip(1).cumsum(1)], dim=1)  # the same moves, last one first
    assert (trail(begun(trail), other, ALL)[0][:, -1] - trail(begun(trail), there, ALL)[0][:, -1]).abs().max() > 0.1


def test_a_signature_trail_is_the_standardised_signature() -> None:
    signature = Signature(D, 2)
    normaliser = Normaliser(D, signature.dim, 3.0).double()
    trail, x = SignatureTrail(normaliser, signature), path()
    trail.fit(list(path(seed=5)))
    found, _ = trail(begun(trail), x, ALL)
    standard = ((x - normaliser.state_mean) / normaliser.state_std).numpy()
    for row in range(B):
        moves = np.diff(standard[row], axis=0)
        first = moves.sum(0)
        second = sum(
            (np.outer(moves[:t].sum(0), moves[t]) + np.outer(moves[t], moves[t]) / 2 for t in range(len(moves))),
            start=np.zeros((D, D)),
        )
        xi = np.concatenate([first, second.ravel()])
        z = (xi - normaliser.xi_mean.numpy()) / normaliser.xi_std.numpy()
        np.testing.assert_allclose(found[row, -1], z / np.hypot(1, z / 3), rtol=1e-8, atol=1e-10)


def test_steps_are_counted_where_they_are_real() -> None:
    trail = StepTrail()
    valid = torch.tensor([[True, False, True]])
    state = MemoryState(torch.tensor([7]), {})
    found, _ = trail(state, torch.zeros(1, 3, D), valid)
    assert (100 * found[0, :, 0]).tolist() == pytest.approx([8, 8, 9])


@pytest.mark.parametrize(
    ("name", "state", "moves", "clock"),
    [
        ("events", True, False, True),
        ("events-seen", False, False, False),
        ("events-state", True, False, False),
        ("events-clock", False, False, True),
        ("events-signature", False, True, False),
        ("events-clock-signature", False, True, True),
    ],
)
def test_an_address_sees_what_it_says(name, state, moves, clock) -> None:
    """Of one event's key: does it depend on the state's half of the content, and on the path? Of a logit: on the order?"""
    torch.manual_seed(0)
    memory = build(MemoryConfig(name=name, channels=D, content=8, width=16, hidden=16)).double().eval()
    assert isinstance(memory, EventMemory)
    x = torch.randn(1, T, 8, dtype=torch.float64)
    other = torch.cat([x[..., :4], x[..., 4:] + 1], dim=-1)
    way = path()[:1]

    def key(contents: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        valid = torch.ones(1, T, dtype=torch.bool)
        seen = memory._split(contents, memory._path(memory.init(1), path, valid))
        return memory.key(seen.address)[0, -1].detach()

    assert bool((key(x, way) != key(other, way)).any()) == state
    assert bool((key(x, way) != key(x, way * 2)).any()) == moves
    assert (memory.order is not None) == clock
