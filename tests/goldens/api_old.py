"""How the code of commit de7fadf is called. Used to record, once."""

from dataclasses import replace
from pathlib import Path as File
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot_policy_trace.learning import EPISODES, Episodes
from torch import Tensor, nn

from goldens import material
from lerobot_policy_trace import MemoryOptions, TraceActConfig, TraceDiffusionConfig
from lerobot_policy_trace.modeling_trace import TraceActPolicy, TraceDiffusionPolicy
from lerobot_policy_trace.paths import Paths
from trace_memory import adapters as adapting
from trace_memory.config import PRESETS, build
from trace_memory.losses import auxiliary_losses  # noqa: F401
from trace_memory.memory import Readout

POLICIES = {
    "act": (TraceActConfig, TraceActPolicy, ACTConfig, ACTPolicy),
    "diffusion": (TraceDiffusionConfig, TraceDiffusionPolicy, DiffusionConfig, DiffusionPolicy),
}


def _chosen(name: str, velocity_channels: Any = (), paper: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Old options of a memory."""
    options = dict(paper or {})
    if options.pop("log_signature", False):
        options["key"] = "logsignature"
    if name in ("paper", "no-auxiliary"):
        options["preset"] = "paper"
    else:
        options |= {"anchor": True, "clock": "path", "preset": "default"}
    if velocity_channels:
        options["rates"] = list(velocity_channels)
    return options | more | {"name": "trace" if name == "paper" else name}


def memory(**options: Any) -> nn.Module:
    chosen = _chosen(**options)
    if "rates" in chosen:
        chosen["rates"] = tuple(chosen["rates"])
    return build(replace(PRESETS[chosen.pop("preset")], **chosen))


def tensors(state: Any) -> dict[str, Tensor]:
    return state.cells


def named(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by their old names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def readout(**fields: Tensor) -> Readout:
    return Readout(**fields)


def adapters(width: int, token: int) -> dict[str, nn.Module]:
    return {
        "tokens": adapting.RegressionAdapter(width, token),
        "residual": adapting.ResidualAdapter(width, token, 4),
        "condition": adapting.DiffusionAdapter(width, 20, [8]),
        "modulation": adapting.FeatureModulation(token, token),
    }


def paths(states: Tensor, starts: Tensor, ends: Tensor) -> Paths:
    return Paths(states, starts, ends)


def give_paths(policy: Any, found: Paths) -> None:
    policy.paths = found


def fit(policy: Any, found: Paths) -> None:
    policy.recall.fit(found)


def _features(shapes: dict[str, tuple[int, ...]], actions: int) -> dict[str, Any]:
    kinds = {"observation.state": FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
    return {
        "input_features": {n: PolicyFeature(kinds.get(n, FeatureType.VISUAL), s) for n, s in shapes.items()},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (actions,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
    }


def _options(memory: dict[str, Any] | None) -> MemoryOptions:
    if memory is None:
        return MemoryOptions(name="none")
    words = {"period": "update_every", "history_frames": "budget", "history_stride": "stride"}
    given = {words.get(n, n): x for n, x in memory.items()}
    return MemoryOptions(**_chosen(**given))


def policy(
    kind: str, options: dict[str, Any], shapes: dict[str, Any], actions: int, memory: dict[str, Any] | None
) -> Any:
    config, cls = POLICIES[kind][:2]
    return cls(config(memory=_options(memory), **_features(shapes, actions), **options))


def attached(
    kind: str, options: dict[str, Any], shapes: dict[str, Any], actions: int, memory: dict[str, Any] | None
) -> Any:
    stock_config, stock_class = POLICIES[kind][2:]
    stock = stock_class(stock_config(**_features(shapes, actions), **options))
    material.fill(named(stock))
    made = policy(kind, options, shapes, actions, memory)
    missing, unexpected = made.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("recall.") for name in missing)
    return made


def load(kind: str, folder: File) -> Any:
    return POLICIES[kind][1].from_pretrained(folder, strict=True)


def encode(policy: Any, frames: list[Tensor]) -> list[Tensor]:
    return list(policy._encode(frames))


def update(policy: Any, given: dict[str, Any], *, frozen: bool) -> Any:
    """Loss and logs of whole episodes."""
    policy.backbone_frozen = frozen
    policy._tested = True  # the statistics are given
    batch = {n: x for n, x in given.items() if n.startswith("observation.")}
    batch |= {"action": given["actions"], "action_is_pad": given["action_is_pad"]}
    names = ("states", "written", "path", "valid", "row", "time", "seen")
    if policy.recall is None:
        for camera, frames in zip(policy.config.image_features, given["frames"], strict=True):
            seen = frames[given["seen"]]
            batch[camera] = seen.squeeze(1)
        return policy(batch)
    batch[EPISODES] = Episodes(pictures=given["frames"], **{n: given[n] for n in names})
    return policy(batch)


def compile(policy: Any, rows: int) -> None:
    policy.compile_for_control(rows=rows, fuse=False)


def state(policy: Any) -> dict[str, Tensor]:
    """The memory's state, eager or compiled."""
    if policy.recall is None:
        return {}
    if policy.control is not None:
        cells = {n: x.clone() for n, x in policy.control._cells().items()}
        return cells | {"steps": torch.tensor(policy.control.schedule.taken)}
    return policy._state.cells | {"steps": policy._state.steps}
