"""TRACE as a whole against Algorithm 1, transcribed here with loops and pysiglib; LRU and retrieval against their rules."""

import math
from dataclasses import replace

import pysiglib
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from trace_memory.config import MemoryConfig, PaperOptions, build
from trace_memory.memory import AuxiliaryWeights

C, D, T = 6, 3, 12
NUMBERS = {"channels": D, "content": C, "width": 16, "hidden": 10}


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    contents = torch.randn(T, C, generator=generator, dtype=torch.float64)
    return contents, torch.randn(T, D, generator=generator, dtype=torch.float64).cumsum(0)


def fitted(**changes):
    torch.manual_seed(1)
    memory = build(MemoryConfig(**NUMBERS | changes)).double()
    memory.normaliser.fit([data(seed)[1] for seed in range(2, 6)], memory.signature)
    return memory.eval()


def two_layers(phi, x):
    return phi.last(F.gelu(phi.first(x)))


PAPER = PaperOptions(tau=0.6, identity=0.4)
FORMS = {
    "paper": {"name": "paper", "paper": PAPER},
    "paper, anchor": {"name": "paper", "paper": replace(PAPER, anchor=True)},
    "trace": {},
    "trace, velocities": {"velocity_channels": (1,)},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_step_is_algorithm_1(form):
    """Our form differs in what is named here: bounded signatures, normalised keys, cosine routes, the gate, the anchor, the
    write rate, and that signatures fade, over a length that is far beyond this path.
    """
    memory, paper = fitted(**FORMS[form]), form.startswith("paper")
    memory.signature.fade = math.inf
    anchor, velocities = form != "paper", [1] if form == "trace, velocities" else []
    tau, identity = (0.6, 0.4) if paper else (1.0, 0.5)
    memory.normaliser.fit([data(seed)[1] for seed in range(2, 6)], memory.signature)
    contents, path = data()
    _, readouts = memory.scan(contents[None], path[None])
    n, keys, slots = memory.normaliser, memory.keys, memory.slots
    squash = torch.sigmoid if paper else lambda x: (1.05 * torch.sigmoid(x) - 0.05).clamp_min(0)
    bound = (lambda x: x) if paper else (lambda x: x / torch.sqrt(1 + (x / 10) ** 2))
    level = (lambda x: x) if paper else (lambda x: (x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-5))
    M = torch.zeros(4, 16, dtype=torch.float64)
    before = torch.zeros(memory.signature.dim, dtype=torch.float64)
    states = (path - n.state_mean) / n.state_std
    training = [(data(seed)[1] - n.state_mean) / n.state_std for seed in range(2, 6)]

    def length(now, before):
        gone = now - before
        gone[..., velocities] = (now + n.state_mean / n.state_std)[
            ..., velocities
        ]  # the raw value, in standard deviations
        return gone.norm(dim=-1)

    mean_step = torch.cat([length(x[1:], x[:-1]) for x in training]).mean()
    for t in range(T):
        xi = pysiglib.sig(states[: t + 1].clone(), 3) if t else torch.zeros_like(before)
        delta, before = xi - before, xi
        g = level(two_layers(keys.phi_g, bound((xi - n.xi_mean) / n.xi_std)))
        dg = level(two_layers(keys.phi_delta, bound((delta - n.delta_mean) / n.delta_std)))
        q = torch.cat([g, dg, contents[0]] if anchor else [g, dg])
        rho = two_layers(keys.phi_rho, q)
        u = two_layers(slots.phi_w, torch.cat([contents[t], q]))
        m_bar = M + identity * slots.eta
        route = slots.W_K.weight.T @ slots.W_Q(rho)
        cosines = [(route @ m) / ((route @ route + 1e-4) * (m @ m + 1e-4)).sqrt() for m in m_bar]
        dots = [slots.W_Q(rho) @ slots.W_K(m) / 4 for m in m_bar]
        omega = torch.softmax(torch.stack(dots if paper else cosines) / tau, 0)
        inside = [torch.cat([m, u, rho]) for m in m_bar]
        moved = 1.0 if paper or not t else min(1.0, float(length(states[t], states[t - 1]) / (0.5 * mean_step)))
        beta = torch.stack([moved * omega[k] * squash(two_layers(slots.phi_beta, x)) for k, x in enumerate(inside)])
        proposal = torch.stack([torch.tanh(two_layers(slots.phi_m, x)) for x in inside])
        M = (1 - beta) * M + beta * proposal
        query = two_layers(slots.phi_r, torch.cat([contents[t], rho]))
        scores = torch.stack([query @ slots.W_K_read(m) for m in M + identity * slots.eta]) / 4
        alpha = torch.softmax(scores, 0)
        z = sum(alpha[k] * slots.W_V_read(M[k]) for k in range(4))
        found = readouts.at(t)
        for name, expected in {"slots": M, "z": z, "alpha": alpha, "g": g, "dg": dg}.items():
            torch.testing.assert_close(getattr(found, name)[0], expected, rtol=1e-9, atol=1e-9, msg=f"{name} at {t}")
        torch.testing.assert_close(found.routing.omega[0], omega)
        torch.testing.assert_close(found.routing.u[0], u)
        torch.testing.assert_close(found.routing.beta[0], beta.mean(-1))


def test_routes_start_as_soft_at_every_width():
    for width in (64, 256):
        assert build(MemoryConfig(width=width)).slots.omega.sharp == pytest.approx(math.sqrt(width) / 4)


def test_signature_only_reads_the_keys_of_trace():
    trace, only = fitted(), fitted(name="signature-only")
    only.keys.phi_g.load_state_dict(trace.keys.phi_g.state_dict())
    only.keys.phi_delta.load_state_dict(trace.keys.phi_delta.state_dict())
    contents, path = (x[None] for x in data())
    a, b = trace.scan(contents, path)[1], only.scan(contents, path)[1]
    assert torch.equal(a.g, b.g)
    assert torch.equal(a.dg, b.dg)
    assert a.g.std() > 0.01
    assert (b.z == 0).all()


def test_starts_and_gains_reach_the_modules():
    torch.manual_seed(0)
    numbers = NUMBERS | {"width": 64, "hidden": 64}
    ours, plain = (build(MemoryConfig(**numbers, dropout=0.3, name=name)) for name in ("trace", "paper"))
    slots = ours.slots
    assert (slots.phi_w.first.weight[:, C : C + 128] == 0).all()  # g and dg
    assert (slots.phi_w.first.weight[:, :C] != 0).any()
    assert (slots.phi_w.first.weight[:, C + 128 :] != 0).any()  # the anchor was seen
    for phi in (slots.phi_m, slots.phi_beta):
        assert (phi.first.weight[:, 128:] == 0).all()
        ratio = phi.first.weight[:, :64].std() / phi.first.weight[:, 64:128].std()
        assert float(ratio) == pytest.approx(0.3, rel=0.1)
    assert slots.phi_beta.last.bias.tolist()[::63] == [-3.0, -5.0]
    assert float(slots.phi_beta.last.weight.std()) == pytest.approx(6 * (0.425 * 64) ** -0.5, rel=0.1)
    assert float(slots.W_V_read.weight.std()) == pytest.approx(5 / math.sqrt(3 * 64), rel=0.1)
    assert plain.slots.phi_beta.last.bias.abs().max() < 0.2
    assert float(plain.slots.W_V_read.weight.std()) == pytest.approx(1 / math.sqrt(3 * 64), rel=0.1)
    assert ours.keys.phi_g.dropout.p == 0.3
    assert slots.phi_m.dropout.p == 0.0


def test_a_memory_says_which_auxiliary_losses_it_is_trained_with():
    options = PaperOptions(balance=0.1, entropy=0.2, consistency=0.3)
    weights = [
        build(MemoryConfig(**NUMBERS, name=name, **paper)).auxiliary
        for name, paper in (
            ("paper", {}), ("paper", {"paper": options}), ("no-auxiliary", {"paper": options}), ("trace", {}), ("gru", {})
        )
    ]  # fmt: skip
    none = AuxiliaryWeights(0.0, 0.0, 0.0)
    assert weights == [AuxiliaryWeights(0.05, 0.01, 0.002), AuxiliaryWeights(0.1, 0.2, 0.3), none, none, none]


def test_lru_takes_the_least_used_row_and_reads_by_similarity():
    torch.manual_seed(0)
    memory = build(MemoryConfig(name="lru", channels=D, content=C, width=8)).double().eval()
    contents, path = (x[None] for x in data())
    torch.nn.init.constant_(memory.strength.bias, -50.0)  # gate shut: always a fresh row; reading as blunt as it gets
    torch.nn.init.zeros_(memory.strength.weight)
    state, readouts = memory.scan(contents[:, :8], path[:, :8])
    values = memory.value(contents[0, :8])
    taken = torch.cdist(state.tensors["rows"][0], values).argmin(1)
    assert sorted(taken.tolist()) == list(range(8))  # eight writes, eight rows, none overwritten
    torch.testing.assert_close(state.tensors["rows"][0], values[taken])
    key = F.normalize(memory.key(contents[0, 7]), dim=-1)
    alpha = torch.softmax(F.normalize(state.tensors["rows"][0], dim=-1) @ key, 0)
    torch.testing.assert_close(readouts.alpha[0, 7], alpha)
    torch.testing.assert_close(readouts.z[0, 7], alpha @ state.tensors["rows"][0])


def test_retrieval_prompts_with_the_most_similar_past():
    torch.manual_seed(0)
    memory = build(MemoryConfig(name="retrieval", channels=D, content=C, width=8)).double().eval()
    contents, path = (x[None] for x in data())
    _, readouts = memory.scan(contents, path)
    scores = memory.key(contents[0, :10]) @ memory.query(contents[0, 9]) / math.sqrt(8)
    best = scores.topk(4)
    torch.testing.assert_close(readouts.alpha[0, 9], torch.softmax(best.values, 0))
    torch.testing.assert_close(readouts.slots[0, 9], memory.value(contents[0, best.indices]))
    assert readouts.alpha[0, 1, 2:].tolist() == [0, 0]  # two steps seen, two entries found
