"""Does a memory still learn after its policy has learnt without one? On demonstrations of a suite's task, three quarters of
them to learn from, a small network predicts the next actions from pooled random features, the state and a memory's readout;
first for `--alone` updates without the memory, then with it. Told is how often its prediction at each branch is nearest to
the actions of the right cue, on demonstrations it has learnt from and on the others. docs/decisions/0009.

    tracemem collect Medicine --out outputs/medicine
    python benchmarks/by_heart.py outputs/medicine --memory trace --alone 3000
"""

import argparse
import json
import math
from pathlib import Path

import torch
from lerobot.policies.factory import get_policy_class
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lerobot_policy_trace.backbone import quicken
from lerobot_policy_trace.configuration_trace import MemoryOptions
from lerobot_policy_trace.paths import Paths
from lerobot_policy_trace.recall import Recall
from trace_lab.features import LOOKS, Encoding
from trace_lab.frames import open_dataset, open_frames, read_columns
from trace_lab.policy import configuration, pipelines
from trace_lab.recipe import recipe

EVERY, WIDTH, AHEAD = 5, 128, 8  # frames a step, width of the memory, steps that are predicted


def features(root: Path) -> Tensor:
    """(looks, frames, 512): every EVERY-th frame through a random encoder, pooled over places and cameras. Kept there."""
    kept = root / "meta" / "trace_memory" / "by_heart.safetensors"
    if kept.exists():
        return load_file(kept)["seen"]
    meta, made = open_dataset(root), recipe("default", "act", "none", {"backbone": "frozen", "jitter": 0.3})
    store = open_frames(meta, "cpu", place="file")
    config = configuration(made, meta, "cpu")
    torch.manual_seed(0)
    policy = get_policy_class(config.type)(config, dataset_meta=meta).eval()
    encoding = Encoding(policy, store, pipelines(config, meta)[0], made, Console())
    encoding.fit()
    for backbone in policy.backbones:
        quicken(backbone)
    spans = zip(store.starts.tolist(), store.ends.tolist(), strict=True)
    rows = torch.cat([torch.arange(start, end, EVERY) for start, end in spans])
    looks = []
    for look in range(LOOKS):
        maps = [policy._encode(encoding.pictures(part, look)) for part in rows.split(128)]
        looks.append(torch.cat([torch.stack([x.mean((-2, -1)) for x in each]).mean(0) for each in maps]))
    save_file({"seen": torch.stack(looks)}, kept)
    return torch.stack(looks)


class Network(nn.Module):
    """What is seen now, and what is remembered, to actions."""

    def __init__(self, memory: str, paths: Paths, actions: int):
        super().__init__()
        channels = paths.states.shape[1]
        self.recall = Recall(
            MemoryOptions(name=memory, update_every=EVERY, width=WIDTH, hidden=WIDTH, grid=1), channels, 512
        )
        self.recall.fit(paths)
        self.now, self.remembered, self.alone = nn.Linear(512 + channels, 256), nn.LazyLinear(256), False
        self.out = nn.Sequential(nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, AHEAD * actions))

    def forward(self, seen: Tensor, states: Tensor, valid: Tensor) -> Tensor:
        """(E, T, AHEAD, actions)."""
        content = self.recall.content
        standard = (states - content.mean) / content.std
        hidden = self.now(torch.cat([F.layer_norm(seen, seen.shape[-1:]), standard], -1))
        if not self.alone:
            written = content([seen.flatten(0, 1)[..., None, None]], states.flatten(0, 1)).unflatten(0, seen.shape[:2])
            found = self.recall.memory.scan(written, states, valid)[1]
            hidden = hidden + self.remembered(torch.cat([found.z, found.g, found.dg, found.slots.flatten(2)], -1))
        actions: Tensor = self.out(hidden)
        return actions.unflatten(-1, (AHEAD, -1))


class Demonstrations:
    """All of a dataset, padded: (E, T, ...)."""

    def __init__(self, root: Path):
        meta = open_dataset(root)
        self.paths = Paths.of(meta)
        told = [json.loads(line) for line in (root / "meta" / "trace_bench.jsonl").read_text().splitlines()]
        self.cue = torch.tensor([each["cue"] for each in told])
        self.branch = torch.tensor([[d["frame"] // EVERY + 2 for d in each["decisions"]] for each in told])
        action = read_columns(meta, torch.device("cpu"))["action"]
        action = (action - action.mean(0)) / (action.std(0) + 1e-3)
        seen = features(root).split([-(-len(path) // EVERY) for path in self.paths.episodes()], dim=1)
        states = [path[::EVERY].float() for path in self.paths.episodes()]
        wanted = []
        for start, end in zip(self.paths.starts.tolist(), self.paths.ends.tolist(), strict=True):
            at = torch.arange(start, end, EVERY)[:, None] + EVERY * torch.arange(1, AHEAD + 1)
            wanted.append(action[at.clamp_max(end - 1)])
        pad = lambda parts: nn.utils.rnn.pad_sequence(parts, batch_first=True)  # noqa: E731
        self.seen = torch.stack([pad([each[look] for each in seen]) for look in range(LOOKS)])
        self.states, self.wanted = pad(states), pad(wanted)
        self.valid = pad([torch.ones(len(each), dtype=torch.bool) for each in states])
        order = torch.randperm(len(told), generator=torch.Generator().manual_seed(100))
        self.others, self.learnt = order[: len(told) // 4], order[len(told) // 4 :]

    def error(self, network: Network, some: Tensor, look: Tensor | int, share: float = 1.0) -> Tensor:
        """Mean absolute error of the predictions, or of a share of them."""
        valid = self.valid[some]
        off = (network(self.seen[look, some], self.states[some], valid) - self.wanted[some]).abs().mean((-2, -1))
        return off[valid & (torch.rand(valid.shape) < share)].mean()

    @torch.no_grad()
    def right(self, network: Network, some: Tensor, look: int = 0) -> str:
        """How many predictions at each branch are nearest to what is done after the cue that was."""
        network.eval()
        found = network(self.seen[look, some], self.states[some], self.valid[some])
        counts = []
        for branch in self.branch.unbind(1):
            done = self.wanted[torch.arange(len(branch)), branch, -1]
            cues = [done[self.learnt][self.cue[self.learnt] == cue].mean(0) for cue in self.cue.unique()]
            guess = torch.cdist(found[torch.arange(len(some)), branch[some], -1], torch.stack(cues)).argmin(1)
            counts.append(f"{int((guess == self.cue[some]).sum())} of {len(some)}")
        network.train()
        return ", ".join(counts)


def main() -> None:
    """Trains, and tells."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dataset", type=Path)
    options.add_argument("--memory", default="trace")
    options.add_argument("--alone", type=int, default=0)
    options.add_argument("--updates", type=int, default=700)
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--targets", type=int, default=0, help="of an episode in an update; 0 is all")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        data = Demonstrations(given.dataset)
    torch.manual_seed(given.seed)
    draw, network = torch.Generator().manual_seed(given.seed), Network(given.memory, data.paths, data.wanted.shape[-1])
    with torch.no_grad():
        data.error(network, data.learnt[:2], 0)  # makes the lazy layer
    share = given.targets / data.valid.sum(1).float().mean().item() if given.targets else 1.0
    optimizer = torch.optim.AdamW(network.parameters(), lr=given.lr, weight_decay=1e-4)
    for alone, updates in ((True, given.alone), (False, given.updates)):
        network.alone = alone
        for update in range(updates):
            rate = min(1, (update + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * update / updates)))
            for group in optimizer.param_groups:
                group["lr"] = given.lr * rate
            some = data.learnt[torch.randint(len(data.learnt), (8,), generator=draw)]
            loss = data.error(network, some, torch.randint(LOOKS, (8,), generator=draw), share)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
        if updates:
            learnt, others = data.right(network, data.learnt), data.right(network, data.others)
            light = [data.right(network, data.others, look) for look in range(1, LOOKS)]
            what = "alone" if alone else f"with {given.memory}"
            print(f"{what}, {updates} updates, error {loss.item():.3f}: right at the branches, learnt from {learnt}; "
                  f"others {others}; in other light {'; '.join(light)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
