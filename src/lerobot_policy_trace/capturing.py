"""A policy's network captured in CUDA graphs, for training batches of one shape: launched once instead of kernel by kernel.
The stock forward is its reference, and the loss stays the stock policy's. Scans are captured in `trace_memory.graphs`.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor, nn

from trace_memory.memory import Readout

if TYPE_CHECKING:
    from lerobot_policy_trace.modeling_trace import TraceActPolicy, TraceDiffusionPolicy

PAD = "action_is_pad"


def graphed(module: nn.Module, example: tuple[Tensor, ...]) -> Any:
    """The module as CUDA graphs, forward and back. Weights are cast inside them: what autocast has cast before belongs to
    no graph, and would be neither renewed nor given gradients.
    """
    half = torch.autocast("cuda", torch.bfloat16, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
    with half:
        return torch.cuda.make_graphed_callables(module, example, allow_unused_input=True)


def check(names: Iterable[str], given: tuple[Tensor, ...], example: tuple[Tensor, ...]) -> None:
    """Refuses by name what is not like the example."""
    for name, x, like in zip(names, given, example, strict=False):
        if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"{name}: {tuple(x.shape)} {x.dtype} on {x.device}, expected {tuple(like.shape)} {like.dtype} on "
                f"{like.device} as captured"
            )


class Flat(nn.Module):
    """ACT's forward pass as a function of tensors to a tuple of tensors, which is what capture needs."""

    policy: "TraceActPolicy"  # not a part of this one

    def __init__(self, policy: "TraceActPolicy"):
        super().__init__()
        self.model = policy.model
        self.adapter = None if policy.recall is None else policy.recall.adapter
        self.__dict__["policy"] = policy

    def given(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """The tensors of a batch, and what is recalled for it."""
        recalled: tuple[Tensor, ...] = () if self.adapter is None else self.policy.recollect()[:5]
        return (batch[OBS_STATE], batch[ACTION], batch[PAD], *batch[OBS_IMAGES], *recalled)

    def forward(self, state: Tensor, action: Tensor, pad: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Actions; with the variational objective mean and log variance too."""
        policy = self.policy
        cameras = len(policy.config.image_features)
        batch = {OBS_STATE: state, ACTION: action, PAD: pad, OBS_IMAGES: list(more[:cameras])}
        if self.adapter is not None:
            policy._source = lambda: Readout(*more[cameras:])  # type: ignore[arg-type]
        with state.device:  # ACT makes its latent on the CPU and moves it, which no CUDA graph can hold
            actions, (mean, spread) = type(self.model).forward(self.model, batch)
        return (actions,) if mean is None else (actions, mean, spread)


class GraphedAct:
    """Stands for `policy.model.forward` in training, for batches like the example: of pictures, or of feature maps where the
    encoder is frozen.
    """

    def __init__(self, policy: "TraceActPolicy", batch: dict[str, Any], readout: Readout | None):
        self.flat = Flat(policy)
        batch = batch | {OBS_IMAGES: [batch[key] for key in policy.config.image_features]}
        policy._source = None if readout is None else lambda: readout
        example = tuple(x.detach().clone() for x in self.flat.given(batch))
        self.example = example
        wanted = len(example) - (0 if readout is None else 5)
        for x in example[wanted:]:
            x.requires_grad_()
        with policy._encoded() if policy.backbone_frozen else nullcontext():
            self.captured = graphed(self.flat, example)

    def __call__(self, batch: dict[str, Any]) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """As ACT's forward, in the tensors of the last call."""
        given = self.flat.given(batch)
        check((OBS_STATE, ACTION, PAD, *self.flat.policy.config.image_features, *Readout._fields), given, self.example)
        actions, *latent = self.captured(*given)
        return actions, (latent[0], latent[1]) if latent else (None, None)


class FlatUnet(nn.Module):
    """Diffusion Policy's U-Net as a function of tensors, with all the weights that it uses."""

    def __init__(self, policy: "TraceDiffusionPolicy"):
        super().__init__()
        self.unet: Any = policy._network
        self.columns = None if policy.recall is None else policy.recall.adapter.columns

    def forward(self, noisy: Tensor, timestep: Tensor, condition: Tensor) -> Tensor:
        """What the U-Net predicts."""
        made: Tensor = type(self.unet).forward(self.unet, noisy, timestep, global_cond=condition)
        return made


class GraphedUnet:
    """Stands for `policy.diffusion.unet.forward` in training, for batches of so many targets. What becomes of the condition
    is captured, how it is made is not.
    """

    def __init__(self, policy: "TraceDiffusionPolicy", targets: int):
        config, flat = policy.config, FlatUnet(policy)
        maps = next(part.cond_encoder[1] for part in flat.unet.modules() if hasattr(part, "cond_encoder"))
        width = maps.in_features - config.diffusion_step_embed_dim + (policy.recall.width if policy.recall else 0)
        like = maps.weight
        noisy = torch.randn(targets, config.horizon, config.action_feature.shape[0], device=like.device)
        condition = torch.randn(targets, width, device=like.device, requires_grad=True)
        self.example = (noisy, torch.zeros(targets, dtype=torch.int64, device=like.device), condition)
        self.captured = graphed(flat, self.example)

    def __call__(self, noisy: Tensor, timestep: Tensor, global_cond: Tensor) -> Tensor:
        """As the U-Net's forward, in the tensors of the last call."""
        given = (noisy, timestep, global_cond)
        check((ACTION, "timestep", "condition"), given, self.example)
        made: Tensor = self.captured(*given)
        return made
