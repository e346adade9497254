"""The policy that a recipe asks for, on a dataset: its cameras, its configuration, its pipelines, and the encoder it starts
with. Training it is `train`'s matter.
"""

from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.constants import ACTION, IMAGENET_STATS
from safetensors.torch import load_file
from torch import Tensor

import lerobot_policy_trace  # noqa: F401  (registers the policies)
from lerobot_policy_trace.configuration_trace import MemoryOptions
from trace_bench.robot import BASE, CHANNELS
from trace_lab.recipe import Recipe, RecipeError
from trace_lab.run import RunError

RESNET = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
COUNTER = "num_batches_tracked"  # of normalisations that learn, which an encoder that is kept as it is does not need


def cameras(made: Recipe, meta: Any) -> list[str]:
    """The dataset's cameras that a recipe asks for; "overhead" is short for "observation.images.overhead"."""
    have = list(meta.camera_keys)
    if made.cameras == "all":
        return have
    short = {name.removeprefix("observation.images."): name for name in have}
    asked = [name.strip().removeprefix("observation.images.") for name in made.cameras.split(",")]
    if strange := [name for name in asked if name not in short]:
        raise RecipeError(f"cameras: got {', '.join(strange)}, expected all, or some of {', '.join(short)}")
    return [name for key, name in short.items() if key in asked]


def configuration(made: Recipe, meta: Any, device: str) -> Any:
    """The plug-in's configuration for a dataset."""
    inputs = {}
    for name, feature in meta.features.items():
        if name in cameras(made, meta):
            height, width, colours = feature["shape"]
            inputs[name] = PolicyFeature(FeatureType.VISUAL, (colours, height, width))
        elif name == "observation.state":
            inputs[name] = PolicyFeature(FeatureType.STATE, tuple(feature["shape"]))
        elif name == "observation.environment_state":
            inputs[name] = PolicyFeature(FeatureType.ENV, tuple(feature["shape"]))
    output = {ACTION: PolicyFeature(FeatureType.ACTION, tuple(meta.features[ACTION]["shape"]))}
    rates: dict[str, Any] = {"optimizer_lr": made.lr}
    if made.policy == "act":
        rates["optimizer_lr_backbone"] = made.backbone_lr
    own: dict[str, Any] = {"lr": made.memory_lr, "adapter_lr": made.memory_lr}
    if meta.robot_type == "trace_bench":
        own["rates"] = list(range(len(CHANNELS)))[BASE]
    kind = PreTrainedConfig.get_choice_class(f"trace_{made.policy}")
    try:
        memory = MemoryOptions(name=made.memory, **(own | made.memory_options))
        config: Any = kind(
            input_features=inputs,
            output_features=output,
            device=device,
            push_to_hub=False,
            memory=memory,
            **(rates | made.policy_options),
        )
        config.validate_features()
        if made.scan == "budget" and memory.update_every != 1:
            raise ValueError(f"memory.update_every: got {memory.update_every}, expected 1 with the budget scan")
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{made.policy} with memory {made.memory}: {error}") from error
    return config


def take_encoder(policy: Any, folder: Path) -> None:
    """Gives a policy the encoder of a trained one, and nothing else of it: the rest of a policy without a memory may
    have its choices by heart, from how scenes look, and a memory would find nothing left to learn (docs/decisions/0009).
    ACT and Diffusion Policy can have each other's, where their ResNets have the same layers.
    """
    weights = load_file(folder / "model.safetensors")
    shared: dict[str, Tensor] = {}
    for name, x in weights.items():
        if ".backbone." in name and not torch.equal(shared.setdefault(_layer(name), x), x):
            shared[_layer(name)] = x.new_empty(0)  # each camera has its own: by name only
    places = [f"{name}." for name, part in policy.named_modules() if any(part is each for each in policy.backbones)]
    wanted = {n: x for n, x in policy.state_dict().items() if n.startswith(tuple(places)) and not n.endswith(COUNTER)}
    if not wanted:
        raise RunError("encoder: the policy has no pictures to encode")
    found = {name: weights.get(name, shared.get(_layer(name))) for name in wanted}
    right = {name: x for name, x in found.items() if x is not None and x.shape == wanted[name].shape}
    differ = [name for name in wanted if name not in right]
    differ += sorted({n for n in shared if not n.endswith(COUNTER)} - {_layer(name) for name in wanted})
    if differ:
        raise RunError(
            f"encoder: that of {folder} is another one: {len(differ)} weights differ ({', '.join(differ[:2])}). "
            "Diffusion Policy can take ACT's with policy.use_group_norm=false"
        )
    policy.load_state_dict(right, strict=False)


def _layer(name: str) -> str:
    """A weight of an encoder as torchvision calls it; Diffusion Policy numbers the parts of its ResNet."""
    part, _, rest = name.rpartition(".backbone.")[2].partition(".")
    return f"{RESNET[int(part)] if part.isdigit() else part}.{rest}"


def pipelines(config: Any, meta: Any) -> tuple[Any, Any]:
    """The policy's own pre- and postprocessor, with ImageNet's statistics for pictures, as lerobot-train makes them."""
    stats = {name: dict(values) for name, values in meta.stats.items()}
    for name in config.image_features:
        stats[name] |= {kind: torch.tensor(value) for kind, value in IMAGENET_STATS.items()}
    return make_pre_post_processors(config, dataset_stats=stats)
