"""Streamed path signatures: `init / step` one state at a time, `stream` for whole batches of paths, and their increments.

A signature of depth p of a path in R^d lists its iterated integrals of levels 1..p, the scalar 1 omitted (Eq.
path_signature_setup). Joining a straight segment multiplies by its exponential (Chen), so a step costs O(d^p) and needs no
history. `fade` is a length in the path's own units over which old motion is forgotten (inf: the paper's signature);
docs/decisions derives it and says why our form has a finite one. Standardisation lives in normalise.py.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trace_errors import UsageError

Levels = list[Tensor]  # level k has shape (..., d^k)


@cache
def _pysiglib() -> Any:
    """pysiglib's functions for torch, or None where it is not installed."""
    try:
        return import_module("pysiglib.torch_api")
    except (ImportError, OSError):
        return None


class SignatureState(NamedTuple):
    """All that a stream must keep of a path. A row of zeros is a path that has not begun."""

    point: Float[Tensor, "B d"]
    value: Float[Tensor, "B D"]
    seen: Int[Tensor, " B"]


class Signature:
    """The depth-p signature of a d-channel path, optionally fading with path length.

    Args:
        channels: d, width of a point.
        depth: p, the highest level.
        fade: length of path over which old motion is forgotten; inf: never.

    Raises:
        UsageError: one of them is not positive.

    Example:
        >>> import torch
        >>> from trace_memory import Signature
        >>> state, xi, delta = Signature(channels=2, depth=2).stream(torch.tensor([[[0.0, 0.0], [1.0, 2.0]]]))
        >>> xi[0, -1].tolist()
        [1.0, 2.0, 0.5, 1.0, 1.0, 2.0]
    """

    def __init__(self, channels: int, depth: int = 3, fade: float = math.inf):
        if channels < 1 or depth < 1 or not fade > 0:
            raise UsageError(f"signature: channels={channels}, depth={depth}, fade={fade}; each must be positive")
        self.channels, self.depth, self.fade = channels, depth, fade
        self.sizes = [channels**level for level in range(1, depth + 1)]

    @property
    def state_dim(self) -> int:
        """Numbers kept per path."""
        return sum(self.sizes)

    @property
    def dim(self) -> int:
        """Numbers per key. Eq. (signature_dim)."""
        return self.state_dim

    def init(
        self, batch: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> SignatureState:
        """Paths that have not begun."""
        return SignatureState(
            torch.zeros(batch, self.channels, dtype=dtype, device=device),
            torch.zeros(batch, self.state_dim, dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def step(
        self, state: SignatureState, point: Float[Tensor, "B d"]
    ) -> tuple[SignatureState, Float[Tensor, "B D"], Float[Tensor, "B D"]]:
        """Appends one point; returns the new state, xi and delta. The first point is the basepoint: xi = delta = 0."""
        dx = (point - state.point) * (state.seen > 0)[:, None]
        before = list(state.value.split(self.sizes, dim=-1))
        if math.isinf(self.fade):
            increments = [_join(before[:k], dx) for k in range(self.depth)]
        else:
            dx, log_decay = self._segment(dx)
            faded = self._fade(before, log_decay)
            increments = [
                _join(faded[:k], dx) + torch.expm1((k + 1) * log_decay)[..., None] * before[k]
                for k in range(self.depth)
            ]
        increment = torch.cat(increments, dim=-1)
        after = SignatureState(point, state.value + increment, state.seen + 1)
        return after, *self._emit(after.value, increment)

    def stream(
        self,
        path: Float[Tensor, "B T d"],
        valid: Bool[Tensor, "B T"] | None = None,
        state: SignatureState | None = None,
    ) -> tuple[SignatureState, Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """xi and delta after every point of every path; points that are not `valid` change nothing (delta = 0).

        Level by level, all times at once: the increments of level k need only lower levels, so each level is one
        running sum (a decayed one when fading).
        """
        if state is None:
            state = self.init(path.shape[0], dtype=path.dtype, device=path.device)
        dx, state_after = displacements(path, valid, state)
        dx, log_decay = self._segment(dx)
        start = state.value.split(self.sizes, dim=-1)
        before: Levels = []
        levels: Levels = []
        increments: Levels = []
        for k in range(1, self.depth + 1):
            gained = _join(self._fade(before, log_decay), dx)
            level = self._integrate(gained, k * log_decay, start[k - 1])
            shifted = torch.cat([start[k - 1][:, None], level[:, :-1]], dim=1)
            levels.append(level)
            before.append(shifted)
            increments.append(gained + torch.expm1(k * log_decay)[..., None] * shifted)
        value = torch.cat(levels, dim=-1)
        return state_after._replace(value=value[:, -1]), *self._emit(value, torch.cat(increments, dim=-1))

    def at(
        self, path: Float[Tensor, "B T d"], indices: Int[Tensor, "B L"]
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
        """xi and delta after the points at `indices` (any order), without keeping every prefix of a long path.

        On the CPU each stretch between wanted points is one call of pysiglib, if that is installed. Where most points are
        wanted, and on a GPU, for which pysiglib's wheels have no kernels, streaming every prefix is faster
        (benchmarks/signature.py).
        """
        if path.is_cuda or path.shape[1] <= 6 * indices.shape[1] or _pysiglib() is None:
            _, xi, delta = self.stream(path)
            where = indices[..., None].expand(-1, -1, self.dim)
            return xi.gather(1, where), delta.gather(1, where)
        order = indices.argsort(dim=1)
        wanted = indices.gather(1, order)
        state = self.init(path.shape[0], dtype=path.dtype, device=path.device)
        xis: Levels = []
        deltas: Levels = []
        done = torch.full_like(wanted[:, 0], -1)  # index of the last point inside `state`
        for column in wanted.unbind(1):
            again = column == done  # a repeated index: the same xi and delta as the column before
            state = self._skip(state, path, done, column - 1)
            following, xi, delta = self.step(state, path[torch.arange(len(path)), column])
            if xis and bool(again.any()):
                following = SignatureState(*(_rows(again, a, b) for a, b in zip(state, following, strict=True)))
                xi, delta = _rows(again, xis[-1], xi), _rows(again, deltas[-1], delta)
            state, done = following, column
            xis.append(xi)
            deltas.append(delta)
        back = order.argsort(dim=1)[..., None].expand(-1, -1, self.dim)
        return torch.stack(xis, 1).gather(1, back), torch.stack(deltas, 1).gather(1, back)

    def _skip(self, state: SignatureState, path: Tensor, done: Tensor, until: Tensor) -> SignatureState:
        """Joins the points after `done` up to `until` (per row; none if until <= done) in one pysiglib call."""
        rows = torch.arange(len(path))
        longest = int((until - done).max())
        if longest <= 0:
            return state
        index = (done[:, None] + 1 + torch.arange(longest)).minimum(torch.maximum(until, done)[:, None]).clamp_min(0)
        points = path[rows[:, None], index]
        begun = (state.seen > 0)[:, None]
        base = torch.where(begun, state.point, points[:, 0])
        dx, log_decay = self._segment(torch.diff(torch.cat([base[:, None], points], dim=1), dim=1))
        to_end = log_decay.sum(1, keepdim=True) - log_decay.cumsum(1)
        faded_path = (torch.exp(to_end)[..., None] * dx).cumsum(1)
        faded_path = torch.cat([torch.zeros_like(faded_path[:, :1]), faded_path], dim=1).contiguous()
        stretch = list(_pysiglib().sig(faded_path, self.depth).split(self.sizes, dim=-1))
        faded = self._fade(list(state.value.split(self.sizes, dim=-1)), log_decay.sum(1))
        value = torch.cat([a + b + c for a, b, c in zip(faded, stretch, _multiply(faded, stretch), strict=True)], -1)
        moved = until > done
        return SignatureState(
            _rows(moved, points[:, -1], state.point),
            _rows(moved, value, state.value),
            state.seen + (until - done).clamp_min(0),
        )

    def _segment(self, dx: Tensor) -> tuple[Tensor, Tensor]:
        """A straight segment seen from its end: its faded displacement, and the log of the decay it puts on the past.

        Fading weighs each bit of path by exp(-(length travelled since) / fade); along a straight line that only shortens
        the displacement, so the result does not depend on how finely the line was sampled.
        """
        if math.isinf(self.fade):
            return dx, torch.zeros_like(dx[..., 0])
        x = torch.linalg.vector_norm(dx, dim=-1) / self.fade
        safe = x.clamp_min(1e-4)
        shrink = torch.where(x < 1e-4, 1 - x / 2, -torch.expm1(-safe) / safe)
        return dx * shrink[..., None], -x

    def _fade(self, levels: Levels, log_decay: Tensor) -> Levels:
        if math.isinf(self.fade):
            return levels
        return [torch.exp(k * log_decay)[..., None] * level for k, level in enumerate(levels, start=1)]

    def _integrate(self, gained: Tensor, log_decay: Tensor, start: Tensor) -> Tensor:
        """x_t = exp(log_decay_t) x_{t-1} + gained_t for all t, x_0 = start."""
        if math.isinf(self.fade):
            return start[:, None] + gained.cumsum(1)
        decayed = torch.exp(log_decay[:, :1, None]) * start[:, None]
        x = torch.cat([gained[:, :1] + decayed, gained[:, 1:]], dim=1)
        shift = 1
        while shift < x.shape[1]:  # doubling: after n rounds x_t holds its last 2^n terms
            x = torch.cat([x[:, :shift], x[:, shift:] + torch.exp(log_decay[:, shift:, None]) * x[:, :-shift]], dim=1)
            log_decay = torch.cat([log_decay[:, :shift], log_decay[:, shift:] + log_decay[:, :-shift]], dim=1)
            shift *= 2
        return x

    def _emit(self, value: Tensor, increment: Tensor) -> tuple[Tensor, Tensor]:
        """From the signature and its last increment to the key and its delta. Eq. (delta_signature)."""
        return value, increment


def lyndon_words(letters: int, longest: int) -> list[tuple[int, ...]]:
    """All words that are smaller than each of their rotations, by length, then in alphabetical order (Duval 1988)."""

    def words() -> Iterator[tuple[int, ...]]:
        word = [-1]
        while word:
            word[-1] += 1
            yield tuple(word)
            word = [word[i % len(word)] for i in range(longest)]
            while word and word[-1] == letters - 1:
                word.pop()

    return sorted(words(), key=lambda word: (len(word), word))


class LogSignature(Signature):
    """The logarithm of the signature in the coordinates of Lyndon words: the same information without redundancy.

    Args:
        channels: d, width of a point.
        depth: p, the highest level.
        fade: length of path over which old motion is forgotten; inf: never.

    Example:
        >>> from trace_memory import LogSignature, Signature
        >>> Signature(17, 3).dim, LogSignature(17, 3).dim
        (5219, 1785)
    """

    def __init__(self, channels: int, depth: int = 3, fade: float = math.inf):
        super().__init__(channels, depth, fade)
        self.words = torch.tensor([self._position(word) for word in lyndon_words(channels, depth)])
        self._words_on = {self.words.device: self.words}  # a copy a device: nothing may be copied inside a CUDA graph

    @property
    def dim(self) -> int:
        """Numbers per key: one a Lyndon word."""
        return len(self.words)

    def _position(self, word: Sequence[int]) -> int:
        index = 0
        for letter in word:
            index = index * self.channels + letter
        return sum(self.sizes[: len(word) - 1]) + index

    def _emit(self, value: Tensor, increment: Tensor) -> tuple[Tensor, Tensor]:
        now, before = self._log(value), self._log(value - increment)
        return now, now - before

    def _log(self, value: Tensor) -> Tensor:
        levels = list(value.split(self.sizes, dim=-1))
        total = power = levels
        for n in range(2, self.depth + 1):  # log(1 + X) = X - X^2/2 + X^3/3 - ...
            power = _multiply(power, levels)
            total = [a + ((-1) ** (n + 1) / n) * b for a, b in zip(total, power, strict=True)]
        if value.device not in self._words_on:
            self._words_on[value.device] = self.words.to(value.device)
        return torch.cat(total, dim=-1)[..., self._words_on[value.device]]


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


def _join(lower: Levels, dx: Tensor) -> Tensor:
    """What level k = len(lower) + 1 gains from joining exp(dx) to the (faded) lower levels, by Horner's rule:
    ((dx / k + level 1) dx / (k - 1) + level 2) dx / (k - 2) + ...
    """
    if not lower:
        return dx
    k = len(lower) + 1
    gained = torch.add(lower[0], dx, alpha=1 / k)
    for i, level in enumerate(lower[1:], start=1):
        wide = level.unflatten(-1, (-1, dx.shape[-1]))
        gained = torch.addcmul(wide, gained[..., :, None], dx[..., None, :], value=1 / (k - i)).flatten(-2)
    return _outer(gained, dx)


def _multiply(a: Levels, b: Levels) -> Levels:
    """Levels of a ⊗ b for series without scalar term."""
    product = [torch.zeros_like(level) for level in a]
    for k in range(2, len(a) + 1):
        product[k - 1] = torch.stack([_outer(a[i - 1], b[k - i - 1]) for i in range(1, k)]).sum(0)
    return product


def _rows(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.ndim - 1)), yes, no)


def displacements(path: Tensor, valid: Tensor | None, state: SignatureState) -> tuple[Tensor, SignatureState]:
    """Displacements between consecutive valid points, zero at padding and at the basepoint; and where that ends."""
    batch, length, _ = path.shape
    if valid is None:
        filled, seen = path, state.seen[:, None] + torch.arange(1, length + 1, device=path.device)
    else:
        position = torch.arange(1, length + 1, device=path.device).expand(batch, length)
        last = torch.where(valid, position, 0).cummax(dim=1).values  # 0: still the point in `state`
        known = torch.cat([state.point[:, None], path], dim=1)
        filled = known.gather(1, last[..., None].expand_as(path))
        seen = state.seen[:, None] + valid.long().cumsum(1)
    previous = torch.cat([state.point[:, None], filled[:, :-1]], dim=1)
    dx = torch.where((seen > 1)[..., None], filled - previous, 0.0)
    return dx, SignatureState(filled[:, -1], state.value, seen[:, -1])
