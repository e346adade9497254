"""The stock pipelines with one step more: the robot's state as it was measured is kept beside the normalised one, because
a memory has statistics of its own and a key must mean the same in every policy.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lerobot.configs import PipelineFeatureType, PolicyFeature
from lerobot.policies.act.processor_act import make_act_pre_post_processors
from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors
from lerobot.processor import NormalizerProcessorStep, ObservationProcessorStep, ProcessorStepRegistry
from lerobot.utils.constants import OBS_STATE

from lerobot_policy_trace.configuration_trace import TraceActConfig, TraceDiffusionConfig
from trace_errors import UsageError

RAW_STATE = "observation.raw_state"
Stats = dict[str, dict[str, torch.Tensor]] | None


@ProcessorStepRegistry.register(name="trace_keep_raw_state")
class KeepRawState(ObservationProcessorStep):
    """Copies the state before it is normalised."""

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The observation with the copy."""
        return observation | ({RAW_STATE: observation[OBS_STATE].clone()} if OBS_STATE in observation else {})

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        """The copy is no feature of a policy."""
        return features


def with_raw_state(pipelines: Sequence[Any]) -> tuple[Any, Any]:
    """A stock policy's pipelines as a memory needs them: the raw state, which addresses it, is kept before it is normalised.

    Args:
        pipelines: pre- and postprocessor, as LeRobot's `make_pre_post_processors` or our `load_policy` give them.

    Returns:
        A preprocessor with one step more, and the same postprocessor.

    Raises:
        UsageError: the preprocessor has no normaliser.

    Example:
        >>> from lerobot_policy_trace import load_policy, with_raw_state
        >>> stock, *processors = load_policy("outputs/act")  # doctest: +SKIP
        >>> before, after = with_raw_state(processors)  # doctest: +SKIP
    """
    before, after = pipelines
    place = next((i for i, step in enumerate(before.steps) if isinstance(step, NormalizerProcessorStep)), None)
    if place is None:
        found = ", ".join(type(step).__name__ for step in before.steps) or "no steps"
        raise UsageError(f"pipelines: got a preprocessor of {found}, expected one with a NormalizerProcessorStep")
    steps = [*before.steps[:place], KeepRawState(), *before.steps[place:]]
    return replace(before, steps=steps), after


def make_trace_act_pre_post_processors(config: TraceActConfig, dataset_stats: Stats = None) -> tuple[Any, Any]:
    """ACT's pipelines and the raw state."""
    return with_raw_state(make_act_pre_post_processors(config, dataset_stats))


def make_trace_diffusion_pre_post_processors(
    config: TraceDiffusionConfig, dataset_stats: Stats = None
) -> tuple[Any, Any]:
    """Diffusion Policy's pipelines and the raw state."""
    return with_raw_state(make_diffusion_pre_post_processors(config, dataset_stats))
