"""Memories to compare with, behind the same interface: none, and those that keep past steps and look back at them:
transformer context, window, retrieval prompt. Those that fold what they see into a state are in recurrent.py.

None of them sees signatures; each gets the same content e_t. Sources, state sizes and costs are in docs/memories.md.
"""

import math
from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_memory.keys import MLP
from trace_memory.memory import Memory, MemoryState, PathFeatures, Readout, may_sync
from trace_memory.packing import Packing

BLOCK = 64  # steps that look back at once


class NoMemory(Memory):
    """Remembers nothing; its readout is zero: the base policy."""

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        return {}, self._empty(contents.new_zeros(*contents.shape[:2], self.width))


class _LookingBack(Memory):
    """A memory that keeps past steps. Its scans go block by block, so that a long one costs time, not the square of it."""

    @abstractmethod
    def _block(self, state: MemoryState, contents: Tensor, valid: Tensor) -> tuple[dict[str, Tensor], Readout]:
        """`_run`, for few steps."""

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        readouts = []
        for some, real in zip(contents.split(BLOCK, 1), valid.split(BLOCK, 1), strict=True):
            tensors, readout = self._block(state, some, real)
            state = MemoryState(state.steps + real.sum(1), tensors)
            readouts.append(readout)
        slots, z, g, dg, alpha = (torch.cat(x, 1) for x in zip(*(r[:5] for r in readouts), strict=True))
        return state.tensors, Readout(slots, z, g, dg, alpha)


class Past(NamedTuple):
    """Entries a step may look at: what was kept before the scan, then the scan's own. `age` counts valid steps; it is given
    once for all rows (1 for B) where it is the same.
    """

    visible: Bool[Tensor, "B T N"]
    age: Int[Tensor, "_ T N"]


def _filled(kept: Tensor, steps: Tensor) -> Tensor:
    """Without the kept entries that are empty in every row; where that may not be asked, all."""
    size = kept.shape[1]
    return kept[:, size - min(size, int(steps.max())) :] if may_sync() else kept


def _past(steps: Tensor, kept: int, valid: Tensor) -> Past:
    """Which of the `kept` old entries (newest last) and of the scan's own steps each step may see, and how old they are."""
    some = valid[:1] if may_sync() and bool(valid.all()) else valid
    own = some.long().cumsum(1)  # valid steps so far, this one included
    old = torch.arange(kept - 1, -1, -1, device=valid.device)  # steps before the scan's first
    old_age = own[..., None] + old
    own_age = own[..., None] - own[:, None, :]
    old_real = (old < steps[:, None])[:, None].expand(-1, valid.shape[1], -1)
    causal = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool, device=valid.device).tril()
    age = torch.cat([old_age, own_age], dim=-1)
    return Past(torch.cat([old_real, causal & valid[:, None]], dim=-1), age)


def _push(kept: Tensor, entries: Tensor, valid: Tensor) -> Tensor:
    """The newest entries of kept and valid entries together, newest last."""
    packing = Packing(valid)
    return packing.newest(kept, packing.pack(entries))


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention with a bias, -inf where nothing is seen; every query sees something."""
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT + bias, dim=-1) @ v


class _Block(nn.Module):
    """A pre-norm transformer layer whose queries are new inputs and whose keys are cached and new inputs."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = MLP(width, 2 * width, width)

    def forward(self, x: Tensor, kept: Tensor, visible: Tensor, age: Tensor) -> Tensor:
        """x (B, T, d), kept (B, W, d), visible (B, T, W + T), age bias (heads, B or 1, T, W + T)."""
        q, k, v = self.qkv(self.norm(torch.cat([kept, x], dim=1))).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q[:, -x.shape[1] :], k, v))
        bias = torch.where(visible[:, None], age.transpose(0, 1), -torch.inf)
        x = x + self.out(_attend(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class TransformerContext(_LookingBack):
    """A causal transformer (Vaswani et al. 2017) in which each layer sees its last `window` inputs, streamed with a cache;
    two layers of 32 reach 63 contents back.
    """

    def __init__(self, *, content: int, channels: int, width: int, window: int = 32, layers: int = 2, heads: int = 8):
        super().__init__(content=content, channels=channels, width=width)
        self.window, self.heads = window, heads
        self.embed = nn.Linear(content, width)
        self.blocks = [_Block(width, heads) for _ in range(layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.age = nn.Parameter(torch.zeros(layers, heads, window))
        self.norm = nn.LayerNorm(width)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each layer's last inputs."""
        return {f"layer{i}": (self.window - 1, self.width) for i in range(len(self.blocks))}

    def _block(self, state: MemoryState, contents: Tensor, valid: Tensor) -> tuple[dict[str, Tensor], Readout]:
        tensors = {}
        x = self.embed(contents)
        filled = {n: _filled(y, state.steps) for n, y in state.tensors.items()}
        kept = filled["layer0"].shape[1]
        past = _past(state.steps, kept, valid)
        visible = past.visible & (past.age < self.window)
        # a step that is not valid sees itself too, so that no softmax is empty
        visible[..., kept:] |= torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)
        for i, block in enumerate(self.blocks):
            tensors[f"layer{i}"] = _push(state.tensors[f"layer{i}"], x, valid)
            x = block(x, filled[f"layer{i}"], visible, self.age[i][:, past.age.clamp(0, self.window - 1)])
        z = self.norm(x)
        return tensors, self._empty(z, z[..., None, :], torch.ones_like(z[..., :1]))


class WindowAttention(_LookingBack):
    """Gated cross-attention over the last `window` contents, after the Gated Memory Policy (Gao et al. 2026): `layers`
    times, the present asks the kept contents, each told with its age, and a gate that sees the present alone says how much
    of the answer is added to it.

    Ages start as sinusoids. The gate is one for all layers and starts nearly open (0.95), since its authors train the
    attention ungated first.
    """

    def __init__(
        self,
        *,
        content: int,
        channels: int,
        width: int,
        window: int = 256,
        layers: int = 2,
        heads: int = 4,
        start: float = 3.0,
    ):
        super().__init__(content=content, channels=channels, width=width)
        self.window = window
        self.embed, self.norm_entries = nn.Linear(content, width), nn.RMSNorm(width, eps=1e-5)
        self.age = nn.Parameter(_sinusoids(window, width))
        self.gate = MLP(content, width, 1)
        nn.init.constant_(self.gate.last.bias, start)
        self.blocks = [_CrossBlock(width, heads) for _ in range(layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The embedded contents before this one."""
        return {"entries": (self.window - 1, self.width)}

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        packing = Packing(valid)  # so that ages are the same in every row
        tensors, readout = super()._run(state, packing.pack(contents), path, packing.real)
        z = packing.unpack(readout.z, torch.zeros_like(readout.z[:, 0]))
        return tensors, self._empty(z, z[..., None, :], torch.ones_like(z[..., :1]))

    def _block(self, state: MemoryState, contents: Tensor, valid: Tensor) -> tuple[dict[str, Tensor], Readout]:
        x = self.embed(contents)
        new, old = self.norm_entries(x), _filled(state.tensors["entries"], state.steps)
        entries, kept = torch.cat([old, new], dim=1), old.shape[1]
        back = torch.arange(kept, 0, -1, device=valid.device) > state.steps[:, None]  # before a row's first step
        unseen = F.pad(back, (0, valid.shape[1]))[:, None, None]
        ages = self.age[: kept + valid.shape[1]].flip(0)  # oldest first, as the entries are
        gate = torch.sigmoid(self.gate(contents))
        for block in self.blocks:
            x = block(x, gate, entries, ages, unseen)
        z = self.norm(x)
        return {"entries": _push(state.tensors["entries"], new, valid)}, self._empty(z)


class _CrossBlock(nn.Module):
    """A layer in which steps ask entries, each of which is given with its age; then an MLP.

    An entry's age hangs on who asks. Keys and values are linear, so those of contents and of ages are computed apart, and
    the parts of an age moved to where entries of that age stand.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        inner = heads * -(-width // heads)
        self.q, self.kv, self.out = nn.Linear(width, inner), nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.mlp = MLP(width, 2 * width, width)

    def forward(self, x: Tensor, gate: Tensor, entries: Tensor, ages: Tensor, unseen: Tensor) -> Tensor:
        """x (B, T, d), gate (B, T, 1), entries (B, W + T, d) that end with x's own, ages (A, d) oldest first, and which
        entries are empty (B, 1, 1, W + T).
        """
        q, (k, v) = self.q(self.norm(x)), self.kv(entries).chunk(2, dim=-1)
        of_age = F.linear(ages, self.kv.weight)
        q, k, v, key, value = (
            y.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for y in (q, k, v, *of_age.chunk(2, dim=-1))
        )
        q = q * q.shape[-1] ** -0.5
        score = q @ k.mT + _to_entries(q @ key.mT, entries.shape[1])
        alpha = torch.softmax(score.masked_fill(unseen, -torch.inf), dim=-1)
        read = alpha @ v + _to_ages(alpha, len(ages)) @ value
        x = x + gate * self.out(read.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


def _to_entries(x: Float[Tensor, "*n T A"], entries: int) -> Float[Tensor, "*n T N"]:
    """From ages, oldest first, to entries that end with the asking steps' own: each step's row moves one on from that of the
    step before. -inf where an entry is too old or not there yet.
    """
    steps, ages = x.shape[-2:]
    moved = F.pad(x, (0, steps), value=-torch.inf).flatten(-2)[..., :-steps].unflatten(-1, (steps, ages + steps - 1))
    return moved[..., ages + steps - 1 - entries :]


def _to_ages(x: Float[Tensor, "*n T N"], ages: int) -> Float[Tensor, "*n T A"]:
    """The way back; entries that are too old or not there yet must be zero."""
    steps, entries = x.shape[-2:]
    x = F.pad(x, (ages + steps - 1 - entries, 0)).flatten(-2)
    return F.pad(x, (0, steps)).unflatten(-1, (steps, ages + steps))[..., :ages]


def _sinusoids(count: int, width: int) -> Float[Tensor, "A d"]:
    """Sines and cosines of an age, at wavelengths from 2 pi to 1e4 times that."""
    angle = torch.arange(count)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


class RetrievalPrompt(_LookingBack):
    """Keeps the whole episode (to `capacity` steps) and prompts with the `top` entries most like the present: after
    memory-augmented prompting (Li et al. 2025), with the episode's own past as the library.
    """

    def __init__(self, *, content: int, channels: int, width: int, capacity: int = 512, top: int = 4):
        super().__init__(content=content, channels=channels, width=width)
        self.capacity, self.top = capacity, top
        self.key = nn.Linear(content, width)
        self.query = MLP(content, width, width)
        self.value = MLP(content, width, width)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Keys and values of every kept step."""
        return {"keys": (self.capacity - 1, self.width), "values": (self.capacity - 1, self.width)}

    def _block(self, state: MemoryState, contents: Tensor, valid: Tensor) -> tuple[dict[str, Tensor], Readout]:
        keys, values = self.key(contents), self.value(contents)
        old_keys, old_values = (_filled(state.tensors[n], state.steps) for n in ("keys", "values"))
        past = _past(state.steps, old_keys.shape[1], valid)
        visible = past.visible & (past.age < self.capacity)
        all_keys = torch.cat([old_keys, keys], dim=1)
        all_values = torch.cat([old_values, values], dim=1)
        score = self.query(contents) @ all_keys.transpose(1, 2) / math.sqrt(self.width)
        best = score.masked_fill(~visible, -torch.inf).topk(min(self.top, score.shape[-1]), dim=-1)
        found = torch.isfinite(best.values)
        alpha = torch.softmax(best.values.masked_fill(~found, torch.finfo(best.values.dtype).min), dim=-1) * found
        index = best.indices.flatten(1)[..., None].expand(-1, -1, self.width)
        prompt = all_values.gather(1, index).unflatten(1, best.indices.shape[1:]) * found[..., None]
        prompt, alpha = _pad(prompt, self.top, -2), _pad(alpha, self.top, -1)
        tensors = {
            "keys": _push(state.tensors["keys"], keys, valid),
            "values": _push(state.tensors["values"], values, valid),
        }
        return tensors, self._empty((alpha[..., None, :] @ prompt)[..., 0, :], prompt, alpha)


def _pad(x: Float[Tensor, "..."], size: int, dim: int) -> Float[Tensor, "..."]:
    missing = size - x.shape[dim]
    if missing <= 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
