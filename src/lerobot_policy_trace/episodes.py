"""What a policy learns from in one update of `tracemem train`: whole episodes, every frame once, with many targets in each.
How such batches are drawn is the business of whoever trains.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MemoryInputs:
    """What the memory takes in, in one update.

    Args:
        states: raw robot states of the frames (F, d).
        written: which of the F frames the memory takes in, in order (E, T).
        path: the raw states that address them (E, T, d); another episode's where paths are swapped.
        valid: whether the episode goes on (E, T).
        row: the episode of each target (N,).
        time: the last of the T steps that each target knows (N,).
    """

    states: Tensor
    written: Tensor
    path: Tensor
    valid: Tensor
    row: Tensor
    time: Tensor


@dataclass(frozen=True)
class EpisodeBatch:
    """Pieces of whole episodes for one update. Nobody changes it.

    Args:
        frames: for each camera normalised pictures (F, 3, H, W), or their feature maps (F, C, h, w) if `encoded`.
        encoded: the frames are maps of an encoder that is not trained.
        seen: the frames that the policy looks at for each target, the present one last (N, s).
        inputs: `observation.state` (and `observation.environment_state`), normalised; (N, d), Diffusion's (N, s, d).
        actions: normalised (N, horizon, a).
        action_is_pad: whether an action lies beyond the episode's end (N, horizon).
        memory: what the memory takes in; None without one.

    Example:
        >>> import torch
        >>> from lerobot_policy_trace import EpisodeBatch
        >>> frames, state = (torch.zeros(5, 3, 64, 64),), {"observation.state": torch.zeros(2, 6)}
        >>> pad = torch.zeros(2, 10, dtype=torch.bool)
        >>> batch = EpisodeBatch(frames, False, torch.tensor([[3], [4]]), state, torch.zeros(2, 10, 6), pad, None)
    """

    frames: tuple[Tensor, ...]
    encoded: bool
    seen: Tensor
    inputs: dict[str, Tensor]
    actions: Tensor
    action_is_pad: Tensor
    memory: MemoryInputs | None
