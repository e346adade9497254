"""The robot's state path of every episode of a dataset, found by a frame's number. A training batch shows a few frames of
its past; the signatures need all of it, and it is small: one row of numbers a frame, read once from the parquet files.
"""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor


class DatasetError(ValueError):
    """A dataset that a memory cannot be trained on; the message names what is wrong where."""


class Paths:
    """Raw states of all frames, and where episodes begin."""

    def __init__(self, states: Tensor, starts: Tensor, ends: Tensor, root: Path | None = None):
        self.states, self.starts, self.ends = states, starts, ends  # (N, d), (E,), (E,)
        self.root = root

    def keep(self, what: str) -> Path | None:
        """Where something computed from exactly these states may be kept, if anywhere."""
        digest = hashlib.sha256(self.states.numpy().tobytes() + self.starts.numpy().tobytes()).hexdigest()[:16]
        return None if self.root is None else self.root / "meta" / "trace_memory" / f"{what}-{digest}.safetensors"

    @classmethod
    def of(cls, meta: Any) -> "Paths":
        """Those of a LeRobotDatasetMetadata."""
        if OBS_STATE not in meta.features:
            raise DatasetError(f"{meta.repo_id}: has no feature {OBS_STATE!r}, which a memory's keys are made of")
        folder = Path(meta.root) / "data"
        files = sorted(folder.glob("**/*.parquet"))
        if not files:
            raise DatasetError(f"{meta.repo_id}: no parquet file below {folder}")
        table = pyarrow.dataset.dataset(files).to_table(columns=["index", "episode_index", OBS_STATE]).sort_by("index")
        index, episode = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("index", "episode_index"))
        if len(table) != meta.total_frames or not torch.equal(index, torch.arange(len(table))):
            raise DatasetError(
                f"{meta.repo_id}: {len(table)} frames in {folder}, expected 0 to {meta.total_frames - 1}"
            )
        states = torch.tensor(table[OBS_STATE].to_pylist(), dtype=torch.float32)
        if not (finite := torch.isfinite(states).all(1)).all():
            frame = int((~finite).nonzero()[0])
            raise DatasetError(
                f"{meta.repo_id}: {OBS_STATE} of frame {frame} (episode {int(episode[frame])}) is not finite"
            )
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (episode.diff() != 0).nonzero()[:, 0] + 1])
        return cls(states, starts, torch.cat([starts[1:], torch.tensor([len(states)])]), Path(meta.root))

    def episodes(self) -> list[Tensor]:
        """The path of each episode."""
        return [self.states[a:b] for a, b in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def look_up(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """For frames by number: their episodes' paths up to them (B, T, d), padded with the last state, and t (B,)."""
        index = index.flatten().cpu()
        start = self.starts[torch.searchsorted(self.starts, index, right=True) - 1]
        t = index - start
        rows = start[:, None] + torch.minimum(torch.arange(int(t.max()) + 1), t[:, None])
        return self.states[rows], t
