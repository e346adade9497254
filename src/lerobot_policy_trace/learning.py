"""A policy that learns to remember: where a memory joins a stock policy, and how both are trained (`Learning`). There are
two ways over the same memory: LeRobot's batches, in which a target brings a few frames of its past (the paper's budget
scan), and `Episodes`, in which whole episodes bring many targets. Deployment is in `remembering`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lerobot.utils.constants import OBS_STATE
from torch import Tensor, nn

from lerobot_policy_trace.configuration_trace import MemoryOptions
from lerobot_policy_trace.paths import DatasetError, Paths
from lerobot_policy_trace.processor_trace import RAW_STATE
from lerobot_policy_trace.recall import Recall
from trace_memory.losses import auxiliary_losses, weighted
from trace_memory.memory import MemoryState, Readout, history_indices

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy
else:
    PreTrainedPolicy = object  # mixed in before a stock policy, which is one

AT_ONCE = 256  # frames encoded without gradient in one go
EPISODES = "episodes"  # the key of a batch under which whole episodes come
Batch = dict[str, Any]


@dataclass
class Episodes:
    """Episodes, or a piece of each, for one training step: every frame once, what the memory sees, where the targets are."""

    pictures: list[Tensor]  # one (F, 3, H, W) a camera, normalised as the policy expects; or feature maps
    states: Tensor  # (F, d), raw
    written: Tensor  # (E, T): which of those frames the memory takes in, in order
    path: Tensor  # (E, T, d), raw: the states that address them
    valid: Tensor  # (E, T) bool
    row: Tensor  # (N,): episode of each target
    time: Tensor  # (N,): the last of the T that it knows
    seen: Tensor  # (N, s): frames the stock policy looks at
    state: MemoryState | None = None  # of the memory before these frames; after a forward pass, after them
    taught: Tensor | None = None  # (F,): weight of the gradient that reaches the encoder from each frame; None is all 1


class Learning(PreTrainedPolicy):
    """What both policies have in common in training. Mixed in before the stock class, whose methods it extends."""

    recall: Recall | None
    paths: Paths | None

    def _begin_memory(self, vision: int, dataset_meta: Any) -> None:
        options: MemoryOptions = self.config.memory
        self.recall, self.paths = None, None
        self._source: Callable[[], Readout] | None = None
        self._seen: list[Tensor] = []
        self.backbone_frozen = False  # if so, feature maps come in place of pictures
        self.captured: Callable[..., Readout] | None = None  # a faster scan of whole episodes, if someone has made one
        self.network: Callable[..., Any] | None = None  # a faster forward pass of the policy's network
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
    def _recalling(self, source: Callable[[], Readout]) -> Iterator[None]:
        self._source, self._seen = source, []
        try:
            yield
        finally:
            self._source, self._seen = None, []

    def recollect(self) -> Readout:
        """The readout for the forward pass that is going on; called once by it, after the backbone has run."""
        source, self._source = self._source, None
        if source is None:
            raise RuntimeError("the memory was asked for a readout outside of a forward pass")
        return source()

    def _current(self) -> list[Tensor]:
        """The backbone's maps of the current frame, one a camera."""
        return self._seen

    def _encode(self, pictures: list[Tensor]) -> list[Tensor]:
        """Feature maps of pictures, one tensor a camera."""
        raise NotImplementedError

    def _encoded(self) -> AbstractContextManager[None]:
        """While this lasts, the stock policy takes feature maps in place of pictures."""
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
        if options.update_every != 1:
            raise DatasetError(
                f"memory.update_every: got {options.update_every}; a target's history of {options.budget} frames ends with "
                "its own frame, so it must be 1 here. tracemem train trains whole episodes, at any rate"
            )
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

    def _scan_episodes(self, batch: Batch, losses: dict[str, Tensor]) -> tuple[Batch, Readout]:
        """Each frame encoded once, the memory folded over whole episodes as in deployment: the stock batch of the targets,
        with feature maps in place of pictures, and the memory's readout at each.
        """
        assert self.recall is not None
        self._test_once()
        now: Episodes = batch[EPISODES]
        maps = self._teach(now)
        contents = self.recall.content(maps, now.states)
        contents = contents.index_select(0, now.written.flatten()).unflatten(0, now.written.shape)
        if self.captured is not None:
            readouts = self.captured(contents, now.path, now.valid)
        else:
            now.state, readouts = self.recall.memory.scan(contents, now.path, now.valid, now.state)
        losses.update(auxiliary_losses(readouts, now.valid))
        stock = {key: x for key, x in batch.items() if key != EPISODES}
        for key, each in zip(self.config.image_features, maps, strict=True):
            found = each.index_select(0, now.seen.flatten()).unflatten(0, now.seen.shape)  # (N, s, C, h, w)
            stock[key] = found.squeeze(1)
        return stock, readouts.pick(now.row, now.time)

    def _teach(self, now: Episodes) -> list[Tensor]:
        """Feature maps of all frames, one tensor a camera; gradient passes where it is wanted."""
        pictures, weight = now.pictures, now.taught
        if self.backbone_frozen:
            return pictures
        if weight is None:
            return self._encode(pictures)
        some, rest = (weight > 0).nonzero()[:, 0], (weight == 0).nonzero()[:, 0]
        scale = weight[some].view(-1, 1, 1, 1)
        maps = []
        for x in self._encode([each[some] for each in pictures]):
            y = x * scale
            maps.append(x.detach() + (y - y.detach()))  # x, with its gradient weighted
        if len(rest):
            with torch.no_grad():  # a part at a time: without gradient nothing of it has to stay
                parts = [self._encode([each[part] for each in pictures]) for part in rest.split(AT_ONCE)]
            back = torch.cat([some, rest]).argsort()
            maps = [torch.cat([x, *others]).index_select(0, back) for x, *others in zip(maps, *parts, strict=True)]
        return maps

    @property
    def _network(self) -> nn.Module:
        """The part of the stock policy whose forward pass `network` stands for."""
        raise NotImplementedError

    @contextmanager
    def _quickly(self) -> Iterator[None]:
        """While this lasts, the captured network is used, if there is one."""
        if self.network is None or not self.training:
            yield
            return
        place = self._network.__dict__
        place["forward"] = self.network
        try:
            yield
        finally:
            del place["forward"]

    def forward(self, batch: Batch, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any] | None]:
        """The stock loss with the memory's readout in it, and the memory's own losses by name."""
        if self.recall is None:
            with self._encoded() if self.backbone_frozen and self.training else nullcontext(), self._quickly():
                return super().forward(batch, *args, **kwargs)
        missing = [key for key in self.config.image_features if key not in batch]
        if missing and EPISODES not in batch:
            found = [key for key in batch if key.startswith("observation.images.")]
            raise DatasetError(
                f"{', '.join(missing)}: not in the batch, whose cameras are {', '.join(found) or 'none'}"
            )
        losses: dict[str, Tensor] = {}
        if EPISODES in batch:
            stock, readout = self._scan_episodes(batch, losses)
            with self._recalling(lambda: readout), self._encoded(), self._quickly():
                loss, logs = super().forward(stock, *args, **kwargs)
        else:
            with self._recalling(lambda: self._scan(batch, self._current(), losses)):
                loss, logs = super().forward(self._stock(batch), *args, **kwargs)
        # of whole episodes as tensors: our own loop does not wait for numbers that it does not write down
        named = {f"memory_{n}": x.detach() if EPISODES in batch else x.item() for n, x in losses.items()}
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
