"""What a memory adds to a policy (`MemoryHead`): the content it writes, the memory itself, and the adapter through which
the policy is conditioned on its readout, with the statistics of the dataset they were trained on. When they are used is not
known here.
"""

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lerobot_policy_trace.configuration_trace import MemoryOptions
from lerobot_policy_trace.episodes import MemoryInputs
from lerobot_policy_trace.paths import Paths
from trace_memory.config import build
from trace_memory.memory import Memory, MemoryState, Readout
from trace_memory.normalise import Moments, Normaliser
from trace_memory.registry import METHODS

FORM = 6  # of weights; raised when the same weights would compute something else
PLACES, POOLED = 3, 1  # on a side of the grid in which things are seen; the paper pools them
Advance = Callable[[MemoryState, Tensor, Tensor], tuple[MemoryState, Readout]]  # state, content, robot state
Scan = Callable[[Tensor, Tensor, Tensor], Readout]  # contents, path, valid


class exact_products:  # noqa: N801
    """Meanwhile matrix products on a GPU are float32's, or TF32's; a memory's are always float32's."""

    def __init__(self, *, exact: bool = True):
        self.exact = exact

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = not self.exact

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


class Content(nn.Module):
    """e_t = [v, p]: the encoder's maps, pooled to a coarse grid and averaged over cameras, and an embedding of the
    standardised state. Both are brought to the same scale, step by step: whatever training does to them, gates are not
    driven to where they stay shut.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, vision: int, channels: int, width: int, grid: int):
        super().__init__()
        self.grid = grid
        self.vision = nn.Identity() if grid == 1 and vision == width else nn.Linear(vision * grid**2, width)
        self.state = nn.Linear(channels, width)
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def forward(self, maps: list[Tensor], state: Tensor) -> Tensor:
        """From one map (N, C, h, w) a camera and raw states (N, d) to (N, 2 width)."""
        places = torch.stack([self._places(each).flatten(1) for each in maps])
        v, p = self.vision(places.mean(0)), self.state((state - self.mean) / self.std)
        return torch.cat([F.layer_norm(x, x.shape[-1:]) for x in (v, p)], dim=-1)

    def _places(self, maps: Tensor) -> Tensor:
        as_they_are = maps.shape[-2:] == (self.grid, self.grid)  # PyTorch would average each place with nothing, slowly
        return maps if as_they_are else F.adaptive_avg_pool2d(maps, self.grid)


class MemoryHead(nn.Module):
    """Content, memory and adapter. `adapter` turns a readout into what the policy takes."""

    frames: Tensor
    form: Tensor

    def __init__(self, options: MemoryOptions, channels: int, vision: int, adapter: Callable[[int, int], nn.Module]):
        super().__init__()
        config = options.config(channels)
        self.content = Content(vision, channels, config.width, POOLED if METHODS[config.name].paper_form else PLACES)
        self.memory: Memory = build(config)
        self.adapter = adapter(config.width, config.hidden)
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))  # states the statistics are of; 0: none yet
        self.register_buffer("form", torch.tensor(FORM))
        self.width, self.period = config.width, options.period

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refuses weights of another form, whatever `strict` says: they would load, and compute something else."""
        found = state.get(f"{prefix}form")
        if any(name.startswith(prefix) for name in state) and (found is None or int(found) != FORM):
            errors: list[str] = rest[-1]
            errors.append(
                f"{prefix}form: got {0 if found is None else int(found)}, expected {FORM}: weights of a memory that "
                "another version made (CHANGELOG). Train anew, or use that version"
            )
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(
        self, maps: list[Tensor], robot_state: Tensor, state: MemoryState, advance: Advance | None = None
    ) -> tuple[Readout, MemoryState]:
        """Takes in one observation of each row: maps (R, s, C, h, w), of which the last are new, and raw states (R, d).
        `advance` may stand for the memory's own.
        """
        raw = robot_state.to(self.content.mean)
        content = self.content([each[:, -1] for each in maps], raw)
        with exact_products():
            after, readout = (advance or self.memory.advance)(state, content.to(raw), raw)
        return readout, after

    def scan(self, maps: list[Tensor], inputs: MemoryInputs, scan: Scan | None = None) -> Readout:
        """Readouts of every step of whole episodes (E, T). `scan` may stand for the memory's own."""
        contents = self.content(maps, inputs.states)
        contents = contents.index_select(0, inputs.written.flatten()).unflatten(0, inputs.written.shape)
        if scan is not None:
            return scan(contents, inputs.path, inputs.valid)
        return self.memory.scan(contents, inputs.path, inputs.valid)[1]

    @torch.no_grad()
    def fit(self, paths: Paths) -> None:
        """Statistics of the dataset's states (all of its episodes, as LeRobot's own statistics are); they travel in the
        checkpoint. Those of signatures are kept beside the dataset, because they take a while where there are many frames.
        """
        self.frames.fill_(len(paths.states))
        moments = Moments(paths.states.shape[1])
        moments.add(paths.states)
        self.content.mean.copy_(moments.mean)
        self.content.std.copy_(torch.where(moments.std > 1e-6, moments.std, 1.0))
        memory: Any = self.memory
        normaliser = getattr(memory, "normaliser", None)
        if isinstance(normaliser, Normaliser):
            signature: Any = memory.signature
            moving = "".join(f"-{channel}" for channel in normaliser.velocities.nonzero()[:, 0].tolist())
            kept = paths.keep(f"{type(signature).__name__}-{signature.depth}-{signature.fade}-{self.period}{moving}-v5")
            # A dataset that cannot be read from or written to here is no reason to stop.
            with contextlib.suppress(OSError, SafetensorError):
                if kept is not None and kept.exists():
                    normaliser.load_state_dict(load_file(kept))
                    return
            normaliser.fit([path[:: self.period] for path in paths.episodes()], signature)  # what it will see
            with contextlib.suppress(OSError, SafetensorError):
                if kept is not None:
                    kept.parent.mkdir(exist_ok=True)
                    save_file(normaliser.state_dict(), kept.with_suffix(f".{os.getpid()}"))
                    kept.with_suffix(f".{os.getpid()}").replace(kept)

    def check(self, paths: Paths) -> None:
        """Warns if these statistics are of other data: keys and contents would then mean something else."""
        states = paths.states.to(self.content.mean)
        moving = states.std(0) > 1e-6
        shift = ((states.mean(0) - self.content.mean).abs() / self.content.std)[moving]
        scale = (states.std(0) / self.content.std)[moving]
        if len(shift) and (shift.max() > 1.0 or scale.max() > 3.0 or scale.min() < 1 / 3):
            warnings.warn(
                f"the memory's statistics are not of this dataset: one state channel is off by {float(shift.max()):.1f} "
                f"standard deviations, spreads differ by factors of {float(scale.min()):.2f} to {float(scale.max()):.2f}. "
                "Train from a checkpoint of the same robot, or from scratch",
                stacklevel=2,
            )

    def prepare(self, paths: Paths) -> None:
        """Fits the statistics if there are none yet, else checks them."""
        if self.frames == 0:
            self.fit(paths)
        else:
            self.check(paths)
