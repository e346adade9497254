"""Many models at once: every parameter carries a leading seed dimension M, a whole update is one CUDA graph."""
import json, math, os, sys, time
import torch
from torch import Tensor
from torch.nn import functional as F
from tasks33 import plan, render, classes, CONDITIONS

torch.backends.cuda.matmul.allow_tf32 = True
W, HEADS, DK, DLOOK, TOK = 64, 4, 16, 32, 4

DEFAULT = dict(mem="events", question="order", cues=3, seeds=6, seed0=0, lr=2e-3, updates=1500, batch=64, warm=50,
    G=1, N=24, standout=1.0, theta=[1.0], slope=3.0, gate_gain=0.2, gate_bias=0.0, leak=0.1, w=0.25, wramp=0,
    clock="event", bumps=12, key="e", sig="none", pointer=True, mass=True, detach_nu=False, logr=True, ageb=False,
    paces=[0.25, 0.5, 0.7, 1.0, 1.4, 2.0], decay=0.25, tau=8.0, episodes=500, far=200, vnorm=False, clip=1.0, hidden=64,
    lclock=1.0, tmaze=False, every=25, tag="", lrgate=0.3, gprior=0.0, eps=1e-8, beta2=0.999, look="conv1", beta=4.0, lrlook=1.0, lrclock=1.0, stop=True, pout="tok", lrsee=1.0, nu="pix", half=False, near=0.0, price=0.0, minup=0)


class Params:
    def __init__(self, m, device):
        self.m, self.device, self.spec, self.chunks, self.scale = m, device, {}, [], []
        self.rates = {}

    def add(self, name, *shape, std=0.0, mean=0.0, lr=1.0):
        x = torch.randn(self.m, *shape, device=self.device) * std + mean
        self.spec[name] = shape
        self.chunks.append(x.flatten(1))
        lr = next((v for k, v in self.rates.items() if name.split(".")[0] == k), lr)
        self.scale.append(torch.full((x[0].numel(),), lr, device=self.device))

    def mlp(self, name, i, h, o, gain=1.0, bias=0.0):
        self.add(name + ".w1", i, h, std=i**-0.5); self.add(name + ".b1", 1, h)
        self.add(name + ".w2", h, o, std=gain * (0.425 * h) ** -0.5); self.add(name + ".b2", 1, o, mean=bias)

    def lin(self, name, i, o, std=None):
        self.add(name + ".w", i, o, std=i**-0.5 if std is None else std); self.add(name + ".b", 1, o)

    def flat(self):
        self.sizes = [c.shape[1] for c in self.chunks]
        return torch.cat(self.chunks, 1), torch.cat(self.scale)

    def views(self, flat):
        return {n: c.view(self.m, *s) for (n, s), c in zip(self.spec.items(), flat.split(self.sizes, 1))}


def mlp(p, name, x):
    h = F.gelu(torch.baddbmm(p[name + ".b1"], x, p[name + ".w1"]))
    return torch.baddbmm(p[name + ".b2"], h, p[name + ".w2"])


def lin(p, name, x):
    return torch.baddbmm(p[name + ".b"], x, p[name + ".w"])


def leaky_clamp(x, leak):
    y = x.clamp(0, 1)
    return y + leak * (x - x.detach()) * ((x < 0) | (x > 1)) if leak else y


def backlash(b, w, y0):
    """y_t = min(max(y_{t-1}, b_t - w), b_t + w) along dim 2, in log T rounds (clamps compose to clamps)."""
    lo, hi = b - w, b + w
    d, T = 1, b.shape[2]
    while d < T:
        plo, phi = lo[:, :, :-d], hi[:, :, :-d]
        nlo = torch.minimum(torch.maximum(plo, lo[:, :, d:]), hi[:, :, d:])
        nhi = torch.minimum(torch.maximum(phi, lo[:, :, d:]), hi[:, :, d:])
        lo, hi = torch.cat([lo[:, :, :d], nlo], 2), torch.cat([hi[:, :, :d], nhi], 2)
        d *= 2
    return torch.minimum(torch.maximum(y0[:, :, None], lo), hi)


class Lab:
    def __init__(self, cfg, device):
        self.c = c = {**DEFAULT, **cfg}
        self.device, self.M = device, c["seeds"]
        self.classes = classes(c["question"].removesuffix("_decoy").removesuffix("_loud"), c["cues"])
        torch.manual_seed(1000 + c["seed0"])
        P = self.P = Params(self.M, device)
        P.rates = dict(gate=c["lrgate"], look=c["lrlook"], pool=c["lrlook"], tau=c["lrlook"], when=c["lrclock"], conv1=c["lrsee"], cb1=c["lrsee"])
        self.LT = {"conv1": 16, "conv1pix": 19}.get(c["look"], 32)
        P.add("conv1", 27, 16, std=(2 / 27) ** 0.5); P.add("cb1", 1, 16)
        P.add("conv2", 144, 32, std=(2 / 144) ** 0.5); P.add("cb2", 1, 32)
        P.lin("see", 128, 64, std=(2 / 128) ** 0.5)
        P.mlp("feel", 3, 64, 64)
        E = 128
        sig = {"none": 0, "sig": 12, "fade": 12, "count": 4, "logsig": 6}[c["sig"]]
        K = {"e": E, "v": 64, "none": 0}[c["key"]] + sig
        G, J, H = c["G"], c["bumps"], HEADS
        gi = c["gate_gain"]
        P.mlp("gate", E, 64, G, gain=gi, bias=c["gate_bias"])
        if c["mem"] == "delta":
            nb = (10 * G if c["clock"] == "event" else 0)
            P.mlp("key", K + nb, 64, H * DK); P.mlp("query", K + nb, 64, H * DK)
            P.mlp("value", E, 64, H * DK)
        else:
            if K:
                P.mlp("key", K, c["hidden"], H * DK); P.mlp("query", K, c["hidden"], H * DK)
            P.lin("value", E, W)
            if c["clock"] != "none":
                P.mlp("when", E, 64, H * J * (2 if c["ageb"] else 1), gain=c["lclock"])
            P.add("null", H, std=0.0)
            P.lin("look", self.LT, DLOOK); P.add("pool", self.LT, 1, std=0.0); P.add("tau", 1, mean=math.log(c["tau"]))
        extra = (HEADS if c["mass"] else 0) + (4 * HEADS if c["pointer"] else 0) if c["mem"] != "delta" else 0
        P.mlp("answer", W + extra + E, 64, self.classes, gain=0.5)
        self.flat, self.lrs = P.flat()
        self.flat.requires_grad_(True)
        self.m1, self.m2 = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.t = torch.zeros((), device=device); self.lr = torch.zeros((), device=device); self.w = torch.zeros((), device=device)
        self.w.fill_(c["w"])
        M = self.M
        self.stats = dict(mu=torch.zeros(M, 1, 64, device=device), var=torch.ones(M, 1, 64, device=device),
                          nm=torch.zeros(M, 1, 1, device=device), nv=torch.ones(M, 1, 1, device=device))
        self.losses = torch.zeros(M, device=device); self.diag = torch.zeros(M, 2, device=device)
        self.acc = torch.zeros(M, device=device)

    # ---- encoder
    def encode(self, p, images, path, update=0.0):
        """images (M,B,T,3,8,8), path (M,B,T,3) -> tokens (M,B,T,4,32), e (M,B,T,128), nu (M,B,T,1)"""
        M, B, T = images.shape[:3]
        K = B * T
        x = F.pad(images.reshape(M * K, 3, 8, 8), (1, 0, 1, 0)).unfold(2, 3, 2).unfold(3, 3, 2)
        x = x.permute(0, 2, 3, 1, 4, 5).reshape(M, K * 16, 27)
        x = F.relu(torch.baddbmm(p["cb1"], x, p["conv1"])).view(M * K, 4, 4, 16)
        fine = x.view(M, K, 2, 2, 2, 2, 16).mean((3, 5))  # first-layer features averaged in each quarter
        x = F.pad(x, (0, 0, 1, 0, 1, 0)).unfold(1, 3, 2).unfold(2, 3, 2)
        x = x.reshape(M, K * 4, 144)
        tok = F.relu(torch.baddbmm(p["cb2"], x, p["conv2"]))
        v = lin(p, "see", tok.view(M, K, 128))
        s = self.stats
        keep = v
        if self.c["nu"] == "pix":  # a coarse picture: averages of 4 x 4 pixels, too small and plain to drift
            v = images.reshape(M, K, 3, 2, 4, 2, 4).mean((4, 6)).flatten(2)
            v = F.pad(v, (0, 64 - v.shape[-1]))
        elif self.c["nu"] == "pix4":
            v = images.reshape(M, K, 3, 4, 2, 4, 2).mean((4, 6)).flatten(2)
            v = F.pad(v, (0, 64 - v.shape[-1]))
        elif self.c["nu"] == "fine":
            v = fine.reshape(M, K, 64)
        if update:
            with torch.no_grad():
                s["mu"].lerp_(v.mean(1, keepdim=True), update); s["var"].lerp_(v.var(1, keepdim=True), update)
        z2 = ((v - s["mu"]) ** 2 / (s["var"] + 1e-6)).mean(-1, keepdim=True)
        nu = torch.log(z2 + 1e-3)
        if self.c["detach_nu"]:
            nu = nu.detach()
        if update:
            with torch.no_grad():
                s["nm"].lerp_(nu.mean(1, keepdim=True), update); s["nv"].lerp_(nu.var(1, keepdim=True), update)
        nu = (nu - s["nm"]) / (s["nv"] + 1e-6).sqrt()
        q = mlp(p, "feel", path.reshape(M, K, 3))
        e = torch.cat([keep, q], -1)
        lt = fine if self.c["look"] == "conv1" else tok
        if self.c["look"] == "conv1pix":
            raw = images.reshape(M, K, 3, 2, 4, 2, 4).mean((4, 6)).permute(0, 1, 3, 4, 2)
            lt = torch.cat([fine.reshape(M, K, 2, 2, 16), 2 * raw], -1)
        return lt.reshape(M, B, T, 4, self.LT), e.view(M, B, T, -1), nu.view(M, B, T, 1)

    def start(self, B):
        M, c = self.M, self.c
        z = lambda *s: torch.zeros(M, B, *s, device=self.device)
        st = dict(y=z(c["G"]) + self.w, c=z(c["G"]), first=None, last=None, s1=z(3), s2=z(9), n=z(1))
        if c["mem"] == "delta":
            st["S"] = z(HEADS, DK, DK)
        else:
            N = c["N"]
            st.update(pri=z(N), r=z(N, c["G"]), at=z(N, c["G"]), k=z(N, W), v=z(N, W), look=z(N, DLOOK))
        return st

    def signature(self, path, st, dt):
        """levels 1, 2 of the state path: from the start (sig) or faded in seconds (fade). (M,B,T,3) -> (M,B,T,12)"""
        c = self.c
        if c["sig"] == "none":
            return None
        if c["sig"] == "count":
            n = st["n"][:, :, None] + dt * torch.arange(1, path.shape[2] + 1, device=path.device)[:, None].float()
            st["n"] = n[:, :, -1]
            return torch.cat([n / 100, torch.log1p(n) / 3, torch.sin(n / 5), torch.cos(n / 5)], -1)
        if st["first"] is None:
            st["first"] = path[:, :, 0] * 0; st["last"] = path[:, :, 0]
        prev = torch.cat([st["last"][:, :, None], path[:, :, :-1]], 2)
        dp = path - prev
        st["last"] = path[:, :, -1]
        lam = dt / 32.0 if c["sig"] == "fade" else 0.0
        a = math.exp(-lam)
        def fade(x, s0):  # y_t = a y_{t-1} + x_t
            y, d, T = torch.cat([(a * s0)[:, :, None] + x[:, :, :1], x[:, :, 1:]], 2), 1, x.shape[2]
            if a == 1.0:
                return y.cumsum(2)
            while d < T:
                y = torch.cat([y[:, :, :d], y[:, :, d:] + a**d * y[:, :, :-d]], 2); d *= 2
            return y
        s1 = fade(dp, st["s1"])
        before = torch.cat([st["s1"][:, :, None], s1[:, :, :-1]], 2) + dp / 2
        s2 = fade((before[..., :, None] * dp[..., None, :]).flatten(-2), st["s2"])
        st["s1"], st["s2"] = s1[:, :, -1], s2[:, :, -1]
        if c["sig"] == "logsig":
            s2 = s2[..., [1, 2, 5]] - s2[..., [3, 6, 7]]
        return torch.cat([s1, s2 / (1 + s2.abs())], -1)

    def keyin(self, e, sg):
        parts = {"e": [e], "v": [e[..., :64]], "none": []}[self.c["key"]]
        return torch.cat(parts + ([sg] if sg is not None else []), -1)

    def bump(self, x, J):
        return torch.exp(-2 * (x[..., None] - torch.arange(J, device=x.device) - (0.5 if self.c["mem"] == "events" else 0)) ** 2)

    def scan(self, p, st, images, path, dt, update=0.0):
        c, M = self.c, self.M
        tok, e, nu = self.encode(p, images, path, update)
        B, T = e.shape[1:3]
        st = dict(st)
        sg = self.signature(path, st, dt)
        s = mlp(p, "gate", e.view(M, B * T, -1)).view(M, B, T, -1)
        self.prior = s.square().mean((1, 2, 3)) if c["gprior"] else 0.0
        if c["standout"]:
            self.parts = (s, c["slope"] * nu)
            th = torch.tensor(c["theta"][: c["G"]], device=self.device) if not hasattr(self, "th") else self.th
            self.th = th
            s = s + c["standout"] * c["slope"] * (nu - th)
        b = leaky_clamp(1.5 * torch.sigmoid(s) - 0.25, c["leak"])
        y = backlash(b, self.w, st["y"])
        r = F.relu(y - torch.cat([st["y"][:, :, None], y[:, :, :-1]], 2)) / (1 - 2 * self.w)
        cc = st["c"][:, :, None] + r.cumsum(2)
        mid = cc - r / 2
        if c["clock"] == "frames":
            n = st["n"][:, :, None] + dt * torch.arange(1, T + 1, device=path.device)[:, None].float()
            st["n"] = n[:, :, -1]
            mid = n / 8 + 0 * mid
        st["y"], st["c"] = y[:, :, -1], cc[:, :, -1]
        st["e"], st["tok"], st["sg"] = e[:, :, -1], tok[:, :, -1], sg[:, :, -1] if sg is not None else None
        if c["mem"] == "delta":
            return self.delta(p, st, e, b, cc, sg)
        N = c["N"]
        pri = (r * (1 + torch.sigmoid(s)) / 2).amax(-1)
        self.cost = cc[:, :, -1].mean((1, 2)) if c["price"] else 0.0
        if c["near"]:  # empty places are filled by what nearly was an event; it weighs nothing, but learns
            sg_ = torch.sigmoid(s)
            pri = torch.where(pri > 0, 1e-2 + pri, 1e-3 * sg_.amax(-1))
            r = r + c["near"] * (sg_ - sg_.detach())
        n = min(N, T)
        top, idx = pri.topk(n, dim=2)
        pick = lambda x: x.gather(2, idx[..., None].expand(-1, -1, -1, x.shape[-1]))
        en = pick(e)
        ki = self.keyin(en, pick(sg) if sg is not None else None)
        k = mlp(p, "key", ki.view(M, B * n, -1)).view(M, B, n, W) if ki.shape[-1] else en[..., :W] * 0
        v = lin(p, "value", en.view(M, B * n, -1)).view(M, B, n, W)
        if c["vnorm"]:
            v = F.layer_norm(v, (W,))
        tn = pick(tok.flatten(-2)).view(M, B * n, TOK, self.LT)
        far = (tn - tn.mean(2, keepdim=True)).square().sum(-1).add(1e-8).sqrt()
        far = (far / far.mean(-1, keepdim=True)).view(M, B, n, TOK)
        tn = tn.view(M, B * n * TOK, self.LT)
        pool = torch.softmax(torch.bmm(tn, p["pool"]).view(M, B, n, TOK) + c["beta"] * far, -1)
        look = (lin(p, "look", tn).view(M, B, n, TOK, DLOOK) * pool[..., None]).sum(3)
        new = dict(pri=top, r=pick(r), at=pick(mid), k=k, v=v, look=look)
        if st["fresh"] if "fresh" in st else False:
            for key, val in new.items():
                st[key] = val
            st["fresh"] = False
            return st
        allp = torch.cat([st["pri"], top], 2)
        top, idx = allp.topk(N, dim=2)
        for key, val in new.items():
            both = torch.cat([st[key], val], 2)
            st[key] = top if key == "pri" else both.gather(2, idx[..., None].expand(-1, -1, -1, both.shape[-1]))
        return st

    def delta(self, p, st, e, b, cc, sg):
        M, B, T = e.shape[:3]
        x = self.keyin(e, sg)
        if self.c["clock"] == "event":
            x = torch.cat([x, self.bump(cc, 10).flatten(-2)], -1)
        x = x.reshape(M, B * T, -1)
        st["x"] = x.view(M, B, T, -1)[:, :, -1]
        k = F.normalize(mlp(p, "key", x).view(M, B, T, HEADS, DK), dim=-1).transpose(2, 3)
        v = mlp(p, "value", e.reshape(M, B * T, -1)).view(M, B, T, HEADS, DK).transpose(2, 3)
        b = b.transpose(2, 3)[..., None]
        S = st["S"]
        for i in range(0, T, 64):
            kk, vv, bb = k[..., i : i + 64, :], v[..., i : i + 64, :], b[..., i : i + 64, :]
            A = (bb * (kk @ kk.mT)).tril(-1)
            A = A + torch.eye(kk.shape[-2], device=A.device)
            U = torch.linalg.solve_triangular(A, bb * (vv - kk @ S), upper=False, unitriangular=True)
            S = S + kk.mT @ U
        st["S"] = S
        return st

    def read(self, p, st):
        c, M = self.c, self.M
        e, tok = st["e"], st["tok"]
        B = e.shape[1]
        H = HEADS
        if c["mem"] == "delta":
            q = F.normalize(mlp(p, "query", st["x"]).view(M, B, H, 1, DK), dim=-1)
            z = (q @ st["S"]).view(M, B, W)
            return mlp(p, "answer", torch.cat([z, e], -1))
        N = st["r"].shape[2]
        ki = self.keyin(e, st["sg"])
        logit = torch.zeros(M, B, H, N, device=e.device)
        if ki.shape[-1]:
            q = mlp(p, "query", ki).view(M, B, H, 1, DK)
            k = st["k"].view(M, B, N, H, DK).permute(0, 1, 3, 4, 2)
            logit = (q @ k)[..., 0, :] / DK**0.5
        G = c["G"]
        voice = torch.arange(H, device=e.device) % G
        r, at = st["r"][..., voice].transpose(2, 3), st["at"][..., voice].transpose(2, 3)  # M B H N
        if c["clock"] != "none":
            a = mlp(p, "when", e).view(M, B, H, 1, -1)
            bm = self.bump(at, c["bumps"])
            if c["ageb"]:
                bm = torch.cat([bm, self.bump(st["c"][..., voice][..., None] - at, c["bumps"])], -1)
            logit = logit + (a * bm).sum(-1)
        rr = r.clamp(max=1)
        nl = p["null"][:, None, :, None].expand(M, B, H, 1)
        top = torch.maximum(torch.where(rr > 0, logit, -1e9).amax(-1, keepdim=True), nl).detach()
        wts = torch.exp((logit - top).clamp(max=5)) * rr
        null = torch.exp(nl - top)
        att = wts / (wts.sum(-1, keepdim=True) + null)
        z = torch.einsum("mbhn,mbnhd->mbhd", att, st["v"].view(M, B, N, H, W // H)).reshape(M, B, W)
        parts = [z]
        if c["mass"]:
            parts.append((rr * torch.sigmoid(logit)).sum(-1))
        if c["pointer"]:
            here = F.normalize(lin(p, "look", tok.reshape(M, B * TOK, self.LT)).view(M, B, TOK, DLOOK), dim=-1)
            sim = F.normalize(st["look"], dim=-1) @ here.mT  # M B N 4
            at_tok = torch.softmax(sim * p["tau"].exp()[:, :, None, None], -1)
            parts.append((att @ at_tok).flatten(2))  # M B H*4: the place pointed at, as weights of the map's tokens
        parts.append(e)
        return mlp(p, "answer", torch.cat(parts, -1))

    # ---- training
    def data(self, rows, condition="trained", pace=1.0):
        return plan(self.c["question"], self.c["cues"], rows * self.M, self.device, condition, pace)

    def forward(self, pace, rows, update=0.0, flat=None):
        d = self.data(rows, pace=pace)
        images, path = render(d)
        p = self.P.views(self.flat if flat is None else flat)
        T = path.shape[1]
        st = self.start(rows)
        if self.c["mem"] == "events" and T >= self.c["N"]:
            st["fresh"] = True
        st = self.scan(p, st, images.view(self.M, rows, T, *images.shape[2:]), path.view(self.M, rows, T, -1), d.step, update)
        logits = self.read(p, st)
        return logits, d.answer.view(self.M, rows), st

    def update(self, pace):
        rate = 0.03
        logits, answer, st = self.forward(pace, self.c["batch"], rate)
        loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none").view(self.M, -1).mean(1)
        (g,) = torch.autograd.grad((loss + self.c["gprior"] * self.prior + self.c["price"] * (1 - loss.detach() / math.log(self.classes)).clamp(min=0) * self.cost).sum(), self.flat)
        with torch.no_grad():
            g = torch.nan_to_num(g)
            norm = g.square().sum(1, keepdim=True).sqrt()
            g = g * (self.c["clip"] / (norm + 1e-6)).clamp(max=1.0)
            self.t += 1
            self.m1.lerp_(g, 0.1); self.m2.lerp_(g * g, 1 - self.c["beta2"])
            step = self.m1 / (1 - 0.9**self.t) / ((self.m2 / (1 - self.c["beta2"]**self.t)).sqrt() + self.c["eps"])
            self.flat.sub_(self.lr * self.lrs * step)
            self.losses.lerp_(loss.detach(), 0.1)

    @torch.no_grad()
    def check(self):
        logits, answer, st = self.forward(1.0, 256)
        self.acc.copy_((logits.argmax(-1) == answer).float().mean(1))
        self.diag[:, 0] = st["c"].amax(-1).mean(1)
        self.diag[:, 1] = st["c"].amin(-1).mean(1)

    def graph(self, f):
        if self.device == "cpu":
            return f
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=self.pool):
            f()
        return g.replay

    def train(self):
        c = self.c
        if self.device != "cpu":
            self.pool = torch.cuda.graph_pool_handle()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            ctx = torch.cuda.stream(side)
        else:
            import contextlib
            ctx = contextlib.nullcontext()
        with ctx:
            with torch.no_grad():
                self.forward(1.0, c["batch"], 1.0)  # data-dependent start of the statistics
            for q in set(c["paces"]):
                self.update(q)
            self.check()
        if self.device != "cpu":
            torch.cuda.current_stream().wait_stream(side)
        try:
            run = {q: self.graph(lambda q=q: self.update(q)) for q in c["paces"]}
            check = self.graph(self.check)
        except Exception as ex:
            print("NO GRAPH", repr(ex)[:400], flush=True)
            torch.cuda.synchronize()
            run = {q: (lambda q=q: self.update(q)) for q in c["paces"]}; check = self.check
        rng = __import__("random").Random(c["seed0"])
        to95 = [None] * self.M; to99 = [None] * self.M
        curve = []
        t0 = time.time()
        settle = 250
        end, good = c["updates"], 0
        for u in range(1, c["updates"] + 1):
            left = max((end - u + 1) / (settle if not c["half"] else c["updates"] / 2), 0.0)
            if u > end:
                break
            self.lr.fill_(c["lr"] * min(1.0, u / c["warm"], left))
            if c["wramp"]:
                self.w.fill_(c["w"] * min(1.0, u / c["wramp"]))
            run[rng.choice(c["paces"])]()
            if u % c["every"] == 0:
                check()
                a = self.acc.tolist()
                for i, x in enumerate(a):
                    to95[i] = to95[i] or (u if x >= 0.95 else None)
                    to99[i] = to99[i] or (u if x >= 0.99 else None)
                good = good + 1 if min(a) >= 0.99 else 0
                if c["stop"] and good >= 2 and u >= c["minup"]:
                    end = min(end, u + settle)
                if u % (4 * c["every"]) == 0:
                    curve.append([round(x, 2) for x in a])
        if self.device != "cpu":
            torch.cuda.synchronize()
        return to95, to99, curve, time.time() - t0

    @torch.no_grad()
    def evaluate(self, condition, episodes, question=None, delay=64, chunk=64):
        right = torch.zeros(self.M, device=self.device)
        p = self.P.views(self.flat.detach())
        done = 0
        rows = min(episodes, 250 if condition != "delay_64x" else 125)
        while done < episodes:
            d = plan(question or self.c["question"], self.c["cues"], rows * self.M, self.device, condition, delay=delay)
            st = self.start(rows)
            rep = 2 if condition == "repeated" else 1
            T = d.path.shape[1]
            for i in range(0, T, chunk):
                images, path = render(d, i, i + chunk, rep)
                n = path.shape[1]
                st = self.scan(p, st, images.view(self.M, rows, n, *images.shape[2:]), path.view(self.M, rows, n, -1), d.step / rep)
            right += (self.read(p, st).argmax(-1) == d.answer.view(self.M, rows)).float().sum(1)
            done += rows
        return [round(x, 4) for x in (right / done).tolist()]


def job(cfg, device, out):
    t0 = time.time()
    lab = Lab(cfg, device)
    to95, to99, curve, secs = lab.train()
    res = {}
    for cond in CONDITIONS:
        if lab.c["tmaze"] or lab.c["question"] == "tmaze":
            break
        res[cond] = lab.evaluate(cond, lab.c["far"] if cond == "delay_64x" else lab.c["episodes"])
    if lab.c["question"] == "tmaze":
        for n, eps in ((100, 1000), (1000, 1000), (10_000, 1000), (100_000, 200), (1_000_000, 50)):
            if n <= lab.c.get("tmax", 10_000):
                res[f"T{n}"] = lab.evaluate("trained", eps, delay=n - 11, chunk=2048)
    if lab.c.get("soak"):
        res["soak_1e6"] = lab.evaluate("trained", 20, delay=1_000_000, chunk=2048)
    row = dict(tag=lab.c["tag"], cfg=cfg, to95=to95, to99=to99, acc=res, clocks=[[round(x, 1) for x in d] for d in lab.diag.tolist()],
               loss=[round(x, 3) for x in lab.losses.tolist()], curve=curve, train_s=round(secs, 1), all_s=round(time.time() - t0, 1))
    with open(out, "a") as f:
        f.write(json.dumps(row) + "\n")
    m = lambda x: "/".join(f"{int(100*v+.5)}" for v in x)
    line = " ".join(f"{k[:3] + k[-3:]}:{m(v)}" for k, v in res.items())
    print(f"{lab.c['tag']:14s} {lab.c['question']}{lab.c['cues']} to95 {to95} {line} clk {row['clocks'][0]} {secs:.0f}s/{row['all_s']:.0f}s", flush=True)
    if lab.c.get("save"):
        torch.save(dict(cfg=lab.c, flat=lab.flat.detach().cpu(), stats={k: v.cpu() for k, v in lab.stats.items()}), lab.c["save"].replace("OUT", os.environ.get("OUT", "/tmp")))


if __name__ == "__main__":
    jobs = json.load(open(sys.argv[1])); lock = sys.argv[2]; out = sys.argv[3]
    device = sys.argv[4] if len(sys.argv) > 4 else "cuda"
    limit = float(os.environ.get("LIMIT", "1e9"))
    os.makedirs(lock, exist_ok=True)
    for i, cfg in enumerate(jobs):
        if time.time() > limit:
            break
        try:
            os.mkdir(f"{lock}/{i}")
        except FileExistsError:
            continue
        try:
            job(cfg, device, out)
        except Exception as ex:  # noqa: BLE001
            import traceback
            print("FAILED", cfg, repr(ex)[:300], traceback.format_exc()[-600:], flush=True)
            torch.cuda.empty_cache() if device != "cpu" else None
