"""The event store (issue 33): a fixed number of events, each with a key, a value, a look and its place in the order of
events, addressed by content and by an event clock. One file: memory, small model, training, tests.

    python memory33.py test                  # scan == fold(step), any chunking; rows; repeated frames; bytes; gradients
    python memory33.py train order 3 200     # question, cues, updates (needs tasks33.py beside it)

Equations (per robot; t counts frames; everything is causal):
    nu_t   = standard( log( mean_d ((x_t - mu) / sigma)^2 ) )    stand-out of a coarse picture x_t (no learning, cannot drift)
    s_t    = MLP_gate(e_t) + a (nu_t - theta)                    a = 3, theta = 1; the last layer of the MLP starts at 0.2x
    b_t    = clamp(1.5 sigmoid(s_t) - 0.25, 0, 1)                a gate with plateaus: exactly shut, exactly open
    y_t    = min(max(y_{t-1}, b_t - w), b_t + w)                 backlash, w = 1/4: blind to noise and to resampling
    r_t    = max(y_t - y_{t-1}, 0) / (1 - 2w)                    how much of an event begins here (the measure dc)
    c_t    = c_{t-1} + r_t,   at_t = c_t - r_t / 2               the event clock: the n-th event is written at n - 1/2
    store  = the N frames with the largest r_t (1 + sigmoid(s_t)) / 2 so far (ties: the older), each with
             (r, at, k = MLP_key(e), v = W_v e, l = W_l pooled look); in training empty slots hold the frames with the
             largest sigmoid(s) among those with r = 0: no weight, but 0.2 of sigmoid's gradient (`near`)
    head h : logit_n = q_h . k_n,h / sqrt(d) + sum_j a_hj(e_t) exp(-2 (at_n - j - 1/2)^2)
             att_n = r_n exp(logit_n) / (exp(null_h) + sum r exp(logit)),   z_h = sum_n att_n v_n,h
             mass_h = sum_n r_n sigmoid(logit_n)                 counts
             point_h = sum_n att_n softmax_tok(tau cos(W_l tok, l_n))   where what was stored is seen now
"""

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class State(NamedTuple):
    """All a robot carries: y, c (B G); the store, best first: pri (B N), r, at (B N G), k, v (B N W), look (B N D)."""

    y: Tensor
    c: Tensor
    pri: Tensor
    r: Tensor
    at: Tensor
    k: Tensor
    v: Tensor
    look: Tensor

    def bytes(self) -> int:
        """A robot."""
        return sum(x[0].numel() * x.element_size() for x in self)


class Frames(NamedTuple):
    """What the memory is given: content e (B T E), coarse picture x (B T X), map of the picture (B T P C)."""

    e: Tensor
    x: Tensor
    map: Tensor

    def part(self, begin: int, end: int) -> "Frames":
        return Frames(*(f[:, begin:end] for f in self))


class Readout(NamedTuple):
    """z (... W): what is recalled; mass (... H): how many; point (... H P): weights of the map's places."""

    z: Tensor
    mass: Tensor
    point: Tensor


class MLP(nn.Sequential):
    """Linear - GELU - Linear that passes the variance on."""

    def __init__(self, inputs: int, hidden: int, outputs: int, gain: float = 1.0):
        super().__init__(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
        nn.init.normal_(self[0].weight, std=inputs**-0.5)
        nn.init.normal_(self[2].weight, std=gain * (0.425 * hidden) ** -0.5)
        nn.init.zeros_(self[0].bias)
        nn.init.zeros_(self[2].bias)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A clamp whose gradient goes to x on ties, and to the bounds where they meet: then clips compose with their gradients
    (halves, as minimum and maximum give, would depend on the chunks).
    """
    x = torch.where((x < low) | (low == high), low, x)
    return torch.where(x > high, high, x)


def backlash(b: Tensor, w: float, y: Tensor) -> Tensor:
    """y_t = min(max(y_{t-1}, b_t - w), b_t + w) along dim 1: clamps compose to clamps, so log T rounds do. Bit-exact."""
    low, high, d = b - w, b + w, 1
    while d < b.shape[1]:
        l, h = low[:, d:], high[:, d:]
        low, high = (torch.cat([x[:, :d], clip(x[:, :-d], l, h)], 1) for x in (low, high))
        d *= 2
    return clip(y[:, None], low, high)


def plateau(s: Tensor, leak: float = 0.1) -> Tensor:
    """clamp(1.5 sigmoid(s) - 0.25, 0, 1); beyond the plateaus' edges a tenth of the gradient passes."""
    x = 1.5 * s.sigmoid() - 0.25
    return x.clamp(0, 1) + leak * (x - x.detach()) * ((x < 0) | (x > 1))


class EventStore(nn.Module):
    """`slots` events; `voices` gates with a clock each (one is enough so far), head h hears voice h mod voices."""

    def __init__(self, content: int, coarse: int, channels: int, width: int = 64, heads: int = 4, slots: int = 24,
                 look: int = 32, voices: int = 1, bumps: int = 12, w: float = 0.25, slope: float = 3.0, theta: float = 1.0,
                 near: float = 0.2):
        super().__init__()
        self.near = near  # in training empty slots hold what nearly was an event: it weighs nothing, but the gate learns
        self.width, self.heads, self.slots, self.voices, self.bumps, self.w = width, heads, slots, voices, bumps, w
        self.slope, self.theta = slope, theta
        self.gate = MLP(content, width, voices, gain=0.2)  # a third of the learning rate: see `groups`
        self.key, self.query = MLP(content, width, width), MLP(content, width, width)
        self.when = MLP(content, width, heads * bumps)
        self.value = linear(content, width)
        self.look = linear(channels, look)
        self.pool = nn.Parameter(torch.zeros(channels))
        self.null = nn.Parameter(torch.zeros(heads))
        self.tau = nn.Parameter(torch.tensor(math.log(8.0)))
        for name, value in (("mu", torch.zeros(coarse)), ("var", torch.ones(coarse)), ("nu_mu", torch.zeros(())), ("nu_var", torch.ones(()))):
            self.register_buffer(name, value)

    def groups(self, rate: float) -> list[dict]:
        """Parameter groups: the gate learns at 0.3 of the rate (it starts right, and must not drift before it pays)."""
        gate = set(self.gate.parameters())
        return [{"params": [p for p in self.parameters() if p not in gate], "lr": rate}, {"params": list(gate), "lr": 0.3 * rate}]

    # ---- what stands out
    def _raw(self, x: Tensor) -> Tensor:
        return (((x - self.mu) ** 2 / (self.var + 1e-6)).mean(-1) + 1e-3).log()

    @torch.no_grad()
    def observe(self, x: Tensor, rate: float = 0.03) -> None:
        """Statistics of the coarse pictures: rate 1 on the first batch (a data-dependent start), then a running mean."""
        x = x.flatten(0, -2)
        self.mu.lerp_(x.mean(0), rate)
        self.var.lerp_(x.var(0), rate)
        nu = self._raw(x)
        self.nu_mu.lerp_(nu.mean(), rate)
        self.nu_var.lerp_(nu.var(), rate)

    # ---- writing
    def init(self, batch: int) -> State:
        g, n = self.voices, self.slots
        z = self.null.new_zeros
        return State(z(batch, g) + self.w, z(batch, g), z(batch, n), z(batch, n, g), z(batch, n, g), z(batch, n, self.width),
                     z(batch, n, self.width), z(batch, n, self.look.out_features))

    def _events(self, state: State, f: Frames) -> tuple[Tensor, ...]:
        """y, c, priority, r, at of every frame, and the learned part of the gate (for `prior`)."""
        learned = self.gate(f.e)
        nu = (self._raw(f.x) - self.nu_mu) / (self.nu_var + 1e-6).sqrt()
        s = learned + self.slope * (nu[..., None] - self.theta)
        y = backlash(plateau(s), self.w, state.y)
        r = (y - torch.cat([state.y[:, None], y[:, :-1]], 1)).relu() / (1 - 2 * self.w)
        c = state.c[:, None] + r.cumsum(1)
        open_, at = s.sigmoid(), c - r / 2
        pri = (r * (1 + open_) / 2).amax(-1)
        if self.training and self.near:
            pri = torch.where(pri > 0, 1 + pri, open_.amax(-1))
            r = r + self.near * (open_ - open_.detach())
        return y, c, pri, r, at, learned

    def _written(self, e: Tensor, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and look of frames (... E), (... P C); a look is pooled by what stands out within the picture."""
        far = (patches - patches.mean(-2, keepdim=True)).square().sum(-1).add(1e-8).sqrt()
        weight = (patches @ self.pool + 4 * far / far.mean(-1, keepdim=True)).softmax(-1)
        return self.key(e), self.value(e), (self.look(patches) * weight[..., None]).sum(-2)

    def scan(self, frames: Frames, state: State | None = None, chunk: int = 64, every: bool = False) -> tuple[State, Readout]:
        """The state after all frames, and the readout at the last one, or at every one. `chunk` does not change the result.

        Two terms for the loss are left behind: `prior`, the mean square of the learned part of the gate (0.002 of it: the
        gate stays with what stands out unless leaving it pays, and cannot run away), and `events`, how many were written an
        episode (0.003 of it, once the answers are right: false events close for good).
        """
        state = self.init(len(frames.e)) if state is None else state
        counted = state.c
        reads, priors = [], []
        for begin in range(0, frames.e.shape[1], chunk):
            part = frames.part(begin, begin + chunk)
            y, c, pri, r, at, learned = self._events(state, part)
            priors.append(learned.square().mean())
            if every:
                new = (pri, r, at, *self._written(part.e, part.map))
                reads.append(self._every(state, new, part))
            else:  # only what may stay is encoded
                top, index = pri.sort(dim=1, descending=True, stable=True)
                index = index[:, : self.slots]
                pick = lambda x: x.take_along_dim(index.view(*index.shape, *[1] * (x.dim() - 2)), 1)  # noqa: B023, E731
                new = (top[:, : self.slots], pick(r), pick(at), *self._written(pick(part.e), pick(part.map)))
            state = State(y[:, -1], c[:, -1], *self._merge(state, new))
        self.prior, self.events = torch.stack(priors).mean(), (state.c - counted).mean()
        if every:
            return state, Readout(*(torch.cat(x, 1) for x in zip(*reads, strict=True)))
        return state, self.read(state, frames.e[:, -1], frames.map[:, -1])

    def step(self, state: State, frame: Frames) -> tuple[State, Readout]:
        """One frame (T = 1)."""
        y, c, pri, r, at, _ = self._events(state, frame)
        state = State(y[:, 0], c[:, 0], *self._merge(state, (pri, r, at, *self._written(frame.e, frame.map))))
        return state, self.read(state, frame.e[:, 0], frame.map[:, 0])

    def _merge(self, state: State, new: tuple[Tensor, ...]) -> list[Tensor]:
        """The best `slots` of the store and the new ones; ties go to the older, so that what is no event never enters."""
        both = [torch.cat(pair, 1) for pair in zip(state[2:], new, strict=True)]
        index = both[0].sort(dim=1, descending=True, stable=True).indices[:, : self.slots]
        return [x.take_along_dim(index.view(*index.shape, *[1] * (x.dim() - 2)), 1) for x in both]

    # ---- reading
    def read(self, state: State, e: Tensor, patches: Tensor) -> Readout:
        """By content (B E) and map (B P C) of the present frame."""
        kept = torch.ones_like(state.pri, dtype=torch.bool)[:, None]
        return Readout(*(x[:, 0] for x in self._attend(state[3:], kept, e[:, None], patches[:, None])))

    def _every(self, state: State, new: tuple[Tensor, ...], part: Frames) -> Readout:
        """At every frame of a chunk: frame t sees the best `slots` of the store and of the chunk's frames up to t."""
        pri = torch.cat([state.pri, new[0]], 1)
        m, t = pri.shape[1], part.e.shape[1]
        order = torch.arange(m, device=pri.device)
        there = order[None] <= order[self.slots :, None]  # t m: in the store, or not later
        better = (pri[:, :, None] > pri[:, None]) | ((pri[:, :, None] == pri[:, None]) & (order[:, None] < order))
        rank = there.to(pri.dtype) @ better.to(pri.dtype)  # B t m: how many of those there are better
        kept = there & (rank < self.slots)
        both = [torch.cat(pair, 1) for pair in zip(state[3:], new[1:], strict=True)]
        assert kept.shape[1:] == (t, m)
        return Readout(*self._attend(both, kept, part.e, part.map))

    def _attend(self, store, kept: Tensor, e: Tensor, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """store: r, at, k, v, look of M events; kept B T M; e B T E; patches B T P C."""
        r, at, k, v, look = store
        (batch, events), times, h = k.shape[:2], e.shape[1], self.heads
        q = self.query(e).view(batch, times, h, -1)
        k, v = k.view(batch, events, h, -1), v.view(batch, events, h, -1)
        voice = torch.arange(h, device=e.device) % self.voices
        bumps = (-2 * (at[..., None] - torch.arange(self.bumps, device=e.device) - 0.5) ** 2).exp()[:, :, voice]  # B M H J
        logit = torch.einsum("bthd,bmhd->bthm", q, k) * q.shape[-1] ** -0.5
        logit = logit + torch.einsum("bthj,bmhj->bthm", self.when(e).view(batch, times, h, -1), bumps)
        r = (r.clamp(max=1)[:, :, voice].transpose(1, 2)[:, None] * kept[:, :, None]).expand_as(logit)
        null = self.null[:, None].expand(*logit.shape[:3], 1)
        top = torch.where(r > 0, logit, -torch.inf).amax(-1, keepdim=True).maximum(null).detach()
        weight = r * (logit - top).clamp(max=5).exp()
        att = weight / (weight.sum(-1, keepdim=True) + (null - top).exp())
        z = torch.einsum("bthm,bmhd->bthd", att, v).flatten(2)
        mass = (r * logit.sigmoid()).sum(-1)
        here = F.normalize(self.look(patches), dim=-1)
        near = torch.einsum("btpd,bmd->btmp", here, F.normalize(look, dim=-1))
        return z, mass, torch.einsum("bthm,btmp->bthp", att, (near * self.tau.exp()).softmax(-1))


class Model(nn.Module):
    """The battery's model: a small convolution and a map of the state make the content; a classifier of the readout."""

    def __init__(self, classes: int, **options):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.see, self.feel = nn.Linear(128, 64), MLP(3, 64, 64)
        for layer in (self.conv1, self.conv2, self.see):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.memory = EventStore(128, 12, 19, **options)
        m = self.memory
        self.answer = MLP(m.width + m.heads * 5 + 128, 64, classes, gain=0.5)

    def frames(self, images: Tensor, path: Tensor) -> Frames:
        """The coarse picture: means of 4 x 4 pixels. The map, 2 x 2 places: first-layer features and colours, averaged, so
        that a look says what a thing is made of and not how it lies in its place.
        """
        lead, x = images.shape[:2], images.flatten(0, 1)
        one = self.conv1(x).relu()
        coarse = F.avg_pool2d(x, 4)
        places = torch.cat([F.avg_pool2d(one, 2), 2 * coarse], 1).flatten(2).transpose(1, 2)
        e = torch.cat([self.see(self.conv2(one).relu().flatten(1)).unflatten(0, lead), self.feel(path)], -1)
        return Frames(e, coarse.flatten(1).unflatten(0, lead), places.unflatten(0, lead))

    def classify(self, read: Readout, e: Tensor) -> Tensor:
        return self.answer(torch.cat([read.z, read.mass, read.point.flatten(-2), e], -1))

    def forward(self, images: Tensor, path: Tensor, rate: float = 0.0) -> Tensor:
        f = self.frames(images, path)
        if rate:
            self.memory.observe(f.x, rate)
        _, read = self.memory.scan(f)
        return self.classify(read, f.e[:, -1])


def train(question: str, cues: int, updates: int, seed: int = 0, rate: float = 2e-3, device: str = "cpu") -> Model:
    """As in the battery: batch 64, warm-up 50, pace 1/4 to 2 a batch, linear decay over the second half."""
    import random
    import time

    from tasks33 import classes, plan, render

    torch.manual_seed(seed)
    rng, begin = random.Random(seed), time.time()
    model = Model(classes(question, cues)).to(device)
    gate = set(model.memory.gate.parameters())
    groups = [{"params": [p for p in model.parameters() if p not in gate], "k": 1.0}, {"params": list(gate), "k": 0.3}]
    optimiser = torch.optim.Adam(groups, lr=rate)
    for update in range(updates + 1):
        p = plan(question, cues, 64, device, pace=rng.choice((0.25, 0.5, 0.7, 1.0, 1.4, 2.0)))
        logits = model(*render(p), rate=0.03 if update else 1.0)
        if not update:
            continue  # the statistics' data-dependent start
        loss = F.cross_entropy(logits, p.answer)
        sure = (1 - loss.detach() / math.log(classes(question, cues))).clamp(min=0)
        loss = loss + 2e-3 * model.memory.prior + 3e-3 * sure * model.memory.events
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate * group["k"] * min(1, update / 50, 2 * (updates - update + 1) / updates)
        optimiser.step()
        if update % 25 == 0:
            with torch.no_grad():
                p = plan(question, cues, 256, device)
                right = (model.eval()(*render(p)).argmax(-1) == p.answer).float().mean()
                model.train()
            print(f"{update:5d} loss {loss.item():.3f} accuracy {right.item():.3f} {time.time() - begin:.0f} s", flush=True)
    return model


def test() -> None:
    torch.manual_seed(0)
    for voices, slots, training in ((1, 24, False), (2, 6, False), (2, 6, True)):
        m = EventStore(20, 12, 5, slots=slots, voices=voices, theta=0.0).double().train(training)
        f = Frames(torch.randn(3, 97, 20).double(), torch.randn(3, 97, 12).double(), torch.randn(3, 97, 4, 5).double())
        f.e.requires_grad_(True)
        m.observe(f.x, 1.0)
        whole, last = m.scan(f, chunk=1000)
        _, all_ = m.scan(f, chunk=1000, every=True)
        state, steps = m.init(3), []
        for t in range(97):
            state, read = m.step(state, f.part(t, t + 1))
            steps.append(read)
        folded = Readout(*(torch.stack(x, 1) for x in zip(*steps, strict=True)))
        gap = lambda a, b: max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))  # noqa: E731
        print(f"voices {voices}, slots {slots}, training {training}: events {whole.c.mean().item():.1f}, kept {float((whole.pri > 0).sum(1).double().mean()):.1f};",
              f"state fold-scan {gap(state, whole):.1e}, readouts {gap(folded, all_):.1e}, last {gap(last, [x[:, -1] for x in all_]):.1e}")
        assert gap(state, whole) < 1e-10 and gap(folded, all_) < 1e-10 and gap(last, [x[:, -1] for x in all_]) < 1e-10
        (grad,) = torch.autograd.grad(all_.z.square().sum() + all_.point.square().sum(), f.e, retain_graph=True)
        for chunk in (1, 7, 32, 64):
            for every in (False, True):
                other, reads = m.scan(f, chunk=chunk, every=every)
                assert gap(other, whole) < 1e-10 and gap(reads, all_ if every else last) < 1e-10
            (g,) = torch.autograd.grad(reads.z.square().sum() + reads.point.square().sum(), f.e)
            assert float((g - grad).abs().max()) < 1e-9
        if training:
            continue  # what nearly was an event is there twice when frames are; it weighs nothing
        twice, _ = m.scan(Frames(*(x.repeat_interleave(2, 1) for x in f)))
        assert gap(twice, whole) < 1e-10  # frames repeated change nothing
        row, _ = m.scan(Frames(*(x[1:2] for x in f)))
        assert gap(row, [x[1:2] for x in whole]) < 1e-10  # rows are independent
    m = EventStore(128, 12, 19).eval()
    print("bytes a robot at width 64:", m.init(1).bytes(), "| at width 512, 24 slots, look 256:", EventStore(1024, 64, 64, width=512, look=256).init(1).bytes(), "| parameters", sum(p.numel() for p in m.parameters()))
    assert m.init(1).bytes() <= 16384
    with torch.no_grad():
        f = Frames(torch.randn(2, 300, 128), torch.randn(2, 300, 12), torch.randn(2, 300, 4, 19))
        m.observe(f.x, 1.0)
        a, b = m.scan(f, chunk=300)[1], m.scan(f, chunk=13)[1]
        print("float32 gap", max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)))
    print("ok")


if __name__ == "__main__":
    torch.set_num_threads(1)
    test() if sys.argv[1] == "test" else train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
