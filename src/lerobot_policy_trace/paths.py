"""The robot's state path of every episode of a dataset, found by a frame's number: the one reader of states. A training
batch shows a few frames of its past; the signatures need all of it, and it is small: one row of numbers a frame, read once
from the parquet files.
"""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.dataset
import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor

from trace_errors import DatasetError


class Paths:
    """Raw states of all frames, and where episodes begin."""

    def __init__(
        self, states: Tensor, starts: Tensor, ends: Tensor, index: Tensor | None = None, root: Path | None = None
    ):
        self.states, self.starts, self.ends = states, starts, ends  # (N, d), (E,), (E,): rows of `states`
        self.index = torch.arange(len(states)) if index is None else index  # (N,): numbers of the frames, growing
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
        columns = ["index", "episode_index", "frame_index", OBS_STATE]
        table = pyarrow.dataset.dataset(files).to_table(columns=columns).sort_by("index")
        index, episode, frame = (torch.from_numpy(table[name].to_numpy().copy()) for name in columns[:3])
        states = torch.tensor(table[OBS_STATE].to_pylist(), dtype=torch.float32).reshape(len(index), -1)
        if not (finite := torch.isfinite(states).all(1)).all():
            bad = int((~finite).nonzero()[0])
            raise DatasetError(
                f"{meta.repo_id}: {OBS_STATE} of frame {int(index[bad])} (episode {int(episode[bad])}) is not finite"
            )
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (episode.diff() != 0).nonzero()[:, 0] + 1])
        ends = torch.cat([starts[1:], torch.tensor([len(states)])])
        whole = torch.cat([torch.arange(n) for n in (ends - starts).tolist()])
        if not torch.equal(frame, whole):
            bad = int((frame != whole).nonzero()[0])
            raise DatasetError(f"{meta.repo_id}: frames of episode {int(episode[bad])} are missing in {folder}")
        return cls(states, starts, ends, index, Path(meta.root))

    def episodes(self) -> list[Tensor]:
        """The path of each episode."""
        return [self.states[a:b] for a, b in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def look_up(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """For frames by number: their episodes' paths up to them (B, T, d), padded with the last state, and t (B,)."""
        index = index.flatten().cpu()
        row = torch.searchsorted(self.index, index).clamp_max(len(self.index) - 1)
        if not torch.equal(self.index[row], index):
            raise DatasetError(f"frame {int(index[self.index[row] != index][0])} is not in the dataset's parquet files")
        start = self.starts[torch.searchsorted(self.starts, row, right=True) - 1]
        t = row - start
        rows = start[:, None] + torch.minimum(torch.arange(int(t.max()) + 1), t[:, None])
        return self.states[rows], t
