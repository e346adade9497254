"""How closely does a policy follow demonstrations? Each run of `tracemem train` sees some of the episodes it was trained on,
step by step as a robot would, and its actions are compared with the demonstrated ones: mean absolute error in standard
deviations of each channel that moves.

    python benchmarks/followed.py outputs/demo/seed-0/data outputs/demo/seed-0/none outputs/demo/seed-0/trace
"""

import argparse
from pathlib import Path

import torch
from lerobot.utils.constants import ACTION, OBS_STATE

from lerobot_policy_trace.loading import load_policy
from trace_lab.frames import FrameStore, open_dataset, open_frames


def error(store: FrameStore, run: Path, episodes: int) -> float:
    """Of a run on the first episodes of a store, as long as the shortest of them goes on."""
    policy, before, after = load_policy(run / "checkpoints" / "last" / "pretrained_model")
    actions, missed = store.columns[ACTION], []
    std = actions.std(0)
    torch.manual_seed(0)
    policy.reset()
    for step in range(int(store.lengths[:episodes].min())):
        rows = store.starts[:episodes] + step
        seen = {name: store.pictures(name, rows) for name in policy.config.image_features}
        with torch.inference_mode():
            made = after(policy.select_action(before(seen | {OBS_STATE: store.columns[OBS_STATE][rows]})))
        missed.append((made - actions[rows]).abs().mean(0))
    return float((torch.stack(missed).mean(0) / std)[std > 1e-6].mean())


def main() -> None:
    """Prints a line a run."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("dataset", type=Path)
    words.add_argument("runs", type=Path, nargs="+")
    words.add_argument("--episodes", type=int, default=8)
    given = words.parse_args()
    store = open_frames(open_dataset(given.dataset), "cpu")
    for run in given.runs:
        print(f"{run}: {error(store, run, given.episodes):.3f}", flush=True)


if __name__ == "__main__":
    main()
