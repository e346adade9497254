"""ACT and Diffusion Policy with a memory. The stock classes do what they always did; a memory joins at one place of each:
ACT's decoder sees more than the encoder gave, Diffusion's condition is longer. The rest is in `remembering`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lerobot.policies.act.modeling_act import ACTDecoder, ACTPolicy
from lerobot.policies.diffusion.modeling_diffusion import (
    DiffusionConditionalUnet1d,
    DiffusionModel,
    DiffusionPolicy,
)
from lerobot.policies.utils import populate_queues
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lerobot_policy_trace.configuration_trace import TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.learning import Batch
from lerobot_policy_trace.remembering import Remembering
from trace_memory.adapters import DiffusionAdapter, RegressionAdapter, ResidualAdapter
from trace_memory.memory import Readout


class RecallingDecoder(ACTDecoder):
    """ACT's decoder, with the memory's tokens beside the encoder's, or with a residual in them."""

    recall: tuple[Callable[[], Readout], nn.Module]  # not a submodule of the decoder: stock names stay stock

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor,  # (S, B, C)
        decoder_pos_embed: Tensor | None = None,
        encoder_pos_embed: Tensor | None = None,
    ) -> Tensor:
        """As ACT's."""
        recollect, adapter = self.recall
        if isinstance(adapter, ResidualAdapter):
            encoder_out = adapter(encoder_out.transpose(0, 1), recollect()).transpose(0, 1)
        else:
            tokens = adapter(recollect()).transpose(0, 1).to(encoder_out)
            encoder_out = torch.cat([encoder_out, tokens])
            if encoder_pos_embed is not None:
                blank = encoder_pos_embed.new_zeros(len(tokens), *encoder_pos_embed.shape[1:])
                encoder_pos_embed = torch.cat([encoder_pos_embed, blank])
        return super().forward(x, encoder_out, decoder_pos_embed, encoder_pos_embed)


class Given(nn.Module):
    """Stands where ACT's backbone is while feature maps come in place of pictures."""

    def forward(self, maps: Tensor) -> dict[str, Tensor]:
        """The maps, as a backbone gives them."""
        return {"feature_map": maps}


class TraceActPolicy(Remembering, ACTPolicy):
    """LeRobot's ACT with a memory."""

    config_class = TraceActConfig
    name = "trace_act"

    def __init__(self, config: TraceActConfig, dataset_meta: Any = None, **kwargs: Any):
        super().__init__(config, **kwargs)
        self._begin_memory(
            self.model.encoder_img_feat_input_proj.in_channels if config.image_features else 0, dataset_meta
        )
        if self.recall is None:
            return
        width, token = self.recall.width, config.dim_model
        tokens = config.memory.attach == "tokens"
        self.recall.adapter = (
            RegressionAdapter(width, token) if tokens else ResidualAdapter(width, token, config.n_heads)
        )
        self.model.backbone.register_forward_hook(self._see)
        self.model.decoder.__class__ = RecallingDecoder  # the same weights under the same names
        self.model.decoder.__dict__["recall"] = (self.recollect, self.recall.adapter)

    @property
    def backbones(self) -> list[nn.Module]:
        """What encodes pictures."""
        return [self.model.backbone] if self.config.image_features else []

    def _encode(self, pictures: list[Tensor]) -> list[Tensor]:
        return [self.model.backbone(each)["feature_map"] for each in pictures]

    @contextmanager
    def _encoded(self) -> Iterator[None]:
        backbone, self.model.backbone = self.model.backbone, Given()
        try:
            yield
        finally:
            self.model.backbone = backbone

    @property
    def _network(self) -> nn.Module:
        return self.model

    def _act(self, seen: Batch) -> Tensor:
        now = {key: x[:, -1] for key, x in seen.items()}
        now |= {OBS_IMAGES: [now[key] for key in self.config.image_features]}
        cuda = now[OBS_STATE].is_cuda  # ACT makes its latent on the CPU and moves it, which no CUDA graph can hold
        with now[OBS_STATE].device if cuda else nullcontext():
            actions: Tensor = self.model(now)[0]
        return actions

    def _stock(self, batch: Batch) -> Batch:
        return {key: x[:, -1] if key.startswith("observation.") and x.ndim > 1 else x for key, x in batch.items()}

    def _ensemble(self, batch: Batch, fresh: Tensor) -> Tensor:
        if fresh.any() and not fresh.all():
            raise ValueError("temporal_ensemble_coeff: rows that begin at different times cannot share an ensemble")
        if fresh.any():
            self.temporal_ensembler.reset()
        return self.temporal_ensembler.update(self._predict(batch))


class WidenedLinear(nn.Linear):
    """A map of Diffusion Policy's condition that also takes what is appended to it, with columns that are the adapter's."""

    widened: tuple[DiffusionAdapter, int]  # not a submodule: stock names and shapes stay stock

    def forward(self, condition: Tensor) -> Tensor:
        """As one wider map."""
        adapter, place = self.widened
        return super().forward(condition) + adapter.columns[place](adapter.said)


class RecallingUnet(DiffusionConditionalUnet1d):
    """Diffusion Policy's U-Net with a longer condition. The stock part of it goes the stock way, so that a memory that says
    nothing changes no bit.
    """

    def forward(self, x: Tensor, timestep: Tensor | int, global_cond: Tensor) -> Tensor:
        """As the stock one's."""
        adapter: DiffusionAdapter = self.__dict__["adapter"]
        stock, said = global_cond.tensor_split([-adapter.width], dim=-1)
        adapter.said = F.mish(said)  # as the stock maps get theirs
        try:
            made: Tensor = super().forward(x, timestep, stock.contiguous())
        finally:
            del adapter.said
        return made


class RecallingDiffusion(DiffusionModel):
    """Diffusion Policy's model, with what the memory says appended to its condition."""

    recall: tuple[Callable[[], Readout], DiffusionAdapter]

    def _prepare_global_conditioning(self, batch: Batch) -> Tensor:
        recollect, adapter = self.recall
        condition = super()._prepare_global_conditioning(batch)
        return torch.cat([condition, adapter(recollect()).to(condition)], dim=-1)


class TraceDiffusionPolicy(Remembering, DiffusionPolicy):
    """LeRobot's Diffusion Policy with a memory."""

    config_class = TraceDiffusionConfig
    name = "trace_diffusion"
    _queues: dict[str, Any]

    def __init__(self, config: TraceDiffusionConfig, dataset_meta: Any = None, **kwargs: Any):
        super().__init__(config, **kwargs)
        self._begin_memory(self._vision, dataset_meta)
        for encoder in self._encoders:
            encoder.backbone.register_forward_hook(self._see)
        if self.recall is None:
            return
        if config.gradient_checkpointing:
            raise ValueError(
                "gradient_checkpointing: got true with a memory, expected false: what the memory says is not kept for the "
                "way back"
            )
        blocks: list[Any] = [part for part in self._network.modules() if hasattr(part, "cond_encoder")]
        maps = [block.cond_encoder[1] for block in blocks]
        adapter = DiffusionAdapter(self.recall.width, self.recall.width, [each.out_features for each in maps])
        for place, each in enumerate(maps):
            each.__class__ = WidenedLinear  # the same weights under the same names
            each.__dict__["widened"] = (adapter, place)
        self.recall.adapter = self._network.__dict__["adapter"] = adapter
        self._network.__class__ = RecallingUnet
        self.diffusion.__class__ = RecallingDiffusion
        self.diffusion.__dict__["recall"] = (self.recollect, adapter)

    @property
    def _network(self) -> nn.Module:
        unet = self.diffusion.unet
        return getattr(unet, "_orig_mod", unet)  # inside what torch.compile makes of it (compile_model)

    @property
    def _encoders(self) -> list[Any]:
        if not self.config.image_features:
            return []
        encoder = self.diffusion.rgb_encoder
        return list(encoder) if isinstance(encoder, nn.ModuleList) else [encoder]

    @property
    def backbones(self) -> list[nn.Module]:
        """What encodes pictures."""
        return [each.backbone for each in self._encoders]

    @property
    def _vision(self) -> int:
        return self._encoders[0].pool.nets.in_channels if self._encoders else 0

    def _current(self) -> list[Tensor]:
        """One map of (b s n) pictures, or one a camera of (b s): the last of s."""
        maps = self._seen
        cameras, steps = len(self.config.image_features), self.config.n_obs_steps
        if len(maps) == cameras and cameras > 1:
            return [each.unflatten(0, (-1, steps))[:, -1] for each in maps]
        return list(maps[0].unflatten(0, (-1, steps, cameras))[:, -1].unbind(1))

    def _encode(self, pictures: list[Tensor]) -> list[Tensor]:
        """Through the stock encoder, crop included; the hook hands over its feature maps."""
        encoders = self._encoders
        found: list[Tensor] = []
        for camera, each in enumerate(pictures):
            with self._recalling(lambda: None):  # type: ignore[arg-type,return-value]
                encoders[camera % len(encoders)](each)
                found.append(self._seen[0])
        return found

    @contextmanager
    def _encoded(self) -> Iterator[None]:
        """Resizing and cropping are part of the encoding, and done."""
        kept = [(each, each.backbone, each.resize, each.do_crop) for each in self._encoders]
        for each in self._encoders:
            each.backbone, each.resize, each.do_crop = nn.Identity(), None, False
        try:
            yield
        finally:
            for each, backbone, resize, crop in kept:
                each.backbone, each.resize, each.do_crop = backbone, resize, crop

    def _act(self, seen: Batch) -> Tensor:
        pictures = torch.stack([seen[key] for key in self.config.image_features], dim=2)
        shape = (len(pictures), self.config.horizon, self.config.action_feature.shape[0])
        noise = torch.randn(shape, device=pictures.device)  # in float32, whatever the weights are
        actions: Tensor = self.diffusion.generate_actions(seen | {OBS_IMAGES: pictures}, noise=noise)
        return actions

    def _stock(self, batch: Batch) -> Batch:
        steps, budget = self.config.n_obs_steps, self.config.memory.budget
        keep = [*range(steps - 1), steps + budget - 2]
        return {key: x[:, keep] if key.startswith("observation.") and x.ndim > 1 else x for key, x in batch.items()}

    def _arrive(self, batch: Batch, fresh: Tensor) -> Batch:
        """Queues the observation as the stock policy does; a row that begins has seen nothing but it."""
        batch = dict(batch)
        batch.pop(ACTION, None)
        if self.config.image_features:
            batch[OBS_IMAGES] = torch.stack([batch[key] for key in self.config.image_features], dim=-4)
        seen = [key for key in self._queues if key != ACTION]
        for key in seen:
            if self._queues[key] and len(self._queues[key][0]) != len(fresh):
                self._queues[key].clear()
        self._queues = populate_queues(self._queues, batch)
        for key in seen:
            queue = self._queues[key]
            for place, old in enumerate(queue):
                queue[place] = torch.where(fresh.view(-1, *[1] * (old.ndim - 1)), batch[key], old)
        return batch

    def _take_note(self) -> Any:
        return {key: deque(queue, maxlen=queue.maxlen) for key, queue in self._queues.items()}

    def _go_back(self, before: Any) -> None:
        self._queues = before
