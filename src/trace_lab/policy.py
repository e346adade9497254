"""The policy that a recipe asks for, on a dataset: its cameras, its configuration and its pipelines. Training it is
`training`'s matter.
"""

import re
from dataclasses import fields
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.constants import ACTION, IMAGENET_STATS, OBS_ENV_STATE, OBS_STATE

from lerobot_policy_trace import MemoryOptions
from trace_errors import UsageError
from trace_lab.recipe import Recipe, known
from trace_memory import PaperOptions

VELOCITY = ("vx", "vy", "vz", "vel", "velocity", "rate", "speed")  # last words of a channel's name


def cameras(made: Recipe, meta: Any) -> list[str]:
    """The dataset's cameras that a recipe asks for; "overhead" is short for "observation.images.overhead"."""
    have = list(meta.camera_keys)
    if made.cameras == "all":
        return have
    short = {name.removeprefix("observation.images."): name for name in have}
    asked = [name.strip().removeprefix("observation.images.") for name in made.cameras.split(",")]
    if strange := [name for name in asked if name not in short]:
        raise UsageError(f"cameras: got {', '.join(strange)}, expected all, or some of {', '.join(short)}")
    return [name for key, name in short.items() if key in asked]


def velocity_channels(meta: Any) -> list[int]:
    """Channels of the robot's state that are velocities, as far as their names tell: a last word such as vx, vel or rate.
    None where channels have no names.
    """
    names = meta.features[OBS_STATE].get("names") or []
    if isinstance(names, dict):  # as some robots have it: {"motors": [...]}
        names = [name for group in names.values() for name in group]
    return [
        i for i, name in enumerate(names) if re.split("[^a-z]+", str(name).lower().rstrip("0123456789"))[-1] in VELOCITY
    ]


def configuration(made: Recipe, meta: Any, device: str) -> Any:
    """The plug-in's configuration for a dataset.

    Raises:
        UsageError: an option is not known, or numbers do not go together.
    """
    inputs = {}
    for name, feature in meta.features.items():
        if name in cameras(made, meta):
            height, width, colours = feature["shape"]
            inputs[name] = PolicyFeature(FeatureType.VISUAL, (colours, height, width))
        elif name == OBS_STATE:
            inputs[name] = PolicyFeature(FeatureType.STATE, tuple(feature["shape"]))
        elif name == OBS_ENV_STATE:
            inputs[name] = PolicyFeature(FeatureType.ENV, tuple(feature["shape"]))
    output = {ACTION: PolicyFeature(FeatureType.ACTION, tuple(meta.features[ACTION]["shape"]))}
    rates: dict[str, Any] = {"optimizer_lr": made.lr}
    if made.policy == "act":
        rates["optimizer_lr_backbone"] = made.backbone_lr
    options = {"velocity_channels": velocity_channels(meta)} | made.memory_options
    kind = PreTrainedConfig.get_choice_class(f"trace_{made.policy}")
    for name in made.policy_options:
        known("option policy.", name, [each.name for each in fields(kind)])
    try:
        paper = PaperOptions(**options.pop("paper", {}))
        memory = MemoryOptions(name=made.memory, lr=made.memory_lr, paper=paper, **options)
        config: Any = kind(
            input_features=inputs,
            output_features=output,
            device=device,
            push_to_hub=False,
            memory=memory,
            **(rates | made.policy_options),
        )
        config.validate_features()
        memory.config(meta.features[OBS_STATE]["shape"][0])
    except (TypeError, ValueError) as error:
        raise UsageError(f"{made.policy} with memory {made.memory}: {error}") from error
    return config


def pipelines(config: Any, meta: Any) -> tuple[Any, Any]:
    """The policy's own pre- and postprocessor, with ImageNet's statistics for pictures, as lerobot-train makes them."""
    stats = {name: dict(values) for name, values in meta.stats.items()}
    for name in config.image_features:
        stats[name] |= {kind: torch.tensor(value) for kind, value in IMAGENET_STATS.items()}
    return make_pre_post_processors(config, dataset_stats=stats)
