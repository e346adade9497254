"""ACT and Diffusion Policy with a memory: encode what is seen, remember it, act. The three steps are written out here, for
the robot in `step`, for whole episodes and LeRobot's batches below `forward`. The layers are in `networks`, the control loop
is in `session`.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.act.modeling_act import ACTTemporalEnsembler
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lerobot_policy_trace.configuration_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.encoder import feature_map
from lerobot_policy_trace.episodes import EpisodeBatch
from lerobot_policy_trace.loading import load_weights
from lerobot_policy_trace.memory_head import Advance, MemoryHead
from lerobot_policy_trace.networks import FlatACT, FlatUnet, Inputs, Latent, MemoryACT, MemoryDiffusion
from lerobot_policy_trace.paths import Paths
from lerobot_policy_trace.processor_trace import RAW_STATE
from lerobot_policy_trace.session import Carry, Marks, Session, choose, measured, spread
from trace_errors import CheckpointError, DatasetError, ObservationError, UsageError
from trace_memory.adapters import ConditionAdapter, RegressionAdapter, ResidualAdapter
from trace_memory.losses import auxiliary_losses, weighted
from trace_memory.memory import MemoryState, Readout, history_indices

if TYPE_CHECKING:
    from lerobot_policy_trace.capture import Programs

PAD = "action_is_pad"
OURS = ("memory_head.", ".memory_encoder.")  # in names of weights that a stock policy does not have
SKIPS = ("inference_delay", "prev_chunk_left_over")  # options of real-time chunking
Batch = dict[str, Any]
Logs = dict[str, Any]


class Targets(NamedTuple):
    """What a policy learns from in one update: what is seen and read at each target, and what was done there."""

    maps: list[Tensor]  # a camera each (N, s, C, h, w)
    inputs: Inputs
    readout: Readout | None
    actions: Tensor  # (N, horizon, a)
    action_is_pad: Tensor  # (N, horizon)


class MemoryPolicy(PreTrainedPolicy):
    """What both policies have in common: how whole episodes and LeRobot's batches become maps and readouts, and control."""

    config_class: Any = PreTrainedConfig
    name: Any = "memory"
    memory_head: MemoryHead | None
    paths: Paths | None
    draws_noise = False  # whether predicting takes random numbers

    def _begin(self, vision: int, adapter: Callable[[int, int], nn.Module], dataset_meta: Any) -> None:
        """Adds the memory, if there is to be one."""
        options: MemoryOptions = self.config.memory
        self.memory_head, self.paths, self._prepared = None, None, False
        self._session: Session | None = None
        self.measured = measured(self.config)
        if options.name == "none":
            return
        state = self.config.robot_state_feature
        if state is None or not self.config.image_features:
            raise DatasetError(
                f"input_features: got {list(self.config.input_features)}, but a memory needs {OBS_STATE!r} and pictures"
            )
        self.memory_head = MemoryHead(options, state.shape[0], vision, adapter)
        if dataset_meta is not None:
            self.paths = Paths.of(dataset_meta)

    @classmethod
    def from_stock(cls, stock: PreTrainedPolicy, memory: MemoryOptions | None = None, dataset_meta: Any = None) -> Self:
        """A trained stock policy with a memory that does nothing yet: every action is what it was, to the bit.

        Args:
            stock: LeRobot's ACTPolicy or DiffusionPolicy.
            memory: which memory; `attach` is always `residual`.
            dataset_meta: LeRobot's description of the dataset to train on.

        Returns:
            The policy, with the stock one's weights.

        Raises:
            UsageError: another kind of policy, or no memory.

        Example:
            >>> policy = TraceActPolicy.from_stock(ACTPolicy.from_pretrained("outputs/act"))  # doctest: +SKIP
        """
        kind = cls.config_class.__mro__[1]
        if type(stock.config) is not kind:
            raise UsageError(f"stock: got a policy of type {stock.config.type!r}, expected {kind.__name__}'s")
        memory = replace(memory or MemoryOptions(), attach="residual")
        if memory.name == "none":
            raise UsageError("memory.name: got 'none', which is the policy you have")
        own = {field.name: getattr(stock.config, field.name) for field in fields(stock.config) if field.init}
        policy = cls(cls.config_class(**own, memory=memory), dataset_meta=dataset_meta)
        missing, unexpected = policy.load_state_dict(stock.state_dict(), strict=False)
        if strange := [*unexpected, *(name for name in missing if not any(part in name for part in OURS))]:
            raise CheckpointError(f"stock: its weights do not fit ({len(strange)} differ, e.g. {strange[0]})")
        return policy.to(next(stock.parameters()).device)

    # -- what each policy does its own way ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def backbones(self) -> list[nn.Module]:
        """What encodes pictures."""

    @abstractmethod
    def encode(self, images: list[Tensor]) -> list[Tensor]:
        """Feature maps (F, C, h, w) of pictures (F, 3, H, W), a camera each; normalisations are folded."""

    @abstractmethod
    def encode_steps(self, images: list[Tensor]) -> list[Tensor]:
        """Feature maps (N, s, C, h, w) of pictures (N, s, 3, H, W), exactly as the stock policy computes them."""

    @abstractmethod
    def act(self, maps: list[Tensor], inputs: Inputs, readout: Readout | None, noise: Tensor | None) -> Tensor:
        """Actions from here on, from maps (N, s, C, h, w) and states (N, s, d)."""

    @abstractmethod
    def imitation_loss(self, targets: "Targets", programs: "Programs | None" = None) -> tuple[Tensor, Logs]:
        """The stock policy's loss, and its parts by name."""

    @abstractmethod
    def flat_network(self, batch: EpisodeBatch) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """What of the policy may be captured, as a function of tensors, with an example of these."""

    @abstractmethod
    def _targets(self, batch: Batch) -> Batch:
        """LeRobot's batch as the stock policy expects it: without the history; pictures and states (N, s, ...)."""

    # -- the forward of one control step -----------------------------------------------------------------------------------

    def step(
        self,
        carry: Carry,
        now: dict[str, Tensor],
        marks: Marks,
        *,
        see: bool,
        act: bool,
        encode: Callable[[list[Tensor]], list[Tensor]] | None = None,
        advance: Advance | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Carry, Tensor | None]:
        """Encodes what is seen, remembers it, and acts if some row wants a chunk. Returns what is carried on, and actions.
        A pure function, eager and compiled: whoever calls it decides whether the step counts, and may encode and advance the
        memory another way.
        """
        encode = encode or self.encode_steps
        (memory, readout, past, chunk), actions = carry, None
        seen = {key: x[:, None] for key, x in now.items() if key != RAW_STATE}  # (R, s, ...)
        for key, old in past.items():
            seen[key] = torch.cat([choose(marks.fresh, seen[key].expand_as(old), old), seen[key]], dim=1)
        maps: list[Tensor] = []
        if see:
            pictures = [seen[key] if act else seen[key][:, -1:] for key in self.config.image_features]
            maps = encode(pictures)
        if see and self.memory_head is not None:
            state = MemoryState(marks.taken, {name: x * ~spread(marks.fresh, x) for name, x in memory.items()})
            found, after = self.memory_head(maps, now[RAW_STATE], state, advance)
            memory = {name: choose(marks.due, after.tensors[name], x) for name, x in state.tensors.items()}
            readout = found if readout is None else found.either(marks.due, readout)
        if act:
            inputs = {key: seen[key] for key in self.measured}
            actions = self.act(maps, inputs, readout, noise)
            actions = actions.to(chunk.dtype)  # the policy's own may be of half precision
            chunk = choose(marks.want, actions[:, : chunk.shape[1]], chunk)
        return Carry(memory, readout, {key: seen[key][:, 1:] for key in past}, chunk), actions

    # -- training ----------------------------------------------------------------------------------------------------------

    def forward(self, batch: "EpisodeBatch | Batch", programs: "Programs | None" = None) -> tuple[Tensor, Logs]:
        """The stock loss, conditioned on the memory, and the memory's own losses by name. From whole episodes the numbers
        are tensors: our own loop does not wait for those that it does not write down.
        """
        losses: dict[str, Tensor] = {}
        targets = (
            self._whole(batch, losses, programs) if isinstance(batch, EpisodeBatch) else self._single(batch, losses)
        )
        loss, logs = self.imitation_loss(targets, programs)
        if self.memory_head is not None:
            loss = loss + weighted(losses, self.memory_head.memory.auxiliary)
            logs = logs | {f"memory_{name}": x for name, x in losses.items()}
        whole = isinstance(batch, EpisodeBatch)
        return loss, {name: x.detach() if whole else x.item() for name, x in logs.items()}

    def _whole(self, batch: EpisodeBatch, losses: dict[str, Tensor], programs: "Programs | None" = None) -> Targets:
        """Each frame encoded once, the memory folded over whole episodes as in deployment: what is seen and read at each
        target.
        """
        maps = list(batch.frames) if batch.encoded else self.encode(list(batch.frames))
        readout, known = None, batch.memory
        if self.memory_head is not None and known is not None:
            self.prepare()
            found = self.memory_head.scan(maps, known, None if programs is None else programs.scan)
            losses.update(auxiliary_losses(found, known.valid))
            readout = found.pick(known.row, known.time)
        seen = batch.seen
        looked = [each.index_select(0, seen.flatten()).unflatten(0, seen.shape) for each in maps]
        return Targets(looked, batch.inputs, readout, batch.actions, batch.action_is_pad)

    def _single(self, batch: Batch, losses: dict[str, Tensor]) -> Targets:
        """LeRobot's batch: every target with a history of its own."""
        self._check_cameras(batch)
        stock = self._targets(batch)
        maps = self.encode_steps([stock[key] for key in self.config.image_features])
        readout = None if self.memory_head is None else self._history(batch, [x[:, -1] for x in maps], losses)
        return Targets(maps, {key: stock[key] for key in self.measured}, readout, stock[ACTION], stock[PAD])

    def _history(self, batch: Batch, now: list[Tensor], losses: dict[str, Tensor]) -> Readout:
        """The paper's budget scan for each target of LeRobot's batch: contents of a few frames, keys of the whole path."""
        assert self.memory_head is not None
        if self.paths is None:
            raise DatasetError("dataset_meta: got none, so this policy cannot be trained: pass the dataset's")
        self.prepare()
        options, head, memory = self.config.memory, self.memory_head, self.memory_head.memory
        frames = options.history_frames
        if options.period != 1:
            raise DatasetError(
                f"memory.period: got {options.period}; a target's history of {frames} frames ends with its own frame, so it "
                "must be 1 here. tracemem train trains whole episodes, at any period"
            )
        path, t = self.paths.look_up(batch["index"])
        path, t = path.to(head.content.mean), t.to(now[0].device)
        at, valid = history_indices(t, frames, options.history_stride)
        states = path.gather(1, at[..., None].expand(-1, -1, path.shape[-1]))
        given = batch[RAW_STATE][:, -frames:].to(states)
        if not torch.equal(torch.where(valid[..., None], states, 0), torch.where(valid[..., None], given, 0)):
            raise DatasetError(
                f"the history of {OBS_STATE} in a batch is not that of the dataset this policy was made with. "
                "Streaming datasets do not give a frame's true past and cannot be used (--dataset.streaming=false)"
            )
        past = valid[:, :-1]
        pictures = [batch[key][:, -frames:-1][past] for key in self.config.image_features]
        contents = states.new_zeros(*at.shape, memory.content)
        contents[:, -1] = head.content(now, states[:, -1]).to(contents)
        if past.any():
            earlier = self.encode(pictures)  # camera by camera: batch normalisations would notice
            contents[:, :-1][past] = head.content(earlier, states[:, :-1][past]).to(contents)
        readouts = memory.scan_at(contents, path, at, valid)
        losses.update(auxiliary_losses(readouts, valid))
        return readouts.at(-1)

    def prepare(self) -> None:
        """Before the first batch: the memory's statistics are there and fit the data."""
        if self.memory_head is not None and self.paths is not None and not self._prepared:
            self.memory_head.prepare(self.paths)
            self._prepared = True

    def _check_cameras(self, batch: Batch) -> None:
        if missing := [key for key in self.config.image_features if key not in batch]:
            found = [key for key in batch if key.startswith("observation.images.")]
            raise DatasetError(
                f"{', '.join(missing)}: not in the batch, whose cameras are {', '.join(found) or 'none'}"
            )

    def get_optim_params(self) -> list[dict[str, Any]]:
        """The stock groups, then memory and adapter with a rate of their own."""
        named = dict(self.named_parameters())
        memory = [name for name in named if name.startswith("memory_head.memory.")]
        adapter = [name for name in named if name not in memory and any(part in name for part in OURS)]
        encoder = [name for name in named if name.startswith("model.backbone")]
        rest = [name for name in named if name not in {*memory, *adapter, *encoder}]
        options, config = self.config.memory, self.config
        groups: list[tuple[list[str], dict[str, Any]]] = [
            (rest, {}),
            (encoder, {"lr": getattr(config, "optimizer_lr_backbone", None)}),
            ([*memory, *adapter], {"lr": options.lr}),
        ]
        found = [{"params": [p for n in names if (p := named[n]).requires_grad]} | rate for names, rate in groups]
        return [group for group in found if group["params"]]

    # -- control -----------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The control loop that is going on; None before the first observation."""
        return self._session

    @property
    def readout(self) -> Readout | None:
        """What was read last, and how it was written; None before the first observation, or without a memory."""
        return None if self._session is None else self._session.readout

    def compile_for_control(
        self, rows: int = 1, *, precision: str | None = None, late: float | None = None, fuse: bool | None = None
    ) -> Session:
        """From now on the same actions come from a frozen copy of this policy whose every step is the same few launches, on
        a GPU one CUDA graph.

        Args:
            rows: robots at once.
            precision: one of `compiled.PRECISIONS`; its error is measured first, and refused if it is too large.
            late: seconds; older observations are refused.
            fuse: joins the memory's small operations (torch.compile, half a minute); on a GPU unless told otherwise.

        Returns:
            The session, which `select_action`, `observe` and `predict_action_chunk` now use.

        Raises:
            ControlError: an option makes no sense, or the precision is too coarse.

        Example:
            >>> session = policy.compile_for_control()  # doctest: +SKIP
        """
        from lerobot_policy_trace.compiled import CompiledSession

        self.use_eager()
        made = CompiledSession.of(self, rows, precision=precision, late=late, fuse=fuse)
        self._session = made
        return made

    def use_eager(self) -> None:
        """Goes back to computing step by step, with a new episode in every row."""
        self._session = None
        self.reset()

    def reset(self) -> None:
        """A new episode in every row."""
        if self._session is not None and self._session.policy is self:
            self._session = None  # the next one has as many rows as the next observation
        elif self._session is not None:
            self._session.reset()
        if getattr(self.config, "temporal_ensemble_coeff", None) is not None:
            self.temporal_ensembler.reset()

    def _going(self, batch: Batch, options: dict[str, Any]) -> Session:
        """The session for an observation."""
        self.eval()
        if refused := [name for name in SKIPS if name in options]:
            raise ObservationError(
                f"{', '.join(refused)}: real-time chunking shows the policy only some observations, and a memory needs all "
                "of them: use --inference.type=sync"
            )
        if strange := sorted(set(options) - ({"noise"} if self.draws_noise else set())):
            raise ObservationError(f"{', '.join(strange)}: not known to {self.name}")
        eager = self._session is None or self._session.policy is self
        rows = next((len(x) for key in self.measured if isinstance(x := batch.get(key), Tensor) and x.ndim), 1)
        if eager and (self._session is None or self._session.rows != rows):
            if self.memory_head is not None and not int(self.memory_head.frames):
                _warn_untrained()
            self._session = Session(self, rows)
        assert self._session is not None
        return self._session

    @torch.no_grad()
    def select_action(self, batch: Batch, **options: Any) -> Tensor:
        """The next action of every row. The memory sees every observation, also while queued actions are carried out; rows
        that begin anew (`observation.episode_step` falls) get a new chunk of their own, also without a memory.
        """
        return self._going(batch, options).select(batch, **options)

    @torch.no_grad()
    def predict_action_chunk(self, batch: Batch, **options: Any) -> Tensor:
        """Actions from here on. Counts as one observation."""
        return self._going(batch, options).predict(batch, **options)

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        """Shows the memory an observation for which no action is wanted."""
        self._going(batch, {}).observe(batch)

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:  # noqa: FBT001
        """LeRobot's, also for checkpoints that leave out what a seed draws."""
        return load_weights(model, model_file, partial(super()._load_as_safetensor, strict=strict), map_location)


class TraceActPolicy(MemoryPolicy):
    """LeRobot's ACT with a memory: its tokens stand beside the encoder's, or are attended to by them.

    Args:
        config: a `TraceActConfig`.
        dataset_meta: LeRobot's description of the dataset, needed for training with a memory.

    Raises:
        DatasetError: a memory without pictures or states.

    Example:
        >>> policy = TraceActPolicy.from_pretrained("checkpoints/signal/trace")  # doctest: +SKIP
        >>> action = policy.select_action(preprocess(observation))  # doctest: +SKIP
    """

    config_class = TraceActConfig
    name = "trace_act"

    def __init__(self, config: TraceActConfig, dataset_meta: Any = None, **_: Any):
        super().__init__(config)
        config.validate_features()
        self.model = MemoryACT(config)
        if config.temporal_ensemble_coeff is not None:
            self.temporal_ensembler = ACTTemporalEnsembler(config.temporal_ensemble_coeff, config.chunk_size)
        vision = self.model.encoder_img_feat_input_proj.in_channels if config.image_features else 0
        self._begin(vision, self._adapter, dataset_meta)

    def _adapter(self, width: int, _hidden: int) -> nn.Module:
        if self.config.memory.attach == "tokens":
            return RegressionAdapter(width, self.config.dim_model)
        return ResidualAdapter(width, self.config.dim_model, self.config.n_heads)

    @property
    def backbones(self) -> list[nn.Module]:
        """ACT's one encoder."""
        return [self.model.backbone] if self.config.image_features else []

    def encode(self, images: list[Tensor]) -> list[Tensor]:
        """Camera by camera."""
        return [feature_map(self.model.backbone, each) for each in images]

    def encode_steps(self, images: list[Tensor]) -> list[Tensor]:
        """Camera by camera, as ACT does."""
        return [self.model.backbone(x.flatten(0, 1))["feature_map"].unflatten(0, x.shape[:2]) for x in images]

    def network(
        self,
        maps: list[Tensor],
        inputs: Inputs,
        readout: Readout | None,
        actions: Tensor | None = None,
        action_is_pad: Tensor | None = None,
    ) -> tuple[Tensor, Latent]:
        """From present maps (N, C, h, w) and states (N, d) to actions: a pure function of tensors."""
        join = None if readout is None else partial(self._join, readout)
        found: tuple[Tensor, Latent] = self.model(maps, inputs, actions, action_is_pad, join)
        return found

    def _join(self, readout: Readout, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """ACT's tokens (S, N, d) with the memory: beside them, at no position, or as a residual in them."""
        assert self.memory_head is not None
        adapter = self.memory_head.adapter
        if self.config.memory.attach == "residual":
            return adapter(tokens.transpose(0, 1), readout).transpose(0, 1), positions
        ours = adapter(readout).transpose(0, 1).to(tokens)
        return torch.cat([tokens, ours]), torch.cat([positions, positions.new_zeros(len(ours), *positions.shape[1:])])

    def flat_network(self, batch: EpisodeBatch) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The network as a function of tensors, and tensors like those that it gets for such batches."""
        module, targets = FlatACT(self), self._whole(batch, {})
        now = [x[:, -1].detach().requires_grad_(not batch.encoded) for x in targets.maps]
        read = targets.readout and targets.readout.map(lambda x: x.detach().requires_grad_())
        return module, module.given(now, targets.inputs, read, targets.actions, targets.action_is_pad)

    def act(self, maps: list[Tensor], inputs: Inputs, readout: Readout | None, noise: Tensor | None) -> Tensor:
        """A chunk, from the present step."""
        del noise
        return self.network([x[:, -1] for x in maps], {key: x[:, -1] for key, x in inputs.items()}, readout)[0]

    def imitation_loss(self, targets: Targets, programs: "Programs | None" = None) -> tuple[Tensor, Logs]:
        """The mean absolute error of actions within the episode, and the VAE's divergence."""
        maps, inputs, readout, actions, action_is_pad = targets
        network = self.network if programs is None or programs.network is None else programs.network
        now = [x[:, -1] for x in maps]
        predicted, (mean, log_variance) = network(now, inputs, readout, actions, action_is_pad)
        inside = ~action_is_pad[..., None]
        error = F.l1_loss(actions, predicted, reduction="none") * inside
        loss = error.sum() / (inside.sum() * error.shape[-1]).clamp_min(1)
        logs = {"l1_loss": loss}
        if mean is not None and log_variance is not None:
            divergence = (-0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp())).sum(-1).mean()
            logs["kld_loss"] = divergence
            loss = loss + divergence * self.config.kl_weight
        return loss, logs

    def _targets(self, batch: Batch) -> Batch:
        ours = {key: x for key, x in batch.items() if key in (ACTION, PAD)}
        if self.memory_head is None:  # no history: LeRobot gives the present frame alone
            return (
                ours
                | {key: batch[key][:, None] for key in self.config.image_features}
                | {key: batch[key] for key in self.measured}
            )
        return (
            ours
            | {key: batch[key][:, -1:] for key in self.config.image_features}
            | {key: batch[key][:, -1] for key in self.measured}
        )


class TraceDiffusionPolicy(MemoryPolicy):
    """LeRobot's Diffusion Policy with a memory: every block of its U-Net is also conditioned on the readout.

    Args:
        config: a `TraceDiffusionConfig`.
        dataset_meta: LeRobot's description of the dataset, needed for training with a memory.

    Raises:
        DatasetError: a memory without pictures or states.

    Example:
        >>> policy = TraceDiffusionPolicy.from_pretrained("outputs/run/pretrained_model")  # doctest: +SKIP
        >>> action = policy.select_action(preprocess(observation))  # doctest: +SKIP
    """

    config_class = TraceDiffusionConfig
    name = "trace_diffusion"
    draws_noise = True

    def __init__(self, config: TraceDiffusionConfig, dataset_meta: Any = None, **_: Any):
        super().__init__(config)
        config.validate_features()
        self.diffusion = MemoryDiffusion(config, 0 if config.memory.name == "none" else config.memory.width)
        encoders = self.diffusion.encoders
        self._begin(encoders[0].pool.nets.in_channels if encoders else 0, ConditionAdapter, dataset_meta)

    @property
    def backbones(self) -> list[nn.Module]:
        """One, or one a camera."""
        return list(dict.fromkeys(each.backbone for each in self.diffusion.encoders))

    def _crop(self, encoder: Any, pictures: Tensor) -> Tensor:
        """Resized and cropped, at random in training, as the stock encoder does."""
        x: Tensor = pictures if encoder.resize is None else encoder.resize(pictures)
        if not encoder.do_crop:
            return x
        cropped: Tensor = encoder.maybe_random_crop(x) if encoder.training else encoder.center_crop(x)
        return cropped

    def encode(self, images: list[Tensor]) -> list[Tensor]:
        """Camera by camera."""
        pairs = zip(self.diffusion.encoders, images, strict=True)
        return [feature_map(one.backbone, self._crop(one, each)) for one, each in pairs]

    def encode_steps(self, images: list[Tensor]) -> list[Tensor]:
        """All cameras at once where they share an encoder, as the stock policy has them; else camera by camera."""
        encoders, shared = self.diffusion.encoders, len(self.backbones) == 1
        groups = [torch.stack(images, dim=2)] if shared else images  # (N, s, n, ...) or (N, s, ...)
        found = []
        for one, x in zip(encoders, groups, strict=False):
            flat = x.flatten(0, -4)
            found.append(one.backbone(self._crop(one, flat)).unflatten(0, x.shape[:-3]))
        return list(found[0].unbind(2)) if shared else found

    def flat_network(self, batch: EpisodeBatch) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The U-Net, and tensors like those that it gets for such batches."""
        targets = self._whole(batch, {})
        condition, memory = self.diffusion.condition(targets.maps, targets.inputs), self.condition(targets.readout)
        timesteps = torch.zeros(len(condition), dtype=torch.int64, device=condition.device)
        given = (torch.randn_like(batch.actions), timesteps, condition, memory)
        return FlatUnet(self.diffusion.unet), tuple(
            x.detach().requires_grad_(x is condition or x is memory) for x in given if x is not None
        )

    def condition(self, readout: Readout | None) -> Tensor | None:
        """What the U-Net's blocks get of a readout."""
        return None if readout is None or self.memory_head is None else self.memory_head.adapter(readout)

    def act(self, maps: list[Tensor], inputs: Inputs, readout: Readout | None, noise: Tensor | None) -> Tensor:
        """Actions from the present step on."""
        stock = self.diffusion.condition(maps, inputs)
        memory = self.condition(readout)
        if noise is None:  # in float32, whatever the weights are
            shape = (len(stock), self.config.horizon, self.config.action_feature.shape[0])
            noise = torch.randn(shape, device=stock.device)
        first = self.config.n_obs_steps - 1
        actions = self.diffusion.sample(stock, None if memory is None else memory.to(stock), noise.to(stock))
        return actions[:, first : first + self.config.n_action_steps]

    def imitation_loss(self, targets: Targets, programs: "Programs | None" = None) -> tuple[Tensor, Logs]:
        """The mean squared error of what the U-Net predicts from noisy actions."""
        maps, inputs, readout, actions, action_is_pad = targets
        denoise = self.diffusion.denoise if programs is None or programs.network is None else programs.network
        scheduler, config = self.diffusion.noise_scheduler, self.config
        condition, memory = self.diffusion.condition(maps, inputs), self.condition(readout)
        noise = torch.randn(actions.shape, device=actions.device)
        last = scheduler.config.num_train_timesteps
        timesteps = torch.randint(low=0, high=last, size=(len(actions),), device=actions.device).long()
        noisy = scheduler.add_noise(actions, noise, timesteps)
        predicted = denoise(noisy, timesteps, condition, None if memory is None else memory.to(condition))
        if config.prediction_type not in ("epsilon", "sample"):
            raise UsageError(f"prediction_type: got {config.prediction_type!r}, expected epsilon or sample")
        error = F.mse_loss(predicted, noise if config.prediction_type == "epsilon" else actions, reduction="none")
        if not config.do_mask_loss_for_padding:
            return error.mean(), {}
        inside = ~action_is_pad[..., None]
        return (error * inside).sum() / (inside.sum() * error.shape[-1]).clamp_min(1), {}

    def _targets(self, batch: Batch) -> Batch:
        ours = {key: x for key, x in batch.items() if key in (ACTION, PAD)}
        names = [*self.measured, *self.config.image_features]
        steps = self.config.n_obs_steps
        if self.memory_head is None:
            images = self.config.image_features
            alone = {key: batch[key][:, None] for key in images if steps == 1 and batch[key].ndim == 4}
            return ours | {key: batch[key] for key in names} | alone
        keep = [*range(steps - 1), steps + self.config.memory.history_frames - 2]
        return ours | {key: batch[key][:, keep] for key in names}


def _warn_untrained() -> None:
    warnings.warn("the memory has no statistics yet: this policy was not trained", stacklevel=4)
