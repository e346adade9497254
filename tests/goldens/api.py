"""How today's code is called for the goldens, and which weight had which name when they were recorded."""

from pathlib import Path
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from torch import Tensor, nn

from goldens import material
from lerobot_policy_trace import (
    EpisodeBatch,
    MemoryOptions,
    TraceActConfig,
    TraceActPolicy,
    TraceDiffusionConfig,
    TraceDiffusionPolicy,
)
from lerobot_policy_trace.episodes import MemoryInputs
from lerobot_policy_trace.paths import Paths
from trace_memory import adapters as adapting
from trace_memory import auxiliary_losses as auxiliary_losses
from trace_memory.config import MemoryConfig, PaperOptions, build
from trace_memory.memory import Readout

POLICIES = {
    "act": (TraceActConfig, TraceActPolicy, ACTConfig, ACTPolicy),
    "diffusion": (TraceDiffusionConfig, TraceDiffusionPolicy, DiffusionConfig, DiffusionPolicy),
}
BLOCK = ".memory_encoder.weight"  # of a block of the U-Net; was one of the adapter's columns


def memory(*, paper: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """A memory by itself."""
    channels = tuple(options.pop("velocity_channels", ()))
    return build(MemoryConfig(paper=PaperOptions(**paper or {}), velocity_channels=channels, **options))


def tensors(state: Any) -> dict[str, Tensor]:
    """What a memory's state holds."""
    found: dict[str, Tensor] = state.tensors
    return found


def named(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by the names that they had when the goldens were recorded."""
    found: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    blocks = [name for name in found if name.endswith(BLOCK)]
    old = {name: f"recall.adapter.columns.{place}.weight" for place, name in enumerate(blocks)}
    return {old.get(n, n.replace("memory_head.", "recall.", 1)): x for n, x in found.items()}


def readout(**fields: Tensor) -> Readout:
    """A readout of these fields."""
    return Readout(**fields)


def adapters(width: int, token: int) -> dict[str, nn.Module]:
    """One of each kind."""
    return {
        "tokens": adapting.RegressionAdapter(width, token),
        "residual": adapting.ResidualAdapter(width, token, 4),
        "condition": adapting.ConditionAdapter(width, 20),
        "modulation": adapting.FeatureModulation(token, token),
    }


def paths(states: Tensor, starts: Tensor, ends: Tensor) -> Paths:
    """A dataset's paths."""
    return Paths(states, starts, ends)


def give_paths(policy: Any, found: Paths) -> None:
    """As if the policy had been made for that dataset."""
    policy.paths = found


def fit(policy: Any, found: Paths) -> None:
    """Statistics of the memory."""
    policy.memory_head.fit(found)


def _features(shapes: dict[str, tuple[int, ...]], actions: int) -> dict[str, Any]:
    kinds = {"observation.state": FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
    return {
        "input_features": {n: PolicyFeature(kinds.get(n, FeatureType.VISUAL), s) for n, s in shapes.items()},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (actions,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
    }


def policy(
    kind: str, options: dict[str, Any], shapes: dict[str, Any], actions: int, memory: dict[str, Any] | None
) -> Any:
    """A policy with that memory."""
    config, cls = POLICIES[kind][:2]
    chosen = MemoryOptions(**memory or {"name": "none"})
    return cls(config(memory=chosen, **_features(shapes, actions), **options))


def attached(
    kind: str, options: dict[str, Any], shapes: dict[str, Any], actions: int, memory: dict[str, Any] | None
) -> Any:
    """A stock policy with its weights given, and a memory attached to it."""
    _, cls, stock_config, stock_class = POLICIES[kind]
    stock = stock_class(stock_config(**_features(shapes, actions), **options))
    material.fill(named(stock))
    return cls.from_stock(stock, memory=MemoryOptions(**memory or {}))


def load(kind: str, folder: Path) -> Any:
    """From a folder."""
    return POLICIES[kind][1].from_pretrained(folder, strict=True)


def encode(policy: Any, frames: list[Tensor]) -> list[Tensor]:
    """Feature maps."""
    return list(policy.encode(frames))


def episode_batch(policy: Any, given: dict[str, Any], *, frozen: bool) -> EpisodeBatch:
    """Whole episodes for an update."""
    names = ("states", "written", "path", "valid", "row", "time")
    known = None if policy.memory_head is None else MemoryInputs(**{name: given[name] for name in names})
    return EpisodeBatch(
        frames=tuple(given["frames"]),
        encoded=frozen,
        seen=given["seen"],
        inputs={name: x for name, x in given.items() if name.startswith("observation.")},
        actions=given["actions"],
        action_is_pad=given["action_is_pad"],
        memory=known,
    )


def update(policy: Any, given: dict[str, Any], *, frozen: bool) -> Any:
    """Loss and logs of whole episodes."""
    return policy(episode_batch(policy, given, frozen=frozen))


def compile(policy: Any, rows: int) -> None:
    """For control."""
    policy.compile_for_control(rows=rows, fuse=False)


def state(policy: Any) -> dict[str, Tensor]:
    """The memory's state, eager or compiled."""
    if policy.session is None or policy.session.state is None:
        return {}
    found = policy.session.state
    return {name: x.clone() for name, x in found.tensors.items()} | {"steps": found.steps}
