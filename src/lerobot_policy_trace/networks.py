"""ACT's transformer and Diffusion Policy's U-Net with a place for a memory's readout: forward passes written out, built from
LeRobot's layers under LeRobot's names, so that weights of the stock policies fit. Without a readout they compute what the
stock networks compute, bit for bit. At the end both, and a memory's scan, as functions of tensors, which can be captured.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from lerobot.policies.act.modeling_act import ACT
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import (
    DiffusionConditionalResidualBlock1d,
    DiffusionConv1dBlock,
    DiffusionRgbEncoder,
    DiffusionSinusoidalPosEmb,
    _make_noise_scheduler,
)
from lerobot.utils.constants import OBS_ENV_STATE, OBS_STATE
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from trace_memory.memory import Memory, Readout, Routing

Inputs = dict[str, Tensor]  # what a policy observes beside pictures, by LeRobot's names
Latent = tuple[Tensor, Tensor] | tuple[None, None]  # mean and log variance
Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of ACT's encoder tokens and their positions


class MemoryACT(ACT):
    """ACT, from feature maps to actions, in steps between which a memory joins."""

    def forward(
        self,
        maps: Sequence[Tensor],  # a camera each (N, C, h, w)
        inputs: Inputs,
        actions: Tensor | None = None,  # (N, chunk, a), for the VAE in training
        action_is_pad: Tensor | None = None,
        join: Join | None = None,
    ) -> tuple[Tensor, Latent]:
        """Actions (N, chunk, a), and the latent's distribution where there is one."""
        latent, distribution = self.latent(inputs, actions, action_is_pad)
        tokens, positions = self.encode_tokens(maps, inputs, latent)
        if join is not None:
            tokens, positions = join(tokens, positions)
        return self.decode(tokens, positions), distribution

    def latent(self, inputs: Inputs, actions: Tensor | None, action_is_pad: Tensor | None) -> tuple[Tensor, Latent]:
        """The style variable: drawn from what the VAE makes of the actions in training, zero otherwise."""
        like = self.encoder_latent_input_proj.weight
        count = len(next(iter(inputs.values())))
        if not (self.config.use_vae and self.training and actions is not None and action_is_pad is not None):
            return like.new_zeros(count, self.config.latent_dim), (None, None)
        tokens = [self.vae_encoder_cls_embed.weight[None].expand(count, -1, -1)]
        if self.config.robot_state_feature:
            tokens.append(self.vae_encoder_robot_state_input_proj(inputs[OBS_STATE])[:, None])
        padded = action_is_pad.new_zeros(count, len(tokens))
        tokens.append(self.vae_encoder_action_input_proj(actions))
        found = self.vae_encoder(
            torch.cat(tokens, dim=1).transpose(0, 1),
            pos_embed=self.vae_encoder_pos_enc.clone().detach().transpose(0, 1),
            key_padding_mask=torch.cat([padded, action_is_pad], dim=1),
        )[0]  # the class token
        mean, log_variance = self.vae_encoder_latent_output_proj(found).split(self.config.latent_dim, dim=1)
        return mean + log_variance.div(2).exp() * torch.randn_like(mean), (mean, log_variance)

    def encode_tokens(self, maps: Sequence[Tensor], inputs: Inputs, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's tokens (S, N, d) for latent, states and places of the maps, and their positions (S, 1, d)."""
        tokens = [self.encoder_latent_input_proj(latent)[None]]
        if self.config.robot_state_feature:
            tokens.append(self.encoder_robot_state_input_proj(inputs[OBS_STATE])[None])
        if self.config.env_state_feature:
            tokens.append(self.encoder_env_state_input_proj(inputs[OBS_ENV_STATE])[None])
        positions = [self.encoder_1d_feature_pos_embed.weight[:, None]]
        for each in maps:
            place = self.encoder_cam_feat_pos_embed(each).to(each.dtype)
            tokens.append(self.encoder_img_feat_input_proj(each).flatten(2).permute(2, 0, 1))
            positions.append(place.flatten(2).permute(2, 0, 1))
        where = torch.cat(positions)
        return self.encoder(torch.cat(tokens), pos_embed=where), where

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Actions from the tokens."""
        queries = positions.new_zeros(self.config.chunk_size, tokens.shape[1], self.config.dim_model)
        found = self.decoder(
            queries,
            tokens,
            encoder_pos_embed=positions,
            decoder_pos_embed=self.decoder_pos_embed.weight[:, None],
        )
        actions: Tensor = self.action_head(found.transpose(0, 1))
        return actions


class MemoryBlock(DiffusionConditionalResidualBlock1d):
    """A residual block of the U-Net that is also conditioned on a readout, through a map of its own that starts at zero."""

    def __init__(self, inputs: int, outputs: int, *, memory: int, **options: Any):
        super().__init__(inputs, outputs, **options)
        if memory:
            self.memory_encoder = nn.Linear(memory, self.cond_encoder[1].out_features, bias=False)
            nn.init.zeros_(self.memory_encoder.weight)

    def forward(self, x: Tensor, cond: Tensor, memory: Tensor | None = None) -> Tensor:
        """(N, c, T) to (N, c', T); `cond`, and what `memory_encoder` makes of a readout, shift (and scale) the channels."""
        out = self.conv1(x)
        shift = self.cond_encoder(cond)
        shift = (shift if memory is None else shift + memory)[..., None]
        if self.use_film_scale_modulation:
            scale, bias = shift[:, : self.out_channels], shift[:, self.out_channels :]
            out = scale * out + bias
        else:
            out = out + shift
        made: Tensor = self.conv2(out) + self.residual_conv(x)
        return made


class MemoryUnet(nn.Module):
    """Diffusion Policy's U-Net of `MemoryBlock`s. `memory` is the width of the readout's vector, 0 for none. What the blocks
    make of a readout does not change from one denoising step to the next, so it is computed by itself, once.
    """

    def __init__(self, config: DiffusionConfig, global_cond_dim: int, memory: int):
        super().__init__()
        self.config = config
        width, depth = config.diffusion_step_embed_dim, config.action_feature.shape[0]
        self.diffusion_step_encoder = nn.Sequential(
            DiffusionSinusoidalPosEmb(width), nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width)
        )
        options: dict[str, Any] = {
            "memory": memory,
            "cond_dim": width + global_cond_dim,
            "kernel_size": config.kernel_size,
            "n_groups": config.n_groups,
            "use_film_scale_modulation": config.use_film_scale_modulation,
        }
        dims = [depth, *config.down_dims]
        self.down_modules: Any = nn.ModuleList()
        for number, (first, last) in enumerate(pairwise(dims)):
            pair = MemoryBlock(first, last, **options), MemoryBlock(last, last, **options)
            ends = number == len(dims) - 2
            self.down_modules.append(nn.ModuleList([*pair, nn.Identity() if ends else nn.Conv1d(last, last, 3, 2, 1)]))
        self.mid_modules = nn.ModuleList(MemoryBlock(dims[-1], dims[-1], **options) for _ in range(2))
        self.up_modules: Any = nn.ModuleList()
        for last, first in reversed(list(pairwise(dims[1:]))):
            pair = MemoryBlock(2 * first, last, **options), MemoryBlock(last, last, **options)
            self.up_modules.append(nn.ModuleList([*pair, nn.ConvTranspose1d(last, last, 4, 2, 1)]))
        self.final_conv = nn.Sequential(
            DiffusionConv1dBlock(dims[1], dims[1], kernel_size=config.kernel_size), nn.Conv1d(dims[1], depth, 1)
        )

    @property
    def blocks(self) -> list[Any]:
        """In the order in which they run."""
        down, up = ([block for one in levels for block in one[:2]] for levels in (self.down_modules, self.up_modules))
        return [*down, *self.mid_modules, *up]

    def shifts(self, memory: Tensor | None) -> tuple[Tensor, ...] | None:
        """What each block is conditioned on, of the readout's vector (N, d)."""
        if memory is None:
            return None
        known = F.mish(memory)
        return tuple(block.memory_encoder(known) for block in self.blocks)

    def forward(
        self, x: Tensor, timestep: Tensor, global_cond: Tensor, shifts: tuple[Tensor, ...] | None = None
    ) -> Tensor:
        """What the network predicts (N, T, a) from noisy actions, the condition and `shifts` of a readout."""
        embed, *layers = self.diffusion_step_encoder
        time = embed(timestep).to(global_cond)  # made in float32, whatever the weights are
        for layer in layers:
            time = layer(time)
        cond = torch.cat([time, global_cond], dim=-1)

        left = iter(shifts or ())

        def run(block: nn.Module, x: Tensor) -> Tensor:
            memory = next(left, None)
            if self.config.gradient_checkpointing and self.training:
                kept: Tensor = checkpoint(block, x, cond, memory, use_reentrant=False)
                return kept
            made: Tensor = block(x, cond, memory)
            return made

        x, skips = x.transpose(1, 2), []
        for first, second, down in self.down_modules:
            x = run(second, run(first, x))
            skips.append(x)
            x = down(x)
        for block in self.mid_modules:
            x = run(block, x)
        for first, second, up in self.up_modules:
            x = run(second, run(first, torch.cat([x, skips.pop()], dim=1)))
            x = up(x)
        out: Tensor = self.final_conv(x)
        return out.transpose(1, 2)


class MemoryDiffusion(nn.Module):
    """Diffusion Policy's encoders, U-Net and noise, from feature maps to actions. Parts have the stock model's names; it has
    none of its functions, because these would leave out the memory.
    """

    def __init__(self, config: DiffusionConfig, memory: int):
        super().__init__()
        self.config = config
        width = config.robot_state_feature.shape[0]
        cameras = len(config.image_features)
        if cameras and config.use_separate_rgb_encoder_per_camera:
            self.rgb_encoder: nn.Module = nn.ModuleList(DiffusionRgbEncoder(config) for _ in range(cameras))
        elif cameras:
            self.rgb_encoder = DiffusionRgbEncoder(config)
        width += sum(each.feature_dim for each in self.encoders)
        if config.env_state_feature:
            width += config.env_state_feature.shape[0]
        self.unet: Any = MemoryUnet(config, width * config.n_obs_steps, memory)
        if config.compile_model:
            self.unet = torch.compile(self.unet, mode=config.compile_mode)
        self.noise_scheduler = _make_noise_scheduler(
            config.noise_scheduler_type,
            num_train_timesteps=config.num_train_timesteps,
            beta_start=config.beta_start,
            beta_end=config.beta_end,
            beta_schedule=config.beta_schedule,
            clip_sample=config.clip_sample,
            clip_sample_range=config.clip_sample_range,
            prediction_type=config.prediction_type,
        )
        steps = config.num_inference_steps
        self.num_inference_steps = self.noise_scheduler.config.num_train_timesteps if steps is None else steps

    @property
    def encoders(self) -> list[Any]:
        """The picture encoder of each camera; the same one for all where they share it."""
        cameras = len(self.config.image_features)
        if not cameras:
            return []
        return list(self.rgb_encoder) if isinstance(self.rgb_encoder, nn.ModuleList) else [self.rgb_encoder] * cameras

    def condition(self, maps: Sequence[Tensor], inputs: Inputs) -> Tensor:
        """The U-Net's condition (N, D) from a camera's maps (N, s, C, h, w) each, and states (N, s, d)."""
        steps = [inputs[OBS_STATE]]
        if maps and isinstance(self.rgb_encoder, nn.ModuleList):
            steps += [self._features(one, each) for one, each in zip(self.encoders, maps, strict=True)]
        elif maps:  # all cameras at once, as the stock policy has them
            steps.append(self._features(self.rgb_encoder, torch.stack(list(maps), dim=2)).flatten(2))
        if self.config.env_state_feature:
            steps.append(inputs[OBS_ENV_STATE])
        return torch.cat(steps, dim=-1).flatten(1)

    @staticmethod
    def _features(encoder: Any, maps: Tensor) -> Tensor:
        """(..., C, h, w) to (..., D)."""
        flat = maps.flatten(0, -4)
        found: Tensor = encoder.relu(encoder.out(encoder.pool(flat).flatten(1)))
        return found.unflatten(0, maps.shape[:-3])

    def denoise(self, x: Tensor, timestep: Tensor, condition: Tensor, memory: Tensor | None) -> Tensor:
        """What the U-Net predicts at one timestep."""
        made: Tensor = self.unet(x, timestep, condition, self.unet.shifts(memory))
        return made

    def sample(self, condition: Tensor, memory: Tensor | None, noise: Tensor) -> Tensor:
        """Actions of the whole horizon (N, T, a), from noise."""
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        x, shifts = noise, self.unet.shifts(memory)
        for t in self.noise_scheduler.timesteps:
            step = torch.full(x.shape[:1], t, dtype=torch.long, device=x.device)
            x = self.noise_scheduler.step(self.unet(x, step, condition, shifts), t, x).prev_sample
        return x


class FlatACT(nn.Module):
    """ACT's network as a function of tensors to a tuple of tensors: pad, actions, states, maps, then a readout's parts."""

    def __init__(self, policy: Any):
        super().__init__()
        self.policy, self.names, self.cameras = policy, policy.measured, len(policy.config.image_features)

    def given(self, maps: Any, inputs: Any, readout: Any, actions: Tensor, pad: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a call."""
        return (pad, actions, *(inputs[name] for name in self.names), *maps, *(() if readout is None else readout[:5]))

    def forward(self, pad: Tensor, actions: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Predicted actions; with the VAE mean and log variance too."""
        inputs, rest = dict(zip(self.names, more, strict=False)), more[len(self.names) :]
        readout = Readout(*rest[self.cameras :]) if len(rest) > self.cameras else None  # type: ignore[arg-type]
        made, (mean, spread) = self.policy.network(list(rest[: self.cameras]), inputs, readout, actions, pad)
        return (made,) if mean is None or spread is None else (made, mean, spread)

    def as_network(self, call: Callable[..., Any]) -> Callable[..., tuple[Tensor, Latent]]:
        """Such a function in the form of the policy's own network."""

        def network(*given: Any) -> tuple[Tensor, Latent]:
            actions, *latent = call(*self.given(*given))
            return actions, tuple(latent) if latent else (None, None)

        return network


class FlatUnet(nn.Module):
    """The U-Net by itself: noisy actions, timesteps, condition, and the readout's vector if there is a memory. A module of
    its own, because capturing changes the module that it is given.
    """

    def __init__(self, unet: Any):
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor, timestep: Tensor, condition: Tensor, memory: Tensor | None = None) -> Tensor:
        """What the U-Net predicts."""
        made: Tensor = self.unet(x, timestep, condition, self.unet.shifts(memory))
        return made


class FlatScan(nn.Module):
    """A memory's scan of whole episodes as a function of tensors to a tuple of tensors: a readout's parts."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory

    def forward(self, contents: Tensor, path: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """The fields of the readouts (B, T, ...)."""
        found = self.memory.scan(contents, path, valid)[1]
        return (*found[:5], *(found.routing or ()))

    @staticmethod
    def readout(parts: tuple[Tensor, ...]) -> Readout:
        """The readouts of these fields."""
        slots, z, g, dg, alpha, *routing = parts
        return Readout(slots, z, g, dg, alpha, Routing(*routing) if routing else None)
