"""How a policy remembers: what is written (`Content`), what is added to the policy (`Recall`), and when, in training and in
deployment (`Remembering`). Which policy it is does not matter here.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lerobot.utils.constants import OBS_STATE
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lerobot_policy_trace.configuration_trace import MemoryOptions
from lerobot_policy_trace.paths import DatasetError, Paths
from lerobot_policy_trace.processor_trace import RAW_STATE
from trace_memory.config import build
from trace_memory.history import history_indices
from trace_memory.losses import auxiliary_losses, weighted
from trace_memory.memory import MemoryState, Readout
from trace_memory.normalise import Moments, Normaliser

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy
else:
    PreTrainedPolicy = object  # mixed in before a stock policy, which is one

IDLE = 50  # steps after which a memory should hold something
EPISODE_STEP = "observation.episode_step"
Batch = dict[str, Any]


class Content(nn.Module):
    """e_t = [v, p]: the backbone's maps pooled over space and cameras, and an embedding of the standardised state."""

    mean: Tensor
    std: Tensor

    def __init__(self, vision: int, channels: int, width: int):
        super().__init__()
        self.vision = nn.Identity() if vision == width else nn.Linear(vision, width)
        self.state = nn.Linear(channels, width)
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def forward(self, maps: list[Tensor], state: Tensor) -> Tensor:
        """From one map (N, C, h, w) a camera and raw states (N, d) to (N, 2 width)."""
        v = torch.stack([each.mean((-2, -1)) for each in maps]).mean(0)
        return torch.cat([self.vision(v), self.state((state - self.mean) / self.std)], dim=-1)


class Recall(nn.Module):
    """All that a memory adds to a policy: the content it writes, itself, and the adapter that the policy sees."""

    def __init__(self, options: MemoryOptions, channels: int, vision: int):
        super().__init__()
        config = options.config(channels)
        self.content = Content(vision, channels, config.width)
        self.memory = build(config)
        self.adapter: nn.Module = nn.Identity()
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))  # states the statistics are of; 0: none yet
        self.width, self.weights = config.width, config.auxiliary_weights

    frames: Tensor

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
        normaliser = getattr(self.memory, "normaliser", None)
        if isinstance(normaliser, Normaliser):
            signature: Any = self.memory.signature
            kept = paths.keep(f"{type(signature).__name__}-{signature.depth}-{signature.fade}-v1")
            # A dataset that cannot be read from or written to here is no reason to stop.
            with contextlib.suppress(OSError, SafetensorError):
                if kept is not None and kept.exists():
                    normaliser.load_state_dict(load_file(kept))
                    return
            normaliser.fit(paths.episodes(), signature)
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


class Remembering(PreTrainedPolicy):
    """What both policies have in common. Mixed in before the stock class, whose methods it extends."""

    recall: Recall | None
    paths: Paths | None

    def _begin_memory(self, vision: int, dataset_meta: Any) -> None:
        options: MemoryOptions = self.config.memory
        self.recall, self.paths = None, None
        self._source: Callable[[list[Tensor]], Readout] | None = None
        self._seen: list[Tensor] = []
        if options.name == "none":
            return
        state = self.config.robot_state_feature
        if state is None or not self.config.image_features:
            raise DatasetError(
                f"a memory needs {OBS_STATE!r} and pictures; the policy's inputs are {list(self.config.input_features)}"
            )
        self.recall = Recall(options, state.shape[0], vision)
        if dataset_meta is not None:
            self.paths = Paths.of(dataset_meta)
        self._tested = self._warned = self._idle = False

    # -- what the stock forward asks for -------------------------------------------------------------------------------

    def _see(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """A hook on the backbone: what it computed for the policy serves the memory too, so no frame is encoded twice."""
        if self._source is not None:
            self._seen.append(output["feature_map"] if isinstance(output, dict) else output)

    @contextmanager
    def _recalling(self, source: Callable[[list[Tensor]], Readout]) -> Iterator[None]:
        self._source, self._seen = source, []
        try:
            yield
        finally:
            self._source, self._seen = None, []

    def recollect(self) -> Readout:
        """The readout for the forward pass that is going on; called once by it, after the backbone has run."""
        source, seen = self._source, self._seen
        if source is None or not seen:
            raise RuntimeError(
                "the memory was asked for a readout outside of a forward pass, or before the backbone ran"
            )
        self._source = None
        return source(self._current(seen))

    def _current(self, maps: list[Tensor]) -> list[Tensor]:
        """The maps of the current frame, one a camera."""
        return maps

    def _encode(self, pictures: list[Tensor]) -> list[Tensor]:
        """Feature maps of pictures, one tensor a camera."""
        raise NotImplementedError

    def _test_once(self) -> None:
        """Before the first batch: statistics are there and fit the data."""
        assert self.recall is not None
        assert self.paths is not None
        if not self._tested:
            if self.recall.frames == 0:
                self.recall.fit(self.paths)
            else:
                self.recall.check(self.paths)
            self._tested = True

    # -- training ------------------------------------------------------------------------------------------------------

    def _scan(self, batch: Batch, now: list[Tensor], losses: dict[str, Tensor]) -> Readout:
        """The paper's budget scan for each target of a batch: contents of a few frames, keys of the whole path. The memory's
        own losses are put into `losses`.
        """
        assert self.recall is not None
        if self.paths is None:
            raise DatasetError("this policy was made without a dataset and cannot be trained: pass dataset_meta")
        self._test_once()
        options, memory, device = self.config.memory, self.recall.memory, now[0].device
        path, t = self.paths.look_up(batch["index"])
        path, t = path.to(self.recall.content.mean), t.to(device)
        at, valid = history_indices(t, options.budget, options.stride)
        states = path.gather(1, at[..., None].expand(-1, -1, path.shape[-1]))
        given = batch[RAW_STATE][:, -options.budget :].to(states)
        if not torch.equal(torch.where(valid[..., None], states, 0), torch.where(valid[..., None], given, 0)):
            raise DatasetError(
                f"the history of {OBS_STATE} in a batch is not that of the dataset this policy was made with. "
                "Streaming datasets do not give a frame's true past and cannot be used (--dataset.streaming=false)"
            )
        past = valid[:, :-1]
        pictures = [batch[key][:, -options.budget : -1][past] for key in self.config.image_features]
        contents = states.new_zeros(*at.shape, memory.content)
        contents[:, -1] = self.recall.content(now, states[:, -1]).to(contents)
        if past.any():
            contents[:, :-1][past] = self.recall.content(self._encode(pictures), states[:, :-1][past]).to(contents)
        readouts = memory.scan_at(contents, path, at, valid)
        losses.update(auxiliary_losses(readouts, valid))
        return readouts.at(-1)

    def forward(self, batch: Batch, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any] | None]:
        """The stock loss with the memory's readout in it, and the memory's own losses by name."""
        if self.recall is None:
            return super().forward(batch, *args, **kwargs)
        if missing := [key for key in self.config.image_features if key not in batch]:
            found = [key for key in batch if key.startswith("observation.images.")]
            raise DatasetError(
                f"{', '.join(missing)}: not in the batch, whose cameras are {', '.join(found) or 'none'}"
            )
        losses: dict[str, Tensor] = {}
        with self._recalling(lambda now: self._scan(batch, now, losses)):
            loss, logs = super().forward(self._stock(batch), *args, **kwargs)
        named = {f"memory_{name}": value.item() for name, value in losses.items()}
        return loss + weighted(losses, self.recall.weights), (logs or {}) | named

    def _stock(self, batch: Batch) -> Batch:
        """The batch as the stock policy expects it: without the history."""
        raise NotImplementedError

    def get_optim_params(self) -> list[dict[str, Any]]:
        """The stock groups, then memory and adapter with rates of their own."""
        stock = super().get_optim_params()
        if self.recall is None:
            return stock
        groups = [dict(group) for group in stock] if isinstance(stock, list) else [{"params": list(stock)}]
        mine = {id(p) for p in self.recall.parameters()}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in mine]
        memory = list(self.recall.memory.parameters())
        adapter = [*self.recall.content.parameters(), *self.recall.adapter.parameters()]
        groups += [
            {"params": memory, "lr": self.config.memory.lr},
            {"params": adapter, "lr": self.config.memory.adapter_lr},
        ]
        return [group for group in groups if group["params"]]

    # -- deployment ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A new episode in every row."""
        super().reset()
        self._state: MemoryState | None = None
        self._next: MemoryState | None = None
        self._clock: Tensor | None = None
        self._missed = False
        self._chunk: Tensor | None = None
        self._position: Tensor | None = None

    def _start_rows(self, batch: Batch) -> Tensor:
        """Looks whose episodes begin (returned), and whose observation is the last one again. Changes nothing yet."""
        assert self.recall is not None
        if self.recall.frames == 0 and not self._warned:
            warnings.warn("the memory has no statistics yet: this policy was not trained", stacklevel=3)
            self._warned = True
        if RAW_STATE not in batch:
            raise ValueError(f"{RAW_STATE} is missing: the policy's own preprocessor must run before it")
        rows, device = len(batch[RAW_STATE]), batch[RAW_STATE].device
        clock, before = batch[EPISODE_STEP].reshape(rows) if EPISODE_STEP in batch else None, self._clock
        none = torch.zeros(rows, dtype=torch.bool, device=device)
        if self._state is None or len(self._state.steps) != rows:
            self._base, self._again, fresh = self.recall.memory.init(rows), none, ~none
        elif clock is None or before is None:
            self._base, self._again, fresh = self._state, none, none
        else:
            fresh, self._again = clock < before, clock == before
            if not self._missed and bool((clock > before + 1).any()):
                self._missed = True
                warnings.warn(
                    f"the memory missed observations: episode_step went from {before.tolist()} to {clock.tolist()}. "
                    "Call observe() for those for which no action is wanted",
                    stacklevel=3,
                )
            self._base = self.recall.memory.reset(self._state, fresh)
        self._now = clock
        return fresh

    def _step(self, batch: Batch, now: list[Tensor]) -> Readout:
        """One step of the memory, not kept yet. An observation that comes twice is not written twice."""
        assert self.recall is not None
        raw = batch[RAW_STATE].to(self.recall.content.mean)
        new, readout = self.recall.memory.step(self._base, self.recall.content(now, raw), raw)
        again = self._again
        cells = {
            name: torch.where(again.view(-1, *[1] * (cell.ndim - 1)), self._base.cells[name], cell)
            for name, cell in new.cells.items()
        }
        self._next = MemoryState(torch.where(again, self._base.steps, new.steps), cells)
        return readout

    def _keep(self) -> None:
        """The step is done: keeps it. A memory that nothing is ever written to is reported, once."""
        self._state, self._clock = self._next, self._now
        assert self._state is not None
        slots = self._state.cells.get("slots")
        if slots is not None and not self._idle and bool((self._state.steps == IDLE).any()) and not bool(slots.any()):
            self._idle = True
            warnings.warn(f"nothing was written to the memory in {IDLE} steps: all gates are closed", stacklevel=4)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """An observation is taken in as a whole or not at all."""
        before = self._take_note()
        try:
            yield
        except BaseException:
            self._go_back(before)
            raise

    def _take_note(self) -> Any:
        """What the stock policy keeps between observations, if it keeps anything."""
        return None

    def _go_back(self, before: Any) -> None:
        """Puts that back."""

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        """Shows the memory an observation for which no action is wanted."""
        if self.recall is not None:
            self.eval()
            with self._whole():
                self._watch(self._arrive(batch, self._start_rows(batch)))

    def _watch(self, batch: Batch) -> None:
        self._step(batch, self._encode([batch[key] for key in self.config.image_features]))
        self._keep()

    def _predict(self, batch: Batch, **kwargs: Any) -> Tensor:
        """A chunk for every row; the memory steps inside, and keeps the step only if all went well."""
        with self._recalling(lambda now: self._step(batch, now)):
            actions: Tensor = super().predict_action_chunk(batch, **kwargs)
        self._keep()
        return actions

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch, **kwargs: Any) -> Tensor:
        """Actions from here on. Counts as one observation."""
        if self.recall is None:
            return super().predict_action_chunk(batch, **kwargs)
        if refused := {"inference_delay", "prev_chunk_left_over"} & set(kwargs):
            raise ValueError(
                f"{', '.join(sorted(refused))}: real-time chunking shows the policy only some observations, and a "
                "memory needs all of them: use --inference.type=sync"
            )
        self.eval()
        with self._whole():
            return self._predict(self._arrive(batch, self._start_rows(batch)), **kwargs)

    @torch.no_grad()
    def select_action(self, batch: Batch, **kwargs: Any) -> Tensor:
        """The next action of every row. The memory sees every observation, also while queued actions are carried out; rows
        that begin anew get a new chunk of their own.
        """
        if self.recall is None:
            return super().select_action(batch, **kwargs)
        self.eval()
        with self._whole():
            return self._select(batch, **kwargs)

    def _select(self, batch: Batch, **kwargs: Any) -> Tensor:
        fresh = self._start_rows(batch)
        batch = self._arrive(batch, fresh)
        if getattr(self.config, "temporal_ensemble_coeff", None) is not None:
            return self._ensemble(batch, fresh)
        if self._chunk is None or self._position is None or len(self._chunk) != len(fresh):
            self._chunk, self._position = None, torch.zeros(len(fresh), dtype=torch.int64, device=fresh.device)
        due = (
            fresh | (self._position >= self.config.n_action_steps)
            if self._chunk is not None
            else torch.ones_like(fresh)
        )
        if due.any():
            new = self._predict(batch, **kwargs)[:, : self.config.n_action_steps]
            self._chunk = new if self._chunk is None else torch.where(due[:, None, None], new, self._chunk)
            self._position = torch.where(due, 0, self._position)
        else:
            self._watch(batch)
        assert self._chunk is not None
        action = self._chunk[torch.arange(len(due), device=due.device), self._position]
        self._position = self._position + 1
        return action

    def _arrive(self, batch: Batch, fresh: Tensor) -> Batch:
        """What the stock policy does with an observation when it comes, before it predicts; by default nothing."""
        del fresh
        return batch

    def _ensemble(self, batch: Batch, fresh: Tensor) -> Tensor:
        raise NotImplementedError
