"""Memories to compare with that fold what they see into a state of fixed size: GRU, LRU slots, gated delta rule, selective
state-space model. Those that look back at kept steps are in baselines.py.

The last two are linear in their state, so that a scan computes them chunk by chunk instead of step by step. Sources, state
sizes and costs are in docs/memories.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trace_memory.keys import MLP
from trace_memory.memory import Memory, MemoryState, PathFeatures, Readout
from trace_memory.packing import Packing

CHUNK = 64  # steps that are computed at once
TAPS = 4  # of the short convolutions


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
        packing, h, cell = Packing(valid), state.tensors["hidden"], self.cell
        weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
        hs, _ = torch.gru(
            packing.pack(contents),
            h[None],
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=torch.is_grad_enabled(),  # without dropout it says only that gradients will be asked for
            bidirectional=False,
            batch_first=True,
        )
        z = packing.unpack(hs, h)
        return {"hidden": z[:, -1]}, self._empty(z, z[..., None, :], torch.ones_like(z[..., :1]))


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
        packing, old = Packing(valid), state.tensors
        contents = packing.pack(contents)
        gate, sharp = self.strength(contents).sigmoid().split(1, dim=-1)
        inputs = (F.normalize(self.key(contents), dim=-1), self.value(contents), gate, 1 + 10 * sharp)
        rows, usage, read = old["rows"], old["usage"], old["read"]
        number, steps = torch.arange(self.rows, device=rows.device), []
        for key, value, again, sharpness in zip(*(x.unbind(1) for x in inputs), strict=True):
            least = (number == usage.argmin(-1, keepdim=True)).to(rows.dtype)
            fresh = (1 - again) * least
            write = again * read + fresh
            # the least used row is cleared as it is taken
            rows = torch.addcmul(rows * (1 - fresh)[..., None], write[..., None], value[:, None])
            cosine = (rows * key[:, None]).sum(-1) / rows.norm(dim=-1).clamp_min(1e-6)
            read = torch.softmax(sharpness * cosine, dim=-1)
            usage = self.decay * usage + read + write
            steps.append((rows, usage, read))
        names = ("rows", "usage", "read")
        after = {
            n: packing.unpack(torch.stack(x, 1), old[n]) for n, x in zip(names, zip(*steps, strict=True), strict=True)
        }
        z = (after["read"][..., None, :] @ after["rows"])[..., 0, :]
        return {n: x[:, -1] for n, x in after.items()}, self._empty(z, after["rows"], after["read"])


# -- linear recurrences, in chunks ----------------------------------------------------------------------------------------


def gated_delta(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H V K"],
    size: int = CHUNK,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H V K"]]:
    """S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, read as S_t q_t, and the last S.

    Within a chunk the matrix that stands before it is S_0, decayed by A_t = a_1 ... a_t, and each step adds u_t k_t^T with
    u_t = b_t (v_t - a_t S_{t-1} k_t). So the u of a chunk solve a triangular system, whose two right sides (of v and of
    S_0 k) are solved for all chunks at once; only S_0 is carried from chunk to chunk.
    """
    length = q.shape[1]
    q, k, v = (_chunks(x, size) for x in (q, k, v))  # (B, H, n, C, ...)
    beta = _chunks(beta[..., None], size)
    within, begun, left = _decays(_chunks(log_decay[..., None], size)[..., 0])
    system = beta * (k @ k.mT) * within  # its diagonal and what is above are not looked at
    sides = torch.cat([beta * v, beta * begun[..., None] * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, of_before = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen, q, k = (q @ k.mT) * within, begun[..., None] * q, left[..., None] * k
    out = []
    for n in range(q.shape[2]):
        u = own[:, :, n] - of_before[:, :, n] @ S.mT
        out.append(q[:, :, n] @ S.mT + seen[:, :, n] @ u)
        S = begun[:, :, n, -1, None, None] * S + u.mT @ k[:, :, n]
    return _unchunked(torch.stack(out, 2), length), S


def selective_scan(
    x: Float[Tensor, "B T H P"],
    log_decay: Float[Tensor, "B T H"],
    write: Float[Tensor, "B T N"],
    read: Float[Tensor, "B T N"],
    S: Float[Tensor, "B H P N"],
    size: int = CHUNK,
) -> tuple[Float[Tensor, "B T H P"], Float[Tensor, "B H P N"]]:
    """S_t = a_t S_{t-1} + x_t B_t^T, read as S_t C_t, and the last S; all heads share B and C (`write`, `read`)."""
    length = x.shape[1]
    x = _chunks(x, size)  # (B, H, n, C, P)
    write, read = (_chunks(y[:, :, None], size) for y in (write, read))  # (B, 1, n, C, N)
    within, begun, left = _decays(_chunks(log_decay[..., None], size)[..., 0])
    own = ((read @ write.mT) * within) @ x
    added = (left[..., None] * x).mT @ write
    before = []
    for n in range(x.shape[2]):
        before.append(S)
        S = begun[:, :, n, -1, None, None] * S + added[:, :, n]
    return _unchunked(own + begun[..., None] * (read @ torch.stack(before, 2).mT), length), S


def _chunks(x: Float[Tensor, "B T H d"], size: int) -> Float[Tensor, "B H n C d"]:
    """Chunks of equal length, no longer than `size`; the last one ends with zeros."""
    count = -(-x.shape[1] // size)
    length = -(-x.shape[1] // count)
    x = F.pad(x, (0, 0, 0, 0, 0, count * length - x.shape[1]))
    return x.unflatten(1, (count, length)).permute(0, 3, 1, 2, 4)


def _unchunked(x: Float[Tensor, "B H n C d"], length: int) -> Float[Tensor, "B T H d"]:
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


def _decays(log_decay: Float[Tensor, "B H n C"]) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk: how much of step i is left at t >= i (C, C), of what was before at t (C), of step i at the end (C)."""
    total = log_decay.cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    within = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    return within, total.exp(), (total[..., -1:] - total).exp()


# -- the memories made of them --------------------------------------------------------------------------------------------


class _Mixer(nn.Module, ABC):
    """What takes a layer's inputs from step to step; `shapes` are those of its state, for one row."""

    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T d"], state: dict[str, Tensor], packing: Packing
    ) -> tuple[Float[Tensor, "B T d"], dict[str, Tensor]]:
        """Outputs for packed inputs, and the state after the last real one."""


class _ShortConvolution(nn.Module):
    """A causal convolution over the last `TAPS` steps, channel by channel, then SiLU."""

    def __init__(self, channels: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(TAPS, channels).uniform_(-(TAPS**-0.5), TAPS**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Float[Tensor, "B T c"], kept: Float[Tensor, "B K c"]) -> Float[Tensor, "B T c"]:
        """Of inputs and those kept before them."""
        x = torch.cat([kept, x], dim=1)
        length = x.shape[1] - TAPS + 1
        y = sum((self.weight[i] * x[:, i : i + length] for i in range(TAPS)), start=torch.zeros_like(x[:, :1]))
        return F.silu(y if self.bias is None else y + self.bias)


def _step_sizes(heads: int) -> Tensor:
    """softplus^-1 of step sizes drawn log-uniformly from 1e-3 to 1e-1, as Gu and Dao draw them."""
    dt = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)))
    return dt + torch.log(-torch.expm1(-dt))


class GatedDelta(_Mixer):
    """A gated DeltaNet layer: `heads` matrices, written by the delta rule under normalised keys. Values are twice as wide as
    keys; queries, keys and values pass a short convolution; what is read is normalised a head and gated.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.key = heads, -(-width // heads)
        keys, values = heads * self.key, 2 * heads * self.key
        self.widths = [keys, keys, values]
        self.qkv = nn.Linear(width, sum(self.widths), bias=False)
        self.convolution = _ShortConvolution(sum(self.widths), bias=False)
        self.gates = nn.Linear(width, 2 * heads, bias=False)  # decay, write strength
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1e-3, 16).log())
        self.dt_bias = nn.Parameter(_step_sizes(heads))
        self.gate = nn.Linear(width, values, bias=False)
        self.norm = nn.RMSNorm(2 * self.key, eps=1e-5)
        self.out = nn.Linear(values, width, bias=False)
        self.shapes = {"matrix": (heads, 2 * self.key, self.key), "inputs": (TAPS - 1, sum(self.widths))}

    def forward(
        self, x: Float[Tensor, "B T d"], state: dict[str, Tensor], packing: Packing
    ) -> tuple[Float[Tensor, "B T d"], dict[str, Tensor]]:
        """Convolve, write and read, gate."""
        inputs = self.qkv(x)
        q, k, v = self.convolution(inputs, state["inputs"]).split(self.widths, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        dt, beta = self.gates(x).chunk(2, dim=-1)
        # a step that is not real neither decays nor writes
        log_decay = packing.real[..., None] * -self.A_log.exp() * F.softplus(dt + self.dt_bias)
        beta = packing.real[..., None] * torch.sigmoid(beta)
        q = _direction(q) * self.key**-0.5
        y, matrix = gated_delta(q, _direction(k), v, log_decay, beta, state["matrix"])
        y = self.out(self.norm(y).flatten(2) * F.silu(self.gate(x)))
        return y, {"matrix": matrix, "inputs": packing.newest(state["inputs"], inputs)}


class SelectiveSSM(_Mixer):
    """A Mamba-2 layer: twice as wide inside, in `heads` heads, each with a decay of its own that the input sets; B and C are
    `states` wide and shared by the heads.
    """

    def __init__(self, width: int, heads: int, states: int):
        super().__init__()
        self.heads, self.states = heads, states
        inner = heads * -(-2 * width // heads)
        self.widths = [inner, inner + 2 * states, heads]
        self.inputs = nn.Linear(width, sum(self.widths), bias=False)  # gate; x, B, C; dt
        self.convolution = _ShortConvolution(inner + 2 * states, bias=True)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(_step_sizes(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out = nn.Linear(inner, width, bias=False)
        self.shapes = {"matrix": (heads, inner // heads, states), "inputs": (TAPS - 1, inner + 2 * states)}

    def forward(
        self, x: Float[Tensor, "B T d"], state: dict[str, Tensor], packing: Packing
    ) -> tuple[Float[Tensor, "B T d"], dict[str, Tensor]]:
        """Convolve, write and read, add what passes by the state, gate."""
        gate, inputs, dt = self.inputs(x).split(self.widths, dim=-1)
        sizes = [self.widths[0], self.states, self.states]
        x, write, read = self.convolution(inputs, state["inputs"]).split(sizes, dim=-1)
        x = x.unflatten(-1, (self.heads, -1))
        dt = packing.real[..., None] * F.softplus(dt + self.dt_bias)  # a step that is not real takes no time
        y, matrix = selective_scan(x * dt[..., None], -self.A_log.exp() * dt, write, read, state["matrix"])
        y = self.out(self.norm((y + self.D[:, None] * x).flatten(2) * F.silu(gate)))
        return y, {"matrix": matrix, "inputs": packing.newest(state["inputs"], inputs)}


class _Layer(nn.Module):
    """A pre-norm residual layer: a mixer, then a map of each step alone, if the mixer's authors have one."""

    def __init__(self, width: int, mixer: _Mixer, after: nn.Module | None):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(width, eps=1e-5), mixer
        self.after = None if after is None else nn.Sequential(nn.RMSNorm(width, eps=1e-5), after)

    def forward(
        self, x: Float[Tensor, "B T d"], state: dict[str, Tensor], packing: Packing
    ) -> tuple[Float[Tensor, "B T d"], dict[str, Tensor]]:
        """Outputs for packed inputs, and the state after the last real one."""
        y, state = self.mixer(self.norm(x), state, packing)
        x = x + y
        return (x if self.after is None else x + self.after(x)), state


class _Layers(Memory):
    """Layers over the embedded contents; the last one's output, normalised, is the one slot and the readout."""

    def __init__(self, *, content: int, channels: int, width: int, layers: int, layer: Callable[[], _Layer]):
        super().__init__(content=content, channels=channels, width=width)
        self.embed = nn.Linear(content, width)
        self.stack = [layer() for _ in range(layers)]
        self.layers = nn.ModuleList(self.stack)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each layer's matrices, and the last inputs of its convolution."""
        return {f"{n}{i}": shape for i, layer in enumerate(self.stack) for n, shape in layer.mixer.shapes.items()}

    def _run(
        self, state: MemoryState, contents: Tensor, path: PathFeatures | None, valid: Tensor
    ) -> tuple[dict[str, Tensor], Readout]:
        packing = Packing(valid)
        tensors: dict[str, Tensor] = {}
        x = self.embed(packing.pack(contents))
        for i, layer in enumerate(self.stack):
            x, after = layer(x, {n: state.tensors[f"{n}{i}"] for n in layer.mixer.shapes}, packing)
            tensors |= {f"{n}{i}": y for n, y in after.items()}
        z = self.norm(x)
        z = packing.unpack(z, torch.zeros_like(z[:, 0]))
        return tensors, self._empty(z, z[..., None, :], torch.ones_like(z[..., :1]))


class DeltaMemory(_Layers):
    """Gated DeltaNet (Yang et al. 2024): content keys, the delta rule, decay; each layer is followed by an MLP."""

    def __init__(self, *, content: int, channels: int, width: int, layers: int = 2, heads: int = 4):
        def layer() -> _Layer:
            return _Layer(width, GatedDelta(width, heads), MLP(width, 2 * width, width))

        super().__init__(content=content, channels=channels, width=width, layers=layers, layer=layer)


class SSMMemory(_Layers):
    """Mamba-2 (Dao and Gu 2024), a selective state-space model."""

    def __init__(self, *, content: int, channels: int, width: int, layers: int = 2, heads: int = 8, states: int = 64):
        def layer() -> _Layer:
            return _Layer(width, SelectiveSSM(width, heads, states), None)

        super().__init__(content=content, channels=channels, width=width, layers=layers, layer=layer)


def _direction(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Of norm one, but for what is nearly nothing."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
