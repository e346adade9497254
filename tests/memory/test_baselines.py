"""Memories to compare with against their equations, transcribed here step by step in float64, over more steps than are
computed at once, from a state that has been filled and with invalid steps between.
"""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from trace_memory import baselines, recurrent
from trace_memory.config import MemoryConfig, build
from trace_memory.memory import MemoryState
from trace_memory.packing import Packing
from trace_memory.registry import METHODS

B, T, C, D = 2, 150, 6, 3
WIDTHS = {"content": C, "channels": D, "width": 8}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(length: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    valid = torch.rand(B, length, generator=torch.Generator().manual_seed(1)) > 0.2
    return random(B, length, C), random(B, length, D, seed=2).cumsum(1) * 0.3, valid


def made(kind, **options):
    """With weights that are drawn anew, so that what starts as one or zero counts too."""
    torch.manual_seed(0)
    memory = kind(**WIDTHS, **options).double().eval()
    with torch.no_grad():
        for name, x in memory.named_parameters():
            if x.ndim == 1 and "A_log" not in name and "dt_bias" not in name:
                x.add_(0.3 * torch.randn_like(x))
    return memory


def agrees(memory, oracle) -> None:
    """The scan with invalid steps, row by row, with the oracle's z over the valid ones; holding it at invalid steps."""
    contents, path, valid = data()
    _, readouts = memory.scan(contents, path, valid)
    for row in range(B):
        expected = torch.stack(oracle(contents[row, valid[row]]))
        torch.testing.assert_close(readouts.z[row, valid[row]], expected, rtol=1e-9, atol=1e-9)


def normed(x, layer):
    """A layer norm or an RMS norm."""
    x = x - x.mean() if isinstance(layer, torch.nn.LayerNorm) else x
    bias = layer.bias if isinstance(layer, torch.nn.LayerNorm) else 0
    return x / torch.sqrt((x * x).mean() + layer.eps) * layer.weight + bias


def two_layers(phi, x):
    return phi.last(F.gelu(phi.first(x)))


# -- packing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["110111", "111111", "000000", "001011", "111100"])
def test_packing_puts_valid_steps_first_and_results_back(pattern):
    valid = torch.tensor([[c == "1" for c in pattern], [True] * 6])
    x, before = random(2, 6, 3), random(2, 3, seed=1)
    packing = Packing(valid)
    packed = packing.pack(x)
    results = packing.unpack(2 * packed, before)
    for row in range(2):
        real = x[row, valid[row]]
        assert torch.equal(packed[row, : len(real)], real)
        assert packing.real[row].tolist() == [i < len(real) for i in range(6)]
        held = before[row]
        for t in range(6):
            held = 2 * x[row, t] if valid[row, t] else held
            assert torch.equal(results[row, t], held)
        kept = random(2, 4, 3, seed=2)
        assert torch.equal(packing.newest(kept, packed)[row], torch.cat([kept[row], real])[-4:])


# -- state machines -------------------------------------------------------------------------------------------------------


def test_the_gru_is_its_equations():
    memory = made(recurrent.GRUMemory)
    w = memory.cell

    def oracle(contents):
        h, out = torch.zeros(8, dtype=torch.float64), []
        for e in contents:
            a, b = w.weight_ih @ e + w.bias_ih, w.weight_hh @ h + w.bias_hh
            reset, update = torch.sigmoid(a[:8] + b[:8]), torch.sigmoid(a[8:16] + b[8:16])
            h = (1 - update) * torch.tanh(a[16:] + reset * b[16:]) + update * h
            out.append(h)
        return out

    agrees(memory, oracle)


def test_lru_is_its_rule():
    memory = made(recurrent.LRUMemory, rows=5)

    def oracle(contents):
        rows, usage, read, out = torch.zeros(5, 8).double(), torch.zeros(5).double(), torch.zeros(5).double(), []
        for e in contents:
            gate, sharp = torch.sigmoid(memory.strength(e))
            least = torch.zeros(5, dtype=torch.float64)
            least[int(usage.argmin())] = 1
            rows = rows * (1 - (1 - gate) * least)[:, None]
            write = gate * read + (1 - gate) * least
            rows = rows + torch.outer(write, memory.value(e))
            cosine = F.normalize(rows, dim=-1, eps=1e-6) @ F.normalize(memory.key(e), dim=0)
            read = torch.softmax((1 + 10 * sharp) * cosine, 0)
            usage = 0.95 * usage + read + write
            out.append(read @ rows)
        return out

    agrees(memory, oracle)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_gated_delta_rule_in_chunks_is_its_recurrence(size):
    """Also with write strengths of one and with decays that leave nothing."""
    H, K, V = 2, 4, 6
    q, k, v = (random(B, T, H, n, seed=i) for i, n in enumerate((K, K, V)))
    k = F.normalize(k, dim=-1)
    decay, beta = torch.sigmoid(random(B, T, H, seed=3) + 3), torch.sigmoid(random(B, T, H, seed=4))
    beta[:, ::5], decay[:, 70] = 1.0, 1e-30
    start = random(B, H, V, K, seed=5)
    found, last = recurrent.gated_delta(q, k, v, decay.log(), beta, start, size)
    for row in range(B):
        for h in range(H):
            S = start[row, h]
            for t in range(T):
                key = k[row, t, h]
                erase = torch.eye(K, dtype=torch.float64) - beta[row, t, h] * torch.outer(key, key)
                S = decay[row, t, h] * S @ erase + beta[row, t, h] * torch.outer(v[row, t, h], key)
                torch.testing.assert_close(found[row, t, h], S @ q[row, t, h], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(last[row, h], S, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_selective_scan_in_chunks_is_its_recurrence(size):
    H, P, N = 3, 4, 5
    x, write, read = random(B, T, H, P), random(B, T, N, seed=1), random(B, T, N, seed=2)
    decay = torch.sigmoid(random(B, T, H, seed=3) + 3)
    decay[:, 70] = 1e-30
    start = random(B, H, P, N, seed=4)
    found, last = recurrent.selective_scan(x, decay.log(), write, read, start, size)
    for row in range(B):
        for h in range(H):
            S = start[row, h]
            for t in range(T):
                S = decay[row, t, h] * S + torch.outer(x[row, t, h], write[row, t])
                torch.testing.assert_close(found[row, t, h], S @ read[row, t], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(last[row, h], S, rtol=1e-9, atol=1e-9)


def convolved(layer, inputs):
    """The last four inputs, oldest first, channel by channel."""
    padded = [torch.zeros_like(inputs[0])] * (4 - len(inputs)) + list(inputs[-4:])
    y = sum(layer.weight[i] * padded[i] for i in range(4))
    return F.silu(y if layer.bias is None else y + layer.bias)


def direction(x):
    return x / torch.sqrt((x * x).sum() + 1e-6)


def test_delta_is_gated_deltanet():
    memory = made(recurrent.DeltaMemory, heads=2)

    def oracle(contents):
        inputs: list[list] = [[], []]
        matrices, out = torch.zeros(2, 2, 8, 4, dtype=torch.float64), []
        for e in contents:
            x = memory.embed(e)
            for i, layer in enumerate(memory.stack):
                m, y = layer.mixer, normed(x, layer.norm)
                inputs[i].append(m.qkv(y))
                qkv = convolved(m.convolution, inputs[i])
                read = []
                for h in range(2):
                    q, k = (direction(qkv[o + 4 * h : o + 4 * h + 4]) for o in (0, 8))
                    v = qkv[16 + 8 * h : 24 + 8 * h]
                    gates = m.gates(y)
                    a = torch.exp(-torch.exp(m.A_log[h]) * F.softplus(gates[h] + m.dt_bias[h]))
                    b = torch.sigmoid(gates[2 + h])
                    S = matrices[i, h].clone()
                    S = a * (S - b * torch.outer(S @ k, k)) + b * torch.outer(v, k)
                    matrices[i, h] = S
                    read.append(normed(S @ q / math.sqrt(4), m.norm))
                x = x + m.out(torch.cat(read) * F.silu(m.gate(y)))
                x = x + two_layers(layer.after[1], normed(x, layer.after[0]))
            out.append(normed(x, memory.norm))
        return out

    with torch.no_grad():
        agrees(memory, oracle)


def test_ssm_is_mamba_2():
    memory = made(recurrent.SSMMemory, heads=4, states=5)

    def oracle(contents):
        inputs: list[list] = [[], []]
        matrices, out = torch.zeros(2, 4, 4, 5, dtype=torch.float64), []
        for e in contents:
            x = memory.embed(e)
            for i, layer in enumerate(memory.stack):
                m = layer.mixer
                projected = m.inputs(normed(x, layer.norm))
                gate, dt = projected[:16], F.softplus(projected[42:] + m.dt_bias)
                inputs[i].append(projected[16:42])
                xBC = convolved(m.convolution, inputs[i])
                read = []
                for h in range(4):
                    u, write, ask = xBC[4 * h : 4 * h + 4], xBC[16:21], xBC[21:26]
                    S = torch.exp(-torch.exp(m.A_log[h]) * dt[h]) * matrices[i, h] + dt[h] * torch.outer(u, write)
                    matrices[i, h] = S
                    read.append(S @ ask + m.D[h] * u)
                x = x + m.out(normed(torch.cat(read) * F.silu(gate), m.norm))
            out.append(normed(x, memory.norm))
        return out

    with torch.no_grad():
        agrees(memory, oracle)


@pytest.mark.parametrize(("name", "least"), [("delta", 0.0), ("ssm", 1.0)])
def test_decays_start_as_their_authors_draw_them(name, least):
    """Rates to 16, uniformly; step sizes log-uniformly from 1e-3 to 1e-1."""
    torch.manual_seed(0)
    mixers = [layer.mixer for _ in range(200) for layer in build(MemoryConfig(name=name, **WIDTHS)).stack]
    rate = torch.cat([m.A_log for m in mixers]).detach().exp()
    dt = F.softplus(torch.cat([m.dt_bias for m in mixers])).detach().log10()
    assert least <= float(rate.min()) < least + 0.5
    assert 15.5 < float(rate.max()) <= 16.001
    assert float(rate.mean()) == pytest.approx((least + 16) / 2, rel=0.05)
    assert -3.001 <= float(dt.min()) < -2.95
    assert -1.05 < float(dt.max()) <= -0.999
    assert float(dt.mean()) == pytest.approx(-2, abs=0.05)


# -- memories that look back ----------------------------------------------------------------------------------------------


def attended(q, ks, vs, biases, heads):
    """One query over lists of keys and values, head by head."""
    size = len(q) // heads
    out = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        score = torch.stack([q[part] @ k[part] / math.sqrt(size) + b[h] for k, b in zip(ks, biases, strict=True)])
        out.append(torch.softmax(score, 0) @ torch.stack([v[part] for v in vs]))
    return torch.cat(out)


def test_the_transformer_sees_its_last_inputs():
    memory = made(baselines.TransformerContext, window=9, heads=2)
    torch.nn.init.normal_(memory.age)

    def oracle(contents):
        layers: list[list] = [[], []]
        out = []
        for e in contents:
            x = memory.embed(e)
            for i, block in enumerate(memory.blocks):
                layers[i].append(x)
                seen = layers[i][-9:]
                qkv = [block.qkv(normed(y, block.norm)) for y in seen]
                ages = [memory.age[i, :, len(seen) - 1 - j] for j in range(len(seen))]
                x = x + block.out(attended(qkv[-1][:8], [y[8:16] for y in qkv], [y[16:] for y in qkv], ages, 2))
                x = x + two_layers(block.mlp, normed(x, block.norm_mlp))
            out.append(normed(x, memory.norm))
        return out

    with torch.no_grad():
        agrees(memory, oracle)


@pytest.mark.parametrize("window", [5, 100, 256])
def test_the_window_asks_its_last_contents(window):
    """Each added to the encoding of its age before keys and values are made."""
    memory = made(baselines.WindowAttention, window=window, heads=2)

    def oracle(contents):
        past, out = [], []
        for e in contents:
            x = memory.embed(e)
            past.append(normed(x, memory.norm_entries))
            seen = past[-window:]
            aged = [y + memory.age[len(seen) - 1 - j] for j, y in enumerate(seen)]
            gate = torch.sigmoid(two_layers(memory.gate, e))
            for block in memory.blocks:
                kv = [block.kv(y) for y in aged]
                # the bias of keys and values is added once, with the content
                read = attended(
                    block.q(normed(x, block.norm)), [y[:8] for y in kv], [y[8:] for y in kv], [(0, 0)] * len(kv), 2
                )
                x = x + gate * block.out(read)
                x = x + two_layers(block.mlp, normed(x, block.norm_mlp))
            out.append(normed(x, memory.norm))
        return out

    with torch.no_grad():
        agrees(memory, oracle)


def test_the_windows_gate_starts_nearly_open_and_shuts_the_past_out():
    torch.manual_seed(0)
    memory = build(MemoryConfig(name="window", **WIDTHS)).double()
    contents, path, _ = data(20)
    assert float(torch.sigmoid(memory.gate(contents)).detach().median()) > 0.9
    torch.nn.init.constant_(memory.gate.last.bias, -1e4)
    apart = memory.scan(contents[:, 19:], path[:, 19:])[1].z[:, 0]
    torch.testing.assert_close(memory.scan(contents, path)[1].z[:, 19], apart, rtol=1e-12, atol=1e-12)


def test_retrieval_forgets_what_is_older_than_its_capacity():
    memory = made(baselines.RetrievalPrompt, capacity=20, top=3)

    def oracle(contents):
        out = []
        for t, e in enumerate(contents):
            past = contents[max(0, t - 19) : t + 1]
            score = torch.stack([memory.query(e) @ memory.key(y) / math.sqrt(8) for y in past])
            best = score.topk(min(3, len(past)))
            out.append(torch.softmax(best.values, 0) @ memory.value(past[best.indices]))
        return out

    with torch.no_grad():
        agrees(memory, oracle)


# -- all of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_long_scan_is_its_pieces(name):
    """Longer than what is computed at once; gradients of the last readout too."""
    torch.manual_seed(0)
    memory = build(MemoryConfig(name=name, **WIDTHS, hidden=8)).double().eval()
    contents, path, valid = data()
    contents.requires_grad_()
    weight = random(B, 8)

    def gradient(z):
        return torch.autograd.grad((z * weight).sum() + 0 * contents.sum(), contents)[0]

    whole, readouts = memory.scan(contents, path, valid)
    state, z = memory.init(B), []
    for piece in torch.arange(T).split([1, 63, 64, 22]):
        state, part = memory.scan(contents[:, piece], path[:, piece], valid[:, piece], state)
        z.append(part.z)
    z = torch.cat(z, 1)
    torch.testing.assert_close(z[valid], readouts.z[valid], rtol=1e-10, atol=1e-10)
    for n in state.tensors:
        torch.testing.assert_close(state.tensors[n], whole.tensors[n], rtol=1e-10, atol=1e-10)
    last = valid.long().cumsum(1).argmax(1)
    pick = torch.arange(B), last
    torch.testing.assert_close(gradient(readouts.z[pick]), gradient(z[pick]), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["transformer", "window", "retrieval"])
def test_a_full_state_is_looked_back_at(name):
    """Rows that have taken many steps beside one that has not begun."""
    torch.manual_seed(0)
    memory = build(MemoryConfig(name=name, **WIDTHS)).double().eval()
    contents, path, valid = data(300)
    state, _ = memory.scan(contents, path, valid)
    mixed = memory.reset(state, torch.tensor([False, True]))
    readouts = memory.scan(contents, path, valid, mixed)[1]
    for row, begin in enumerate((state, memory.init(B))):
        alone = MemoryState(begin.steps[row : row + 1], {n: x[row : row + 1] for n, x in begin.tensors.items()})
        one = [x[row : row + 1] for x in (contents, path, valid)]
        expected = memory.scan(*one, alone)[1].z[0]
        torch.testing.assert_close(readouts.z[row, valid[row]], expected[valid[row]], rtol=1e-10, atol=1e-10)
