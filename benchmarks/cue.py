"""What do a memory's contents tell of the cue? The first frames of training episodes, several looks each, pass an encoder
and `Content` into a small network that is told the cue; printed is how often it is right on first frames of held-out
episodes. docs/decisions/0009.

    tracemem collect Tool --out outputs/tool
    python benchmarks/cue.py Tool outputs/tool                        # a random encoder
    python benchmarks/cue.py Tool outputs/tool --encoder outputs/run  # that of a run of tracemem train
"""

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import torch
from lerobot.policies.factory import get_policy_class
from lerobot.utils.constants import OBS_STATE
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import trace_bench  # noqa: F401
from lerobot_policy_trace.backbone import calibrate
from lerobot_policy_trace.recall import Content
from trace_bench.registry import VERSIONS
from trace_lab.batches import Augment
from trace_lab.frames import open_dataset
from trace_lab.policy import configuration, pipelines, take_encoder
from trace_lab.recipe import recipe
from trace_lab.train import trained

LOOKS, WIDTH, UPDATES, BATCH = 6, 256, 500, 64


def first_frames(task: str, split: str, count: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Pictures (N, 3, H, W) by camera, states and cues of the first frames of episodes 0 to N - 1."""
    env = gymnasium.make(f"trace_bench/{task}-v{VERSIONS[task]}", split=split)
    seen, cues = [], []
    for seed in range(count):
        observation, info = env.reset(seed=seed)
        seen.append(observation)
        cues.append(info["scoring"]["cue"])
    pictures = {}
    for name in seen[0]["pixels"]:
        taken = torch.tensor(np.stack([each["pixels"][name] for each in seen]))
        pictures[f"observation.images.{name}"] = taken.permute(0, 3, 1, 2) / 255
    return pictures, torch.tensor(np.stack([each["agent_pos"] for each in seen])).float(), torch.tensor(cues)


@torch.no_grad()
def encoded(given: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maps (N, cameras, C, h, w) and cues, of the looks to learn from and of held-out frames."""
    meta, made = open_dataset(given.dataset), recipe("default", "act", "none", {})
    config = configuration(made, meta, "cpu")
    torch.manual_seed(0)
    policy = get_policy_class(config.type)(config, dataset_meta=meta).eval()
    prepare = pipelines(config, meta)[0]
    draw, augment = torch.Generator().manual_seed(0), Augment(0, 0.3)

    def ready(pictures: dict[str, Tensor], states: Tensor) -> list[Tensor]:
        batch = prepare(pictures | {OBS_STATE: states})
        return [batch[camera] for camera in config.image_features]

    pictures, states, cues = first_frames(given.task, "train", given.episodes)
    looks = [ready(pictures, states)]
    for _ in range(LOOKS - 1):
        light = {camera: augment(x, torch.arange(len(x)), draw) for camera, x in pictures.items()}
        looks.append(ready(light, states))
    held, held_states, held_cues = first_frames(given.task, "heldout", 2 * given.episodes)
    if given.encoder is None:
        for backbone in policy.backbones:
            calibrate(backbone, torch.cat(looks[0]))
    else:
        take_encoder(policy, trained(given.encoder)[0])
    maps = [torch.stack(policy._encode(look), 1) for look in looks]
    return torch.cat(maps), cues.repeat(LOOKS), torch.stack(policy._encode(ready(held, held_states)), 1), held_cues


def right(grid: int, seed: int, learnt: Tensor, cues: Tensor, others: Tensor, answers: Tensor) -> float:
    """Share of held-out cues that are told from contents with so many places."""
    torch.manual_seed(seed)
    content = Content(learnt.shape[2], 1, WIDTH, grid)
    answer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, int(cues.max()) + 1))

    def told(maps: Tensor) -> Tensor:
        seen = content(list(maps.unbind(1)), torch.zeros(len(maps), 1))[:, :WIDTH]  # what is seen, without the state
        answers: Tensor = answer(seen)
        return answers

    optimizer = torch.optim.AdamW([*content.parameters(), *answer.parameters()], lr=5e-4, weight_decay=1e-4)
    for _ in range(UPDATES):
        some = torch.randint(len(learnt), (BATCH,))
        loss = F.cross_entropy(told(learnt[some]), cues[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (told(others).argmax(1) == answers).float().mean().item()


def main() -> None:
    """Encodes, learns, tells."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("task")
    options.add_argument(
        "dataset", type=Path, help="demonstrations of the task: sizes and statistics are taken from it"
    )
    options.add_argument(
        "--encoder", type=Path, help="a run of tracemem train; else a random one, fitted to the frames"
    )
    options.add_argument("--episodes", type=int, default=100, help="to learn from; twice as many held-out ones")
    given = options.parse_args()
    data = encoded(given)
    for grid in (1, 2, 3):
        shares = ", ".join(f"{right(grid, seed, *data):.3f}" for seed in range(3))
        print(f"{given.task}, {given.encoder or 'random encoder'}, grid {grid}: {shares}", flush=True)


if __name__ == "__main__":
    main()
