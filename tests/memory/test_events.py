"""The memory of events: what it keeps is what an obvious algorithm keeps, in any chunking; frames shown again and finer
sampling change nothing; what stands out is written, what does not is not; a look points at where the same thing is now.
"""

from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch

from trace_errors import UsageError
from trace_memory import events
from trace_memory.config import MemoryConfig, build
from trace_memory.events import PLAY, SLOTS, EventMemory, backlash, plateau, strongest
from trace_memory.memory import MemoryState, Readout

B, T, E, D = 2, 150, 6, 3
MAP = (2, 4, 2, 3)  # views, features, height, width
CONFIG = MemoryConfig(name="events", channels=D, content=E, width=16, hidden=16, map=MAP, plain=2)
ALL = torch.arange(T).expand(B, -1)


def make(dtype: torch.dtype = torch.float64) -> EventMemory:
    """Its common pictures are the dull half of `contents`."""
    torch.manual_seed(0)
    memory = build(CONFIG).to(dtype).eval()
    assert isinstance(memory, EventMemory)
    return memory.fit([0.5 * contents().flatten(0, 1)])


def contents(rows: int = B, steps: int = T) -> torch.Tensor:
    """Every frame stands out more or less, or not at all."""
    generator = torch.Generator().manual_seed(1)
    size = torch.rand(rows, steps, 1, generator=generator, dtype=torch.float64)
    return size * torch.randn(rows, steps, CONFIG.inputs, generator=generator, dtype=torch.float64)


def path(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(*x.shape[:2], D)


def tensors(readout: Readout) -> list[torch.Tensor]:
    return [x for x in (readout.slots, readout.z, readout.alpha, readout.counts, readout.points) if x is not None]


def assert_same(a: MemoryState, b: MemoryState, tolerance: float = 1e-10) -> None:
    for name, x in a.tensors.items():
        torch.testing.assert_close(
            x, b.tensors[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_more_events_come_than_are_kept() -> None:
    """Without this the tests of the store below would test little."""
    x = contents()
    state, _ = make().scan(x, path(x))
    assert (state.tensors["clock"] > SLOTS).all()
    assert (state.tensors["strength"] > 0).all()


@pytest.mark.parametrize("chunk", [1, 7, 32, 64, 1000])
def test_any_chunking_gives_the_same(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Numbers and gradients, at every step."""
    memory, x = make(), contents().requires_grad_()

    def run() -> tuple[MemoryState, Readout, torch.Tensor]:
        state, readouts = memory.scan(x, path(x))
        total = sum((y.square().sum() for y in tensors(readouts)), start=torch.zeros(()))
        return state, readouts, torch.autograd.grad(total, x)[0]

    expected = run()
    monkeypatch.setattr(events, "CHUNK", chunk)
    found = run()
    assert_same(found[0], expected[0])
    for a, b in zip([*tensors(found[1]), found[2]], [*tensors(expected[1]), expected[2]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_readouts_at_some_steps_are_those_of_all() -> None:
    """And so are their gradients, though other frames are encoded."""
    memory, x = make(), contents().requires_grad_()
    at = torch.tensor([[3, 77, 149], [140, 0, 77]])
    rows = torch.arange(B)[:, None]
    few_state, few = memory.scan(x, path(x), at=at)
    state, every = memory.scan(x, path(x))
    assert_same(few_state, state)
    picked = every.map(lambda y: y[rows, at])
    grads = []
    for readout in (few, picked):
        for a, b in zip(tensors(readout), tensors(picked), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        total = sum((y.square().sum() for y in tensors(readout)), start=torch.zeros(()))
        grads.append(torch.autograd.grad(total, x)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


def test_what_is_kept_is_what_an_obvious_algorithm_keeps() -> None:
    """The oracle: numpy, one frame after the other, a sorted list."""
    memory, x = make(), contents()
    with torch.no_grad():
        state, _ = memory.scan(x, path(x))
        split = memory._split(x)
        learned = events.LEARNED * memory.gate(split.e)[..., 0].numpy()
        plain = split.places[..., -CONFIG.plain :].flatten(-3).numpy()
    unusual = memory.standout
    distance = np.log((((plain - unusual.mean.numpy()) / unusual.std.numpy()) ** 2).mean(-1) + 1e-3)
    nu = (distance - unusual.middle.numpy()) / unusual.spread.numpy()
    for row in range(B):
        y, clock, store = PLAY, 0.0, []
        for t in range(T):
            opened = 1 / (1 + np.exp(-(learned[row, t] + events.SLOPE * (nu[row, t] - events.BAR))))
            b = min(max(1.5 * opened - 0.25, 0.0), 1.0)
            before, y = y, min(max(y, b - PLAY), b + PLAY)
            rate = 1.0 if t == 0 else max(y - before, 0.0) / (1 - 2 * PLAY)
            clock += rate
            if rate > 0:
                store.append((rate * (1 + opened) / 2, rate, clock - rate / 2))
            store = sorted(store, key=lambda event: -event[0])[:SLOTS]
        expected = np.array(store)
        found = torch.stack([state.tensors[n][row] for n in ("strength", "rate", "when")], -1).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        np.testing.assert_allclose(float(state.tensors["clock"][row]), clock, rtol=1e-9)


def test_what_is_read_is_what_the_equations_say() -> None:
    """By value: event by event and head by head, in numpy, from the state that a scan leaves."""
    memory, x = make(), contents()
    with torch.no_grad():
        memory.salience.copy_(torch.linspace(-1, 1, MAP[1]))
        memory.none.copy_(torch.linspace(-1, 1, events.HEADS))
        state, readouts = memory.scan(x, path(x))
        last = memory._split(x[:, -1])
        query, order = memory.query(last.e).numpy(), memory.order(last.e).numpy()
        assert memory.look is not None
        weight, bias = memory.look.weight.numpy(), memory.look.bias.numpy()
        none, kappa = memory.none.numpy(), float(memory.kappa.exp())
    found = readouts.at(-1)
    assert found.counts is not None
    assert found.points is not None
    views, _, high, wide = MAP
    size = CONFIG.width // events.HEADS
    for row in range(B):
        kept = {name: tensor[row].numpy() for name, tensor in state.tensors.items()}
        for h in range(events.HEADS):
            part = slice(h * size, (h + 1) * size)
            weights, counted = [], 0.0
            for n in range(SLOTS):
                logit = query[row, part] @ kept["key"][n, part] / np.sqrt(size)
                for j in range(events.BUMPS):
                    bump = np.exp(-2 * (kept["when"][n] - j - 0.5) ** 2)
                    logit += order[row, h * events.BUMPS + j] * bump
                weights.append(kept["rate"][n] * np.exp(logit))
                counted += kept["rate"][n] / (1 + np.exp(-logit))
            share = np.array(weights) / (np.exp(none[h]) + sum(weights))
            np.testing.assert_allclose(found.z[row, part], share @ kept["value"][:, part], rtol=1e-8)
            assert float(found.counts[row, h]) == pytest.approx(counted)
            for v in range(views):
                point = np.zeros(2)
                here = [weight @ last.places[row, v, p].numpy() + bias for p in range(high * wide)]
                for n in range(SLOTS):
                    look = kept["look"][n]
                    alike = [y @ look / np.linalg.norm(y) / np.linalg.norm(look) for y in here]
                    where = np.exp(kappa * np.array(alike))
                    for p in range(high * wide):
                        place = np.array([2 * (p // wide) / (high - 1) - 1, 2 * (p % wide) / (wide - 1) - 1])
                        point += share[n] * where[p] / where.sum() * place
                np.testing.assert_allclose(found.points[row, h, v], point, rtol=1e-8, atol=1e-10)


def test_backlash_is_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(3)
    b = torch.rand(4, 61, generator=generator, dtype=torch.float64)
    valid = torch.rand(4, 61, generator=generator) > 0.2
    found = backlash(b, valid, torch.zeros(4, dtype=torch.float64))
    for row in range(4):
        y = PLAY
        for t in range(61):
            if valid[row, t]:
                y = min(max(y, float(b[row, t]) - PLAY), float(b[row, t]) + PLAY)
            assert float(found[row, t]) == pytest.approx(y - PLAY, abs=1e-12)


@pytest.mark.parametrize("often", [2, 5])
def test_frames_shown_again_change_nothing(often: int) -> None:
    memory, x = make(), contents()
    state, readouts = memory.scan(x, path(x))
    again = x.repeat_interleave(often, dim=1)
    other, found = memory.scan(again, path(again))
    assert_same(other, state)
    for a, b in zip(tensors(found.at(-1)), tensors(readouts.at(-1)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_rise_counts_the_same_however_finely_it_is_sampled() -> None:
    """The event clock is an integral along the gate's path: it does not know how many steps a rise took."""
    steps = torch.cat([torch.linspace(0, 1, 9), torch.ones(4), torch.linspace(1, 0, 5)]).double()
    fine = torch.nn.functional.interpolate(steps[None, None], scale_factor=8, mode="linear", align_corners=True)[0, 0]
    zero = torch.zeros(1, dtype=torch.float64)
    clocks = []
    for b in (steps, fine, torch.tensor([0.0, 1.0, 0.0]).double()):
        level = backlash(b[None], torch.ones(1, len(b), dtype=torch.bool), zero)
        clocks.append(float(torch.cat([zero[:, None], level], 1).diff().relu().sum() / (1 - 2 * PLAY)))
    assert clocks == pytest.approx([1, 1, 1], abs=1e-12)


def test_small_noise_is_no_event() -> None:
    noise = 2 * PLAY * torch.rand(1, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level = backlash(noise, torch.ones(1, 500, dtype=torch.bool), torch.zeros(1, dtype=torch.float64))
    assert float(level.max()) == 0.0


def test_a_gate_is_exactly_shut_and_exactly_open() -> None:
    s = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
    b = plateau(s)
    assert b.tolist() == [0.0, 0.5, 1.0]
    assert (torch.autograd.grad(b.sum(), s)[0] > 0).all()  # and can be opened and shut by learning still


def scene(kinds: list[int], steps: int = 30) -> torch.Tensor:
    """A dull row of frames; at steps 5, 10, ... a thing of some kind stands in one of the six places of the first view."""
    generator = torch.Generator().manual_seed(7)
    x = 0.05 * torch.randn(1, steps, CONFIG.inputs, generator=generator, dtype=torch.float64)
    for number, kind in enumerate(kinds, start=1):
        show(x[0, 5 * number], kind, place=number % 6)
    return x


def show(frame: torch.Tensor, kind: int, place: int) -> None:
    views, features, high, wide = MAP
    picture = frame[E:].view(views, features, high * wide)
    picture[0, :, place] = torch.eye(features, dtype=frame.dtype)[kind] * 3 + torch.tensor([0, 0, 2.0, 2.0]).to(frame)


@pytest.fixture
def eyes() -> EventMemory:
    """A memory for which `scene` is common but for its things."""
    torch.manual_seed(0)
    memory = build(CONFIG).double().eval()
    assert isinstance(memory, EventMemory)
    return memory.fit([scene([0, 1, 2, 3, 0])[0], scene([3, 2, 1, 0, 3])[0]])


def test_what_stands_out_is_written_from_the_first_update_on(eyes: EventMemory) -> None:
    """One event each, and the first step, at places near 1/2, 3/2, ... of the clock, before anything was learned."""
    x = scene([0, 1, 2])
    state, _ = eyes.scan(x, path(x))
    assert int((state.tensors["strength"] > 0).sum()) == 4
    assert state.tensors["when"][0, :4].sort().values.tolist() == pytest.approx([0.5, 1.5, 2.5, 3.5], abs=0.15)


@pytest.mark.parametrize("place", range(6))
def test_a_look_points_at_where_the_same_thing_is_now(eyes: EventMemory, place: int) -> None:
    """At initialisation: of two things in sight it is the one that was shown which is pointed at."""
    right = 0
    for shown in range(4):
        x = scene([shown])
        other = (place + 3) % 6
        show(x[0, -1], shown, place)
        show(x[0, -1], (shown + 1) % 4, other)
        with torch.no_grad():
            look = eyes._look(eyes._split(x[:, 5:6]).places)
            points = eyes._points(look, x.new_ones(1, 1, 1, 1), eyes._split(x[:, -1:]).places)
        assert points is not None
        near = (points[0, 0, 0, 0] - eyes.grid).square().sum(-1)
        right += int(near[place] < near[other])
    assert right == 4


def test_the_state_has_the_size_that_is_promised() -> None:
    small = MemoryConfig(name="events", channels=3, content=128, width=64, hidden=64, map=(1, 19, 2, 2), plain=3)
    large = MemoryConfig(name="events", channels=17, content=1024, width=512, hidden=512, map=(3, 19, 8, 8), plain=3)
    assert build(small).state_bytes <= 16 * 1024
    assert build(large).state_bytes <= 256 * 1024


def test_of_equals_the_first_is_kept() -> None:
    assert strongest(torch.tensor([[0.5, 1.0, 0.5, 1.0]]), 3).tolist() == [[1, 3, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"map": (1, 2, 3)}, r"memory map: \(1, 2, 3\), expected views"),
        ({"map": (1, 0, 3, 3)}, "memory map: 0, expected a whole number"),
        ({"plain": 5}, "memory plain: 5, expected 1 to 4"),
        ({"map": None}, "memory plain: 2, expected 0"),
        ({"name": "gru"}, "memory map: given for memory 'gru'"),
    ],
)
def test_a_map_that_makes_no_sense_is_named(change, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it would refuse wrong types itself, in tests
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **change)


def test_a_width_that_the_heads_do_not_divide_is_named() -> None:
    with pytest.raises(UsageError, match="a width that 4 divides"):
        build(MemoryConfig(name="events", content=8, width=10))


def test_the_prior_is_of_the_whole_scan() -> None:
    """However many readouts are wanted."""
    memory, x = make(), contents()
    _, few = memory.scan(x, path(x), at=ALL[:, :3])
    assert few.prior is not None
    with torch.no_grad():
        learned = events.LEARNED * memory.gate(memory._split(x).e)[..., 0]
    torch.testing.assert_close(few.prior, learned.square().mean(1, keepdim=True).expand(-1, 3), rtol=1e-12, atol=1e-12)
