"""A store of events (`EventMemory`): the few frames that stood out most, each with a key, a value, a look and its place in
the order of events. An event is written by a gate that closes by itself; what is read does not depend on how finely time is
sampled. How it is scanned in parallel over time stands here too, beside the step that it equals.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_errors import UsageError
from trace_memory.addresses import Address, Trail
from trace_memory.config import MemoryConfig
from trace_memory.keys import MLP
from trace_memory.memory import AuxiliaryWeights, Memory, MemoryState, PathFeatures, Readout

SLOTS = 24  # N, events that are kept
HEADS = 4  # H
BUMPS = 12  # J, places in the order of events that can be told apart
PLAY = 0.25  # w, of the backlash
SLOPE, BAR = 3.0, 1.0  # a and theta: how far from common a frame must be, in standard deviations, to open the gate
LEARNED = 0.3  # of the learned part of the gate: it starts right, and must not drift before that pays
LEAK = 0.1  # of the gradient beyond the gate's plateaus
SHARP = 8.0  # kappa, of pointers at the start
CHUNK = 64  # steps that are scanned at once where every one is read


class Split(NamedTuple):
    """A content taken apart."""

    e: Float[Tensor, "*n E"]
    places: Float[Tensor, "*n V P f"]  # of V views; P = h w
    address: Float[Tensor, "*n A"]  # what keys and queries are made of


class Event(NamedTuple):
    """What is kept of frames, stronger ones first; all are (B, M, ...). A strength of zero is none."""

    strength: Tensor
    rate: Tensor  # r, how much of an event began here
    when: Tensor  # by the event clock: the n-th event stands at n - 1/2
    key: Tensor
    value: Tensor
    look: Tensor

    def pick(self, index: Int[Tensor, "B m"]) -> "Event":
        """Some of them."""
        return Event(*(_take(x, index) for x in self))

    def join(self, other: "Event") -> "Event":
        """These, then others."""
        return Event(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))


class Writes(NamedTuple):
    """What the gate does at each step, (B, T) each but the last."""

    level: Tensor  # y - w
    clock: Tensor  # c
    strength: Tensor
    rate: Tensor
    when: Tensor
    prior: Tensor  # (B,): how far the gate has left its start


class StandOut(nn.Module):
    """nu: how far a plain picture is from common ones, in standard deviations. Nothing here learns, so it cannot drift; the
    statistics are fitted once, before training.

    Args:
        width: of a plain picture.
    """

    mean: Tensor
    std: Tensor
    middle: Tensor
    spread: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.register_buffer("middle", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))

    def _distance(self, x: Tensor) -> Tensor:
        return (((x - self.mean) / self.std).square().mean(-1) + 1e-3).log()

    def forward(self, x: Float[Tensor, "*n X"]) -> Float[Tensor, "*n"]:
        """nu of each."""
        return (self._distance(x) - self.middle) / self.spread

    @torch.no_grad()
    def fit(self, pictures: Float[Tensor, "N X"]) -> None:
        """Takes these for what is common."""
        self.mean.copy_(pictures.mean(0))
        self.std.copy_(pictures.std(0).clamp_min(1e-3))
        distance = self._distance(pictures)
        self.middle.copy_(distance.mean())
        self.spread.copy_(distance.std().clamp_min(1e-3))


class EventMemory(Memory):
    """Keeps the `SLOTS` frames at which most of an event began, and reads them by what they were, by their place in the
    order of events, and by what of them is in sight now.

    A content is an embedding e and, if there is a map of the picture, its features place by place; the last `plain` features
    are colours and the like, which nothing learns: by these a frame stands out. Without a map that is asked of e itself.

    Args:
        content: width of what is seen in a step, map included.
        channels: width of a robot state, d_s.
        width: d, of keys, values and the readout.
        map: views, features, height and width of the map; None for no map.
        plain: how many of its features are plain.
        address: by what events are found.
        trail: the address's, if it has one.

    Example:
        >>> import torch
        >>> from trace_memory import MemoryConfig, build
        >>> memory = build(MemoryConfig(name="events", channels=7, content=64, width=32, hidden=32))
        >>> _, readouts = memory.scan(torch.randn(2, 100, 64), torch.zeros(2, 100, 7))
        >>> tuple(readouts.z.shape), memory.state_bytes
        ((2, 100, 32), 8056)
    """

    grid: Tensor

    def __init__(
        self,
        *,
        content: int,
        channels: int,
        width: int,
        hidden: int,
        map: tuple[int, int, int, int] | None = None,
        plain: int = 0,
        address: Address = Address(),  # noqa: B008
        trail: Trail | None = None,
    ):
        super().__init__(content=content, channels=channels, width=width)
        self.map, self.plain = map, plain
        views, features, high, wide = map or (0, 0, 0, 0)
        self.embedded = content - views * features * high * wide
        if width % HEADS or self.embedded < 1 or (map is not None and not 0 < plain <= features):
            raise UsageError(
                f"memory events: width {width}, content {content}, map {map}, plain {plain}; expected a width that {HEADS} "
                "divides, a content wider than the map, and 1 or more plain features of it"
            )
        self.looks = width // 2 if map else 0
        self.gate = MLP(self.embedded, hidden, 1)
        self.columns, self.trail = address.columns(self.embedded), trail
        keyed = self.columns + (trail.width if trail else 0)
        self.key, self.query = MLP(keyed, hidden, width), MLP(keyed, hidden, width)
        self.order = MLP(self.embedded, hidden, HEADS * BUMPS) if address.clock else None
        self.value = nn.Linear(self.embedded, width)
        self.look = nn.Linear(features, self.looks) if map else None
        self.salience = nn.Parameter(torch.zeros(features))
        self.none = nn.Parameter(torch.zeros(HEADS))
        self.kappa = nn.Parameter(torch.tensor(math.log(SHARP)))
        self.standout = StandOut(views * plain * high * wide if map else self.embedded)
        for layer in (self.value, self.look):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.gate.last.weight.mul_(0.2 / LEARNED)
        rows, columns = (torch.linspace(-1, 1, n) if n > 1 else torch.zeros(n) for n in (high, wide))
        self.register_buffer("grid", torch.cartesian_prod(rows, columns).view(-1, 2), persistent=False)

    @classmethod
    def from_config(cls, config: MemoryConfig, address: Address = Address()) -> "EventMemory":  # noqa: B008
        """In the sizes of a configuration."""
        c, trail = config, address.make_trail(config)
        sizes = {"content": c.inputs, "channels": c.channels, "width": c.width, "hidden": c.hidden}
        return cls(**sizes, map=c.map, plain=c.plain, address=address, trail=trail)

    @property
    def auxiliary(self) -> AuxiliaryWeights:
        """What holds the gate to what stands out, unless leaving it pays."""
        return AuxiliaryWeights(prior=0.002)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The gate's level, the event clock, the events, and what the trail keeps."""
        sizes = ((), (), (), (self.width,), (self.width,), (self.looks,))
        events = {n: (SLOTS, *s) for n, s in zip(Event._fields, sizes, strict=True)}
        return {"level": (), "clock": ()} | events | (self.trail.shapes if self.trail else {})

    def fit(
        self, contents: Iterable[Float[Tensor, "_ c"]], paths: Sequence[Float[Tensor, "_ d_s"]] = ()
    ) -> "EventMemory":
        """Learns what is common from the training data; call it once, before training.

        Args:
            contents: some hundreds of frames or more, in pieces.
            paths: of raw robot states, an episode each, for an address that looks at them.

        Returns:
            Itself.
        """
        self.standout.fit(torch.cat([self._plain(self._split(x)) for x in contents]).to(self.standout.mean))
        if self.trail is not None:
            self.trail.fit(list(paths))
        return self

    def _path(self, state: MemoryState, path: Tensor, valid: Tensor) -> PathFeatures | None:
        return None if self.trail is None else self.trail.features(state, path, valid)

    def _path_at(self, path: Tensor, at: Tensor) -> PathFeatures | None:
        every = torch.ones_like(path[..., 0], dtype=torch.bool)
        found = self._path(self.init(len(path)), path, every)
        rows = torch.arange(len(at), device=at.device)[:, None]
        return None if found is None else found.map(lambda x: x[rows, at])

    def _split(self, contents: Tensor, path: PathFeatures | None = None) -> Split:
        e, places = contents[..., : self.embedded], contents[..., self.embedded :]
        views, features, high, wide = self.map or (0, 0, 0, 0)
        address = e[..., : self.columns]
        address = address if path is None else torch.cat([address, path.xi], dim=-1)
        return Split(e, places.unflatten(-1, (views, features, high * wide)).transpose(-1, -2), address)

    def _plain(self, seen: Split) -> Tensor:
        return seen.places[..., -self.plain :].flatten(-3) if self.map else seen.e.detach()

    # -- writing -----------------------------------------------------------------------------------------------------------

    def _gate(self, state: MemoryState, seen: Split, valid: Tensor) -> Writes:
        """Eqs. (event_gate) to (event_clock): how much of an event begins at each step (B, T). An episode's first always is
        one.
        """
        learned = LEARNED * self.gate(seen.e)[..., 0]
        s = learned + SLOPE * (self.standout(self._plain(seen)) - BAR)
        before = state.tensors["level"]
        level = backlash(plateau(s), valid, before)
        rate = (level - torch.cat([before[:, None], level[:, :-1]], dim=1)).relu() / (1 - 2 * PLAY)
        first = valid & (state.steps[:, None] + valid.cumsum(1) == 1)
        rate = torch.where(first, 1.0, rate)
        clock = state.tensors["clock"][:, None] + rate.cumsum(1)
        prior = (learned.square() * valid).sum(1) / valid.sum(1).clamp_min(1)
        return Writes(level, clock, rate * (1 + s.sigmoid()) / 2, rate, clock - rate / 2, prior)

    def _events(self, writes: Writes, seen: Split, index: Tensor | None = None) -> Event:
        """What is kept of steps, or of some of them (B, m)."""
        written = writes.strength, writes.rate, writes.when
        strength, rate, when = written if index is None else (_take(x, index) for x in written)
        seen = seen if index is None else Split(*(_take(x, index) for x in seen))
        return Event(strength, rate, when, self.key(seen.address), self.value(seen.e), self._look(seen.places))

    def _look(self, places: Tensor) -> Tensor:
        """What a frame looks like, where it differs most from the rest of it: (*n, V, P, f) to (*n, D)."""
        if self.look is None:
            return places.new_zeros(*places.shape[:-3], 0)
        far = (places - places.mean(-2, keepdim=True)).square().sum(-1).add(1e-8).sqrt()
        score = places @ self.salience + 4 * far / far.mean((-1, -2), keepdim=True)
        weight = score.flatten(-2).softmax(-1)
        return (self.look(places.flatten(-3, -2)) * weight[..., None]).sum(-2)

    def _step(self, state: MemoryState, content: Tensor, robot_state: Tensor) -> tuple[dict[str, Tensor], Readout]:
        valid = torch.ones_like(content[:, :1], dtype=torch.bool)
        path = self._path(state, robot_state[:, None], valid)
        seen = self._split(content[:, None], path)
        writes = self._gate(state, seen, valid)
        store = self._kept(state).join(self._events(writes, seen))
        store = store.pick(strongest(store.strength, SLOTS))
        readouts = self._read(store, (store.strength > 0)[:, None], seen, writes)
        return self._tensors(writes, store) | ({} if path is None else path.tensors), readouts.at(0)

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        readouts, steps = list[Readout](), torch.arange(contents.shape[1], device=contents.device)
        for begin in range(0, contents.shape[1], CHUNK):
            part = slice(begin, begin + CHUNK)
            at = (steps[part] - begin).expand(len(contents), -1)
            way = None if path is None else path.map(partial(_steps, part=part))
            tensors, found = self._run_at(state, contents[:, part], way, valid[:, part], at)
            state = MemoryState(state.steps + valid[:, part].sum(1), tensors)
            readouts.append(found)
        return state.tensors, readouts[0].join(readouts[1:], lambda x: torch.cat(x, dim=1))

    def _run_at(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor, at: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        seen, store = self._split(contents, path), self._kept(state)
        writes, rows = self._gate(state, seen, valid), torch.arange(len(at), device=at.device)[:, None]
        strength = torch.cat([store.strength, writes.strength], dim=1)  # (B, M): the store, then the steps
        time = torch.arange(-SLOTS, contents.shape[1], device=at.device)
        there = (
            time <= torch.cat([at, torch.full_like(at[:, :1], contents.shape[1])], dim=1)[..., None]
        )  # (B, R + 1, M)
        now = torch.where(there, strength[:, None], -1.0)
        best = strongest(now, SLOTS)
        kept = torch.zeros_like(there).scatter(2, best, value=True) & there & (strength[:, None] > 0)
        wanted = kept[:, :, SLOTS:].any(1)  # (B, T): steps that are kept at some time that matters
        count = contents.shape[1] if at.shape[1] == contents.shape[1] else int(wanted.sum(1).max())
        index = wanted.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :count]
        everything = store.join(self._events(writes, seen, index))
        places = torch.cat([torch.arange(SLOTS, device=at.device).expand(len(at), -1), SLOTS + index], dim=1)
        kept = kept.gather(2, places[:, None].expand(-1, kept.shape[1], -1))
        last = everything.pick(strongest(everything.strength, SLOTS))
        readouts = self._read(everything, kept[:, :-1], Split(*(x[rows, at] for x in seen)), writes)
        return self._tensors(writes, last), readouts

    def _kept(self, state: MemoryState) -> Event:
        return Event(*(state.tensors[name] for name in Event._fields))

    def _tensors(self, writes: Writes, store: Event) -> dict[str, Tensor]:
        return {"level": writes.level[:, -1], "clock": writes.clock[:, -1]} | store._asdict()

    # -- reading -----------------------------------------------------------------------------------------------------------

    def _read(self, store: Event, kept: Tensor, seen: Split, writes: Writes) -> Readout:
        """Eqs. (event_logit) to (event_point): what R steps read of M events, of which `kept` (B, R, M) are there."""
        (batch, times), events = seen.e.shape[:2], store.key.shape[1]
        query = self.query(seen.address).view(batch, times, HEADS, -1)
        key, value = (x.view(batch, events, HEADS, -1) for x in (store.key, store.value))
        logit = torch.einsum("brhd,bmhd->brhm", query, key) * query.shape[-1] ** -0.5
        if self.order is not None:
            bumps = (-2 * (store.when[..., None] - torch.arange(BUMPS, device=kept.device) - 0.5).square()).exp()
            order = self.order(seen.e).view(batch, times, HEADS, BUMPS)
            logit = logit + torch.einsum("brhj,bmj->brhm", order, bumps)
        rate = (store.rate.clamp(max=1)[:, None] * kept)[:, :, None].expand_as(logit)
        none = self.none[:, None].expand(*logit.shape[:-1], 1)
        top = torch.where(rate > 0, logit, -torch.inf).amax(-1, keepdim=True).maximum(none).detach()
        weight = rate * (logit - top).clamp(max=5).exp()
        weight = weight / (weight.sum(-1, keepdim=True) + (none - top).exp())
        z = torch.einsum("brhm,bmhd->brhd", weight, value)
        counts = (rate * logit.sigmoid()).sum(-1)
        zero = z.new_zeros(batch, times, self.width)
        heads = torch.eye(HEADS, dtype=z.dtype, device=z.device)
        slots = (heads[:, :, None] * z[..., None, :, :]).flatten(-2)  # a head each, where it stands in z
        return Readout(
            slots,
            z.flatten(-2),
            zero,
            zero,
            torch.full_like(slots[..., 0], 1 / HEADS),
            counts=counts,
            points=self._points(store.look, weight, seen.places),
            prior=writes.prior[:, None].expand(-1, times),
        )

    def _points(self, look: Tensor, weight: Tensor, places: Tensor) -> Tensor | None:
        """Where in each view what was read is seen now (B, R, H, V, 2): each event's look is compared with each place."""
        if self.look is None:
            return None
        here = F.normalize(self.look(places), dim=-1)
        alike = torch.einsum("brvpd,bmd->brmvp", here, F.normalize(look, dim=-1))
        where = (alike * self.kappa.exp()).softmax(-1) @ self.grid
        return torch.einsum("brhm,brmvc->brhvc", weight, where)


def plateau(s: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """b: a sigmoid whose ends are cut off: a gate can be exactly shut or open, and a little of the gradient still passes."""
    x = 1.5 * s.sigmoid() - 0.25
    return x.clamp(0, 1) + LEAK * (x - x.detach()) * ((x < 0) | (x > 1))


def backlash(b: Float[Tensor, "B T"], valid: Tensor, level: Float[Tensor, " B"]) -> Float[Tensor, "B T"]:
    """y_t - w for y_t = min(max(y_{t-1}, b_t - w), b_t + w): follows b only where b leaves it behind by more than w, so that
    neither small noise nor another sampling of the same rise changes how far it goes. `level` is the one before; what is not
    valid changes nothing. Clamps compose to clamps, so log T rounds do.
    """
    low = torch.where(valid, b - 2 * PLAY, -torch.inf)
    high = torch.where(valid, b, torch.inf)
    reach = 1
    while reach < b.shape[1]:
        low, high = (
            torch.cat([x[:, :reach], _clip(x[:, :-reach], low[:, reach:], high[:, reach:])], dim=1) for x in (low, high)
        )
        reach *= 2
    return _clip(level[:, None].expand_as(b), low, high)


def _clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A clamp whose gradient goes to x on ties, and to the bounds where they meet: so clips compose with their gradients,
    which the halves of minimum and maximum do not.
    """
    x = torch.where((x < low) | (low == high), low, x)
    return torch.where(x > high, high, x)


def _steps(x: Tensor, part: slice) -> Tensor:
    return x[:, part]


def strongest(strength: Float[Tensor, "*n M"], count: int) -> Int[Tensor, "*n m"]:
    """The places of the strongest, in order; of equals the first."""
    return strength.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _take(x: Tensor, index: Int[Tensor, "B m"]) -> Tensor:
    """x (B, M, ...) at places of dimension 1."""
    return x.take_along_dim(index.view(*index.shape, *[1] * (x.ndim - 2)), dim=1)
