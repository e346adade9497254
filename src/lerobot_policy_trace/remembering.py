"""A policy that remembers, in deployment: one step of the memory for every observation, rows that begin anew, actions from
queues of their own. Which policy it is does not matter here; how it is trained is in `learning`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor

from lerobot_policy_trace.control import IDLE, Control
from lerobot_policy_trace.drawn import is_lean, put_back
from lerobot_policy_trace.frozen import choose, lasting, version
from lerobot_policy_trace.learning import Batch, Learning
from lerobot_policy_trace.processor_trace import RAW_STATE
from lerobot_policy_trace.schedule import EPISODE_STEP, ControlError
from trace_memory.memory import MemoryState, Readout


class Remembering(Learning):
    """What both policies have in common. Mixed in before the stock class, whose methods it extends."""

    control: Control | None = None  # the fast path, once asked for; None: step by step as PyTorch does

    def compile_for_control(
        self,
        rows: int = 1,
        *,
        precision: str | None = None,
        late: float | None = None,
        fuse: bool | None = None,
    ) -> Control:
        """From now on `select_action`, `observe` and `predict_action_chunk` go the fast way: the same actions from a frozen
        copy of this policy, on a GPU as CUDA graphs. `policy.control = None` goes back.

        `rows` robots at once; a `precision` (`control.PRECISIONS`) whose error is measured first; observations older than
        `late` seconds are refused; `fuse` joins the memory's small operations (torch.compile, half a minute; on a GPU unless
        told otherwise, on a CPU it does not pay).
        """
        self.control = None
        self.reset()
        device = next(self.parameters()).device
        with torch.inference_mode(mode=False), torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.control = Control(self, rows=rows, precision=precision, late=late, fuse=fuse)
        return self.control

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:  # noqa: FBT001
        """LeRobot's, for checkpoints that leave out what a seed draws, too."""
        if not is_lean(model_file):
            return super()._load_as_safetensor(model, model_file, map_location, strict)
        put_back(model, model_file)
        return model

    def reset(self) -> None:
        """A new episode in every row."""
        super().reset()
        if self.control is not None:
            if version(self) != self.control.version:
                raise ControlError(
                    "the weights changed since compile_for_control: call it again, or set policy.control = None"
                )
            self.control.reset()
        self._rows = 0
        self._count: Tensor | None = None  # observations of each row's episode so far
        self._held: Readout | None = None  # what the memory said last
        self._state: MemoryState | None = None
        self._next: MemoryState | None = None
        self._clock: Tensor | None = None
        self._missed = False
        self._chunk: Tensor | None = None
        self._position: Tensor | None = None
        self._lasts: Tensor | None = None  # actions of each row's chunk that are carried out

    @property
    def readout(self) -> Readout | None:
        """What the memory said last, and how it wrote; None before the first observation, or without a memory."""
        return self._held

    def _start_rows(self, batch: Batch) -> Tensor:
        """Looks whose episodes begin (returned), and whose observation is the last one again. Changes nothing yet."""
        rows, device = len(batch[OBS_STATE]), batch[OBS_STATE].device
        clock, before = batch[EPISODE_STEP].reshape(rows) if EPISODE_STEP in batch else None, self._clock
        none = torch.zeros(rows, dtype=torch.bool, device=device)
        if self._rows != rows:
            fresh, self._again = ~none, none
        elif clock is None or before is None:
            fresh, self._again = none, none
        else:
            fresh, self._again = clock < before, clock == before
            if self.recall is not None and not self._missed and bool((clock > before + 1).any()):
                self._missed = True
                warnings.warn(
                    f"the memory missed observations: episode_step went from {before.tolist()} to {clock.tolist()}. "
                    "Call observe() for those for which no action is wanted",
                    stacklevel=3,
                )
        self._now = clock
        if self.recall is not None:
            self._prepare(batch, fresh)
        return fresh

    def _prepare(self, batch: Batch, fresh: Tensor) -> None:
        """The memory before this observation, with the rows that begin emptied."""
        assert self.recall is not None
        if self.recall.frames == 0 and not self._warned:
            warnings.warn("the memory has no statistics yet: this policy was not trained", stacklevel=4)
            self._warned = True
        if RAW_STATE not in batch:
            raise ValueError(f"{RAW_STATE} is missing: the policy's own preprocessor must run before it")
        memory = self.recall.memory
        new = self._state is None or len(self._state.steps) != len(fresh)
        self._base = memory.init(len(fresh)) if self._state is None or new else memory.reset(self._state, fresh)
        count = torch.zeros_like(fresh, dtype=torch.int64) if self._count is None or new else self._count
        self._seen_so_far = torch.where(fresh, 0, count)
        self._due = ~self._again & (self._seen_so_far % self.config.memory.update_every == 0)

    def _step(self, batch: Batch, now: Callable[[], list[Tensor]]) -> Readout:
        """One step of the memory, not kept yet. It takes in every `update_every`-th observation of an episode, and none
        twice; in between it says what it said last.
        """
        assert self.recall is not None
        due, self._next, self._says = self._due, self._base, self._held
        if self._says is None or bool(due.any()):
            raw = batch[RAW_STATE].to(self.recall.content.mean)
            new, readout = self.recall.memory.step(self._base, self.recall.content(now(), raw), raw)
            cells = {name: choose(due, cell, self._base.cells[name]) for name, cell in new.cells.items()}
            self._next = MemoryState(torch.where(due, new.steps, self._base.steps), cells)
            old = self._says if self._says is not None and len(self._says.z) == len(due) else readout
            self._says = readout.either(due, old)
        return self._says

    def _keep(self) -> None:
        """The step is done: keeps it. A memory that nothing is ever written to is reported, once."""
        self._rows, self._clock = len(self._again), self._now
        if self.recall is None:
            return
        self._state, self._held = self._next, self._says
        self._count = self._seen_so_far + (~self._again).long()
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
        if self.control is not None:
            self.control.observe(batch)
        else:
            self.eval()
            with self._whole():
                fresh = self._start_rows(batch)
                self._watch(self._arrive(batch, fresh))
                self._forget_chunk(fresh)

    def _forget_chunk(self, fresh: Tensor) -> None:
        """Rows that began without taking an action have none left from before."""
        if getattr(self.config, "temporal_ensemble_coeff", None) is not None and fresh.any():
            self.temporal_ensembler.reset()
        if self._position is not None and len(self._position) == len(fresh):
            self._position = torch.where(fresh, self.config.n_action_steps, self._position)

    def _watch(self, batch: Batch) -> None:
        if self.recall is not None:
            self._step(batch, lambda: self._encode([batch[key] for key in self.config.image_features]))
        self._keep()

    def _predict(self, batch: Batch, **kwargs: Any) -> Tensor:
        """A chunk for every row; the memory steps inside, and keeps the step only if all went well."""
        with self._recalling(lambda: self._step(batch, self._current)):
            actions: Tensor = super().predict_action_chunk(batch, **kwargs)
        self._keep()
        return actions

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch, **kwargs: Any) -> Tensor:
        """Actions from here on. Counts as one observation."""
        if self.control is not None:
            return self.control.predict(batch, **kwargs)
        if self.recall is None:
            return super().predict_action_chunk(batch, **kwargs)
        if refused := {"inference_delay", "prev_chunk_left_over"} & set(kwargs):
            raise ValueError(
                f"{', '.join(sorted(refused))}: real-time chunking shows the policy only some observations, and a "
                "memory needs all of them: use --inference.type=sync"
            )
        self.eval()
        with self._whole():
            fresh = self._start_rows(batch)
            actions = self._predict(self._arrive(batch, fresh), **kwargs)
            self._forget_chunk(fresh)
            return actions

    @torch.no_grad()
    def select_action(self, batch: Batch, **kwargs: Any) -> Tensor:
        """The next action of every row. The memory sees every observation, also while queued actions are carried out; rows
        that begin anew (`observation.episode_step` falls) get a new chunk of their own, also without a memory.
        """
        if self.control is not None:
            return self.control.select(batch, **kwargs)
        self.eval()
        with self._whole():
            return self._select(batch, **kwargs)

    def _select(self, batch: Batch, **kwargs: Any) -> Tensor:
        fresh = self._start_rows(batch)
        batch = self._arrive(batch, fresh)
        if getattr(self.config, "temporal_ensemble_coeff", None) is not None:
            return self._ensemble(batch, fresh)
        if self._chunk is None or self._position is None or self._lasts is None or len(self._chunk) != len(fresh):
            self._chunk, due = None, torch.ones_like(fresh)
            self._position = self._lasts = torch.zeros(len(fresh), dtype=torch.int64, device=fresh.device)
        else:
            due = fresh | (self._position >= self._lasts)
        if due.any():
            new = self._predict(batch, **kwargs)[:, : self.config.n_action_steps]
            self._chunk = new if self._chunk is None else torch.where(due[:, None, None], new, self._chunk)
            self._position = torch.where(due, 0, self._position)
            self._lasts = torch.where(due, lasting(new, self.config.rest_action_steps), self._lasts)
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

    def _act(self, seen: Batch) -> Tensor:
        """A chunk from what the stock policy looks at (rows, steps, ...), with feature maps in place of pictures."""
        raise NotImplementedError
