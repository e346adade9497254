"""ACT with a memory in a training loop of one's own, with LeRobot's dataset and loader: each target comes with at most 32
frames of its past, as in the paper. `tracemem train DATA` does more: it learns from whole episodes, several times as fast.
"""

import sys
from pathlib import Path

import torch
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.policies.factory import make_policy, make_pre_post_processors

from lerobot_policy_trace import MemoryOptions, TraceActConfig


def main(data: str = "data/laundry", out: str = "outputs/example", updates: int = 1000, **options) -> float:
    """Trains on the dataset in the folder `data`; `options` are LeRobot's of ACT. Returns the last loss."""
    name = f"local/{Path(data).name}"
    meta = LeRobotDatasetMetadata(name, root=data)
    config = TraceActConfig(memory=MemoryOptions(width=256, hidden=256), push_to_hub=False, **options)
    policy = make_policy(config, ds_meta=meta)  # reads features, and the state paths that address the memory
    before, after = make_pre_post_processors(config, dataset_stats=meta.stats)

    dataset = LeRobotDataset(name, root=data, delta_timestamps=resolve_delta_timestamps(config, meta))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
    optimiser = config.get_optimizer_preset().build(policy.get_optim_params())
    policy.train()
    update, loss = 0, torch.tensor(0.0)
    while update < updates:
        for batch in loader:
            loss, _ = policy(before(batch))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if update % 50 == 0:
                print(f"update {update}: loss {loss.item():.3f}")
            if (update := update + 1) == updates:
                break

    for part in (policy, before, after):  # the folder is a checkpoint for LeRobot's commands, and for example 05
        part.save_pretrained(out)
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:3])
