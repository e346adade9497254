"""Memories to compare with, behind the same interface: none, GRU, transformer context, LRU slots, retrieval prompt.

None of them sees signatures; each gets the same content e_t. Sources, state sizes and costs are in docs/memories.md.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_memory.keys import MLP
from trace_memory.memory import Memory, MemoryState, PathFeatures, Readout


class NoMemory(Memory):
    """Remembers nothing; its readout is zero: the base policy."""

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        return {}, self._empty(contents.new_zeros(*contents.shape[:2], self.width))


class GRUMemory(Memory):
    """A gated recurrent unit (Cho et al. 2014) over the contents; the hidden state is the one slot and the readout.

    Its update gate starts with a time-scale of `keep` steps (Tallec and Ollivier 2018): started as PyTorch does, it never
    left chance on the probe, and a baseline should be given its best form.
    """

    def __init__(self, *, content: int, channels: int, width: int, keep: float = 64.0):
        super().__init__(content=content, channels=channels, width=width)
        self.cell = nn.GRUCell(content, width)
        nn.init.constant_(self.cell.bias_hh[width : 2 * width], math.log(keep - 1))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The hidden state."""
        return {"hidden": (self.width,)}

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        h, states = state.tensors["hidden"], []
        inputs = F.linear(contents, self.cell.weight_ih, self.cell.bias_ih)
        for x, ok in zip(inputs.unbind(1), valid.unbind(1), strict=True):
            h = torch.where(ok[:, None], self._advance(h, x), h)
            states.append(h)
        z = torch.stack(states, 1)
        return {"hidden": h}, self._empty(z, z[..., None, :], torch.ones_like(z[..., :1]))

    def _advance(self, h: Tensor, x: Tensor) -> Tensor:
        reset, update, new = F.linear(h, self.cell.weight_hh, self.cell.bias_hh).chunk(3, dim=-1)
        x_reset, x_update, x_new = x.chunk(3, dim=-1)
        gate = torch.sigmoid(x_update + update)
        return gate * h + (1 - gate) * torch.tanh(x_new + torch.sigmoid(x_reset + reset) * new)


class Past(NamedTuple):
    """Entries a step may look at: what was kept before the scan, then the scan's own. `age` counts valid steps."""

    visible: Bool[Tensor, "B T N"]
    age: Int[Tensor, "B T N"]


def _past(steps: Tensor, kept: int, valid: Tensor) -> Past:
    """Which of the `kept` old entries (newest last) and of the scan's own steps each step may see, and how old they are."""
    own = valid.long().cumsum(1)  # valid steps so far, this one included
    old = torch.arange(kept - 1, -1, -1, device=valid.device)  # steps before the scan's first
    old_age = own[..., None] + old
    own_age = own[..., None] - own[:, None, :]
    old_real = (old < steps[:, None])[:, None].expand_as(old_age)
    causal = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool, device=valid.device).tril()
    age = torch.cat([old_age, own_age], dim=-1)
    return Past(torch.cat([old_real, causal & valid[:, None]], dim=-1), age)


def _push(kept: Tensor, entries: Tensor, valid: Tensor) -> Tensor:
    """The newest entries of kept and valid entries together, newest last."""
    size = kept.shape[1]
    rank = torch.cat([torch.ones_like(kept[:, :, 0], dtype=torch.long), valid.long()], dim=1)
    order = torch.argsort(rank, dim=1, stable=True)[:, -size:]  # invalid ones first, else in order
    index = order[..., None].expand(-1, -1, kept.shape[-1])
    return torch.cat([kept, entries], dim=1).gather(1, index)


class _Block(nn.Module):
    """A pre-norm transformer layer whose queries are new inputs and whose keys are cached and new inputs."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = MLP(width, 2 * width, width)

    def forward(self, x: Tensor, kept: Tensor, visible: Tensor, age: Tensor) -> Tensor:
        """x (B, T, d), kept (B, W, d), visible (B, T, W + T), age bias (heads, B, T, W + T)."""
        q, k, v = self.qkv(self.norm(torch.cat([kept, x], dim=1))).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q[:, -x.shape[1] :], k, v))
        bias = torch.where(visible[:, None], age.transpose(0, 1), -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class TransformerContext(Memory):
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

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        past = _past(state.steps, self.window - 1, valid)
        visible = past.visible & (past.age < self.window)
        # a step that is not valid sees itself alone, so that no softmax is empty
        itself = torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)
        visible[..., self.window - 1 :] |= itself
        tensors = {}
        x = self.embed(contents)
        for i, block in enumerate(self.blocks):
            kept = state.tensors[f"layer{i}"]
            tensors[f"layer{i}"] = _push(kept, x, valid)
            x = block(x, kept, visible, self.age[i][:, past.age.clamp(0, self.window - 1)])
        z = self.norm(x)
        return tensors, self._empty(z, z[..., None, :], torch.ones_like(z[..., :1]))


class LRUMemory(Memory):
    """External memory with least-recently-used writes (Santoro et al. 2016): rows are written where nobody looked lately,
    or where the last read looked, and read by cosine similarity.
    """

    def __init__(self, *, content: int, channels: int, width: int, rows: int = 8, decay: float = 0.95):
        super().__init__(content=content, channels=channels, width=width)
        self.rows, self.decay = rows, decay
        self.key = MLP(content, width, width)
        self.value = MLP(content, width, width)
        self.strength = nn.Linear(content, 2)  # write gate, read sharpness

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Rows, how lately each was used, and the last read."""
        return {"rows": (self.rows, self.width), "usage": (self.rows,), "read": (self.rows,)}

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        tensors = dict(state.tensors)
        inputs = (F.normalize(self.key(contents), dim=-1), self.value(contents), self.strength(contents))
        rows, zs, reads = [], [], []
        for now, ok in zip(zip(*(x.unbind(1) for x in inputs), strict=True), valid.unbind(1), strict=True):
            new = self._advance(tensors, *now)
            tensors = {n: torch.where(ok.view(-1, *[1] * (new[n].ndim - 1)), new[n], tensors[n]) for n in tensors}
            rows.append(tensors["rows"])
            reads.append(tensors["read"])
            zs.append((tensors["read"][:, None] @ tensors["rows"])[:, 0])
        return tensors, self._empty(torch.stack(zs, 1), torch.stack(rows, 1), torch.stack(reads, 1))

    def _advance(self, tensors: dict[str, Tensor], key: Tensor, value: Tensor, strength: Tensor) -> dict[str, Tensor]:
        least = F.one_hot(tensors["usage"].argmin(-1), self.rows).to(value.dtype)
        gate = torch.sigmoid(strength[:, :1])
        write = gate * tensors["read"] + (1 - gate) * least
        kept = tensors["rows"] * (1 - (1 - gate) * least)[..., None]  # the least used row is cleared as it is taken
        rows = kept + write[..., None] * value[:, None]
        sharp = 1 + 10 * torch.sigmoid(strength[:, 1:])
        read = torch.softmax(sharp * (F.normalize(rows, dim=-1, eps=1e-6) @ key[..., None])[..., 0], dim=-1)
        return {"rows": rows, "usage": self.decay * tensors["usage"] + read + write, "read": read}


class RetrievalPrompt(Memory):
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

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        keys, values = self.key(contents), self.value(contents)
        past = _past(state.steps, self.capacity - 1, valid)
        visible = past.visible & (past.age < self.capacity)
        all_keys = torch.cat([state.tensors["keys"], keys], dim=1)
        all_values = torch.cat([state.tensors["values"], values], dim=1)
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
