"""Can a task be learnt at all by a policy that lacks nothing? A small network imitates the expert from what no robot gets:
where everything is, the lamp's colour, what shows that it was done, and the cue. It has no memory. What it does not reach
here nobody without a memory can be expected to reach from pictures. docs/decisions/0004.

    python benchmarks/ceiling.py Tool --demonstrations 60 --updates 3000
"""

import argparse
import json
from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trace_bench.env import BenchEnv, make
from trace_bench.robot import CHANNELS

CHUNK, WIDTH, BATCH, RATE = 30, 512, 256, 1e-3
STILL, SECOND = 0.25, 10  # resting frames are drawn so often; control steps a second


def seen(env: BenchEnv, *, cue: bool) -> NDArray[np.float32]:
    """Everything that could matter."""
    world = env.world
    places = [world.in_base(world.position(prop)) for prop in world.props]
    places += [world.in_base(world.spot(spot)) for spot in world.spots]
    lamp = world.model.geom("lamp").rgba[:3]
    done = getattr(world, "done", ())  # version 1 of the suite, to which 0010 compares, showed nothing
    signs = [*(body in done for body in ("intake", "garment", "bell", "cover")), "pill" in world.marks]
    asked = np.eye(len(env.bench.cues))[env.episode.cue] * cue
    return np.concatenate([world.state(), *places, lamp, signs, asked]).astype(np.float32)


def demonstration(task: str, seed: int, *, cue: bool) -> tuple[Tensor, Tensor]:
    """What was seen and done in one episode of the expert."""
    env = make(task, split="train", cameras=())
    env.reset(seed=seed)
    inputs, actions = [], []
    for action in env.expert():
        inputs.append(seen(env, cue=cue))
        actions.append(action.astype(np.float32))
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    return torch.from_numpy(np.array(inputs)), torch.from_numpy(np.array(actions))


class Imitator(nn.Module):
    """From what is seen to the next actions."""

    def __init__(self, episodes: list[tuple[Tensor, Tensor]]):
        super().__init__()
        self.inputs, self.actions = (torch.cat(parts) for parts in zip(*episodes, strict=True))
        lengths = torch.tensor([len(actions) for _, actions in episodes])
        self.last = (lengths.cumsum(0) - 1).repeat_interleave(lengths)  # of each frame's episode
        self.mean, self.std = self.inputs.mean(0), self.inputs.std(0).clamp_min(1e-3)
        self.level, self.scale = self.actions.mean(0), self.actions.std(0).clamp_min(1e-3)
        layers: list[nn.Module] = [nn.Linear(self.inputs.shape[1], WIDTH)]
        for _ in range(2):
            layers += [nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.net = nn.Sequential(*layers, nn.GELU(), nn.Linear(WIDTH, CHUNK * len(CHANNELS)))

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, CHUNK, 17), standardised."""
        found: Tensor = self.net((inputs - self.mean) / self.std)
        return found.unflatten(-1, (CHUNK, -1))

    def weights(self) -> Tensor:
        """How often a frame is drawn: less where the expert rests for a second."""
        now, still = torch.arange(len(self.actions)), torch.ones(len(self.actions), dtype=torch.bool)
        for later in range(1, SECOND + 1):
            moved = (self.actions[torch.minimum(now + later, self.last)] - self.actions).abs()
            still &= (moved <= 0.05 * self.scale).all(1)
        return torch.where(still, STILL, 1.0)

    def learn(self, updates: int) -> float:
        """Trains; returns the last error."""
        optimizer, weights = torch.optim.AdamW(self.parameters(), RATE), self.weights()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, updates, pct_start=0.05)
        for _ in range(updates):
            frames = torch.multinomial(weights, BATCH, replacement=True)
            at, last = frames[:, None] + torch.arange(CHUNK), self.last[frames][:, None]
            wanted = (self.actions[torch.minimum(at, last)] - self.level) / self.scale
            off = (self(self.inputs[frames]) - wanted).abs() * (at <= last)[..., None]
            loss = off.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return loss.item()

    @torch.no_grad()
    def play(self, env: BenchEnv, seed: int, blind: int, *, cue: bool, asked: int | None = None) -> dict[str, Any]:
        """The score sheet of one episode, with `blind` actions between two looks and the seed's cue or the one asked for."""
        env.reset(seed=seed, options=None if asked is None else {"cue": asked})
        queue: list[NDArray[np.float32]] = []
        while True:
            if not queue:
                actions = self(torch.from_numpy(seen(env, cue=cue)))[:blind] * self.scale + self.level
                queue = list(actions.numpy())
            _, _, terminated, truncated, info = env.step(queue.pop(0))
            if terminated or truncated:
                sheet: dict[str, Any] = json.loads(info["scoring"]["record"])
                return sheet


def main() -> None:
    """Collects, trains, plays, tells."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("task")
    options.add_argument("--demonstrations", type=int, default=60)
    options.add_argument("--updates", type=int, default=3000)
    options.add_argument("--episodes", type=int, default=12, help="held-out ones to play")
    options.add_argument("--blind", type=int, nargs="+", default=[5, 10, 20], help="actions between two looks")
    options.add_argument("--guess", action="store_true", help="without the cue; does its choice change with it?")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cue = not given.guess
    network = Imitator([demonstration(given.task, seed, cue=cue) for seed in range(given.demonstrations)])
    error = network.learn(given.updates)
    network.eval()
    env = make(given.task, split="heldout", cameras=())
    for blind in given.blind:
        sheets = [network.play(env, seed, blind, cue=cue) for seed in range(given.episodes)]
        mean = 100 * float(np.mean([sheet["progress"] for sheet in sheets]))
        outcomes = dict(Counter(str(sheet["outcome"]) for sheet in sheets))
        print(f"{given.task}, error {error:.3f}, {blind} actions between looks: progress {mean:.1f} %, {outcomes}")
        if given.guess:  # the same scene with every cue: who chooses alike cannot know
            cues, made = range(len(env.bench.cues)), []
            for seed in range(given.episodes):
                scene = [network.play(env, seed, blind, cue=cue, asked=each) for each in cues]
                made.append([sheet["decisions"][0]["choice"] for sheet in scene])
            alike = [len(set(choices)) == 1 for choices in made if None not in choices]
            print(f"the same first choice whatever the cue: {sum(alike)} of {len(alike)} scenes")


if __name__ == "__main__":
    main()
